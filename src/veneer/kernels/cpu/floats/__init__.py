"""Products of floats with stored matrices: codes become f32 in registers, or nearby; or bf16.

Which side of the matrix is contracted decides how it is read, and how many rows of x there are,
what counts. A module with a kernel has a function `build`.

    rows_few        rows contracted by few rows of x: the matrix is read once, as it lies
    rows_tiled      the same, whose rows have scales for tiles of their own
    rows_many       by many: blocks of the matrix are decoded first
    decode          neighbours in a row of codes, as vectors
    columns_short   columns contracted by few, of rows as short as a head: they are summed together
    columns_one     by one row: sums stay in registers until they are done
    columns_few     by few: panels of the matrix are decoded in registers
    columns_many    by many: blocks of the matrix are decoded, scaled and transposed first
    columns_x       x in the order that panels are decoded in
    pairs           f32, or pairs of bf16: what many rows of x may be
    panels          the product with a panel, and its scales
"""
