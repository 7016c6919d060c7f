"""Quantized training: weights that are quantized on use, and products of quantized codes.

options         `BackwardProduct` and N:M sparsity: options of rules for training
fake_quantized  `fake_quantize`, and `FakeQuantized`, a weight that is quantized on use
products        the primitives that training quantizes, and their gradients
recipe          the rules of `FakeQuantized`; products with quantized gradients
trees           conversion, masks and rounding keys of all weights of a tree
"""

from . import recipe as recipe
from .fake_quantized import FakeQuantized as FakeQuantized
from .options import BackwardProduct as BackwardProduct
from .trees import convert as convert
from .trees import sparsity_masks as sparsity_masks
from .trees import with_masks as with_masks
from .trees import with_stochastic_rounding as with_stochastic_rounding
