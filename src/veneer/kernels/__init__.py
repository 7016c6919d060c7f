"""Products with stored matrices, by the fastest means that a platform has.

Kernels know no types: a matrix is codes in bytes, scales and zero points.

    common          what kernels of all platforms share: codes, operands, calls
    matmul          the product as a JAX primitive: its derivatives, its batching, its lowering
    lowering        how it is computed on one device, and cut over several
    stacks          with a slice of a stack, as a loop has it: read from where it lies
    quantize        codes and scales of an array, as a JAX primitive
    select          which kernel computes which product, and `use`
    pruning         which entries of a group are largest
    cpu             kernels for the CPU
    gpu             kernels for NVIDIA GPUs
    tpu             a kernel for TPUs, which is experimental
"""

from . import stacks as stacks
from .common.problem import BYTES as BYTES
from .common.problem import FLOATS as FLOATS
from .common.problem import PLANE_BITS as PLANE_BITS
from .common.problem import SIX_BIT_FLOATS as SIX_BIT_FLOATS
from .common.problem import Codes as Codes
from .common.problem import MatmulOperands as MatmulOperands
from .common.problem import MatmulProblem as MatmulProblem
from .common.problem import ScaleCodes as ScaleCodes
from .cpu.build import register_handlers as register_handlers
from .matmul import matmul as matmul
from .select import use as use
