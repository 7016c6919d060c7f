"""Vectors in registers: blocks of them are values of Numba's, and instructions work on these.

Which instructions a CPU has for something is known here and in `isa.py` alone. Who uses these
knows of it how many numbers a vector has, and how many vectors there are registers for.

    blocks          the type of a block, how an instruction is made, and what emits its code
    floats          f32: made, read, written, multiplied and added up
    bf16            pairs of bf16, and products of them
    integers        products of bytes, four at once, in int32
    bytes           what codes are worth, as bytes, and the order that products of them need
"""
