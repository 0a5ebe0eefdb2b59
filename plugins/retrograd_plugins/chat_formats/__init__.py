"""How model families write tool calls; one module a family, `prompt` for all others."""
