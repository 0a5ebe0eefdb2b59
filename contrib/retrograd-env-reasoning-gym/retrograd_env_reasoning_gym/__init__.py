"""Tasks of reasoning-gym for retrograd: `[agent.environment] type = "reasoning_gym"`."""
