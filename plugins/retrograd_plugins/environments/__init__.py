"""Environments: the worlds of trajectories."""
