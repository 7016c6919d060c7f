"""What JAX's primitives do on quantised arrays: functions, and the rules of `implicit`.

The modules here:

    dot_general     the ways to a product, in the order they are preferred
    product         what is asked for, and the plan by which it is computed
    by_kernel       the way by a kernel, as one of matrices
    kernel_references  what XLA computes where a kernel does not
    by_xla          the ways by XLA: scaled_matmul, on codes, by tiles, by values, dense
    tile_sums       a sum cut in tiles
    minima          minima of tiles, a sum apart from that of the codes
    operands        from a QArray to what arithmetic takes
    einsum          einsum and dot, of such products
    convolution     conv_general_dilated
    ragged_dot      ragged_dot and ragged_dot_general
    group_tiles     products of groups of rows, a tile of rows at a time
    activations     products of weights that quantise what they meet
    movement        casts, and look-ups that fill what is out of bounds
"""

from . import activations as activations
from . import movement as movement
from .convolution import conv_general_dilated as conv_general_dilated
from .dot_general import dot_general as dot_general
from .einsum import dot as dot
from .einsum import einsum as einsum
from .ragged_dot import ragged_dot as ragged_dot
from .ragged_dot import ragged_dot_general as ragged_dot_general
