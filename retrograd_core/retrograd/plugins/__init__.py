"""Finding plugins (`discovery`) and loading the ones a run refers to (`session`)."""

from .discovery import Catalogue, PluginEntry
from .session import PluginSession, Registered

__all__ = ["Catalogue", "PluginEntry", "PluginSession", "Registered"]
