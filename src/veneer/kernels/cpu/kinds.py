"""The kinds of codes that kernels are made for, by the names that they have in targets."""

#: The bits of a code of each kind. Fewer than 8 are looked up.
BITS = {
    "lookup1": 1,
    "lookup2": 2,
    "lookup4": 4,
    "int8": 8,
    "uint8": 8,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
}

#: Those whose codes are worth integers, or may be.
INTEGERS = tuple(kind for kind in BITS if not kind.startswith("float8"))
