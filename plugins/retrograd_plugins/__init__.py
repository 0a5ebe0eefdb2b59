"""Built-in plugins of retrograd, one folder a kind."""
