"""Low-rank corrections of the rounding error of a weight.

For a weight W that is rounded to Q, the correction is the matrix of rank r nearest to `E = W - Q`:
`E @ V @ V.T`, where V holds the right singular vectors of the r largest singular values (Eckart and
Young 1936). The correction needs no data.
"""

import itertools
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
    """How the axes of a weight split into leading, input and output axes: `[*lead, *in, *out]`.

    A low-rank correction has a factor `a` for the input axes and a factor `b` for the output axes.
    """

    in_ndim: int  # the number of input axes
    out_ndim: int  # the number of output axes
    contracted: str  # the axes that products contract: "in" or "out"

    def split_shape(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Split the shape of a weight into the sizes of leading, input and output axes."""
        at = len(shape) - self.out_ndim
        return shape[: at - self.in_ndim], shape[at - self.in_ndim : at], shape[at:]

    def as_lora(self, q: Any, a: Any, b: Any) -> LoraArray:
        """Return the weight `q` with the correction `a @ b` as a `LoraArray`.

        `a` has the shape `[lead, in, rank]` and `b` the shape `[lead, rank, out]`. All leading axes
        of the weight are merged into `lead`, all input axes into `in`, and output axes into `out`.
        """
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
    """Return the `LowRankAxes` of a weight, or None if its axes are in an unsupported order.

    `contracted` and `free` are the axes that products contract and keep, counted from the end. The
    last axes of the weight (the output axes) must be of one kind, and the axes directly before them
    (the input axes) of the other kind. All axes before these two groups are leading axes.

    >>> from veneer.quant.models.correction import low_rank_axes
    >>> low_rank_axes(4, {-3}, {-2, -1})  # layers of [in, heads, size]
    LowRankAxes(in_ndim=1, out_ndim=2, contracted='in')
    >>> low_rank_axes(3, {-3}, {-1}) is None
    True
    """
    kind_of = lambda i: "contracted" if i in contracted else "free" if i in free else None
    # The groups of adjacent axes of one kind, from the last axis to the first.
    groups = itertools.groupby(range(-1, -ndim - 1, -1), kind_of)
    runs = [(kind, len([*axes])) for kind, axes in groups]
    if len(runs) < 2 or runs[0][0] is None or runs[1][0] is None:
        return None
    (last_kind, out_ndim), (_, in_ndim) = runs[:2]
    return LowRankAxes(in_ndim, out_ndim, "in" if last_kind == "free" else "out")


def quantize_with_correction(array: Any, rule: Rule, axes: LowRankAxes | None) -> Any:
    """Quantize a weight by a rule. If the rule sets `correction_rank`, add a correction.

    `axes` are the input and output axes of the correction. If it is None, there is no correction.

    With several `correction_steps`, each step rounds the weight minus the correction of the step
    before (LoftQ, Li et al., arXiv 2310.08659, algorithm 1). The result is the `LoraArray` of the
    step with the least squared error.
    """
    if rule.correction_rank is None or axes is None:
        return rule.quantize(array)
    array = jnp.asarray(array)
    best, least_loss, target = None, jnp.asarray(jnp.inf), array
    for _ in range(rule.correction_steps):
        corrected = add_correction(rule.quantize(target), array, rule.correction_rank, axes)
        update = corrected.update().astype(jnp.float32)
        loss = jnp.square(_rounding_error(corrected.w, array) - update).sum()
        select_better = partial(jnp.where, loss < least_loss)
        best = corrected if best is None else jax.tree.map(select_better, corrected, best)
        least_loss = jnp.minimum(loss, least_loss)
        target = (array - update).astype(array.dtype)
    return best


def add_correction(q: Any, array: Any, rank: int, axes: LowRankAxes) -> LoraArray:
    """Add to a quantized array the low-rank correction with the least squared error.

    `q` is the quantized array and `array` the original. A `rank` above the input or output size is
    reduced to this size.

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
    """Return `array - q` in float32, with 0 in place of values that are not finite."""
    error = jnp.asarray(array, jnp.float32) - materialise_one(q)
    return jnp.where(jnp.isfinite(error), error, 0)


def _low_rank_factors(matrices: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    """Return factors `a` and `b` for matrices `[L, K, N]`, with `a @ b` nearest to the matrices.

    The shapes of the factors are `[L, K, rank]` and `[L, rank, N]`.
    """
    if matrices.shape[1] < matrices.shape[2]:  # solve the smaller eigenproblem
        b, a = _low_rank_factors(matrices.mT, rank)
        return a.mT, b.mT
    # Divide by the largest magnitude, so that the squares do not overflow.
    largest = jnp.maximum(jnp.abs(matrices).max(initial=0), jnp.finfo(matrices.dtype).tiny)
    scaled = matrices / largest
    # The right singular vectors are the eigenvectors of `matrices.T @ matrices`. `eigh` returns
    # them in ascending order of the eigenvalues.
    _, vectors = jnp.linalg.eigh(jnp.matmul(scaled.mT, scaled, precision="highest"))
    right = vectors[..., matrices.shape[2] - rank :]
    return balance_factors(jnp.matmul(matrices, right, precision="highest"), right.mT)


def balance_factors(a: Any, b: Any) -> tuple[Any, Any]:
    """Scale two factors of a product so that column `i` of `a` and row `i` of `b` have equal norms.

    In training, the two factors then learn at the same rate. The rows of `b` must have norm 1. If
    column `i` of `a` is zero, both stay unchanged.
    """
    norms = (a**2).sum(-2, keepdims=True) ** 0.5
    root = (norms + (norms == 0)) ** 0.5  # 1 for zero columns
    return a / root, b * root.mT
