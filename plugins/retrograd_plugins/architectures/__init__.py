"""Model architectures, by `general.architecture` of the GGUF."""
