"""Operations on quantized arrays: public functions, and the rules of `vn.implicit`.

A strategy is a function that returns a `Plan` for a product, or None if it does not support the
product. The plan of the first strategy that supports the product is executed:

    product         QuantizedProduct, the arguments of a dot_general; Plan; execute
    dot_general     dot_general, its rule, and the table of strategies
    by_kernel       strategies that call kernels
    stored_matrix   a weight in the layout that kernels read
    by_xla          strategies that use XLA operations, on codes or on dense arrays
    minima          products of an operand with minima (offsets per tile), as two products
    tile_sums       products that are summed tile by tile
    operands        conversions of operands: codes, values and scales for products

Other operations:

    einsum          einsum and dot
    convolution     conv_general_dilated
    ragged_dot      ragged_dot and ragged_dot_general
    group_tiles     ragged_dot on CPU, as a loop over tiles of rows
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
