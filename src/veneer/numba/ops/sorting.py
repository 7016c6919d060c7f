"""Sorting, top_k, and comparisons in the total order of floats.

Entries are converted to unsigned integers of the same order. If a key has at most 32 bits, the key
and the index of the entry form one 64-bit word, and words are sorted. Since no two words are equal,
the order is stable. Wider keys, and several keys, are sorted together with indices, from the last
key to the first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Buffer, Index
from ..codegen.builder import Builder
from ..codegen.loop_nest import LoopNest
from ..codegen.registry import Unsupported, funcify, fused, perform
from ..maths.instructions import ByPrecision, by_precision, floats, reinterpreted, scalar, select
from .elementwise import entrywise

# Keys.


_UNSIGNED: Any = ByPrecision(np.uint32, np.uint64)
_SIGN_SHIFT: Any = ByPrecision(np.uint32(31), np.uint64(63))
_MAXIMUM: Any = ByPrecision(np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFFFFFFFFFFFF))
_ZERO = floats(0, 0)


@by_precision
def total_order(x):
    """Return an unsigned integer for a float, which sorts as the float in IEEE's total order.

    In this order, -0.0 is before 0.0.
    """
    bits = reinterpreted(x, _UNSIGNED(0))
    sign = _UNSIGNED(bits >> _SIGN_SHIFT)
    ones = _UNSIGNED(_UNSIGNED(0) - sign)
    return np.uint64(_UNSIGNED(bits ^ _UNSIGNED(ones | _UNSIGNED(_UNSIGNED(1) << _SIGN_SHIFT))))


@by_precision
def value_order(x):
    """Return an unsigned integer for a float, which sorts as its value.

    Both zeros are equal, and all NaN are equal and last.
    """
    return select(x != x, _MAXIMUM, total_order(select(x == _ZERO, _ZERO, x)))


def _order_keys(k: LoopNest, text: str, dtype: np.dtype, float_order: ByPrecision) -> list[str]:
    """Return expressions for unsigned integers that sort as the entry `text` of a dtype.

    The most significant integer is first. There are two for a complex number. `float_order`
    converts a float to an integer.
    """
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        parts = (f"{text}.real", f"{text}.imag")
        return [key for x in parts for key in _order_keys(k, x, part, float_order)]
    computed = storage.computed_dtype(dtype)
    if computed.kind == "f":
        return [k.let(k.call(float_order.for_dtype(computed), text))]
    if computed.kind == "i":
        least = 1 << (8 * computed.itemsize - 1)
        return [k.let(f"np.uint64(np.uint64(np.int64({text})) + np.uint64({least}))")]
    return [k.let(f"np.uint64({text})")]


@dataclass(frozen=True)
class _Key:
    """A sort key: an operand, its direction, and the function that converts floats to integers.

    Entries are compared by these integers. An entry has two integers if it is complex.
    """

    value: ArrayExpr
    descending: bool = False
    float_order: ByPrecision = value_order

    @property
    def is_narrow(self) -> bool:
        """True if an entry is ordered by one integer of at most 32 bits."""
        dtype = self.value.dtype
        return dtype.kind != "c" and storage.computed_dtype(dtype).itemsize <= 4

    @property
    def n_parts(self) -> int:
        """The number of integers by which an entry is ordered."""
        return 2 if self.value.dtype.kind == "c" else 1

    def read(self, k: LoopNest, index: Sequence[Index]) -> list[str]:
        """Return expressions for the integers of the entry at `index`, as uint64."""
        keys = _order_keys(k, k.read(self.value, index), self.value.dtype, self.float_order)
        most = 0xFFFFFFFF if self.is_narrow else 0xFFFFFFFFFFFFFFFF
        return (
            [f"np.uint64(np.uint64({most}) - {key})" for key in keys] if self.descending else keys
        )


#: Returns the index of an entry from its index along the sorted axis.
_IndexAt = Callable[[Index], tuple[Index, ...]]


# Order.


@scalar
def sort_words(words, other, n):
    """Sort `words[:n]` by merge sort. `other` is scratch memory of the same size."""
    for start in range(0, n, 8):
        for i in range(start + 1, min(start + 8, n)):
            word, j = words[i], i
            while j > start and words[j - 1] > word:
                words[j] = words[j - 1]
                j -= 1
            words[j] = word
    width = 8
    while width < n:
        for start in range(0, n, 2 * width):
            middle, end = min(start + width, n), min(start + 2 * width, n)
            i, j = start, middle
            for to in range(start, end):
                if j >= end or (i < middle and words[i] <= words[j]):
                    other[to] = words[i]
                    i += 1
                else:
                    other[to] = words[j]
                    j += 1
        for i in range(n):
            words[i] = other[i]
        width *= 2


@scalar
def sort_pairs(keys, places, other_keys, other_places, n):
    """Sort `keys[:n]` by a stable merge sort, and move `places[:n]` along.

    `other_keys` and `other_places` are scratch memory of the same sizes.
    """
    for start in range(0, n, 8):
        for i in range(start + 1, min(start + 8, n)):
            key, place, j = keys[i], places[i], i
            while j > start and keys[j - 1] > key:
                keys[j] = keys[j - 1]
                places[j] = places[j - 1]
                j -= 1
            keys[j] = key
            places[j] = place
    width = 8
    while width < n:
        for start in range(0, n, 2 * width):
            middle, end = min(start + width, n), min(start + 2 * width, n)
            i, j = start, middle
            for to in range(start, end):
                if j >= end or (i < middle and keys[i] <= keys[j]):
                    other_keys[to] = keys[i]
                    other_places[to] = places[i]
                    i += 1
                else:
                    other_keys[to] = keys[j]
                    other_places[to] = places[j]
                    j += 1
        for i in range(n):
            keys[i] = other_keys[i]
            places[i] = other_places[i]
        width *= 2


def _argsort(b: Builder, keys: Sequence[_Key], axis: int, count: int) -> Buffer:
    """Return the indices along `axis` that sort arrays by `keys`: the first `count` of them."""
    shape = keys[0].value.shape
    order = b.buffer((*shape[:axis], count, *shape[axis + 1 :]), np.int32)
    sort = _sort_words if len(keys) == 1 and keys[0].is_narrow else _sort_pairs
    with b.kernel() as k, k.loops([n for d, n in enumerate(shape) if d != axis]) as others:
        index_at = lambda i: (*others[:axis], i, *others[axis:])
        words = sort(b, k, keys, index_at, shape[axis])
        with k.loops([count]) as (i,):
            word = k.load(words, (i,))
            k.store(order, index_at(i), f"np.int32({word} & np.uint64(0xFFFFFFFF))")
    return order


def _sort_words(
    b: Builder, k: LoopNest, keys: Sequence[_Key], index_at: _IndexAt, n: int
) -> Buffer:
    words, other = (b.buffer((n,), np.uint64) for _ in range(2))
    with k.loops([n]) as (i,):
        (key,) = keys[0].read(k, index_at(i))
        k.store(words, (i,), f"np.uint64({key} << np.uint64(32)) | np.uint64({i})")
    k.line(k.call(sort_words, k.pointer(words), k.pointer(other), str(n)))
    return words


def _sort_pairs(
    b: Builder, k: LoopNest, keys: Sequence[_Key], index_at: _IndexAt, n: int
) -> Buffer:
    words, places, *others = (b.buffer((n,), np.uint64) for _ in range(4))
    with k.loops([n]) as (i,):
        k.store(places, (i,), f"np.uint64({i})")
    for key in reversed(keys):
        for part in reversed(range(key.n_parts)):
            with k.loops([n]) as (i,):
                at = k.variable(f"np.int64({k.load(places, (i,))})", n)
                k.store(words, (i,), key.read(k, index_at(at))[part])
            pointers = [k.pointer(x) for x in (words, places, *others)]
            k.line(k.call(sort_pairs, *pointers, str(n)))
    return places


def _round_operand(b: Builder, x: ArrayExpr) -> ArrayExpr:
    """Return an operand of a sort, with entries rounded to its dtype.

    Entries of half precision are computed in float32. Rounding may make them equal.
    """
    return b.force(x) if x.dtype.kind in "fV" and x.dtype.itemsize == 2 else b.force_costly(x)


def _take_along(b: Builder, x: ArrayExpr, order: ArrayExpr, axis: int) -> ArrayExpr:
    """Return the entries of `x` at the indices `order` along an axis, as `take_along_axis`."""
    n = x.shape[axis]

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        at = k.variable(k.read(order, index), n)
        return k.read(x, (*index[:axis], at, *index[axis + 1 :]))

    return b.lazy(entry, x, order, shape=order.shape, dtype=x.dtype, cost=1)


@funcify.register("sort")
def _(
    b: Builder, *operands: ArrayExpr, dimension: int, num_keys: int, is_stable: bool
) -> list[ArrayExpr]:
    if operands[0].size == 0:
        return [*operands]
    values = [_round_operand(b, x) for x in operands]
    keys = [_Key(x) for x in values[:num_keys]]
    order = _argsort(b, keys, dimension, values[0].shape[dimension])
    return [b.force(_take_along(b, x, order, dimension)) for x in values]


@funcify.register("top_k")
def _(b: Builder, x: ArrayExpr, *, k: int, axis: int = -1, **_: Any) -> list[ArrayExpr]:
    axis %= x.ndim
    if 0 in b.out.shape:
        return [b.buffer(aval.shape, aval.dtype) for aval in b.outs]
    x = _round_operand(b, x)
    order = _argsort(b, [_Key(x, True, total_order)], axis, k)
    return [b.force(_take_along(b, x, order, axis)), b.convert(order, b.outs[1].dtype)]


@funcify.register("approx_top_k")
def _(
    b: Builder, x: ArrayExpr, *, k: int, reduction_dimension: int, is_max_k: bool,
    aggregate_to_topk: bool, **_: Any,
) -> list[ArrayExpr]:  # fmt: skip
    if not aggregate_to_topk:
        raise Unsupported("aggregate_to_topk", "False is not supported.")
    axis, x = reduction_dimension % x.ndim, _round_operand(b, x)
    order = _argsort(b, [_Key(x, is_max_k)], axis, k)
    return [b.force(_take_along(b, x, order, axis)), b.convert(order, b.outs[1].dtype)]


def _register_comparison(name: str, symbol: str, ufunc: Any) -> None:
    @fused(name)
    def _(b: Builder, x: ArrayExpr, y: ArrayExpr) -> ArrayExpr:
        if x.dtype.kind == "c":
            raise Unsupported("dtype", f"{x.dtype} is not supported.")

        def entry(k: LoopNest, x: str, y: str) -> str:
            (left,), (right,) = (_order_keys(k, text, dtype, total_order) for text in (x, y))
            return f"{left} {symbol} {right}"

        dtype = x.dtype
        return entrywise(b, entry, x, y, cost=8)

    @perform.register(name)
    def _(x: Any, y: Any) -> Any:
        return ufunc(_to_ordered_bits(np.asarray(x)), _to_ordered_bits(np.asarray(y)))


_register_comparison("lt_to", "<", np.less)
_register_comparison("le_to", "<=", np.less_equal)
_register_comparison("eq_to", "==", np.equal)


# NumPy references.


def _to_sortable(x: Any) -> Any:
    """Convert entries so that NumPy sorts them in the order of JAX, for zeros and NaN."""
    x = np.asarray(x)
    if x.dtype.kind not in "fV":
        return x
    wide = x.astype(np.float64) + 0.0
    return np.where(np.isnan(wide), np.nan, wide)


def _lexsort(keys: Sequence[Any], axis: int) -> Any:
    parts = []
    for key in keys:
        key = np.asarray(key)
        parts += [key.real, key.imag] if key.dtype.kind == "c" else [key]
    ordered = [np.moveaxis(_to_sortable(part), axis, -1) for part in parts]
    order = np.argsort(ordered[-1], axis=-1, kind="stable")
    for part in ordered[-2::-1]:
        again = np.argsort(np.take_along_axis(part, order, -1), axis=-1, kind="stable")
        order = np.take_along_axis(order, again, -1)
    return np.moveaxis(order, -1, axis)


@perform.register("sort")
def _(*operands: Any, dimension: int, num_keys: int, is_stable: bool) -> list[Any]:
    order = _lexsort(operands[:num_keys], dimension)
    return [np.take_along_axis(np.asarray(x), order, dimension) for x in operands]


def _top_k(x: Any, k: int, axis: int, largest: bool, keys: Any) -> list[Any]:
    if largest:  # keep the order of equal entries
        order = np.flip(_lexsort([np.flip(keys, axis)], axis), axis)
        order = x.shape[axis] - 1 - order
    else:
        order = _lexsort([keys], axis)
    order = np.take(order, range(k), axis)
    return [np.take_along_axis(x, order, axis), order.astype(np.int32)]


def _to_ordered_bits(x: Any) -> Any:
    """Return integers that sort as floats in IEEE's total order. Other dtypes are unchanged."""
    if x.dtype.kind not in "fV":
        return x
    bits = x.view(f"i{x.dtype.itemsize}")
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


@perform.register("top_k")
def _(x: Any, *, k: int, axis: int = -1, **_: Any) -> list[Any]:
    return _top_k(x, k, axis % x.ndim, True, _to_ordered_bits(x))


@perform.register("approx_top_k")
def _(x: Any, *, k: int, reduction_dimension: int, is_max_k: bool, **_: Any) -> list[Any]:
    return _top_k(x, k, reduction_dimension % x.ndim, is_max_k, x)
