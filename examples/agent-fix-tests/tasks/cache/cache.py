"""A cache of limited size."""


class Cache:
    """Keeps the `size` entries that were used last."""

    def __init__(self, size):
        self.size = size
        self.entries = {}

    def get(self, key):
        """The value, or None; it counts as used."""
        return self.entries.get(key)

    def put(self, key, value):
        """Add or replace an entry; the one whose use is longest ago makes room."""
        self.entries[key] = value
        if len(self.entries) > self.size:
            self.entries.popitem()
