"""Nodes that find and talk to each other. Knows nothing of inference or renting."""
