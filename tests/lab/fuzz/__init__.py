"""Hostile bytes for every decoder: mutations of valid ones, by seed. The command is tests/lab/fuzz_cluster.py."""
