"""Products of f32 or bf16 activations x with stored matrices W, whose codes are decoded to floats.

A kernel contracts the rows of W (`x @ W`) or its columns (`x @ W.T`). With few rows of x, the time
to read and decode W dominates, so codes are decoded in registers. With many rows, arithmetic
dominates, so blocks of W are decoded to memory once for all rows. Each module of a kernel has a
function `build`.

    rows_few        rows contracted, few rows of x: W is read once, in the order of memory
    rows_tiled      rows contracted, few rows of x, and a scale per tile of columns in each row of W
    rows_many       rows contracted, many rows of x, f32 or bf16
    columns_few     columns contracted, few rows of x or one
    columns_short   columns contracted, few rows of x, rows of W as short as an attention head
    columns_many    columns contracted, many rows of x, f32 or bf16
    panels          shared by the kernels of columns_few: decode and multiply panels of W
"""
