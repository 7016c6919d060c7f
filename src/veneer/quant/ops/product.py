"""`QuantizedProduct`, a `dot_general` with all facts about it, and `Plan`, how to compute it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.policy import note_how
from ..._core.primitives.dimension_numbers import DotDimensionNumbers, NestedAxes
from ..._core.surface.array import ImplicitArray
from ..arrays.qarray import QArray
from ..formats.tiles import Shape, over_tiles
from .operands import can_scale_output, operand_pair

Operand = jax.Array | QArray

#: The names of the operands in reports. Their indices are called sides: 0 is lhs, 1 is rhs.
SIDES = ("lhs", "rhs")

# The side of the weight, if both operands are QArrays and the caller knows it.
_weight_side: ContextVar[int | None] = ContextVar("weight_side", default=None)


@contextmanager
def weight_operand(side: int) -> Iterator[None]:
    """Declare which operand of the products within is the weight: 0 for lhs, 1 for rhs.

    Quantized activations look like a weight. Kernels read the stored weight, and need the
    activations in a certain layout. By default, the weight is rhs if that is a QArray.
    """
    token = _weight_side.set(side)
    try:
        yield
    finally:
        _weight_side.reset(token)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("operands",),
    meta_fields=(
        *("dimension_numbers", "precision", "preferred_element_type", "out_sharding"),
        *("weight_side", "shapes", "dtypes", "out_dtype", "terms"),
    ),
)
@dataclasses.dataclass(frozen=True)
class QuantizedProduct:
    """A call of `dot_general`, and the facts that strategies need. See `QuantizedProduct.create`.

    It is a pytree with the leaves of its operands, so JAX can trace functions of it.

    **Arguments:**

    - `operands`: lhs and rhs.
    - `dimension_numbers`, `precision`, `preferred_element_type`, `out_sharding`: as for
      `jax.lax.dot_general`.
    - `weight_side`: the side that `weight_operand` declared, or None.
    - `shapes`, `dtypes`: of the dense operands.
    - `out_dtype`: the dtype of the result.
    - `terms`: the number of products that are summed for one entry of the result.
    """

    operands: tuple[Operand, Operand]
    dimension_numbers: DotDimensionNumbers
    precision: Any
    preferred_element_type: DTypeLike | None
    out_sharding: Any
    weight_side: int | None
    shapes: tuple[Shape, Shape]
    dtypes: tuple[jnp.dtype, jnp.dtype]
    out_dtype: jnp.dtype
    terms: int

    @classmethod
    def create(
        cls,
        lhs: ArrayLike | ImplicitArray,
        rhs: ArrayLike | ImplicitArray,
        dimension_numbers: NestedAxes,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> "QuantizedProduct":
        """Return the product for the arguments of `dot_general`."""
        numbers = DotDimensionNumbers.of(dimension_numbers)
        operands = operand_pair(lhs, rhs, precision, preferred_element_type)
        left = operands[0].aval() if isinstance(operands[0], QArray) else operands[0]
        right = operands[1].aval() if isinstance(operands[1], QArray) else operands[1]
        if preferred_element_type is not None:
            out_dtype = jnp.dtype(preferred_element_type)
        elif left.dtype == right.dtype:
            out_dtype = left.dtype
        else:
            avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (left, right)]
            dot = functools.partial(lax.dot_general, dimension_numbers=numbers)
            out_dtype = jax.eval_shape(dot, *avals).dtype
        terms = 1
        for axis in numbers.contracting[0]:
            terms *= left.shape[axis]
        return cls(
            *(operands, numbers, precision, preferred_element_type, out_sharding),
            *(_weight_side.get(), (left.shape, right.shape), (left.dtype, right.dtype)),
            *(out_dtype, terms),
        )

    def replace(
        self, lhs: Operand, rhs: Operand, dtype: DTypeLike | None = None
    ) -> "QuantizedProduct":
        """Return the same product of other operands, with results in `dtype` if it is set."""
        dtype = self.preferred_element_type if dtype is None else dtype
        arguments = self.dimension_numbers, self.precision, dtype, self.out_sharding
        return QuantizedProduct.create(lhs, rhs, *arguments)

    @property
    def can_scale_output(self) -> bool:
        """True if codes can be multiplied before scales are applied."""
        return can_scale_output(*self.operands, self.out_dtype, self.precision)

    def free(self, side: int) -> tuple[int, ...]:
        """Return the axes of an operand that are neither contracted nor batch axes."""
        return self.dimension_numbers.free(side, len(self.shapes[side]))

    def dot(self, lhs: jax.Array, rhs: jax.Array, dtype: DTypeLike | None) -> jax.Array:
        """Return the product of dense arrays in place of the operands, in `dtype`."""
        return lax.dot_general(
            lhs,
            rhs,
            self.dimension_numbers,
            precision=self.precision,
            preferred_element_type=dtype,
            out_sharding=self.out_sharding,
        )

    def broadcast_to_output(self, leaf: jax.Array, side: int, ndim: int) -> jax.Array:
        """Return the scale or zero point of an operand so that it broadcasts against the output.

        **Arguments:**

        - `leaf`: of size 1 along the contracted axes.
        - `side`: of the operand.
        - `ndim`: the rank of the output. Its axes are the batch axes, the free axes of lhs and the
          free axes of rhs.
        """
        contracting, batch = (pair[side] for pair in self.dimension_numbers)
        kept = [axis for axis in range(leaf.ndim) if axis not in contracting]
        counts = [leaf.shape[axis] for axis in kept]
        shape = self.shapes[side]
        sizes = [n if n == 1 else shape[axis] for n, axis in zip(counts, kept, strict=True)]
        leaf = lax.squeeze(leaf, contracting)
        if sizes != counts:
            leaf = broadcast_tiles(leaf, sizes)
        order = [*batch, *(axis for axis in kept if axis not in batch)]
        leaf = lax.transpose(leaf, [kept.index(axis) for axis in order])
        first = leaf.ndim if side == 0 else len(batch)
        return lax.expand_dims(leaf, range(first, first + ndim - leaf.ndim))


def broadcast_tiles(leaf: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return an array of a shape in which each entry of `leaf` fills its tile."""
    return over_tiles(
        lambda values, tiles: jnp.broadcast_to(tiles, values.shape),
        jnp.zeros(shape, leaf.dtype),
        leaf,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a product is computed.

    **Arguments:**

    - `how`: a description for `vn.explain`.
    - `compute`: a function of `operands` that returns the result.
    - `operands`: arrays, or pytrees of arrays.
    - `dense`: the bytes of each operand that are materialized on the default platform.
    - `kernels_for`: the platforms on which a kernel computes the product.
    - `no_kernel`: the reason why no kernel is used, if an operand is too small.
    """

    how: str
    compute: Callable[..., jax.Array]
    operands: tuple[Any, ...]
    dense: tuple[int, ...] = ()
    kernels_for: tuple[str, ...] = ()
    no_kernel: str = ""

    def __call__(self) -> jax.Array:
        """Return the result."""
        return self.compute(*self.operands)


#: A function that plans a product, or returns None if it does not support it.
Strategy = Callable[[QuantizedProduct], Plan | None]


def first_plan(product: QuantizedProduct, strategies: Sequence[Strategy]) -> Plan:
    """Return the plan of the first strategy that supports a product."""
    for strategy in strategies:
        plan = strategy(product)
        if plan is not None:
            return plan
    raise AssertionError("the last strategy supports every product")


def execute(plan: Plan) -> jax.Array:
    """Compute the result in a rule, and report the plan."""
    compute = plan.compute
    if not plan.kernels_for:
        leaves = jax.tree.leaves(plan.operands)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            # A derivative dequantizes again. Otherwise the dense weights of a whole model would be
            # kept from the forward pass to the backward pass.
            compute = jax.checkpoint(compute)
    out = compute(*plan.operands)
    note_how(plan.how, plan.dense, plan.no_kernel)
    return out


def describe_dequantized(lhs: Operand, rhs: Operand) -> str:
    """Return the description of a plan that dequantizes each quantized operand."""
    names = [name for name, x in zip(SIDES, (lhs, rhs), strict=True) if isinstance(x, QArray)]
    return f"dequantize {' and '.join(names)}"


def dense_nbytes(*operands: Operand, dtype: DTypeLike | None = None) -> tuple[int, ...]:
    """Return the bytes of each operand if it is materialized, or 0 if it is not quantized.

    **Arguments:**

    - `operands`: arrays and QArrays.
    - `dtype`: of the materialized arrays. The default is the dtype of each operand.
    """
    sizes = (x.size * jnp.dtype(x.dtype if dtype is None else dtype).itemsize for x in operands)
    return tuple(n if isinstance(x, QArray) else 0 for x, n in zip(operands, sizes, strict=True))


def runs_on_cpu() -> bool:
    """Return whether the default platform of JAX is a CPU."""
    return jax.default_backend() == "cpu"
