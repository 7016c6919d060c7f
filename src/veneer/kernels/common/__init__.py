"""Modules that the kernels of all platforms share.

They import no kernel, and neither Numba nor LLVM:

    codes           the kinds of codes, their values, and bit planes
    problem         the operands of a product with a stored matrix, and its description
    table           the table of all kernels, one row per kernel, and the sizes that they support
    calls           calls of kernels, which join products of the same activations
"""
