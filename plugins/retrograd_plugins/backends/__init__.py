"""Devices: array storage and the choice of kernels."""
