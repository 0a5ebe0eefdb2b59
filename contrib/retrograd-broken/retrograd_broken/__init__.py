"""Each module here is one mistake a plugin author can make."""
