"""What the kernels of all platforms share.

Its modules import no kernel, and neither Numba nor LLVM:

    kinds           the kinds of codes that kernels read, and their bits
    limits          the variants of CPU kernels, and the sizes that each is for
    bit_planes      pack codes of any number of bits without gaps
    problem         the operands of a product with a stored matrix, and its description
    calls           calls of kernels, which join products of the same activations
"""
