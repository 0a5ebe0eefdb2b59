"""Block formats of weights."""
