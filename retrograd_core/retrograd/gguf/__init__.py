"""GGUF files: reading through memory maps, writing atomically, adapters, merging."""

from .reader import GGUFFile, open_model

__all__ = ["GGUFFile", "open_model"]
