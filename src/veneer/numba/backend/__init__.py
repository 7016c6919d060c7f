"""The back end: source as machine code, and what calls it.

intrinsics      instructions and functions of numbers, as Numba is given them
entry           the function of a program that Python calls
raw             a program as a function for other Numba code
interpreted     a program run by Python, with every access of memory checked
"""
