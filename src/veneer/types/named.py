"""`Named`: an array with named axes, and the axis names of the results of primitives.

The law of a primitive is a function that computes the axis names of its results. If a primitive
combines axes of two operands, such as the contracted axes of a product, their names must be equal.
An axis without a name takes the name of the other axis, and so does an axis of size 1 that is
broadcast. Merged, split and new axes have no name.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, SupportsIndex

import jax
import jax.numpy as jnp

from .._core.surface import Leaf, check_axes
from .._core.trace import redispatch
from .._core.tree import static
from .._core.value import aval_of, materialise_one
from .._jax.tracing import mapped_axis
from .label import Label

Names = tuple[str | None, ...]


@dataclass(frozen=True)
class Axes:
    """The names and sizes of the axes of an operand. The names of a dense array are None."""

    names: Names
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)

    def without(self, removed: Collection[Any]) -> Names:
        """Return the names of the axes that are not in `removed`."""
        return tuple(name for i, name in enumerate(self.names) if i not in removed)


def _unify(*axes: tuple[Axes, SupportsIndex]) -> str | None:
    """Return the name that axes of operands share, or None if none of them has a name.

    `axes` are pairs of an operand and the index of its axis. A primitive combines these axes: for
    example, it contracts one with the other.

    **Raises:** `ValueError` if two axes have different names.
    """
    named = [(x, i) for x, i in axes if x.names[i] is not None]
    for x, i in named[1:]:
        first, j = named[0]
        if x.names[i] != first.names[j]:
            raise ValueError(
                f"axis {j} of {first.names} is {first.names[j]!r}, but axis {i} of {x.names} is "
                f"{x.names[i]!r}. Rename an axis with Named.rename, or remove its name."
            )
    return named[0][0].names[named[0][1]] if named else None


def _unify_all(*operands: Axes) -> Names:
    """Return, for each axis, the name that it has in any of the operands, or None.

    The operands have the same number of axes. The sizes of an axis may differ.

    **Raises:** `ValueError` if an axis has different names in two operands.
    """
    return tuple(_unify(*((x, i) for x in operands)) for i in range(len(operands[0])))


def _elementwise(*operands: Axes, **params: Any) -> Names:
    rank = max(map(len, operands))
    full = [x for x in operands if len(x) == rank]  # all others are scalars
    names = []
    for i in range(rank):
        # Ignore the names of axes that are broadcast.
        not_broadcast = [x for x in full if x.shape[i] != 1]
        names.append(_unify(*((x, i) for x in not_broadcast or full)))
    return tuple(names)


def _broadcast_in_dim(x: Axes, *, shape: Any, broadcast_dimensions: Any, **params: Any) -> Names:
    names: list[str | None] = [None] * len(shape)
    for i, j in enumerate(broadcast_dimensions):
        if x.shape[i] == shape[j]:
            names[j] = x.names[i]
    return tuple(names)


def _reshape(x: Axes, *, new_sizes: Any, dimensions: Any, **params: Any) -> Any:
    """Return the axis names after a reshape of `x`. Merged, split and new axes have no name.

    An axis keeps its name if its size and the product of the sizes before it stay the same. Then,
    in row-major order, it has the same entries.
    """
    if dimensions is not None:
        return NotImplemented
    old, new = _strides_from_front(x.shape), _strides_from_front(new_sizes)
    # Adjacent axes of size 1 are alike. They keep their names if their number stays the same.
    unchanged = {
        axis: iter([name for other, name in zip(old, x.names, strict=True) if other == axis])
        for axis in old
        if old.count(axis) == new.count(axis)
    }
    return tuple(next(unchanged[axis]) if axis in unchanged else None for axis in new)


def _strides_from_front(shape: Sequence[Any]) -> list[tuple[int, int]]:
    """Return, for each axis, a pair: the product of the sizes before the axis, and its size."""
    sizes = [size or _LARGE_PRIME for size in shape]  # after a 0, all products would be 0
    return [(math.prod(sizes[:i]), size) for i, size in enumerate(sizes)]


_LARGE_PRIME = 2**61 - 1


def _insert(names: Names, axis: int) -> Names:
    return (*names[:axis], None, *names[axis:])


def _dot_general(a: Axes, b: Axes, *, dimension_numbers: Any, **params: Any) -> Names:
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    for i, j in zip(contract_a, contract_b, strict=True):
        _unify((a, i), (b, j))
    batch = [_unify((a, i), (b, j)) for i, j in zip(batch_a, batch_b, strict=True)]
    return (*batch, *a.without((*contract_a, *batch_a)), *b.without((*contract_b, *batch_b)))


def _gather(x: Axes, indices: Axes, *, dimension_numbers: Any, **params: Any) -> Names:
    numbers = dimension_numbers
    batch = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    # The last axis of the indices has the components of one index.
    index_names = iter(
        _unify((indices, i), (x, batch[i])) if i in batch else indices.names[i]
        for i in range(len(indices) - 1)
    )
    slice_names = iter(x.without((*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)))
    rank = len(indices) - 1 + len(numbers.offset_dims)
    return tuple(
        next(slice_names if i in numbers.offset_dims else index_names) for i in range(rank)
    )


def _scatter(
    x: Axes, indices: Axes, updates: Axes, *, dimension_numbers: Any, **params: Any
) -> Names:
    numbers = dimension_numbers
    not_sliced = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    sliced = (i for i in range(len(x)) if i not in not_sliced)
    update_axis = dict(zip(sliced, sorted(numbers.update_window_dims), strict=True))
    index_axes = [i for i in range(len(updates)) if i not in numbers.update_window_dims]
    batch = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for i, j in batch:
        update_axis[i] = index_axes[j]
        _unify((indices, j), (x, i))
    for i, j in enumerate(index_axes):
        _unify((indices, i), (updates, j))
    return tuple(
        _unify((x, i), (updates, update_axis[i])) if i in update_axis else name
        for i, name in enumerate(x.names)
    )


#: A function of the operands' `Axes` that returns the names of the result, or a list of them.
Law = Callable[..., Any]

#: Laws by the names of their primitives.
_TABLE: dict[str, Law] = {
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil "
    "clamp clz complex conj convert_element_type cos cosh digamma div eq eq_to erf erf_inv erfc "
    "exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le "
    "le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not "
    "one_minus_square or polygamma population_count pow real reduce_precision "
    "regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta": _elementwise,
    "all_to_all cumlogsumexp cummax cummin cumprod cumsum dynamic_slice pad pbroadcast ppermute "
    "pvary rev slice": lambda x, *others, **params: x.names,
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor": (
        lambda x, *, axes, **params: x.without(axes)
    ),
    # Here `axes` contains the names of mesh axes, too.
    "pmax pmin psum psum_invariant": lambda x, *, axes, **params: x.without(axes),
    "all_gather all_gather_invariant": lambda x, *, all_gather_dimension, tiled, **params: (
        x.names if tiled else _insert(x.names, all_gather_dimension)
    ),
    "reduce_scatter": lambda x, *, scatter_dimension, tiled, **params: (
        x.names if tiled else x.without([scatter_dimension])
    ),
    "squeeze": lambda x, *, dimensions, **params: x.without(dimensions),
    "transpose": lambda x, *, permutation, **params: tuple(x.names[i] for i in permutation),
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "tile": lambda x, *, reps, **params: tuple(
        name if n == 1 else None for name, n in zip(x.names, reps, strict=True)
    ),
    "concatenate": lambda *xs, **params: _unify_all(*xs),
    "stack": lambda *xs, axis, **params: _insert(_unify_all(*xs), axis),
    "unstack": lambda x, *, axis, **params: [x.without([axis])] * x.shape[axis],
    "split": lambda x, *, sizes, **params: [x.names] * len(sizes),
    "sort": lambda *xs, **params: [_unify_all(*xs)] * len(xs),
    "top_k": lambda x, **params: [x.names, x.names],
    "dynamic_update_slice": lambda x, update, *starts, **params: _unify_all(x, update),
    "dot_general": _dot_general,
    "gather": _gather,
    "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub": _scatter,
}

LAWS = {name: law for names, law in _TABLE.items() for name in names.split()}


class Named(Label):
    """An array `[...]` with a name per axis, such as `("batch", "seq")`.

    A program that addresses axes by position runs unchanged. If an operation such as `x + y`
    combines axes with different names, it raises an error when the program is traced. Names cost
    nothing at run time.

    - An axis can have no name (None), like the axes of a dense array. If an operation combines it
      with a named axis, the result has that name. If an axis of size 1 is broadcast, the result has
      the name of the other axis.
    - In a product, the names of two batch axes or two contracted axes must be equal. The other axes
      keep their names, so `x @ x.T` has two axes with the same name.
    - `reshape` keeps the names of unchanged axes. Merged, split and new axes have no name.
    - `vmap` and loops remove the mapped axis and its name. The axis that they add to a result has
      no name. The names of `jax.vmap(vn.implicit(f))` are correct only if `out_axes` is 0.
      `vn.implicit(jax.vmap(f))` works with all `out_axes`.

    **Keeps the structure:** elementwise functions, reductions, transposes, slices, indexing,
    products, cumulative sums, sorts, `concatenate` and `stack`. A result without names is a dense
    array.

    **Materializes:** other primitives, such as `fft`. The result is a dense array without names.

    **Arguments:**

    - `array`: an array `[...]` of any dtype, dense or implicit.
    - `names`: a tuple with a distinct name or None per axis; static.

    **Raises:**

    - `TypeError` if `array` is not an array or already has names, or a name is not a string.
    - `ValueError` if the number of names differs from the rank, or a name occurs twice.
    - `ValueError` in an operation that combines axes with different names.

    >>> import jax.numpy as jnp, veneer as vn
    >>> x = vn.types.Named(jnp.ones((2, 3)), ("batch", "seq"))
    >>> w = vn.types.Named(jnp.ones((3, 4)), ("seq", "out"))
    >>> x @ w, x.mean(0)
    (Named(f32[batch=2, out=4]), Named(f32[seq=3]))
    >>> x * x.rename(seq="time")
    Traceback (most recent call last):
        ...
    ValueError: mul(Named(f32[batch=2, seq=3]), Named(f32[batch=2, time=3])): axis 1 of ...
    """

    array: Leaf  # [...]
    names: Names = static()

    laws: ClassVar[Mapping[str, Callable]] = LAWS

    def __post_init__(self) -> None:
        names: Any = self.names
        if isinstance(names, str) or not all(n is None or isinstance(n, str) for n in names):
            raise TypeError(f"Named takes a tuple of names, strings or None, got {names!r}")
        names = tuple(names)
        for name in names:
            if name is not None and names.count(name) > 1:
                raise ValueError(f"Named takes distinct names, but {name!r} is twice in {names}")
        object.__setattr__(self, "names", names)
        check_axes(self, array="")
        if isinstance(self.array, Named):
            raise TypeError(
                f"Named takes an array without names, not {self.array!r}. Use .rename()."
            )
        shape = self.aval().shape
        if len(names) != len(shape):
            raise ValueError(
                f"Named takes a name or None for each axis; got {len(names)} names, {names}, for "
                f"an array of shape {shape}"
            )

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of the array."""
        return aval_of(self.array)

    def materialise(self) -> Any:
        """Return the dense array without names."""
        return materialise_one(self.array)

    def axis(self, name: str) -> int:
        """Return the position of the axis with this name, for functions that take an `axis`.

        **Raises:** `ValueError` if no axis, or more than one, has this name.
        """
        if self.names.count(name) != 1:
            problem = "several axes have" if name in self.names else "no axis has"
            raise ValueError(f"{problem} the name {name!r} in {self!r}, with names {self.names}")
        return self.names.index(name)

    def order(self, *names: str) -> "Named":
        """Transpose the array so that its axes have these names, in this order.

        **Arguments:**

        - `names`: the names of all axes, in the new order.

        **Raises:** `ValueError` if `names` does not contain the name of each axis once.
        """
        if len(names) != len(self.names):
            raise ValueError(f"order takes all the names {self.names}, got {names}")
        axes = [self.axis(name) for name in names]
        return redispatch(lambda x: jnp.transpose(x, axes), self)

    def rename(self, **names: str | None) -> "Named":
        """Rename axes: `x.rename(old="new")`. Remove a name with `x.rename(old=None)`.

        **Raises:** `ValueError` if no axis, or more than one, has an old name, or if two axes would
        have the same new name.
        """
        for name in names:
            self.axis(name)
        return Named(self.array, tuple(names.get(n, n) if n else n for n in self.names))

    def __repr__(self) -> str:
        if _rank(self.array) != len(self.names):  # JAX replaced the array by another object
            return f"Named({self.array!r}, {self.names})"
        aval = self.aval()
        dtype = aval.str_short(short_dtypes=True).split("[")[0]
        sizes = map(str, aval.shape)
        axes = [f"{n}={size}" if n else size for n, size in zip(self.names, sizes, strict=True)]
        return f"Named({dtype}[{', '.join(axes)}])"

    @classmethod
    def apply_law(cls, law: Callable, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Return the arrays without names, and the names of the results.

        **Arguments:**

        - `law`: a function, called as `law(*axes, **params)` with an object per operand that has
          its axis names (`names`) and sizes (`shape`). It returns the names of the result: a tuple,
          or a list of tuples for several results.
        - `values`, `params`: the operands and the parameters of the primitive.
        """
        axes = [
            Axes(x.names if isinstance(x, Named) else (None,) * jnp.ndim(x), tuple(jnp.shape(x)))
            for x in values
        ]
        names = law(*axes, **params)
        if names is NotImplemented:
            return NotImplemented
        return [x.array if isinstance(x, Named) else x for x in values], names

    @classmethod
    def attach(cls, array: Any, metadata: Names) -> Any:
        """Return an array with names, which may repeat. If all names are None, return the array."""
        return _unflatten((metadata,), (array,)) if any(metadata) else array


# The pytree. JAX adds and removes leading axes of the leaf, so names belong to the last axes.


class _Metadata(tuple):
    """The static data `(names,)` of a `Named`. Leading axes without a name do not affect equality.

    `jax.jacrev` requires this: it compares the tree structures of the input and the result of a
    `vmap`, which has one more axis without a name.
    """

    def _without_leading_axes(self) -> Names:
        (names,) = self
        first = next((i for i, name in enumerate(names) if name is not None), len(names))
        return names[first:]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple):
            return NotImplemented
        return self._without_leading_axes() == _Metadata(other)._without_leading_axes()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._without_leading_axes())


def _unflatten(metadata: tuple[Names], leaves: Iterable[Any]) -> Named:
    """Create a `Named` from its pytree metadata and leaf, without checks.

    If a transformation has changed the rank of the array, drop the names of removed axes, and give
    new leading axes no name.
    """
    (array,), (names,) = leaves, metadata
    value = object.__new__(Named)
    rank = _rank(array)
    if rank is not None and rank != len(names):
        removed = mapped_axis(array)
        if removed is not None and rank == len(names) - 1:
            names = names[:removed] + names[removed + 1 :]
        names = (None,) * (rank - len(names)) + names[max(len(names) - rank, 0) :]
    value.__dict__.update(array=array, names=names)
    return value


def _rank(array: Any) -> int | None:
    """Return the number of axes, or None for an object that JAX stores in place of an array."""
    leaves = jax.tree.leaves(array)
    if isinstance(array, Named) or not all(hasattr(x, "dtype") for x in leaves):
        return None
    return getattr(array, "ndim", None)


_KEY = jax.tree_util.GetAttrKey("array")

jax.tree_util.register_pytree_with_keys(
    Named,
    lambda x: (((_KEY, x.array),), _Metadata((x.names,))),
    _unflatten,
    lambda x: ((x.array,), _Metadata((x.names,))),
)
