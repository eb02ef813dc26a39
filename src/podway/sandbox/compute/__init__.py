"""Compute Engine as far as TPUs need it."""
