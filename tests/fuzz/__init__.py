"""Random programs of implicit arrays, against the same programs of dense arrays.

    python -m fuzz --programs 1000 --seed 7        # from tests/; or --seconds 120

A program is a text, which can be run by itself: an operand, of any type or format, and lines that
compute something of it, under some transformation. One that fails is printed, as small as it can be
made.

    operands    texts that make arrays of every type and format
    lines       texts that compute something of an array
    programs    programs of these, and their transformations
    by_numpy    programs run without being compiled
    run         programs, one after the other, and what fails made small
    checks      whether a program gives what it gives of dense arrays
"""
