"""Number formats: how values are encoded in few bits and packed in bytes.

The modules:

    format          Format: encoding values as codes, and decoding them
    table           FORMATS, the table of all formats; get_format and is_format
    packing         packing codes of fewer than 8 bits in bytes without gaps
    tiles           the groups of values that share a scale, and the axes that have tiles
"""

from .format import Format as Format
from .table import FORMATS as FORMATS
from .table import get_format as get_format
from .table import is_format as is_format
