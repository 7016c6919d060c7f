"""Products with stored matrices, by the fastest means that a platform has.

Kernels know no types: a matrix is codes in bytes, scales and zero points.

    problem         what a product is: its operands, and all else that is known of it
    matmul          the product as a JAX primitive: its derivatives, its batching, its lowering
    sharding        how it is lowered, and cut over devices
    one_device      how one device computes it: by a kernel, or by its reference
    quantize        codes and scales of an array, as a JAX primitive
    select          which kernel computes which product, and `use`
    codes           what a kernel is told of the numbers in a matrix
    bit_planes      small numbers of any bits in bytes, without gaps
    cpu             kernels for the CPU
"""

from .codes import BYTES as BYTES
from .codes import Codes as Codes
from .matmul import matmul as matmul
from .problem import MatmulOperands as MatmulOperands
from .problem import MatmulProblem as MatmulProblem
from .select import use as use
