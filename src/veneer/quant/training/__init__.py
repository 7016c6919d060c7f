"""Training with quantisation: weights quantised as they are used, and products on codes.

The modules here:

    fake_quantized  FakeQuantized, a weight in training
    backward        BackwardProduct, how a product of the backward pass is quantised
    products        rules for products of such weights
    operand         how an operand is quantised, and its derivative
    dot_general     dot_general on codes, forward and backward
    convolution     a convolution on codes, forward and backward
    ragged_dot      ragged_dot_general, of quantised operands and gradients
    layout          rules for what moves a weight about
    rounding_keys   keys for stochastic rounding
    masks           masks of sparse weights, from step to step
    convert         convert: the way out of training
"""

from . import layout as layout
from . import products as products
from .backward import BackwardProduct as BackwardProduct
from .convert import convert as convert
from .fake_quantized import FakeQuantized as FakeQuantized
from .masks import sparsity_masks as sparsity_masks
from .masks import with_masks as with_masks
from .rounding_keys import with_stochastic_rounding as with_stochastic_rounding
