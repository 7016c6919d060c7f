"""Quantized training: weights that are quantized on use, and products of quantized codes.

backward        `BackwardProduct`, the options for a product of the backward pass
fake_quantized  `FakeQuantized`, a weight that is quantized on use
products        the primitives that training quantizes, and their gradients
recipe          `quantized_product`, which quantizes its operands and its gradients
rules           the rules of `FakeQuantized` for primitives
trees           conversion, masks and rounding keys of all weights of a tree
"""

from . import rules as rules
from .backward import BackwardProduct as BackwardProduct
from .fake_quantized import FakeQuantized as FakeQuantized
from .trees import convert as convert
from .trees import sparsity_masks as sparsity_masks
from .trees import with_masks as with_masks
from .trees import with_stochastic_rounding as with_stochastic_rounding
