"""`QuantizedProduct`, the arguments of a `dot_general`, and `Plan`, a function that computes it.

A product of an operand with minima is split into a product of codes and a smaller product. A
minimum is an offset of all values of a tile. If t is the tile that contains k, then
`sum_k x[k] * (codes[k, n] * scale[t, n] + minimum[t, n])` is the sum of

- the main product, `sum_k x[k] * codes[k, n] * scale[t, n]`, and
- the minimum term, `sum_t (sum of x over t) * minimum[t, n]`, which is smaller by the tile size.

If x is infinite, the result is NaN if these two terms have opposite signs, or if an integer code is
equal to its zero point.
"""

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
from ..._core.primitives.axes import DotDimensionNumbers, NestedAxes
from ..._core.surface.array import ImplicitArray
from ..arrays import QArray
from ..formats.tiles import over_tiles
from .operands import accumulator, can_scale_output, dequantized, has_minimum, operand_pair

Operand = jax.Array | QArray

#: The names of the operands in reports, in the order of sides. The side of lhs is 0, of rhs 1.
SIDES = ("lhs", "rhs")

# The side of the weight that `weight_operand` declares.
_weight_side: ContextVar[int | None] = ContextVar("weight_side", default=None)


@contextmanager
def weight_operand(side: int) -> Iterator[None]:
    """Declare which operand is the weight if both are QArrays, for products in a `with` block.

    A kernel reads the codes of the weight as stored, and converts the other operand. Without this
    declaration, strategies that use kernels try rhs first. `side` is 0 for lhs and 1 for rhs.
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
    """The arguments of a `dot_general`, and values that strategies derive from them.

    `QuantizedProduct.create` computes the derived values. A product is a pytree whose leaves are
    the leaves of the operands, so JAX can trace functions of a product.

    **Arguments:**

    - `operands`: the pair `(lhs, rhs)`.
    - `dimension_numbers`, `precision`, `preferred_element_type`, `out_sharding`: as for
      `jax.lax.dot_general`.
    - `weight_side`: 0 if lhs is the weight and 1 if rhs is. None if this is unknown.
    - `shapes`, `dtypes`: the shapes and dtypes of the two dense operands.
    - `out_dtype`: the dtype of the result.
    - `terms`: the number of products that are summed for one entry of the result.
    """

    operands: tuple[Operand, Operand]
    dimension_numbers: DotDimensionNumbers
    precision: Any
    preferred_element_type: DTypeLike | None
    out_sharding: Any
    weight_side: int | None
    shapes: tuple[tuple[Any, ...], tuple[Any, ...]]  # sizes may be symbolic
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
        """Return the `QuantizedProduct` of the arguments of `dot_general`."""
        numbers = DotDimensionNumbers.from_lax(dimension_numbers)
        operands = operand_pair(lhs, rhs, precision, preferred_element_type)
        # The type of each dense operand. `aval` is called once, because it computes the shape.
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
        arguments = operands, numbers, precision, preferred_element_type, out_sharding
        shapes, dtypes = (left.shape, right.shape), (left.dtype, right.dtype)
        return cls(*arguments, _weight_side.get(), shapes, dtypes, out_dtype, terms)

    def replace(
        self, lhs: Operand, rhs: Operand, dtype: DTypeLike | None = None
    ) -> "QuantizedProduct":
        """Return a `QuantizedProduct` of other operands, with the same axes and precision.

        `dtype` is the new `preferred_element_type`. None keeps the current one.
        """
        dtype = self.preferred_element_type if dtype is None else dtype
        arguments = self.dimension_numbers, self.precision, dtype, self.out_sharding
        product = QuantizedProduct.create(lhs, rhs, *arguments)
        return dataclasses.replace(product, weight_side=self.weight_side)

    @property
    def can_scale_output(self) -> bool:
        """True if codes can be multiplied as floats before scales are applied."""
        return can_scale_output(*self.operands, self.out_dtype, self.precision)

    def free_axes(self, side: int) -> tuple[int, ...]:
        """Return the axes of lhs (side 0) or rhs (1) that are neither contracted nor batch axes."""
        return self.dimension_numbers.free(side, len(self.shapes[side]))

    def dot(self, lhs: jax.Array, rhs: jax.Array, dtype: DTypeLike | None) -> jax.Array:
        """Return the product of dense arrays, such as codes, with the axes of this product.

        `dtype` is the `preferred_element_type`.
        """
        return lax.dot_general(
            lhs,
            rhs,
            self.dimension_numbers,
            precision=self.precision,
            preferred_element_type=dtype,
            out_sharding=self.out_sharding,
        )

    def broadcast_to_output(self, leaf: jax.Array, side: int, ndim: int) -> jax.Array:
        """Rearrange the scale or zero point of an operand to broadcast it against the output.

        **Arguments:**

        - `leaf`: the scale or zero point. Its size along contracted axes must be 1.
        - `side`: 0 if the operand is lhs, 1 if it is rhs.
        - `ndim`: the rank of the output, whose axes are the batch axes, the free axes of lhs and
          the free axes of rhs.

        **Returns:** an array of rank `ndim`.
        """
        contracting, batch = (pair[side] for pair in self.dimension_numbers)
        remaining_axes = [axis for axis in range(leaf.ndim) if axis not in contracting]
        leaf = lax.squeeze(leaf, contracting)
        # Repeat the entries of tiles, so that each axis has size 1 or the size of the operand.
        sizes = [
            1 if count == 1 else self.shapes[side][axis]
            for count, axis in zip(leaf.shape, remaining_axes, strict=True)
        ]
        if sizes != [*leaf.shape]:
            leaf = broadcast_tiles(leaf, sizes)
        order = [*batch, *(axis for axis in remaining_axes if axis not in batch)]
        leaf = lax.transpose(leaf, [remaining_axes.index(axis) for axis in order])
        # Insert axes of size 1 for the free axes of the other operand.
        start = leaf.ndim if side == 0 else len(batch)
        return lax.expand_dims(leaf, range(start, start + ndim - leaf.ndim))


def broadcast_tiles(leaf: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Broadcast each entry of a scale over its tile, and return an array of shape `shape`."""
    repeat_entry = lambda tile, entry: jnp.broadcast_to(entry, tile.shape)
    return over_tiles(repeat_entry, jnp.zeros(shape, leaf.dtype), leaf)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A function that computes a product, its arguments, and a description for reports.

    **Arguments:**

    - `how`: a description for `vn.explain`.
    - `compute`: a function of `operands` that returns the result.
    - `operands`: arrays, or pytrees of arrays.
    - `dense`: for each operand, the bytes that are materialized on the default platform. An empty
      tuple means none.
    - `kernels_for`: the platforms on which a kernel computes the product, such as "cpu".
    - `no_kernel`: a message if an operand is too small for a kernel, and "" otherwise.
    """

    how: str
    compute: Callable[..., jax.Array]
    operands: tuple[Any, ...]
    dense: tuple[int, ...] = ()
    kernels_for: tuple[str, ...] = ()
    no_kernel: str = ""

    def __call__(self) -> jax.Array:
        """Compute the product."""
        return self.compute(*self.operands)


#: A function that returns a plan for a product, or None for a product that it does not support.
Strategy = Callable[[QuantizedProduct], Plan | None]


def first_plan(product: QuantizedProduct, strategies: Sequence[Strategy]) -> Plan:
    """Return the plan of the first strategy that supports a product.

    The last strategy must support every product.
    """
    for strategy in strategies:
        plan = strategy(product)
        if plan is not None:
            return plan
    raise AssertionError("the last strategy supports every product")


def execute(plan: Plan) -> jax.Array:
    """Compute the product of a plan, and report the description of the plan to `vn.explain`.

    Call this function in a rule of `vn.implicit`. A derivative dequantizes the operands again,
    instead of keeping dense operands in memory.
    """
    compute = plan.compute
    leaves = jax.tree.leaves(plan.operands)
    if not plan.kernels_for and any(isinstance(x, jax.core.Tracer) for x in leaves):
        # A derivative dequantizes again. Otherwise the dense weights of a whole model would be
        # kept from the forward pass to the backward pass.
        compute = jax.checkpoint(compute)
    out = compute(*plan.operands)
    note_how(plan.how, plan.dense, plan.no_kernel)
    return out


def describe_dequantized(lhs: Operand, rhs: Operand) -> str:
    """Return the text "dequantize lhs and rhs", with only the operands that are QArrays."""
    names = [name for name, x in zip(SIDES, (lhs, rhs), strict=True) if isinstance(x, QArray)]
    return f"dequantize {' and '.join(names)}"


def dense_nbytes(*operands: Operand, dtype: DTypeLike | None = None) -> tuple[int, ...]:
    """Return the size in bytes of the dense array of each QArray, and 0 for each dense operand.

    `dtype` is the dtype of the dense arrays. None means the dtype of each operand.
    """
    sizes = (x.size * jnp.dtype(x.dtype if dtype is None else dtype).itemsize for x in operands)
    return tuple(n if isinstance(x, QArray) else 0 for x, n in zip(operands, sizes, strict=True))


def runs_on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def split_minimum(
    product: QuantizedProduct,
) -> tuple[QuantizedProduct, Callable[[Plan], Plan]] | None:
    """Split a product of an operand with minima into its main product and its minimum term.

    If both operands have minima, lhs is dequantized.

    **Returns:** a pair: the main product, and a function that takes a plan for the main product and
    returns a plan that also adds the minimum term. None if no operand has minima, or if codes
    cannot be multiplied before scales are applied.
    """
    lhs, rhs = product.operands
    if not (has_minimum(lhs) or has_minimum(rhs)):
        return None
    if not product.can_scale_output or product.terms == 0:
        return None
    side = 1 if has_minimum(rhs) else 0
    x: Operand = dequantized(lhs) if side and has_minimum(lhs) else product.operands[1 - side]
    q: Any = product.operands[side]
    q_main, dtype = q.replace(minimum=None), accumulator(product.out_dtype)
    main = product.replace(x, q_main, dtype) if side == 1 else product.replace(q_main, x, dtype)

    def add_minimum_term(main_plan: Plan) -> Plan:
        def compute(main_operands: tuple[Any, ...], x: Operand, q: QArray) -> jax.Array:
            out = main_plan.compute(*main_operands) + _minimum_term(main, x, q, side)
            return out.astype(product.out_dtype)

        return dataclasses.replace(
            main_plan,
            how=f"{main_plan.how}; add minima times per-tile sums",
            compute=compute,
            operands=(main_plan.operands, x, q),
        )

    return main, add_minimum_term


def _minimum_term(product: QuantizedProduct, x: Operand, q: QArray, side: int) -> jax.Array:
    """Return the part of a product that the minima of the operand `q` contribute.

    This part is the product of the minima of `q` and the sums of the other operand `x` over the
    tiles of `q`. The dimension numbers and the dtype of the result are as in `product`. `side` is 0
    if `q` is lhs and 1 if it is rhs.
    """
    dtype = jnp.dtype(product.out_dtype)
    minima = q.minima()
    assert minima is not None
    # Sum x over the tiles of each contracted axis.
    contracting = product.dimension_numbers.contracting
    sums, q_contracted = dequantized(x).astype(dtype), contracting[side]
    for x_axis, q_axis in zip(contracting[1 - side], q_contracted, strict=True):
        count = minima.shape[q_axis]
        before, (size, *after) = sums.shape[:x_axis], sums.shape[x_axis:]
        sums = sums.reshape(*before, count, size // count, *after).sum(x_axis + 1)
    # Along the other axes, repeat the minimum of each tile.
    sizes = [minima.shape[i] if i in q_contracted else n for i, n in enumerate(q.shape)]
    minima = broadcast_tiles(minima.astype(dtype), sizes)
    exact = dataclasses.replace(product, precision=lax.Precision.HIGHEST)
    return exact.dot(*((sums, minima) if side == 1 else (minima, sums)), dtype)
