"""Built-in toolsets."""
