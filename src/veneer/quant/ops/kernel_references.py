"""What XLA computes where a kernel does not, from the operands that kernels take; hashable."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ...kernels import MatmulOperands, MatmulProblem
from ..arrays.qarray import QArray
from ..formats import get_format
from ..formats.packing import Packing
from .by_xla import by_xla
from .product import DotParams


@dataclasses.dataclass(frozen=True)
class ProductByXla:
    """The product of matrices by XLA, from the operands that a kernel takes.

    **Arguments:**

    - `qtype`, `dense_dtype`: of the weight.
    - `precision`: of the product.
    """

    qtype: str
    dense_dtype: str
    precision: Any

    def __call__(self, operands: MatmulOperands, product: MatmulProblem) -> jax.Array:
        """Returns `[B, M, N]`."""
        operands = operands.apart()
        batched = operands.x.shape[0] != 1
        if not batched:  # which not all that XLA has for products is as fast with
            operands = MatmulOperands(*(None if x is None else jnp.squeeze(x, 0) for x in operands))
        x, packed, scale, zero_point, x_scale, minimum, *_ = operands
        is_narrow = get_format(self.qtype).bits < 8
        q = QArray.from_packed(
            packed,
            scale,
            zero_point,
            minimum=minimum,
            qtype=self.qtype,
            packing=Packing(-1, product.columns) if is_narrow else None,
            dense_dtype=x.dtype if x_scale is None else self.dense_dtype,
        )
        if x_scale is not None:
            scale = x_scale if x_scale.ndim == x.ndim else x_scale[..., None]
            x = QArray.from_packed(x, scale, qtype="int8", dense_dtype=self.dense_dtype)
        summed = (x.ndim - 1,), (x.ndim - (2 if product.contracting == "rows" else 1),)
        numbers = DotDimensionNumbers(summed, ((0,), (0,)) if batched else ((), ()))
        out = by_xla(x, q, DotParams(numbers, self.precision, product.out_dtype))
        return out if batched else jnp.expand_dims(out, 0)


@dataclasses.dataclass(frozen=True)
class ScalesByXla:
    """What scales that are codes are worth, in f32.

    **Arguments:**

    - `qtype`: of the codes; and how many a row has: `count`.
    """

    qtype: str
    count: int

    def __call__(self, packed: jax.Array, outer: jax.Array) -> jax.Array:
        """Returns them, `[B, R / tr, C / tc]`."""
        packing = None if self.qtype == "int8" else Packing(-1, self.count)
        leaf = QArray.from_packed(
            packed, outer, qtype=self.qtype, packing=packing, dense_dtype="float32"
        )
        return leaf.dequantize()
