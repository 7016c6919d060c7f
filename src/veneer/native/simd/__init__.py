"""Vector instructions on blocks of registers, which are values of Numba.

This package and `isa.py` know the instructions of each CPU. Kernels know only the number of lanes
in a vector and the number of registers.

    blocks          the type of a block, the decorator of instructions, and emitters of LLVM IR
    floats          f32: loads, stores, arithmetic, reductions
    bf16            pairs of bf16, and their dot products
    integers        int32, and dot products of four bytes
    bytes           bytes: lookup tables, and the order that dot products of four bytes need
"""
