"""Quantized arrays, which store few bits per value and act as dense arrays in JAX programs.

`quantize` makes a `QArray`, and `quantize_tree` quantizes the weights of a model by a list of
`Rule`. `calibrate` quantizes weights with the help of sample data (GPTQ, AWQ, SmoothQuant).
`FORMATS` has all number formats.

The modules and packages:

    formats              number formats, packing and tiles
    qarray               QArray, the quantized array
    pairs                decoding two neighboring values at once, which is faster on GPUs
    qcache               QCache, a QArray that programs write into
    block_cache          BlockCache, a cache in which blocks of tokens share scales
    zeros                zeros: new arrays of type QCache or BlockCache
    conversion           quantize: from dense arrays to QArrays
    ops                  the rules of QArrays for JAX's primitives
    product_weights      ProductWeight, the base class of weights with their own rule for products
    activations          ActivationQuantized, a weight that quantizes the other operand
    activation_products  quantize_products: products of two activations
    models               rules that quantize the parameters of a model
    observation          statistics of activations
    ptq                  calibrate, allocate_bits and tune: quantization with sample data
    training             FakeQuantized and quantized products for training
"""

from .activation_products import quantize_products
from .activations import ActivationQuantized
from .block_cache import BlockCache
from .conversion.fake_quantize import fake_quantize, fake_quantize_with_scale
from .conversion.quantize import dequantize, quantize, quantize_with_scale
from .conversion.ranges import calibration_range, scale_of_range
from .formats import FORMATS, Format, get_format
from .formats.packing import Packing
from .models.quantize_tree import quantize_tree
from .models.rules import Rule
from .observation.observe import observe
from .observation.statistics import ActivationStatistics, load_statistics, save_statistics
from .ops import conv_general_dilated, dot, dot_general, einsum, ragged_dot, ragged_dot_general
from .ptq.allocate_bits import BitAllocator, allocate_bits
from .ptq.calibrate import Calibrator, calibrate
from .ptq.tune import Tuner, tune
from .qarray import QArray
from .qcache import QCache
from .training import (
    BackwardProduct,
    FakeQuantized,
    convert,
    sparsity_masks,
    with_masks,
    with_stochastic_rounding,
)
from .zeros import zeros

__all__ = [
    "FORMATS",
    "ActivationQuantized",
    "ActivationStatistics",
    "BackwardProduct",
    "BitAllocator",
    "BlockCache",
    "Calibrator",
    "FakeQuantized",
    "Format",
    "Packing",
    "QArray",
    "QCache",
    "Rule",
    "Tuner",
    "allocate_bits",
    "calibrate",
    "calibration_range",
    "conv_general_dilated",
    "convert",
    "dequantize",
    "dot",
    "dot_general",
    "einsum",
    "fake_quantize",
    "fake_quantize_with_scale",
    "get_format",
    "load_statistics",
    "observe",
    "quantize",
    "quantize_products",
    "quantize_tree",
    "quantize_with_scale",
    "ragged_dot",
    "ragged_dot_general",
    "save_statistics",
    "scale_of_range",
    "sparsity_masks",
    "tune",
    "with_masks",
    "with_stochastic_rounding",
    "zeros",
]


def __dir__() -> list[str]:
    return __all__
