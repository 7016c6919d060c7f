"""Kernels for the CPU: Numba functions that XLA calls.

What knows one CPU from another, and makes machine code of functions, is in `veneer.native`.

    build           kernels become FFI targets: compiled at first use, and kept on disk
    targets         what targets there are, and the object file of each
    variants        the variants of a kernel, by how many rows of x there are
    kinds           the kinds of codes that there are kernels for
    job             what a kernel is to compute, in words
    group           the jobs of several products, whose parts are taken as one job's
    place           where the rows of a matrix lie, and which of its parts a thread does
    scales          scales and minima, as f32
    minima          what minima add, for few rows of x
    handlers        a call from XLA becomes a job
    floats          products of f32, or bf16, with codes
    integers        products of int8 with codes
    quantize        codes and scales of f32
"""
