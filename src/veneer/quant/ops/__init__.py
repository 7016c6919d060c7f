"""Operations on quantized arrays: public functions, and the rules of `vn.implicit`.

A product is a `QuantizedProduct` object. The first strategy that supports it returns a `Plan`,
which is then executed:

    product         QuantizedProduct, a call of dot_general with all facts about it; Plan; execute
    dot_general     dot_general, its rule, and the table of strategies
    by_kernel       strategies by kernels
    stored_matrix   a weight in the layout that kernels multiply
    by_xla          strategies by XLA: scaled_matmul, codes, tiles, values, dense arrays
    minima          products of an operand with minima, as two products
    tile_sums       sums that are computed tile by tile
    operands        conversions of operands: codes, values and scales for products

Other operations:

    einsum          einsum and dot
    convolution     conv_general_dilated
    ragged_dot      ragged_dot and ragged_dot_general
    group_tiles     products of groups of rows, one tile of rows at a time
    activations     products of weights that quantize their activations
    movement        casts, gather, slices and ppermute
"""

from . import activations as activations
from . import movement as movement
from .convolution import conv_general_dilated as conv_general_dilated
from .dot_general import dot_general as dot_general
from .einsum import dot as dot
from .einsum import einsum as einsum
from .ragged_dot import ragged_dot as ragged_dot
from .ragged_dot import ragged_dot_general as ragged_dot_general
