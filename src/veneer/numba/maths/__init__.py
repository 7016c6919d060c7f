"""Functions of numbers that generated code calls: plain Python, which Numba compiles when it must.

scalar          makes a function one that generated code may call
precision       one function for float32 and for float64
instructions    those that are an instruction of the CPU, or few
libm            those of the C library
conversions     numbers of one dtype as numbers of another
elementary      exponentials, logarithms, sigmoids and the like, without branches
complex         functions of complex numbers
"""
