"""Random programs on implicit arrays, compared with the same programs on dense arrays.

    python -m fuzz --programs 1000 --seed 7        # from tests/; or --seconds 120

A program is a text that can be run on its own: an operand of any type or format, lines that compute
with it, and a transformation. A failing program is shrunk and printed.

    operands    texts that make arrays of every type and format
    lines       texts that compute with an array
    programs    programs with a transformation
    by_numpy    programs run without being compiled
    run         the worker processes, and the shrinking of failing programs
    checks      the comparison of a program with its dense run
"""
