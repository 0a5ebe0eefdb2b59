"""Agents: scenarios, trajectories with tools, and what plays them. Public API for environments of third
parties."""

from .scenarios import load_scenarios, scenario_of, scenario_record
from .worlds import WorldProvider, mistake, observation

__all__ = [
    "WorldProvider",
    "load_scenarios",
    "mistake",
    "observation",
    "scenario_of",
    "scenario_record",
]
