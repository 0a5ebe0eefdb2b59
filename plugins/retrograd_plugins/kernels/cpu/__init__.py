"""Kernels of the `cpu` backend: Numba, compiled for the processor at hand."""
