"""Sandboxes: where the tools of a trajectory act."""
