"""Operations on quantized arrays: public functions, and the rules of `vn.implicit`.

A strategy is a function that returns a `Plan` for a product, or None if it does not support the
product. The plan of the first strategy that supports the product is executed:

    product         QuantizedProduct, the arguments of a dot_general; Plan; execute
    dot_general     dot_general, its rule, and the table of strategies; einsum and dot
    by_kernel       strategies that call kernels
    stored_matrix   a weight in the layout that kernels read
    by_xla          strategies that use XLA operations, on codes or on dense arrays
    operands        conversions of operands: codes, values and scales for products

Other operations:

    convolution     conv_general_dilated
    ragged_dot      ragged_dot and ragged_dot_general
    movement        casts, gather, slices and ppermute
"""

from . import movement as movement
from .convolution import conv_general_dilated as conv_general_dilated
from .dot_general import dot as dot
from .dot_general import dot_general as dot_general
from .dot_general import einsum as einsum
from .ragged_dot import ragged_dot as ragged_dot
from .ragged_dot import ragged_dot_general as ragged_dot_general
