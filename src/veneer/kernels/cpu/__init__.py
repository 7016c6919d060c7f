"""Kernels for the CPU: Numba functions that XLA calls.

What knows one CPU from another, and makes machine code of functions, is in `veneer.native`.

    build           kernels become FFI targets: compiled at first use, and kept on disk
    targets         what targets there are, and the object file of each
    operands        the operands of a product: addresses, codes, scales and minima
    handlers        a call from XLA becomes jobs, whose parts threads compute
    floats          products of f32, or bf16, with codes
    integers        products of int8 with codes
    quantize        codes and scales of f32
    quantize_simd   its operations on vectors
"""
