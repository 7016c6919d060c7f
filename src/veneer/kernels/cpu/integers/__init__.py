"""Products of int8 activations with stored integers, exact in int32 within a tile.

A module with a kernel has a function `build`: `rows`, `columns`, `rows_few` and `columns_few`.

    blocks          by any number of rows of x: the matrix in panels, block by block
    rows_few        rows contracted by few rows of x: the matrix is read once, as it lies
    columns_few     columns contracted by few rows of x: it is, too
    panel           a panel of bytes, and the product of activations with it
    rows, columns   where a panel comes from, by what is contracted
"""
