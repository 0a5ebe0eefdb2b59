"""Tools that act in a sandbox: definitions, toolsets, and the catalogue of a run. Public API for
environments."""

from .builtin import FunctionTool, FunctionToolFactory, NoParams, ToolFault
from .catalogue import CataloguedTool, ToolCatalogue, catalogue_of, digest
from .components import InstalledTools, ToolComponents
from .config import Tools
from .texts import MAX_RESULT_BYTES, cap_text, command_text

__all__ = [
    "MAX_RESULT_BYTES",
    "CataloguedTool",
    "FunctionTool",
    "FunctionToolFactory",
    "InstalledTools",
    "NoParams",
    "ToolCatalogue",
    "ToolComponents",
    "ToolFault",
    "Tools",
    "cap_text",
    "catalogue_of",
    "command_text",
    "digest",
]
