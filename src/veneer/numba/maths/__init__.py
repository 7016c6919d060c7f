"""Functions of numbers that generated code calls.

Each imports only the modules above it:

    instructions    how to define such a function; instructions of the CPU and the C library
    elementary      exponentials, logarithms, sigmoids and others, without branches
    complex         functions of complex numbers
    intrinsics      the LLVM code of the instructions. It imports Numba
"""
