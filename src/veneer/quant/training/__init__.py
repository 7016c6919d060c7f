"""Training with quantisation: weights quantised as they are used, and products on codes.

The modules here:

    fake_quantized  FakeQuantized, a weight in training
    products        rules for products of such weights
    operand         how an operand is quantised, and its derivative
    dot_general     dot_general on codes, forward and backward
    convolution     a convolution on codes, forward and backward
    layout          rules for what moves a weight about
    rounding_keys   keys for stochastic rounding
    convert         convert: the way out of training
"""

from . import layout as layout
from . import products as products
from .convert import convert as convert
from .fake_quantized import FakeQuantized as FakeQuantized
from .rounding_keys import with_stochastic_rounding as with_stochastic_rounding
