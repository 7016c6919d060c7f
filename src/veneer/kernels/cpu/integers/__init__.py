"""Multiply int8 activations by integer codes on CPU. Sums are exact in int32 within a tile.

rows_few        few rows of activations, with rows contracted
columns_few     few rows of activations, with columns contracted
blocks          many rows of activations, with rows or columns contracted
panels          panels of decoded codes, for `blocks` and `rows_few`
"""
