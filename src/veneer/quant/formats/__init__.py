"""Number formats: how values are encoded in few bits and packed in bytes.

The modules:

    format          Format: encoding values as codes, and decoding them
    table           FORMATS: all number formats
    packing         packing codes of fewer than 8 bits in bytes without gaps
    tiles           the groups of values that share a scale
    rounding        rounding to a narrow float dtype, and stochastic rounding
    lookup          get_format, is_format, and the error for an unknown format
"""

from .format import Format as Format
from .lookup import get_format as get_format
from .lookup import is_format as is_format
from .table import FORMATS as FORMATS
