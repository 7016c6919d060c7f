"""Operations of custom primitives mapped, as `jax.vmap` does."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._jax.hijax import GradAccum, ValAccum, Zero
from ..high import Operation, Pack, Unpack, apply
from ..high_rules import jvp_of_vmap, transpose
from ..operations import Vmap
from ..types import TangentType, as_high_array
from ..values import value_of


def map_operation(
    operation: Operation, size: int, name: Any, values: Sequence[Any], dims: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of an operation mapped, and their axes."""
    out = apply(Mapped(operation, size, name, tuple(dims)), *values)
    return out, [0] * len(out)


class Mapped(Vmap):
    """An operation mapped, of which derivatives and transposes are those of it, mapped."""

    @property
    def result_types(self) -> list[Any] | None:
        """Those of the operation, with an axis."""
        types = self.of.result_types
        return types and [
            t.inc_rank(self.size, 0)
            if isinstance(t, TangentType)
            else t.update(shape=(self.size, *t.shape))
            for t in types
        ]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return jvp_of_vmap(self, primals, tangents)

    def batch(self, size: int, name: Any, values: Sequence[Any], dims: Sequence[Any]) -> Any:
        return map_operation(self, size, name, values, dims)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> bool:
        linear = [isinstance(x, GradAccum) for x in operands]
        if all(type(ct) is Zero for ct in cotangents):
            return True
        accumulators = [x for x in operands if isinstance(x, GradAccum)]
        axes = [d for d, is_linear in zip(self.dims, linear, strict=True) if is_linear]
        pairs = zip(accumulators, axes, strict=True)
        types = [x.aval if d is None else x.aval.dec_rank(self.size, d) for x, d in pairs]

        def one(others: list[Any], cts: list[Any]) -> list[Any]:
            inner = [ValAccum(t) for t in types]
            of_linear, of_others = iter(inner), iter(others)
            each = [next(of_linear if is_linear else of_others) for is_linear in linear]
            transpose(cts, *each, operation=self.of)
            return [full_zero(x.freeze()) for x in inner]

        others = [as_high_array(value_of(x)) for x in operands if not isinstance(x, GradAccum)]
        dims = [d for d, is_linear in zip(self.dims, linear, strict=True) if not is_linear]
        out_axes = [d or 0 for d in axes]
        name = {} if self.axis_name is None else {"axis_name": self.axis_name}
        mapped = jax.vmap(one, (dims, 0), out_axes, axis_size=self.size, **name)
        sums = mapped(others, list(map(full_zero, cotangents)))
        for x, d, ct in zip(accumulators, axes, sums, strict=True):
            x.accum(_sum(x.aval, ct) if d is None else ct)
        return True


def _sum(aval: Any, ct: Any) -> Any:
    """Over the first axis."""
    if not isinstance(aval, TangentType):
        return jnp.sum(ct, axis=0)
    leaves = apply(Unpack(jax.typeof(ct)), ct)
    return apply(Pack(aval), *(jnp.sum(leaf, axis=0) for leaf in leaves))[0]


def full_zero(tangent: Any) -> Any:
    """A tangent that is not symbolically zero."""
    if type(tangent) is not Zero:
        return tangent
    aval: Any = tangent.aval
    is_tree = isinstance(aval, TangentType)
    return aval.vspace_zero() if is_tree else jnp.zeros(aval.shape, aval.dtype)
