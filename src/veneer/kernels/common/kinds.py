"""The kinds of codes that kernels are made for, by the names that they have in targets."""

#: The bits of codes that are looked up, of those in bit planes, and what numbers of a dtype are.
LOOKUP_BITS = {"lookup1": 1, "lookup2": 2, "lookup4": 4}
SIX_BIT_FLOATS = ("float6_e2m3fn", "float6_e3m2fn")  # in bit planes, too
PLANE_BITS = {"planes3": 3, "planes5": 5, "planes6": 6, "planes7": 7} | dict.fromkeys(
    SIX_BIT_FLOATS, 6
)
BYTES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")

#: The bits of a code of each kind.
BITS = LOOKUP_BITS | PLANE_BITS | dict.fromkeys(BYTES, 8)

#: Those that there are kernels for whose activations are integers, too; and, where few of them meet
#: columns, of bit planes.
INTEGERS = (*LOOKUP_BITS, "int8", "uint8")
INTEGER_PLANES = ("planes3", "planes5", "planes6", "planes7")

#: The types of activations that kernels multiply, in the order that handlers know them by.
ACTIVATIONS = ("float32", "int8", "bfloat16")

#: The formats that there are kernels to quantise to, and the bits of their codes.
QUANTIZED_BITS = {"int8": 8, "int4": 4, "nf4": 4}
#: The size of the table of such a kernel, in numbers: two, and up to 15 thresholds.
QUANTIZE_TABLE = 17
#: Where tiles lie within a row, such a kernel takes so many columns, or a multiple of it: they are
#: whole vectors of any CPU. Else it has space for tiles of so many columns at most.
WITHIN_ROWS, MOST_COLUMNS = 32, 4096

#: What scales and minima may be stored as, in the order of their types in jobs.
FLOATS = ("float32", "float16", "bfloat16", "float8_e8m0fnu")
#: And what zero points, of which minima are made, in the order of the types that follow. Scales and
#: minima that are codes are int8, too, or of the last type: bit planes of 6 bits without a sign.
ZERO_POINTS = ("int8", "uint8")
PLANES_TYPE, PLANES = len(FLOATS) + len(ZERO_POINTS), 6


def byte_of_planes(kind: str) -> str:
    """Returns what a code of bit planes is a byte of, once it is one: signed, of so many bits."""
    return kind if kind in SIX_BIT_FLOATS else "int8"


def row_bytes(columns: int, bits: int) -> int:
    """Returns the bytes that a row of codes takes.

    Those of bits that divide 8 share bytes; of others, 8 neighbours are as many bytes as they have
    bits.

    >>> row_bytes(9, 4), row_bytes(9, 3)
    (5, 6)
    """
    if 8 % bits:
        return (columns + 7) // 8 * bits
    return (columns * bits + 7) // 8
