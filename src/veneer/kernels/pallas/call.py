"""A product by a Pallas kernel: from its operands to what a kernel takes, and what is left to add.

Importing this imports no Pallas, which takes long, and which few programs need.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..problem import Codes, MatmulOperands, MatmulProblem, MatmulShape
from .layout import layout_of

#: Platforms, and where their kernels are.
MODULES = {"gpu": ".gpu", "tpu": ".tpu"}


def _kernels(platform: str) -> Any:
    return importlib.import_module(MODULES[platform], __package__)


def has_kernel(platform: str, codes: Codes, shape: MatmulShape) -> bool:
    """Returns whether the kernel of a platform computes a product: whether its tiles fit.

    >>> from veneer.kernels.pallas.call import has_kernel
    >>> from veneer.kernels.problem import Codes, MatmulShape
    >>> shape = MatmulShape("rows", "float", m=1, k=288, n=64, tile=24)
    >>> has_kernel("gpu", Codes(8, "int8"), shape)  # 24 has no 16 in it
    False
    """
    if not isinstance(shape.m, int) or shape.m == 0:  # symbolic: for programs that are exported
        return False
    layout = layout_of(codes, shape)
    return layout is not None and _kernels(platform).blocks_of(layout) is not None


#: What JAX calls platforms as it lowers programs.
LOWERED = {"gpu": "cuda", "tpu": "tpu"}


def lower(platform: str, operands: MatmulOperands, problem: MatmulProblem) -> None:
    """Lowers the kernel for a product by itself, for no use but to see whether JAX can.

    **Raises:** whatever that raises.
    """
    typed = (None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    _lower(platform, MatmulOperands(*typed), problem)


@functools.cache
def _lower(platform: str, operands: MatmulOperands, problem: MatmulProblem) -> None:
    compute = jax.jit(functools.partial(product, platform, problem=problem))
    compute.trace(operands).lower(lowering_platforms=(LOWERED[platform],))


def product(
    platform: str, operands: MatmulOperands, problem: MatmulProblem, *, interpret: bool = False
) -> jax.Array:
    """Returns a product of floats with codes, as if there were no zero points and no minima.

    **Arguments:**

    - `interpret`: whether JAX runs the kernel, on whatever device.

    **Returns:** `[B, M, N]`, in f32 where zero points or minima are yet to be added.
    """
    x, packed, scale, zero_point, _, minimum, *_ = operands
    layout = layout_of(problem.codes, problem.shape(operands))
    assert layout is not None
    is_whole = zero_point is None and minimum is None
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
    return _kernels(platform).product(
        x,
        lax.bitcast_convert_type(packed, jnp.uint8),
        scale,
        problem.codes,
        layout,
        jnp.dtype(problem.out_dtype if is_whole else "float32"),
        interpret=interpret,
    )
