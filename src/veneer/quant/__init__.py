"""Quantised arrays: few bits a value, dense to every JAX program."""

from .clipping import fake_quantize as fake_quantize
from .clipping import fake_quantize_with_scale as fake_quantize_with_scale
from .conversion import dequantize as dequantize
from .conversion import quantize as quantize
from .conversion import quantize_with_scale as quantize_with_scale
from .formats import FORMATS as FORMATS
from .formats import Format as Format
from .formats import get_format as get_format
from .model import Rule as Rule
from .model import quantize_tree as quantize_tree
from .ops import conv_general_dilated as conv_general_dilated
from .ops import dot as dot
from .ops import dot_general as dot_general
from .ops import einsum as einsum
from .packing import Packing as Packing
from .qarray import QArray as QArray
from .ranges import calibration_range as calibration_range
from .ranges import scale_of_range as scale_of_range
