"""Kernels: implementations of ops, one folder a backend."""
