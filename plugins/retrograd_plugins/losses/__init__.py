"""Losses over the log-probabilities of trained tokens."""
