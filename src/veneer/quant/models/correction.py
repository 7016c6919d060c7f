"""Corrections of low rank: what rounding a weight lost, as far as a few products make up for it.

Of `E = W - Q`, the matrix of rank r nearest to it: `E @ V @ V.T`, where the columns of V are the
right singular vectors of the r largest singular values (Eckart and Young 1936). Here in the metric
of the weight itself, without any data; `ptq/low_rank.py` has that of the activations it meets.
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
    """How many axes of a weight `[*lead, *in, *out]` come in and go out in a `LoraArray`.

    **Arguments:**

    - `in_ndim`, `out_ndim`: of a `LoraArray`.
    - `contracted`: whether it is the axes `"in"` or `"out"` that products contract.
    """

    in_ndim: int
    out_ndim: int
    contracted: str

    def matrices(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the sizes of leading axes, of those that come in, and of those that go out."""
        at = len(shape) - self.out_ndim
        return shape[: at - self.in_ndim], shape[at - self.in_ndim : at], shape[at:]

    def held(self, q: Any, a: Any, b: Any) -> LoraArray:
        """Returns a weight with a correction.

        **Arguments:**

        - `q`: the weight, of any type.
        - `a`, `b`: `[L, in, rank]` and `[L, rank, out]`, of matrices one after the other.
        """
        lead, ins, outs = self.matrices(q.shape)
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
    """Returns how a `LoraArray` has the axes of a weight, counted from the end; None if it cannot.

    The last two runs of axes are those that come in and go out; all before are leading ones.

    **Arguments:**

    - `contracted`: those that products contract.
    - `free`: those that products leave.

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


def free_without_program(ndim: int, contracted: Collection[int]) -> set[int]:
    """Returns the axes that a product leaves, where no program says it.

    All that lie behind those that it contracts; or else, as in a torch weight `[out, in]`, the one
    before them.
    """
    behind = set(range(max(contracted) + 1, 0))
    before = [axis for axis in range(-ndim, 0) if axis not in contracted]
    return behind or set(before[-1:])


def quantize_corrected(array: Any, rule: Rule, axes: LowRankAxes | None) -> Any:
    """Quantises a weight as a rule says, with a correction of low rank if it asks for one.

    With several `correction_steps`, what is rounded is the weight without the correction that was
    found before (LoftQ: Li et al., arXiv 2310.08659, algorithm 1), and the step is kept of which
    the sum of squares lost is the least.

    **Arguments:**

    - `array`: floating, `[*lead, *in, *out]`.
    - `axes`: of the correction; None where the rule asks for none.

    **Returns:** what `rule.quantize` does, in a `LoraArray` if it is corrected.
    """
    if rule.correction_rank is None or axes is None:
        return rule.quantize(array)
    array = jnp.asarray(array)
    best, least, target = None, jnp.asarray(jnp.inf), array
    for _ in range(rule.correction_steps):
        found = corrected(rule.quantize(target), array, rule.correction_rank, axes)
        update = found.update().astype(jnp.float32)
        loss = jnp.square(_lost(found.w, array) - update).sum()
        target = (array - update).astype(array.dtype)
        kept = partial(jnp.where, loss < least)
        best = found if best is None else jax.tree.map(kept, found, best)
        least = jnp.minimum(loss, least)
    return best


def corrected(q: Any, array: Any, rank: int, axes: LowRankAxes) -> LoraArray:
    """Returns what stands for an array, rounded, with the correction of least squares.

    **Arguments:**

    - `q`: the rounded array.
    - `array`: as it was.
    - `rank`: at most; of smaller matrices, as many as they have rows or columns.
    - `axes`: of the correction.

    >>> import jax, jax.numpy as jnp
    >>> from veneer.quant import quantize
    >>> from veneer.quant.models.correction import LowRankAxes, corrected
    >>> w = jax.random.normal(jax.random.key(0), (16, 8))
    >>> whole = corrected(quantize(w, "int2"), w, 8, LowRankAxes(1, 1, "in"))
    >>> bool(jnp.allclose(whole.materialise(), w, atol=1e-5))
    True
    """
    lead, ins, outs = axes.matrices(q.shape)
    lost = _lost(q, array).reshape(math.prod(lead), math.prod(ins), math.prod(outs))
    return axes.held(q, *_factors(lost, min(rank, *lost.shape[1:])))


def _lost(q: Any, array: Any) -> jax.Array:
    """What an array lost; zeros where that is no number."""
    lost = jnp.asarray(array, jnp.float32) - materialise_one(q)
    return jnp.where(jnp.isfinite(lost), lost, 0)


def _factors(lost: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    """The nearest matrices of a rank, as `a @ b`, of matrices `[L, K, N]`."""
    if lost.shape[1] < lost.shape[2]:
        b, a = _factors(lost.mT, rank)
        return a.mT, b.mT
    unit = lost / jnp.maximum(jnp.abs(lost).max(initial=0), jnp.finfo(lost.dtype).tiny)
    _, vectors = jnp.linalg.eigh(jnp.matmul(unit.mT, unit, precision="highest"))
    right = vectors[..., lost.shape[2] - rank :]
    return balanced(jnp.matmul(lost, right, precision="highest"), right.mT)


def balanced(a: Any, b: Any) -> tuple[Any, Any]:
    """Returns factors whose columns and rows have the same norms, where those of b are of norm 1.

    So both learn as fast. A column of a that is zero stays so, as in a LoRA to begin with.
    """
    norms = (a**2).sum(-2, keepdims=True) ** 0.5
    root = (norms + (norms == 0)) ** 0.5
    return a / root, b * root.mT
