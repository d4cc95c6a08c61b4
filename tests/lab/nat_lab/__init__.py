"""Nodes behind address translators and firewalls, in network namespaces of one machine. See lab.py for the way in."""
