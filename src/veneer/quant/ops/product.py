"""A product: what is asked for, and the plan by which it is computed.

What is asked for is said by the parameters of `dot_general`, which know where the axes of operands
are in the output. A way to a product looks at types and shapes alone, and offers a plan or nothing:
it is chosen once, so that what is told is what is done.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..._core.policy import note_how
from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ..arrays.qarray import QArray
from ..formats.tiles import Shape, over_tiles


@dataclasses.dataclass(frozen=True)
class DotParams:
    """The arguments of `jax.lax.dot_general` beside the operands, which are the sides 0 and 1."""

    dimension_numbers: DotDimensionNumbers
    precision: Any = None
    preferred_element_type: DTypeLike | None = None
    out_sharding: Any = None

    def dot(self, lhs: jax.Array, rhs: jax.Array, dtype: DTypeLike | None) -> jax.Array:
        """Returns the product of dense operands in `dtype`."""
        return lax.dot_general(
            lhs,
            rhs,
            self.dimension_numbers,
            precision=self.precision,
            preferred_element_type=dtype,
            out_sharding=self.out_sharding,
        )

    def out_dtype(self, lhs: jax.Array | QArray, rhs: jax.Array | QArray) -> jnp.dtype:
        """Returns the dtype that the dense operands give."""
        if self.preferred_element_type is not None:
            return jnp.dtype(self.preferred_element_type)
        if lhs.dtype == rhs.dtype:
            return lhs.dtype
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)]
        dot = functools.partial(lax.dot_general, dimension_numbers=self.dimension_numbers)
        return jax.eval_shape(dot, *avals).dtype

    def terms(self, lhs: jax.Array | QArray) -> int:
        """Returns how many products are summed in an entry of the output."""
        return math.prod(lhs.shape[axis] for axis in self.dimension_numbers.contracting[0])

    def free_size(self, x: jax.Array | QArray, side: int) -> int:
        """Returns how many entries of the output an operand's free axes make."""
        return math.prod(x.shape[axis] for axis in self.dimension_numbers.free(side, x.ndim))

    def in_output(self, leaf: jax.Array, side: int, shape: Shape, ndim: int) -> jax.Array:
        """Returns an operand's scale or zero point so that it broadcasts against the output.

        **Arguments:**

        - `leaf`: with size 1 on the contracting axes.
        - `side`, `shape`: which operand it is of, and the operand's shape: tiles of several values
          are spread over them, unless there is one tile.
        - `ndim`: of the output, whose axes are the batch axes, those left of the first operand, and
          those left of the second.
        """
        contracting, batch = (pair[side] for pair in self.dimension_numbers)
        kept = [axis for axis in range(leaf.ndim) if axis not in contracting]
        counts = [leaf.shape[axis] for axis in kept]
        sizes = [n if n == 1 else shape[axis] for n, axis in zip(counts, kept, strict=True)]
        leaf = lax.squeeze(leaf, contracting)
        if sizes != counts:
            leaf = over_tiles(broadcast_tiles, jnp.zeros(sizes, leaf.dtype), leaf)
        order = [*batch, *(axis for axis in kept if axis not in batch)]
        leaf = lax.transpose(leaf, [kept.index(axis) for axis in order])
        first = leaf.ndim if side == 0 else len(batch)
        return lax.expand_dims(leaf, range(first, first + ndim - leaf.ndim))


def broadcast_tiles(values: jax.Array, tiles: jax.Array) -> jax.Array:
    """Return `tiles` broadcast to the shape of `values`, for `over_tiles`."""
    return jnp.broadcast_to(tiles, values.shape)


# The answer.


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be done for a product.

    **Arguments:**

    - `how`: what it is, as `vn.explain` tells it.
    - `compute`: from the operands to the product.
    - `operands`: arrays, and QArrays.
    - `dense`: the bytes of each operand that it makes dense on the platform that JAX runs on:
      `dense_nbytes` of the operands.
    - `kernels_for`: the platforms that it is a kernel for, which makes no weight dense. On others,
      what the next way plans is done.
    - `no_kernel`: why no kernel computes it, if the size of an operand is the reason.
    """

    how: str
    compute: Callable[..., jax.Array]
    operands: tuple[Any, ...]
    dense: tuple[int, ...] = ()
    kernels_for: tuple[str, ...] = ()
    no_kernel: str = ""

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel, on some platform."""
        return bool(self.kernels_for)

    @property
    def dense_nbytes(self) -> int:
        """The bytes that it makes dense altogether."""
        return sum(self.dense)

    def __call__(self) -> jax.Array:
        """Returns the product."""
        return self.compute(*self.operands)


def carry_out(plan: Plan) -> jax.Array:
    """Does what a rule does with a plan: says what it is, and computes the product."""
    compute = plan.compute
    leaves = jax.tree.leaves(plan.operands)
    if not plan.is_kernel and any(isinstance(x, jax.core.Tracer) for x in leaves):
        # A derivative dequantises once more, instead of keeping the dense weights of a whole model
        # from the forward pass to the backward one.
        compute = jax.checkpoint(compute)
    out = compute(*plan.operands)
    note_how(plan.how, plan.dense, plan.no_kernel)
    return out


def how_dense(lhs: jax.Array | QArray, rhs: jax.Array | QArray) -> str:
    """Return the description of a plan that dequantizes each quantized operand."""
    names = [n for n, x in (("lhs", lhs), ("rhs", rhs)) if isinstance(x, QArray)]
    return f"dequantize {' and '.join(names)}"


def dense_nbytes(*operands: jax.Array | QArray, dtype: DTypeLike | None = None) -> tuple[int, ...]:
    """Returns the bytes of each operand as a whole array of floats, 0 of what is dense already.

    **Arguments:**

    - `operands`: those that become floats.
    - `dtype`: of the floats, or None for that of each operand.
    """
    sizes = (x.size * jnp.dtype(x.dtype if dtype is None else dtype).itemsize for x in operands)
    return tuple(n if isinstance(x, QArray) else 0 for x, n in zip(operands, sizes, strict=True))


def runs_on_cpu() -> bool:
    """Whether the platform that JAX runs on, where nobody says another, is a CPU."""
    return jax.default_backend() == "cpu"
