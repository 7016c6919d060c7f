"""Kernels for the CPU: Numba functions that XLA calls."""
