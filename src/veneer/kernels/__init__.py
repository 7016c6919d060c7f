"""Kernels for products with stored matrices.

Kernels know no array types. A stored matrix is codes in bytes, scales, and zero points or minima.

    common          modules that all platforms share: the table of kernels, codes, operands
    select          select the kernel for a product, and `use`
    lowering        lower a product on one device: by a kernel, or by XLA
    partitioning    lower a product on several devices
    stacks          lower products in loops, which read slices of a stack in place
    matmul          the product as a JAX primitive: derivatives, batching, lowering
    quantize        quantization of an array, as a JAX primitive
    cpu             kernels for the CPU
    gpu             kernels for NVIDIA GPUs
    tpu             an experimental kernel for TPUs, which has never run on one
"""

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
