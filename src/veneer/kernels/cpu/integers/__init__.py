"""Multiply int8 activations by integer codes on CPU. Sums are exact in int32 within a tile.

Each of the first four modules has a kernel, and returns its functions from `build`.

    rows, columns   many rows of activations, by the contracted side of the matrix
    rows_few        a few rows of activations, with rows contracted
    columns_few     a few rows of activations, with columns contracted
    blocks          the kernel of `rows` and `columns`, without what depends on the side
    panel           the layout of a panel, and the product with one
"""
