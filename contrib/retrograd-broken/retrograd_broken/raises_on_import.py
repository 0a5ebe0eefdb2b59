"""Fails while it is imported."""

raise RuntimeError("this plugin cannot be imported")
