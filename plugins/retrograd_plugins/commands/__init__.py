"""Subcommands of `retrograd`.

A module is imported to print its line of `--help`: it imports click and the contracts, and the rest
inside the function that runs.
"""
