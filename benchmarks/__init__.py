"""Benchmarks of retrograd against what users would take instead: `python -m benchmarks --help`.

Scripts of this package that run inside a peer's interpreter import the standard library and that peer
only; `attrs` and retrograd are imported by the orchestrating side alone.
"""
