"""`LoraArray`: a weight with a low-rank update."""

import copy
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.leaf_axes import Axes, LeafAxis, Movement
from ..._core.surface import Leaf, check_arrays, check_axes, check_key
from ..._core.surface.array import ImplicitArray, is_default
from ..._core.trace import redispatch
from ..._core.tree import check_metadata, static
from ..._core.value import describe, materialise_one
from ..structured.matrix import Matrix, has_method, multiply_vectors
from .contractions import RANK, Labels, arrange, contract, divide_by_norm, norm, scale_by


class LoraArray(Matrix):
    """A weight `[..., *in, *out]` with a LoRA adapter: `w + scale * a @ b`.

    The adapter is a low-rank update (LoRA: Hu et al. 2021, arXiv 2106.09685). Fine-tuning trains
    `a` and `b`, but not `w`, which can be quantized (QLoRA). A product is computed as
    `x @ w + scale * (x @ a) @ b`. This adds `rank * (in + out)` operations per vector. Neither the
    product nor its gradients compute the dense `a @ b`.

    **Keeps the structure:** transposes, slices, `stop_gradient`, dtype conversions, and reshapes
    that do not merge input and output axes. With one input axis and one output axis, multiples by a
    number and sums with a `LowRank` keep it too. Row lookups and convolutions do not compute
    `a @ b`. If `w` is a structured matrix, such as a `Diagonal`, solves and determinants do not
    compute `a @ b` either (Woodbury identity).

    **Materializes:** other elementwise functions, sums with a dense array, and the second operand
    in a matmul of two `LoraArray`, unless the result is a `vn.types.Product`.

    **Arguments:**

    - `w`: the weight `[..., *in, *out]`, floating, dense or implicit. Its dtype is the dtype of the
      `LoraArray`.
    - `a`: the first factor of the update, `[..., *in, rank]`.
    - `b`: the second factor of the update, `[..., rank, *out]`.
    - `magnitude`: for DoRA (Liu et al. 2024, arXiv 2402.09353), the column norms `[..., 1, out]`.
      The weight is then `magnitude * v / norm(v)` with `v = w + scale * a @ b`. The gradient treats
      `norm(v)` as a constant.
    - `dropout_key`: PRNG keys that turn dropout on: typed keys `[...]` or raw keys `[..., 2]`.
      `vn.lora.with_dropout` sets it.
    - `scale`: the factor of the update, a Python number.
    - `dropout`: the dropout rate, in [0, 1): the fraction of the entries of `x` that are set to 0
      in `x @ a`, but not in `x @ w`.
    - `dropped`: the axes of `w` that products contract while dropout is on: "in" for `x @ w`, "out"
      for `x @ w.T`.
    - `normed`: the axes of `w` over which DoRA takes the norm: "in" or "out". With "out",
      `magnitude` is `[..., out, 1]`.
    - `in_ndim`, `out_ndim`: the number of input and output axes. For example, a weight
      `[in, heads, size]` needs `out_ndim=2`, and a kernel `[height, width, in, out]` needs
      `in_ndim=3`.

    **Raises:**

    - `TypeError` if `w` is not floating, `a`, `b` or `magnitude` is not an array, or `scale` or
      `dropout` is not a number.
    - `TypeError` when the array is materialized, if dropout is on.
    - `ValueError` if the shape of an array or the value of an option is not as stated above.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.types.LoraArray.init(jnp.ones((3, 4)), rank=2, key=jax.random.key(0))
    >>> w
    LoraArray(w=f32[3,4], a=f32[3,2], b=f32[2,4], scale=1.0)
    >>> (jnp.ones((1, 3)) @ w).tolist()
    [[3.0, 3.0, 3.0, 3.0]]
    """

    metadata_is_meaning: ClassVar[bool] = False
    trainable: ClassVar[tuple[str, ...] | None] = ("a", "b", "magnitude")

    w: Leaf
    a: Leaf
    b: Leaf
    magnitude: Leaf | None = None
    dropout_key: Leaf | None = None
    scale: float = static(default=1.0, kw_only=True)
    dropout: float = static(default=0.0, kw_only=True)
    dropped: str = static(default="in", kw_only=True)
    normed: str = static(default="in", kw_only=True)
    in_ndim: int = static(default=1, kw_only=True)
    out_ndim: int = static(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check_metadata(self)
        if min(self.in_ndim, self.out_ndim) < 1:
            raise ValueError(
                "LoraArray needs at least one input axis and one output axis, got "
                f"in_ndim={self.in_ndim}, out_ndim={self.out_ndim}"
            )
        if not isinstance(self.scale, numbers.Number):
            raise TypeError(f"scale must be a Python number, not {self.scale!r}")
        if not isinstance(self.dropout, numbers.Real):
            raise TypeError(f"dropout must be a Python number in [0, 1), not {self.dropout!r}")
        if self.normed not in _OTHER:
            raise ValueError(f"normed must be 'in' or 'out', not {self.normed!r}")
        if self.dropped not in _OTHER or not 0 <= self.dropout < 1:
            raise ValueError(
                "dropout must be in [0, 1) and dropped must be 'in' or 'out', got "
                f"dropout={self.dropout}, dropped={self.dropped!r}"
            )
        number = lambda name, n: " ".join(f"{name}{i}" for i in range(n)) if n > 1 else name
        ones = lambda n: " ".join(["1"] * n)
        ins, outs = number("in", self.in_ndim), number("out", self.out_ndim)
        axes = {"w": f"{ins} {outs}", "a": f"{ins} rank", "b": f"rank {outs}"}
        if self.magnitude is not None:
            norms = {"in": f"{ones(self.in_ndim)} {outs}", "out": f"{ins} {ones(self.out_ndim)}"}
            axes["magnitude"] = norms[self.normed]
        if self.dropout_key is not None:
            check_arrays(self, Leaf, "dropout_key")
            is_typed = jnp.issubdtype(self.dropout_key.dtype, jax.dtypes.prng_key)
            axes["dropout_key"] = "" if is_typed else "2"
        check_axes(self, **axes)
        _check_floating(self.w)

    @classmethod
    def init(
        cls,
        w: ArrayLike | ImplicitArray,
        rank: int,
        *,
        key: jax.Array,
        alpha: float | int | None = None,
        rs_lora: bool = False,
        dora: bool = False,
        dropout: float = 0.0,
        dropped: str = "in",
        dtype: DTypeLike | None = None,
        in_ndim: int = 1,
        out_ndim: int = 1,
    ) -> "LoraArray":
        """Add an adapter to a weight. The update is zero at first: `a` is random and `b` is zero.

        The entries of `a` are uniform between `-1 / sqrt(in)` and `1 / sqrt(in)`, as in PEFT
        (Kaiming initialization with a slope of `sqrt(5)`).

        **Arguments:**

        - `w`: the weight `[..., *in, *out]`, floating, dense or implicit.
        - `rank`: the rank of the update, at least 1.
        - `key`: a PRNG key for `a`.
        - `alpha`: a number. The factor of the update, `scale`, is `alpha / rank`. The default is
          `rank`, so `scale` is 1.
        - `rs_lora`: whether to set `scale` to `alpha / sqrt(rank)` instead, so that large ranks
          learn as fast as small ones (rsLoRA: Kalajdzievski 2023, arXiv 2312.03732).
        - `dora`: whether to use DoRA. Its `magnitude` starts as the column norms of `w`.
        - `dtype`: the dtype of `a` and `b`. The default is the dtype of `w`.
        - `dropout`, `dropped`, `in_ndim`, `out_ndim`: as in `LoraArray`.

        **Returns:** a `LoraArray`.

        **Raises:** `ValueError` if `rank` is less than 1 or the dtype of `a` and `b` is not
        floating. `TypeError` if `key` is not a PRNG key. Also the errors of `LoraArray`.

        >>> import jax, jax.numpy as jnp, veneer as vn
        >>> kernel = vn.quant.quantize(jnp.ones((64, 32)), "nf4", channelwise_axes=[1])
        >>> w = vn.types.LoraArray.init(kernel, 8, key=jax.random.key(0), alpha=16, rs_lora=True)
        >>> w.a.shape, w.b.shape, round(w.scale, 3)
        ((64, 8), (8, 32), 5.657)
        """
        if rank < 1:
            raise ValueError(f"the rank of an adapter must be at least 1, not {rank}")
        check_key(key)
        w = w if isinstance(w, ImplicitArray) else jnp.asarray(w)
        _check_floating(w)
        dtype = w.dtype if dtype is None else dtype
        n_lead, first_out = w.ndim - in_ndim - out_ndim, w.ndim - out_ndim
        lead, ins, outs = w.shape[:n_lead], w.shape[n_lead:first_out], w.shape[first_out:]
        bound = 1 / math.sqrt(max(1, math.prod(ins)))
        alpha = rank if alpha is None else alpha
        return cls(
            w,
            jax.random.uniform(key, (*lead, *ins, rank), dtype, -bound, bound),
            jnp.zeros((*lead, rank, *outs), dtype),
            norm(w, range(n_lead, first_out)).astype(dtype) if dora else None,
            scale=float(alpha / (math.sqrt(rank) if rs_lora else rank)),
            dropout=dropout,
            dropped=dropped,
            in_ndim=in_ndim,
            out_ndim=out_ndim,
        )

    @property
    def lead(self) -> tuple[int, ...]:
        """The indices of the leading axes: all axes before the input and output axes."""
        return tuple(range(self.w.ndim - self.in_ndim - self.out_ndim))

    @property
    def ins(self) -> tuple[int, ...]:
        """The indices of the input axes of `w`, counted from the front."""
        return tuple(range(len(self.lead), self.w.ndim - self.out_ndim))

    @property
    def outs(self) -> tuple[int, ...]:
        """The indices of the output axes of `w`, counted from the front."""
        return tuple(range(self.w.ndim - self.out_ndim, self.w.ndim))

    @property
    def w_labels(self) -> Labels:
        """The labels of the axes of `w`: their indices."""
        return tuple(range(self.w.ndim))

    @property
    def a_labels(self) -> Labels:
        """The labels of the axes of `a`: `"rank"` for the rank axis, else an axis index of `w`."""
        return *self.lead, *self.ins, RANK

    @property
    def b_labels(self) -> Labels:
        """The labels of the axes of `b`: `"rank"` for the rank axis, else an axis index of `w`."""
        return *self.lead, RANK, *self.outs

    @property
    def norm_axes(self) -> tuple[int, ...]:
        """The axes over which DoRA takes the norm, or an empty tuple without DoRA."""
        if self.magnitude is None:
            return ()
        return self.ins if self.normed == "in" else self.outs

    @property
    def drops(self) -> bool:
        """True if dropout is on: a dropout key is set, and the rate is above 0."""
        return self.dropout_key is not None and self.dropout > 0

    def changed(self, **changes: Any) -> "LoraArray":
        """Return a copy in which `changes` replaces some fields.

        The new values are not checked. They can be None or abstract arrays.
        """
        new = copy.copy(self)
        new.__dict__.update(changes)
        return new

    def with_dense_factors(self) -> "LoraArray":
        """Return a copy in which `a` and `b` are dense arrays."""
        return self.changed(a=materialise_one(self.a), b=materialise_one(self.b))

    def update(self) -> Any:
        """Return the dense update `scale * a @ b`."""
        low = scale_by(self.scale, self.a)
        return contract(low, self.a_labels, self.b, self.b_labels, [RANK])[0]

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of `w`."""
        return self.changed(dropout_key=None).aval() if self.drops else super().aval()

    def materialise(self) -> Any:
        """Return the dense weight, including the update.

        **Raises:** `TypeError` if dropout is on.
        """
        if self.drops:
            raise TypeError(
                f"{self!r} has a dropout key, so it has no dense form. Remove the key with "
                "vn.lora.without_dropout."
            )
        dense = jnp.asarray(materialise_one(self.w))
        out = dense + self.update()
        if self.magnitude is not None:
            out = out * divide_by_norm(self.magnitude, norm(out, self.norm_axes))
        return out.astype(dense.dtype)

    def leaf_axes(self) -> list[Axes]:
        """Return a `vn.LeafAxis` per axis of each leaf. Axes in `norm_axes` cannot be sliced."""
        n_lead, first_out = len(self.lead), len(self.lead) + self.in_ndim
        axes = [LeafAxis(axis - self.w.ndim) for axis in self.w_labels]
        lead, ins, outs = axes[:n_lead], axes[n_lead:first_out], axes[first_out:]
        leaves: list[Axes] = [axes, [*lead, *ins, None], [*lead, None, *outs]]
        if self.magnitude is not None:
            leaves.append(
                [
                    axis._replace(block="whole") if i in self.norm_axes else axis
                    for i, axis in enumerate(axes)
                ]
            )
        if self.dropout_key is not None:
            leaves.append([*lead, *[None] * (self.dropout_key.ndim - n_lead)])
        return leaves

    def _moved(self, movement: Movement) -> Any:
        ndim, inner = len(movement.shape), self.in_ndim + self.out_ndim
        keeps_inner_axes = movement.axes[-inner:] == tuple(range(ndim - inner, ndim))
        return self if keeps_inner_axes else NotImplemented

    @property
    def is_sum(self) -> bool:
        """True if each matrix of the array is the plain sum `w + scale * a @ b`.

        The array has one input axis and one output axis, no DoRA, and dropout is off.
        """
        return self.in_ndim == self.out_ndim == 1 and self.magnitude is None and not self.drops

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        if not self.is_sum:
            return NotImplemented
        times = partial(multiply_vectors, precision=precision)
        low = scale_by(self.scale, times(self.b, x))
        return times(self.w, x) + times(self.a, low)

    def transposed(self) -> Any:
        is_matrix = self.in_ndim == self.out_ndim == 1
        return self.permuted((*self.lead, *self.outs, *self.ins)) if is_matrix else NotImplemented

    def permuted(self, permutation: Sequence[int]) -> Any:
        """Return the array with permuted axes.

        **Arguments:**

        - `permutation`: the order of the axes, as in `jax.lax.transpose`.

        **Returns:** a `LoraArray`. The input axes and the output axes can change places.
        `NotImplemented` if the permutation mixes leading, input and output axes.
        """
        n_lead = len(self.lead)
        swapped = permutation[n_lead] in self.outs
        groups = (self.outs, self.ins) if swapped else (self.ins, self.outs)
        split = n_lead + len(groups[0])
        lead, ins, outs = permutation[:n_lead], permutation[n_lead:split], permutation[split:]
        if [*map(set, (lead, ins, outs))] != [*map(set, (self.lead, *groups))]:
            return NotImplemented
        a, b = (self.a, self.a_labels), (self.b, self.b_labels)
        if swapped:
            a, b = b, a
        transpose = partial(redispatch, lambda x: lax.transpose(x, permutation))
        key = self.dropout_key
        if key is not None:
            key = lax.transpose(key, (*lead, *range(n_lead, key.ndim)))
        return self.changed(
            w=transpose(self.w),
            a=arrange(*a, (*lead, *ins, RANK)),
            b=arrange(*b, (*lead, RANK, *outs)),
            magnitude=None if self.magnitude is None else transpose(self.magnitude),
            dropout_key=key,
            dropped=_OTHER[self.dropped] if swapped else self.dropped,
            normed=_OTHER[self.normed] if swapped else self.normed,
            in_ndim=len(ins),
            out_ndim=len(outs),
        )

    def rescaled(self, scale: Callable[[Any], Any]) -> Any:
        if self.in_ndim + self.out_ndim != 2:
            return NotImplemented
        if self.magnitude is not None:
            return replace(self, magnitude=scale(self.magnitude))
        return replace(self, w=scale(self.w), b=scale(self.b))

    def converted(self, dtype: Any) -> "LoraArray":
        cast = lambda x: None if x is None else redispatch(lambda x: x.astype(dtype), x)
        names = ("w", "a", "b", "magnitude")
        return self.changed(**{name: cast(getattr(self, name)) for name in names})

    def main_diagonal(self) -> Any:
        if not self.is_sum:
            return NotImplemented
        diagonal = redispatch(partial(jnp.diagonal, axis1=-2, axis2=-1), self.w)
        n = diagonal.shape[-1]
        lora = self.with_dense_factors()
        a, b = lora.a[..., :n, :], jnp.matrix_transpose(lora.b)[..., :n, :]
        return diagonal + scale_by(self.scale, (a * b).sum(-1)).astype(diagonal.dtype)

    # The Woodbury identity and the matrix determinant lemma (Golub and Van Loan, *Matrix
    # Computations*, section 2.1.4). Only `C = I + scale * b w⁻¹ a` is factorized, a matrix as large
    # as the rank. Digits are lost if `w` or `C` is much closer to a singular matrix than the sum.

    def _woodbury_parts(self, method: str) -> Any:
        """Return the terms of the Woodbury identity: `(w⁻¹ a).T`, `b`, `C = I + scale * b w⁻¹ a`.

        Return NotImplemented if `w` is no structured matrix that implements `solve` and the method
        of `Matrix` with the name `method`, or if this array is not a plain sum (`is_sum`).
        """
        can_factorize = isinstance(self.w, Matrix) and self.is_sum
        if not can_factorize or not all(has_method(self.w, name) for name in (method, "solve")):
            return NotImplemented
        lora = self.with_dense_factors()
        solved_a = self.w.solve(jnp.matrix_transpose(lora.a))
        if solved_a is NotImplemented:
            return NotImplemented
        low = self.scale * lora.b @ jnp.matrix_transpose(solved_a)
        return solved_a, lora.b, jnp.eye(low.shape[-1], dtype=low.dtype) + low

    def solve(self, b: Any) -> Any:
        parts = self._woodbury_parts("solve")
        x = NotImplemented if parts is NotImplemented else self.w.solve(b)
        if x is NotImplemented:
            return NotImplemented
        solved_a, factor_b, capacitance = parts
        low = jnp.linalg.solve(capacitance, factor_b @ jnp.matrix_transpose(x))
        return x - self.scale * jnp.matrix_transpose(low) @ solved_a

    def inverse(self) -> Any:
        parts = self._woodbury_parts("inverse")
        if parts is NotImplemented:
            return NotImplemented
        solved_a, factor_b, capacitance = parts
        inverse, transposed = self.w.inverse(), self.w.transposed()
        if inverse is NotImplemented or transposed is NotImplemented:
            return NotImplemented
        solved_b = transposed.solve(jnp.asarray(factor_b))
        if solved_b is NotImplemented:
            return NotImplemented
        a, b = jnp.matrix_transpose(solved_a), jnp.linalg.solve(capacitance, solved_b)
        return LoraArray(inverse, a, b, scale=-self.scale)

    def slogdet(self) -> Any:
        parts = self._woodbury_parts("slogdet")
        determinant = NotImplemented if parts is NotImplemented else self.w.slogdet()
        if determinant is NotImplemented:
            return NotImplemented
        sign, logabsdet = jnp.linalg.slogdet(parts[-1])
        return determinant[0] * sign, determinant[1] + logabsdet

    @property
    def rank(self) -> int:
        """The rank of the update."""
        return self.a.shape[-1]

    def __repr__(self) -> str:
        # Omit fields that have their default, apart from the first three and `scale`.
        values = ((f, getattr(self, f.name, None)) for f in fields(self))
        parts = [
            f"{f.name}={describe([x])[0]}"
            for f, x in values
            if f.name in ("w", "a", "b", "scale") or not is_default(x, f.default)
        ]
        return f"LoraArray({', '.join(parts)})"


_OTHER = {"in": "out", "out": "in"}


def _check_floating(w: Any) -> None:
    if not jnp.issubdtype(w.dtype, jnp.inexact):
        raise TypeError(f"LoraArray takes a floating weight, not {w.dtype.name}")
