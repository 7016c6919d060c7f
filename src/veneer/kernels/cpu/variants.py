"""The variants of a kernel, compiled apart, where a program first needs one; and which that is.

few     for few rows of activations: what counts is how fast the matrix is read
short   for few, by a matrix whose rows are as short as a head: to begin and to end one counts
many    for more: what is decoded once is multiplied by all of them
"""

from typing import NamedTuple

#: Those that there are, by activations and what is contracted.
VARIANTS = {
    ("float32", "rows"): ("few", "many"),
    ("float32", "columns"): ("few", "short", "many"),
    ("int8", "rows"): ("few", "many"),
    ("int8", "columns"): ("few", "many"),
    ("bfloat16", "rows"): ("many",),
    ("bfloat16", "columns"): ("many",),
}

#: Rows of floats that are few, at most, by what is contracted; and of int8, where columns are.
FLOATS_BY_ROWS, FLOATS_BY_COLUMNS, INTEGERS_BY_COLUMNS = 16, 23, 16
#: And of int8 where rows are, by the bits of a code. Each four of them interleave the matrix
#: again, where the fields of a byte do not fit into registers at once for each field.
INTEGERS_BY_ROWS = {8: 8, 4: 6, 2: 4, 1: 4}
#: Rows of a tile, at least, where few rows of activations meet rows.
LEAST_TILE = 16
#: After so many codes, int32 sums go on in f32: no sum may have more than 31 bits.
LONGEST = 32768
#: Rows that are multiplied at once by few of int8, where columns are contracted.
ROWS = 4
#: Vectors of columns that are decoded at once of short rows, and the columns of the longest.
SHORT_VECTORS, SHORT = 4, 256


class Product(NamedTuple):
    """What the choice depends on, beside the kernel.

    **Arguments:**

    - `m`: rows of activations.
    - `rows`, `columns`: of the stored matrix; and how many of each share a scale: `tile`.
    - `has_minima`: whether the kernel adds minima.
    """

    m: int
    rows: int
    columns: int
    tile: tuple[int, int]
    has_minima: bool = False


def variant_for(activations: str, contracting: str, bits: int, product: Product) -> str:
    """Returns the variant for a product.

    >>> from veneer.kernels.cpu.variants import Product, variant_for
    >>> variant_for("float32", "columns", 4, Product(1, 4096, 4096, (1, 128)))
    'few'
    """
    if activations == "bfloat16":
        return "many"
    if activations == "int8":
        is_few = _integers_by_rows if contracting == "rows" else _integers_by_columns
        return "few" if is_few(product, bits) else "many"
    if contracting == "rows":
        has_few = product.m <= FLOATS_BY_ROWS and product.tile[0] >= LEAST_TILE
        return "few" if has_few else "many"
    if product.m > FLOATS_BY_COLUMNS:
        return "many"
    return "short" if _is_short(product) else "few"


def _integers_by_rows(product: Product, bits: int) -> bool:
    tile = product.tile[0]
    is_tile = LEAST_TILE <= tile <= LONGEST and tile % 4 == 0
    return product.m <= INTEGERS_BY_ROWS.get(bits, 0) and is_tile


def _integers_by_columns(product: Product, bits: int) -> bool:
    """Tiles are of whole groups of rows, and of columns that are lanes of a vector, or vectors."""
    from ...native.isa import LANES  # which imports LLVM

    shared, tile = product.tile
    if product.m > INTEGERS_BY_COLUMNS or product.rows < ROWS or tile > LONGEST:
        return False
    if shared > 1 and (shared % ROWS != 0 or product.rows % ROWS != 0):
        return False
    in_planes = 8 % bits != 0
    lane = 4 if in_planes else 32 // bits
    group = lane * LANES
    if in_planes and product.columns % group != 0:  # of which vectors are whole
        return False
    if tile == product.columns or group % tile == 0:
        return tile % lane == 0
    return tile % group == 0


def _is_short(product: Product) -> bool:
    """Whether rows are short, and each has one scale, its own or that of all."""
    from ...native.isa import LANES

    columns, (shared, tile) = product.columns, product.tile
    fits = columns <= SHORT and columns % (SHORT_VECTORS * LANES) == 0 and product.rows >= LANES
    has_one = tile == columns and shared in (1, product.rows)
    return fits and has_one and not product.has_minima
