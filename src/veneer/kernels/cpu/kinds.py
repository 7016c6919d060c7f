"""The kinds of codes that kernels are made for, by the names that they have in targets."""

#: The bits of codes that are looked up, and of those that are numbers of a dtype.
LOOKUP_BITS = {"lookup1": 1, "lookup2": 2, "lookup4": 4}
BYTES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")

#: The bits of a code of each kind.
BITS = LOOKUP_BITS | dict.fromkeys(BYTES, 8)

#: Those whose codes are worth integers, or may be.
INTEGERS = tuple(kind for kind in BITS if not kind.startswith("float8"))

#: The formats that there are kernels to quantise to, and the bits of their codes.
QUANTIZED_BITS = {"int8": 8, "int4": 4, "nf4": 4}
#: Where tiles lie within a row, such a kernel takes so many columns, or a multiple of it: they are
#: whole vectors of any CPU. Else it has space for tiles of so many columns at most.
WITHIN_ROWS, MOST_COLUMNS = 32, 4096

#: What scales and minima may be stored as, in the order of their types in jobs.
FLOATS = ("float32", "float16", "bfloat16", "float8_e8m0fnu")
