"""Quantised arrays: few bits a value, dense to every JAX program.

The modules here, and rooms of several:

    formats              how numbers become few bits: formats, packing, tiles
    qarray               QArray, the quantised array
    pairs                neighboring values computed in pairs, for XLA on GPUs
    qcache               QCache, a QArray that programs write into
    block_cache          BlockCache, one whose tokens share scales in blocks
    zeros                caches of either kind, empty
    conversion           quantize: from dense arrays to QArrays
    ops                  what JAX's primitives do on QArrays
    product_weights      weights that do something of their own in products
    activations          ActivationQuantized, whose partner in a product is quantised
    activation_products  products of two activations, quantised by their place in a program
    models               rules by which the parameters of a model are quantised
    observation          statistics of activations
    ptq                  weights rounded by the activations that they meet
    training             weights quantised as they are used, and products on codes
"""

from .activation_products import quantize_products as quantize_products
from .activations import ActivationQuantized as ActivationQuantized
from .block_cache import BlockCache as BlockCache
from .conversion.fake_quantize import fake_quantize as fake_quantize
from .conversion.fake_quantize import fake_quantize_with_scale as fake_quantize_with_scale
from .conversion.quantize import dequantize as dequantize
from .conversion.quantize import quantize as quantize
from .conversion.quantize import quantize_with_scale as quantize_with_scale
from .conversion.ranges import calibration_range as calibration_range
from .conversion.ranges import scale_of_range as scale_of_range
from .formats import FORMATS as FORMATS
from .formats import Format as Format
from .formats import get_format as get_format
from .formats.packing import Packing as Packing
from .models.quantize_tree import quantize_tree as quantize_tree
from .models.rules import Rule as Rule
from .observation.observe import observe as observe
from .observation.statistics import ActivationStatistics as ActivationStatistics
from .observation.statistics import load_statistics as load_statistics
from .observation.statistics import save_statistics as save_statistics
from .ops import conv_general_dilated as conv_general_dilated
from .ops import dot as dot
from .ops import dot_general as dot_general
from .ops import einsum as einsum
from .ops import ragged_dot as ragged_dot
from .ops import ragged_dot_general as ragged_dot_general
from .ptq.allocate_bits import BitAllocator as BitAllocator
from .ptq.allocate_bits import allocate_bits as allocate_bits
from .ptq.calibrate import Calibrator as Calibrator
from .ptq.calibrate import calibrate as calibrate
from .ptq.tune import tune as tune
from .qarray import QArray as QArray
from .qcache import QCache as QCache
from .training import BackwardProduct as BackwardProduct
from .training import FakeQuantized as FakeQuantized
from .training import convert as convert
from .training import sparsity_masks as sparsity_masks
from .training import with_masks as with_masks
from .training import with_stochastic_rounding as with_stochastic_rounding
from .zeros import zeros as zeros
