"""The variants of a kernel, which are compiled apart; `select.py` says which a product needs.

one     for one row of activations: no sum leaves a register before it is done
few     for few rows of activations: what counts is how fast the matrix is read
short   for few, by a matrix whose rows are as short as a head: to begin and to end one counts
tiled   for few, by a matrix whose rows have scales of their own, for tiles of some columns
many    for more: what is decoded once is multiplied by all of them
"""

#: Those that there are, by activations and what is contracted.
VARIANTS = {
    ("float32", "rows"): ("few", "tiled", "many"),
    ("float32", "columns"): ("one", "few", "short", "many"),
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
#: Of what a row of a matrix has that is tiled: the least part of its columns, and the most tiles.
TILED_COLUMNS, MOST_TILES = 64, 512
#: Vectors of columns that are decoded at once of short rows, and the columns of the longest.
SHORT_VECTORS, SHORT = 4, 256
