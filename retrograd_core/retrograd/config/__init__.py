"""Configuration: TOML with positions, strict structuring, rules across keys, schema, reference.

The way of a file: `load_document` → `read_shared` → (plugins are found) → `RunShape.of(components)` →
`check_rules` and `read_component` → `SharedSections.config(problems)` → `check_component`.
"""

from .document import Document, Origin, RawTable, load_document, parse_document, parse_value
from .keys import ConfigKey, keys_of
from .lint import class_faults
from .reference import render_table, sections_in, update_reference
from .report import ordered, raise_problems
from .resolved import resolved_text, to_table, write_resolved
from .rules import CONDITIONAL_KEYS, check_rules
from .run_config import RunConfig, SharedSections, read_shared
from .schema import json_schema
from .sections import (
    NAMED_TABLES,
    SHARED_SECTIONS,
    CheckpointConfig,
    EvaluationConfig,
    MetricsConfig,
    ModelConfig,
    ObserveConfig,
    OutputConfig,
    PluginsConfig,
    ReferenceConfig,
    RunSection,
    TrainingConfig,
)
from .shape import RunShape, check_component, read_component, table_name
from .structure import Structured, read_table, structure

__all__ = [
    "CONDITIONAL_KEYS",
    "NAMED_TABLES",
    "SHARED_SECTIONS",
    "CheckpointConfig",
    "ConfigKey",
    "Document",
    "EvaluationConfig",
    "MetricsConfig",
    "ModelConfig",
    "ObserveConfig",
    "Origin",
    "OutputConfig",
    "PluginsConfig",
    "RawTable",
    "ReferenceConfig",
    "RunConfig",
    "RunSection",
    "RunShape",
    "SharedSections",
    "Structured",
    "TrainingConfig",
    "check_component",
    "check_rules",
    "class_faults",
    "json_schema",
    "keys_of",
    "load_document",
    "ordered",
    "parse_document",
    "parse_value",
    "raise_problems",
    "read_component",
    "read_shared",
    "read_table",
    "render_table",
    "resolved_text",
    "sections_in",
    "structure",
    "table_name",
    "to_table",
    "update_reference",
    "write_resolved",
]
