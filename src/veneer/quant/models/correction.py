"""Low-rank corrections of the rounding error of a weight.

For a weight W that is rounded to Q, the correction is the matrix of rank r nearest to `E = W - Q`:
`E @ V @ V.T`, where V holds the right singular vectors of the r largest singular values (Eckart and
Young 1936). It needs no data. `ptq/moments.py` weights corrections by activations.
"""

import math
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._core.value import materialise_one
from ...types.lora import LoraArray
from .rules import Rule


class LowRankAxes(NamedTuple):
    """The axes of a weight `[*lead, *in, *out]` that is stored in a `LoraArray`."""

    in_ndim: int  # the number of input axes
    out_ndim: int  # the number of output axes
    contracted: str  # "in" or "out"

    def split_shape(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Split the shape of a weight into leading, input and output sizes."""
        at = len(shape) - self.out_ndim
        return shape[: at - self.in_ndim], shape[at - self.in_ndim : at], shape[at:]

    def as_lora(self, q: Any, a: Any, b: Any) -> LoraArray:
        """Return a weight plus the correction `a @ b`, `[L, in, rank]` and `[L, rank, out]`."""
        lead, ins, outs = self.split_shape(q.shape)
        rank = a.shape[-1]
        return LoraArray(
            q,
            jnp.asarray(a, q.dtype).reshape(*lead, *ins, rank),
            jnp.asarray(b, q.dtype).reshape(*lead, rank, *outs),
            dropped=self.contracted,
            in_ndim=self.in_ndim,
            out_ndim=self.out_ndim,
        )


def low_rank_axes(
    ndim: int, contracted: Collection[int], free: Collection[int]
) -> LowRankAxes | None:
    """Return the axes of a weight in a `LoraArray`, or None if no `LoraArray` has these axes.

    `contracted` and `free` are the axes in products, counted from the end. The last two runs of
    them are the input and output axes. The axes before them are leading axes.

    >>> from veneer.quant.models.correction import low_rank_axes
    >>> low_rank_axes(4, {-3}, {-2, -1})  # layers of [in, heads, size]
    LowRankAxes(in_ndim=1, out_ndim=2, contracted='in')
    >>> low_rank_axes(3, {-3}, {-1}) is None
    True
    """
    sides = [(i in contracted) - (i in free) for i in range(-ndim, 0)]
    last = sides[-1] if sides else 0
    outs = next((i for i, side in enumerate(reversed(sides)) if side != last), ndim)
    rest = sides[: ndim - outs]
    ins = next((i for i, side in enumerate(reversed(rest)) if side != rest[-1]), len(rest))
    if not last or not rest or not rest[-1]:
        return None
    return LowRankAxes(ins, outs, "in" if last < 0 else "out")


def quantize_with_correction(array: Any, rule: Rule, axes: LowRankAxes | None) -> Any:
    """Quantize a weight by a rule, and add the low-rank correction of the rule if it has one.

    With several `correction_steps`, each step rounds the weight minus the correction of the step
    before (LoftQ, Li et al., arXiv 2310.08659, algorithm 1). The result is the step with the least
    squared error, in a `LoraArray`.
    """
    if rule.correction_rank is None or axes is None:
        return rule.quantize(array)
    array = jnp.asarray(array)
    best, least, target = None, jnp.asarray(jnp.inf), array
    for _ in range(rule.correction_steps):
        step = add_correction(rule.quantize(target), array, rule.correction_rank, axes)
        update = step.update().astype(jnp.float32)
        loss = jnp.square(_rounding_error(step.w, array) - update).sum()
        target = (array - update).astype(array.dtype)
        select_better = partial(jnp.where, loss < least)
        best = step if best is None else jax.tree.map(select_better, step, best)
        least = jnp.minimum(loss, least)
    return best


def add_correction(q: Any, array: Any, rank: int, axes: LowRankAxes) -> LoraArray:
    """Add the correction of least squared error to `q`, the rounded `array`.

    The sizes of the matrices limit the rank.

    >>> import jax, jax.numpy as jnp
    >>> from veneer.quant import quantize
    >>> from veneer.quant.models.correction import LowRankAxes, add_correction
    >>> w = jax.random.normal(jax.random.key(0), (16, 8))
    >>> exact = add_correction(quantize(w, "int2"), w, 8, LowRankAxes(1, 1, "in"))
    >>> bool(jnp.allclose(exact.materialise(), w, atol=1e-5))
    True
    """
    error = _rounding_error(q, array).reshape(*map(math.prod, axes.split_shape(q.shape)))
    return axes.as_lora(q, *_low_rank_factors(error, min(rank, *error.shape[1:])))


def _rounding_error(q: Any, array: Any) -> jax.Array:
    error = jnp.asarray(array, jnp.float32) - materialise_one(q)
    return jnp.where(jnp.isfinite(error), error, 0)


def _low_rank_factors(matrices: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    """Return the factors `a` and `b` of the nearest matrices of a rank, for `[L, K, N]`."""
    if matrices.shape[1] < matrices.shape[2]:  # the eigenproblem is that of the smaller side
        b, a = _low_rank_factors(matrices.mT, rank)
        return a.mT, b.mT
    largest = jnp.maximum(jnp.abs(matrices).max(initial=0), jnp.finfo(matrices.dtype).tiny)
    unit = matrices / largest
    _, vectors = jnp.linalg.eigh(jnp.matmul(unit.mT, unit, precision="highest"))
    right = vectors[..., matrices.shape[2] - rank :]
    return balance_factors(jnp.matmul(matrices, right, precision="highest"), right.mT)


def balance_factors(a: Any, b: Any) -> tuple[Any, Any]:
    """Scale factors so that the columns of `a` and the rows of `b` have equal norms.

    The two factors then learn at the same rate. The rows of `b` must have norm 1. A zero column of
    `a` stays zero, as in a new LoRA.
    """
    norms = (a**2).sum(-2, keepdims=True) ** 0.5
    root = (norms + (norms == 0)) ** 0.5
    return a / root, b * root.mT
