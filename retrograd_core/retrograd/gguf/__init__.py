"""GGUF files: reading through memory maps, writing atomically, adapters, merging."""
