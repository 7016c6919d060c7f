"""The back end: source as machine code, and what calls it.

A program may be run by machine code, or by Python:

    machine         source as machine code, by Numba and LLVM
    cache           machine code on disk, and library functions that it calls
    intrinsics      instructions and functions of numbers, as Numba is given them
    njit_functions  functions that users compile with Numba, as a program calls them
    entry           the function of a program that Python calls, and what it calls by address
    layout          offsets of fields in objects of CPython and NumPy
    raw             a program as a function for other Numba code
    interpreted     a program run by Python, with every access of memory checked
"""
