"""Tools that act in a sandbox: definitions, toolsets, and the catalogue of a run. Public API for
environments."""

from .catalogue import ToolCatalogue, catalogue_of
from .components import InstalledTools, ToolComponents
from .config import Tools
from .texts import MAX_RESULT_BYTES, cap_text, command_text

__all__ = [
    "MAX_RESULT_BYTES",
    "InstalledTools",
    "ToolCatalogue",
    "ToolComponents",
    "Tools",
    "cap_text",
    "catalogue_of",
    "command_text",
]
