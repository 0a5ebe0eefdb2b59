"""Makers of built-in tools."""
