"""The laws of named axes: the names of a primitive's results, from those of its operands.

Names that meet must agree. An axis without a name agrees with any and takes its name, and so does
an axis of size 1 that is stretched. An axis is never given a name that does not belong to it: one
that is merged, split or made anew has none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

Names = tuple[str | None, ...]


@dataclass(frozen=True)
class Axes:
    """The names and sizes of an operand's axes; those of a dense operand have no names."""

    names: Names
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        return str(self.names)


def agree(*axes: tuple[Axes, SupportsIndex]) -> str | None:
    """The name of axes that meet, each given as an operand and the number of one of its axes."""
    named = [(x, i) for x, i in axes if x.names[i] is not None]
    for x, i in named[1:]:
        first, j = named[0]
        if x.names[i] != first.names[j]:
            raise ValueError(
                f"axis {j} of {first} is {first.names[j]!r}, but axis {i} of {x} is {x.names[i]!r}"
            )
    return named[0][0].names[named[0][1]] if named else None


def side_by_side(*operands: Axes) -> Names:
    """The names of operands of one rank, whose sizes may differ (`concatenate`)."""
    return tuple(agree(*((x, i) for x in operands)) for i in range(len(operands[0])))


def elementwise(*operands: Axes, **params: Any) -> Names:
    """The names of operands that are stretched to one shape; scalars have no axes to meet."""
    rank = max(map(len, operands))
    full = [x for x in operands if len(x) == rank]
    names = []
    for i in range(rank):
        stretched = [x for x in full if x.shape[i] != 1]
        names.append(agree(*((x, i) for x in stretched or full)))
    return tuple(names)


def first(x: Axes, *others: Axes, **params: Any) -> Names:
    """The names of the first operand, whose axes stay; of the others none meets them."""
    return x.names


def _all_alike(*operands: Axes, **params: Any) -> list[Names]:
    return [side_by_side(*operands)] * len(operands)


def _collective(x: Axes, *, axes: Any, **params: Any) -> Names:
    """Axes of the mesh, by name, and axes of the operand, which are reduced, by position."""
    return _without([axis for axis in axes if not isinstance(axis, str)], x)


def _without(dropped: Sequence[SupportsIndex], x: Axes) -> Names:
    return tuple(name for i, name in enumerate(x.names) if i not in dropped)


def _all_gather(x: Axes, *, all_gather_dimension: int, tiled: bool, **params: Any) -> Names:
    new = [] if tiled else [None]
    return (*x.names[:all_gather_dimension], *new, *x.names[all_gather_dimension:])


def _reduce_scatter(x: Axes, *, scatter_dimension: int, tiled: bool, **params: Any) -> Names:
    return x.names if tiled else _without([scatter_dimension], x)


def _reduction(x: Axes, *, axes: Any, **params: Any) -> Names:
    return _without(axes, x)


def _squeeze(x: Axes, *, dimensions: Any, **params: Any) -> Names:
    return _without(dimensions, x)


def _transpose(x: Axes, *, permutation: Any, **params: Any) -> Names:
    return tuple(x.names[i] for i in permutation)


def _broadcast_in_dim(x: Axes, *, shape: Any, broadcast_dimensions: Any, **params: Any) -> Names:
    names: list[str | None] = [None] * len(shape)
    for i, j in enumerate(broadcast_dimensions):
        if x.shape[i] == shape[j]:
            names[j] = x.names[i]
    return tuple(names)


def _reshape(x: Axes, *, new_sizes: Any, dimensions: Any, **params: Any) -> Any:
    """Axes that are the same before and after keep their names; those merged or split have none.

    Two axes are the same if they are of one size, and the sizes of the axes before each have the
    same product: then, in row-major order, they have the same entries.
    """
    if dimensions is not None:
        return NotImplemented
    old, new = _places(x.shape), _places(new_sizes)
    # Axes of size 1 that are side by side have one place; if they are as many, they are the same.
    named = {
        place: iter([name for p, name in zip(old, x.names, strict=True) if p == place])
        for place in old
        if old.count(place) == new.count(place)
    }
    return tuple(next(named[place]) if place in named else None for place in new)


def _places(shape: Sequence[Any]) -> list[tuple[int, int]]:
    """Of each axis, the product of the sizes before it, and its size."""
    sizes = [size or _PRIME for size in shape]  # after a 0, all products would be 0
    return [(math.prod(sizes[:i]), size) for i, size in enumerate(sizes)]


_PRIME = 2**61 - 1


def _tile(x: Axes, *, reps: Any, **params: Any) -> Names:
    return tuple(name if n == 1 else None for name, n in zip(x.names, reps, strict=True))


def _concatenate(*operands: Axes, **params: Any) -> Names:
    return side_by_side(*operands)


def _stack(*operands: Axes, axis: Any, **params: Any) -> Names:
    names = side_by_side(*operands)
    return (*names[:axis], None, *names[axis:])


def _unstack(x: Axes, *, axis: Any, **params: Any) -> list[Names]:
    return [_without([axis], x)] * x.shape[axis]


def _split(x: Axes, *, sizes: Any, **params: Any) -> list[Names]:
    return [x.names] * len(sizes)


def _dynamic_update_slice(x: Axes, update: Axes, *starts: Axes, **params: Any) -> Names:
    return side_by_side(x, update)


def _dot_general(a: Axes, b: Axes, *, dimension_numbers: Any, **params: Any) -> Names:
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    for i, j in zip(contract_a, contract_b, strict=True):
        agree((a, i), (b, j))
    batch = [agree((a, i), (b, j)) for i, j in zip(batch_a, batch_b, strict=True)]
    free_a = _without((*contract_a, *batch_a), a)
    return (*batch, *free_a, *_without((*contract_b, *batch_b), b))


def _gather(x: Axes, indices: Axes, *, dimension_numbers: Any, **params: Any) -> Names:
    dims = dimension_numbers
    partners = dict(zip(dims.start_indices_batching_dims, dims.operand_batching_dims, strict=True))
    # The last axis of the indices is that of the parts of an index.
    looked_up = iter(
        agree((indices, i), (x, partners[i])) if i in partners else indices.names[i]
        for i in range(len(indices) - 1)
    )
    sliced = iter(_without((*dims.collapsed_slice_dims, *dims.operand_batching_dims), x))
    rank = len(indices) - 1 + len(dims.offset_dims)
    return tuple(next(sliced if i in dims.offset_dims else looked_up) for i in range(rank))


def _scatter(
    x: Axes, indices: Axes, updates: Axes, *, dimension_numbers: Any, **params: Any
) -> Names:
    dims = dimension_numbers
    not_sliced = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    sliced = (i for i in range(len(x)) if i not in not_sliced)
    met = dict(zip(sliced, sorted(dims.update_window_dims), strict=True))
    looked_up = [i for i in range(len(updates)) if i not in dims.update_window_dims]
    for i, j in zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True):
        met[i] = looked_up[j]
        agree((indices, j), (x, i))
    for i, j in enumerate(looked_up):
        agree((indices, i), (updates, j))
    return tuple(
        agree((x, i), (updates, met[i])) if i in met else name for i, name in enumerate(x.names)
    )


Law = Callable[..., Any]

#: By a primitive's name: the names of its result, or a list of those of its results.
LAWS: dict[str, Law] = {
    **dict.fromkeys(
        "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt "
        "ceil clamp clz complex conj convert_element_type cos cosh digamma div eq eq_to erf "
        "erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow "
        "is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi ne neg "
        "nextafter not one_minus_square or polygamma population_count pow real reduce_precision "
        "regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
        "shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta".split(),
        elementwise,
    ),
    **dict.fromkeys(
        "all_to_all cumlogsumexp cummax cummin cumprod cumsum dynamic_slice pad "
        "pbroadcast ppermute pvary rev slice".split(),
        first,
    ),
    **dict.fromkeys("all_gather all_gather_invariant".split(), _all_gather),
    **dict.fromkeys("pmax pmin psum psum_invariant".split(), _collective),
    **dict.fromkeys(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
        "reduce_xor".split(),
        _reduction,
    ),
    **dict.fromkeys(
        "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub".split(), _scatter
    ),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "reshape": _reshape,
    "sort": _all_alike,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "top_k": lambda x, **params: [x.names, x.names],
    "transpose": _transpose,
    "unstack": _unstack,
}
