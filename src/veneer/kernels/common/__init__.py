"""Modules that the kernels of all platforms share.

They import no kernel, and neither Numba nor LLVM:

    kinds           the kinds of codes that kernels read, and their bits
    bit_planes      pack codes of any number of bits without gaps
    limits          the sizes that CPU kernels are compiled for
    problem         the operands of a product with a stored matrix, and its description
    table           the table of all kernels, one row per kernel
    calls           calls of kernels, which join products of the same activations
"""
