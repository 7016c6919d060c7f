"""What JAX's primitives do on quantised arrays: functions, and the rules of `implicit`.

The modules here:

    dot_general     the ways to a product, in the order they are preferred
    plan            what a way offers: what it is, and what computes it
    by_kernel       the way by a kernel, as one of matrices
    by_xla          the ways by XLA: on codes, by tiles, by values, dense
    tile_sums       a sum cut in tiles
    dot_params      what dot_general is told, and where axes are in its output
    operands        from a QArray to what arithmetic takes
    einsum          einsum and dot, of such products
    convolution     conv_general_dilated
    ragged_dot      ragged_dot and ragged_dot_general
    group_tiles     products of groups of rows, a tile of rows at a time
    layout, grids   what moves values about, and the leaves as grids
"""

from . import movement as movement
from .convolution import conv_general_dilated as conv_general_dilated
from .dot_general import dot_general as dot_general
from .einsum import dot as dot
from .einsum import einsum as einsum
from .ragged_dot import ragged_dot as ragged_dot
from .ragged_dot import ragged_dot_general as ragged_dot_general
