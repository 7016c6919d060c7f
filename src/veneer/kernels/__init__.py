"""Products with stored matrices, by the fastest means that a platform has."""

from .codes import BYTES as BYTES
from .codes import Codes as Codes
from .matmul import Operands as Operands
from .matmul import Product as Product
from .matmul import matmul as matmul
from .select import use as use
