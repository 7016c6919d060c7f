"""Training with quantisation: weights quantised as they are used, and products on codes."""

from . import layout as layout
from . import products as products
from .convert import convert as convert
from .fake_quantized import FakeQuantized as FakeQuantized
from .rounding_keys import with_stochastic_rounding as with_stochastic_rounding
