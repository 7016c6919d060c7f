"""Products with stored matrices, by the fastest means that a platform has.

Kernels know no types: a matrix is codes in bytes, scales and zero points.

    problem         what a product is: its codes, its operands, and all else known of it
    matmul          the product as a JAX primitive: its derivatives, its batching, its lowering
    lowering        how it is computed on one device, and cut over several
    calls           calls of kernels for CPUs and GPUs: products of the same x are one
    stacks          with a slice of a stack, as a loop has it: read from where it lies
    quantize        codes and scales of an array, as a JAX primitive
    select          which kernel computes which product, and `use`
    bit_planes      small numbers of any bits in bytes, without gaps
    pruning         which entries of a group are largest
    cpu             kernels for the CPU
    gpu             kernels for NVIDIA GPUs
    tpu             a kernel for TPUs, which is experimental
"""

from . import stacks as stacks
from .cpu.build import register_handlers as register_handlers
from .matmul import matmul as matmul
from .problem import BYTES as BYTES
from .problem import FLOATS as FLOATS
from .problem import PLANE_BITS as PLANE_BITS
from .problem import SIX_BIT_FLOATS as SIX_BIT_FLOATS
from .problem import Codes as Codes
from .problem import MatmulOperands as MatmulOperands
from .problem import MatmulProblem as MatmulProblem
from .problem import ScaleCodes as ScaleCodes
from .select import use as use
