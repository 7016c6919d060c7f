"""Sizes that a CPU kernel is compiled for, and that `table.py` compares products with."""

#: The most rows of activations for kernels of few rows, by the contracted axis of the matrix. More
#: rows are faster by a kernel that decodes a block of the matrix once for all of them.
FLOATS_BY_ROWS, FLOATS_BY_COLUMNS, INT8_BY_COLUMNS = 16, 23, 16
#: The same for int8 activations and contracted rows, by the bits of a code. The kernel interleaves
#: the matrix again for every four rows of activations, unless all fields of a byte fit in
#: registers.
INT8_ROWS_BY_BITS = {8: 8, 4: 6, 2: 4, 1: 4}
INT8_BY_ROWS = max(INT8_ROWS_BY_BITS.values())
#: The fewest codes in a tile along an axis of the matrix, for kernels of few rows of activations
#: that contract rows or read short rows.
LEAST_TILE = 16
#: The most codes in a tile, for kernels that sum a tile of int8 products in int32.
LONGEST = 32768
#: Rows of the matrix that the kernel for few rows of int8 that contracts columns multiplies at
#: once.
ROWS = 4
#: A kernel for matrices with tiles along each row: its columns are a multiple of the first number,
#: and a row has at most the second number of tiles.
TILED_COLUMNS, MOST_TILES = 64, 512
#: A kernel for short rows, such as the keys of one attention head: the vectors of columns that it
#: decodes at once, and the most columns.
SHORT_VECTORS, SHORT = 4, 256
