"""Quantized arrays, which store few bits per value and act as dense arrays in JAX programs.

`quantize` makes a `QArray`, and `quantize_tree` quantizes the weights of a model by a list of
`Rule`. `calibrate` quantizes weights with the help of sample data (GPTQ, AWQ, SmoothQuant).
`FORMATS` has all number formats.

The modules and packages:

    formats      number formats, packing and tiles
    arrays       QArray, the quantized array
    conversion   quantize: from dense arrays to QArrays
    caches       QCache and BlockCache, quantized arrays that programs write into
    ops          the rules of QArrays for JAX's primitives
    product_weights       ProductWeight, the base class of weights with rules for products
    activation_quantized  a weight that quantizes the other operand of its products
    training     FakeQuantized and quantized products for training
    statistics   ActivationStatistics, their files, and static scales
    recording    a weight that records the activations that multiply it
    models       Rule, quantize_tree, observe and quantize_products: rules for a whole model
    ptq          calibrate, allocate_bits and tune: quantization with sample data

Each package or module imports only from those above it in this list.
"""

from .activation_quantized import ActivationQuantized
from .arrays import QArray
from .caches import BlockCache, QCache, zeros
from .conversion.quantize import (
    calibration_range,
    dequantize,
    quantize,
    quantize_with_scale,
    scale_of_range,
)
from .formats import FORMATS, Format, get_format
from .formats.packing import Packing
from .models.activation_products import quantize_products
from .models.observe import observe
from .models.quantize_tree import quantize_tree
from .models.rules import Rule
from .ops import conv_general_dilated, dot, dot_general, einsum, ragged_dot, ragged_dot_general
from .ptq.allocate_bits import BitAllocator, allocate_bits
from .ptq.calibrate import Calibrator, calibrate
from .ptq.tune import Tuner, tune
from .statistics import ActivationStatistics, load_statistics, save_statistics
from .training import (
    BackwardProduct,
    FakeQuantized,
    convert,
    sparsity_masks,
    with_masks,
    with_stochastic_rounding,
)
from .training.fake_quantized import fake_quantize, fake_quantize_with_scale

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
