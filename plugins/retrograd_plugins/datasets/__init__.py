"""Data formats."""
