"""Slices simulated on this machine: its hosts, their environment, and their networks."""
