"""Functions of numbers that generated code calls: plain Python, which Numba compiles when it must.

What makes a function one of them, and then they:

    scalar          functions that are compiled, and those that are instructions
    precision       a function written once for float32 and for float64
    instructions    those that are an instruction of the CPU, or few
    libm            those of the C library
    conversions     numbers of one dtype as numbers of another
    elementary      exponentials, logarithms, sigmoids and the like, without branches
    complex         functions of complex numbers
"""
