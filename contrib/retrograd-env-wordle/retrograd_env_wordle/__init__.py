"""Wordle for retrograd: `[agent.environment] type = "wordle"`."""
