"""What JAX's primitives do on quantised arrays: functions, and the rules of `implicit`."""

from . import movement as movement
from .convolution import conv_general_dilated as conv_general_dilated
from .dot_general import dot_general as dot_general
from .einsum import dot as dot
from .einsum import einsum as einsum
from .ragged_dot import ragged_dot as ragged_dot
from .ragged_dot import ragged_dot_general as ragged_dot_general
