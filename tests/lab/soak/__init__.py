"""A cluster in the NAT lab under faults, with requests running: `python -m tests.lab.soak`."""
