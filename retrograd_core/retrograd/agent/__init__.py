"""Agents: scenarios, trajectories with tools, and what plays them. Public API for environments of third
parties."""

from .scenarios import load_scenarios, scenario_of, scenario_record

__all__ = ["load_scenarios", "scenario_of", "scenario_record"]
