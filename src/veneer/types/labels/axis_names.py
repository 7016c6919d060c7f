"""The laws of named axes: the axis names of a primitive's results.

If axes of two operands correspond, their names must agree. An axis without a name takes the name of
the other, and so does an axis of size 1 that is broadcast. Merged, split and new axes have no name.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

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
    """Return the name of axes that correspond, or None if none of them has a name.

    `axes` are pairs of an operand and the index of its axis.

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
    """Return the new names: axes that do not change keep theirs, merged and split axes have none.

    An axis does not change if its size and the product of the sizes before it stay the same. Then,
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
