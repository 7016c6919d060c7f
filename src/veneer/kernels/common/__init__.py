"""Modules that the kernels of all platforms share.

They import no kernel, and neither Numba nor LLVM:

    problem         the codes of a stored matrix, the operands of a product with it, and its shape
    table           the table of all kernels, one row per kernel, and the sizes that they support
    calls           calls of kernels, which join products of the same activations
"""
