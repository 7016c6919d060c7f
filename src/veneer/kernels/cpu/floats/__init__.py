"""Products of floats with stored matrices: codes become f32 in registers, or nearby; or bf16.

`rows.py` and `columns.py` are the kernels; which side of the matrix is contracted decides how it is
read, and how many rows of x there are, what counts.

    rows            rows contracted, for any number of rows of x
    rows_few        for few: the matrix is read once, as it lies
    rows_many       for many: blocks of the matrix are decoded first
    place           where the rows of a matrix are
    decode          neighbours in a row of codes, as vectors
    columns         columns contracted, for any number of rows of x
    columns_short   for few, of rows as short as a head: rows are summed together
    columns_few     for few: panels of the matrix are decoded in registers
    columns_many    for many: blocks of the matrix are decoded, scaled and transposed first
    columns_x       x in the order that panels are decoded in
    bf16            either side contracted, for many rows of bf16
    pairs           f32, or pairs of bf16: what many rows of x may be
    panels          the product with a panel, and its scales
"""
