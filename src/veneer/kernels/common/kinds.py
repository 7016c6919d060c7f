"""The kinds of codes that kernels read. Their names are part of the names of kernels."""

#: The bits of codes whose values are looked up in a table.
LOOKUP_BITS = {"lookup1": 1, "lookup2": 2, "lookup4": 4}
SIX_BIT_FLOATS = ("float6_e2m3fn", "float6_e3m2fn")
#: The bits of codes in bit planes (`bit_planes.py`).
PLANE_BITS = {"planes3": 3, "planes5": 5, "planes6": 6, "planes7": 7} | dict.fromkeys(
    SIX_BIT_FLOATS, 6
)
#: Dtypes of codes of 8 bits.
BYTES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")

#: The bits of a code of each kind.
BITS = LOOKUP_BITS | PLANE_BITS | dict.fromkeys(BYTES, 8)

#: The kinds that kernels multiply by int8 activations. Only the kernel for few rows of activations
#: that contracts columns reads the planes.
INTEGERS = (*LOOKUP_BITS, "int8", "uint8")
INTEGER_PLANES = ("planes3", "planes5", "planes6", "planes7")

#: The dtypes of activations. Compiled code contains the index of a dtype here.
ACTIVATIONS = ("float32", "int8", "bfloat16")

#: The formats that CPU kernels quantize to, and the bits of their codes.
QUANTIZED_BITS = {"int8": 8, "int4": 4, "nf4": 4}
#: The size of the table of such a kernel: two numbers, and up to 15 thresholds.
QUANTIZE_TABLE = 17
#: For tiles within rows, such a kernel takes a multiple of `WITHIN_ROWS` columns: whole vectors of
#: any CPU. Otherwise, a tile has at most `MOST_COLUMNS` columns.
WITHIN_ROWS, MOST_COLUMNS = 32, 4096

#: The dtypes of scales and minima. Compiled code contains the index of a dtype here.
FLOATS = ("float32", "float16", "bfloat16", "float8_e8m0fnu")
#: The dtypes of zero points, whose indices follow the dtypes in `FLOATS`.
ZERO_POINTS = ("int8", "uint8")
#: Scales and minima that are codes are int8, or bit planes of `PLANES` bits with this index.
PLANES_TYPE, PLANES = len(FLOATS) + len(ZERO_POINTS), 6


def byte_of_planes(kind: str) -> str:
    """Return the dtype of a code in bit planes after it was expanded to a byte."""
    return kind if kind in SIX_BIT_FLOATS else "int8"


def row_bytes(columns: int, bits: int) -> int:
    """Return the bytes that a row of codes takes.

    Codes whose bits divide 8 share bytes. Eight neighbors of other codes take `bits` bytes.

    >>> row_bytes(9, 4), row_bytes(9, 3)
    (5, 6)
    """
    if 8 % bits:
        return (columns + 7) // 8 * bits
    return (columns * bits + 7) // 8
