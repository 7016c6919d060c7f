"""How numbers become few bits: the formats, and what each does with codes, bytes and tiles.

The modules here:

    table           Format, FORMATS, get_format, is_format: a row for each format
    codebooks       the value of each code, where that is not the code itself
    packing         codes of fewer than 8 bits, without gaps, in bytes
    tiles           the groups of values that share a scale
    rounding        rounding to the nearest value of a dtype, and stochastic rounding
    unknown         the error for an unknown format, with the name that was probably meant
"""

from .table import FORMATS as FORMATS
from .table import Format as Format
from .table import get_format as get_format
from .table import is_format as is_format
