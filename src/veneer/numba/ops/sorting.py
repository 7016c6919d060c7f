"""Sorting: by numbers without a sign whose order is that of the entries.

Where those and the places of entries fit into one word, words are sorted; which is stable, as no
two are equal. Wider keys, and several, are sorted with places beside them, from the last key on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Buffer
from ..codegen.builder import Builder
from ..codegen.index import Index
from ..codegen.loop_nest import LoopNest
from ..maths.instructions import reinterpreted, select
from ..maths.precision import ByPrecision, by_precision, floats
from ..maths.scalar import scalar
from ..registry import Unsupported, funcify, fused, perform
from .elementwise import entrywise

# Keys.


_UNSIGNED: Any = ByPrecision(np.uint32, np.uint64)
_SIGN_SHIFT: Any = ByPrecision(np.uint32(31), np.uint64(63))
_MOST: Any = ByPrecision(np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFFFFFFFFFFFF))
_ZERO = floats(0, 0)


@by_precision
def total_order(x):
    """By all bits: -0.0 before 0.0, and NaN first or last, by its sign."""
    whole = reinterpreted(x, _UNSIGNED(0))
    sign = _UNSIGNED(whole >> _SIGN_SHIFT)
    ones = _UNSIGNED(_UNSIGNED(0) - sign)
    return np.uint64(_UNSIGNED(whole ^ _UNSIGNED(ones | _UNSIGNED(_UNSIGNED(1) << _SIGN_SHIFT))))


@by_precision
def value_order(x):
    """All NaN are equal and last, both zeros are equal."""
    return select(x != x, _MOST, total_order(select(x == _ZERO, _ZERO, x)))


def _keys(k: LoopNest, text: str, dtype: np.dtype, of_floats: ByPrecision) -> list[str]:
    """What an entry is ordered by, the first first."""
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return [key for of in ("real", "imag") for key in _keys(k, f"{text}.{of}", part, of_floats)]
    computed = storage.computed_dtype(dtype)
    if computed.kind == "f":
        return [k.let(k.call(of_floats.of(computed), text))]
    if computed.kind == "i":
        least = 1 << (8 * computed.itemsize - 1)
        return [k.let(f"np.uint64(np.uint64(np.int64({text})) + np.uint64({least}))")]
    return [k.let(f"np.uint64({text})")]


@dataclass(frozen=True)
class _Key:
    """An operand that others are sorted by."""

    value: ArrayExpr
    descending: bool = False
    of_floats: ByPrecision = value_order

    @property
    def is_narrow(self) -> bool:
        """Whether it is ordered by one number of at most 32 bits."""
        dtype = self.value.dtype
        return dtype.kind != "c" and storage.computed_dtype(dtype).itemsize <= 4

    @property
    def n_parts(self) -> int:
        """By how many numbers it is ordered."""
        return 2 if self.value.dtype.kind == "c" else 1

    def read(self, k: LoopNest, index: Sequence[Index]) -> list[str]:
        """Those numbers of an entry, as uint64."""
        keys = _keys(k, k.read(self.value, index), self.value.dtype, self.of_floats)
        most = 0xFFFFFFFF if self.is_narrow else 0xFFFFFFFFFFFFFFFF
        return (
            [f"np.uint64(np.uint64({most}) - {key})" for key in keys] if self.descending else keys
        )


_Place = Callable[[Index], tuple[Index, ...]]


# Order.


@scalar
def sort_words(words, other, n):
    """Sorts `words[:n]`, by merging runs; `other` is as much memory to do it in."""
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
    """Sorts `keys[:n]`, and with them `places`; of equal keys the order stays."""
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


def _order(b: Builder, keys: Sequence[_Key], axis: int, count: int) -> Buffer:
    """Where along an axis the first `count` entries of it sorted are."""
    shape = keys[0].value.shape
    order = b.buffer((*shape[:axis], count, *shape[axis + 1 :]), np.int32)
    sort = _sort_words if len(keys) == 1 and keys[0].is_narrow else _sort_pairs
    with b.kernel() as k, k.loops([n for d, n in enumerate(shape) if d != axis]) as others:
        place = lambda i: (*others[:axis], i, *others[axis:])
        words = sort(b, k, keys, place, shape[axis])
        with k.loops([count]) as (i,):
            word = k.load(words, (i,))
            k.store(order, place(i), f"np.int32({word} & np.uint64(0xFFFFFFFF))")
    return order


def _sort_words(b: Builder, k: LoopNest, keys: Sequence[_Key], place: _Place, n: int) -> Buffer:
    words, other = (b.buffer((n,), np.uint64) for _ in range(2))
    with k.loops([n]) as (i,):
        (key,) = keys[0].read(k, place(i))
        k.store(words, (i,), f"np.uint64({key} << np.uint64(32)) | np.uint64({i})")
    k.line(k.call(sort_words, k.pointer(words), k.pointer(other), str(n)))
    return words


def _sort_pairs(b: Builder, k: LoopNest, keys: Sequence[_Key], place: _Place, n: int) -> Buffer:
    words, places, *others = (b.buffer((n,), np.uint64) for _ in range(4))
    with k.loops([n]) as (i,):
        k.store(places, (i,), f"np.uint64({i})")
    for key in reversed(keys):
        for part in reversed(range(key.n_parts)):
            with k.loops([n]) as (i,):
                at = k.variable(f"np.int64({k.load(places, (i,))})", n)
                k.store(words, (i,), key.read(k, place(at))[part])
            pointers = [k.pointer(x) for x in (words, places, *others)]
            k.line(k.call(sort_pairs, *pointers, str(n)))
    return places


def _as_stored(b: Builder, x: ArrayExpr) -> ArrayExpr:
    """The value as it is sorted: half precision rounded, after which some entries are equal."""
    return b.force(x) if x.dtype.kind in "fV" and x.dtype.itemsize == 2 else b.cheap(x)


def _taken(b: Builder, x: ArrayExpr, order: ArrayExpr, axis: int) -> ArrayExpr:
    """The entries at places along an axis."""
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
    values = [_as_stored(b, x) for x in operands]
    keys = [_Key(x) for x in values[:num_keys]]
    order = _order(b, keys, dimension, values[0].shape[dimension])
    return [b.force(_taken(b, x, order, dimension)) for x in values]


@funcify.register("top_k")
def _(b: Builder, x: ArrayExpr, *, k: int, axis: int = -1, **_: Any) -> list[ArrayExpr]:
    axis %= x.ndim
    if 0 in b.out.shape:
        return [b.buffer(aval.shape, aval.dtype) for aval in b.outs]
    x = _as_stored(b, x)
    order = _order(b, [_Key(x, True, total_order)], axis, k)
    return [b.force(_taken(b, x, order, axis)), b.converted(order, b.outs[1].dtype)]


@funcify.register("approx_top_k")
def _(
    b: Builder, x: ArrayExpr, *, k: int, reduction_dimension: int, is_max_k: bool,
    aggregate_to_topk: bool, **_: Any,
) -> list[ArrayExpr]:  # fmt: skip
    if not aggregate_to_topk:
        raise Unsupported("aggregate_to_topk", "False is not supported.")
    axis, x = reduction_dimension % x.ndim, _as_stored(b, x)
    order = _order(b, [_Key(x, is_max_k)], axis, k)
    return [b.force(_taken(b, x, order, axis)), b.converted(order, b.outs[1].dtype)]


def _register_comparison(name: str, symbol: str, ufunc: Any) -> None:
    @fused(name)
    def _(b: Builder, x: ArrayExpr, y: ArrayExpr) -> ArrayExpr:
        if x.dtype.kind == "c":
            raise Unsupported("dtype", f"{x.dtype} is not supported.")

        def entry(k: LoopNest, x: str, y: str) -> str:
            (left,), (right,) = (_keys(k, text, dtype, total_order) for text in (x, y))
            return f"{left} {symbol} {right}"

        dtype = x.dtype
        return entrywise(b, entry, x, y, cost=8)

    @perform.register(name)
    def _(x: Any, y: Any) -> Any:
        return ufunc(_by_bits(np.asarray(x)), _by_bits(np.asarray(y)))


_register_comparison("lt_to", "<", np.less)
_register_comparison("le_to", "<=", np.less_equal)
_register_comparison("eq_to", "==", np.equal)


# What they are in NumPy.


def _ordered(x: Any) -> Any:
    """Entries that NumPy sorts as they are to be."""
    x = np.asarray(x)
    if x.dtype.kind not in "fV":
        return x
    wide = x.astype(np.float64) + 0.0
    return np.where(np.isnan(wide), np.nan, wide)


def _lexical(keys: Sequence[Any], axis: int) -> Any:
    parts = []
    for key in keys:
        key = np.asarray(key)
        parts += [key.real, key.imag] if key.dtype.kind == "c" else [key]
    ordered = [np.moveaxis(_ordered(part), axis, -1) for part in parts]
    order = np.argsort(ordered[-1], axis=-1, kind="stable")
    for part in ordered[-2::-1]:
        again = np.argsort(np.take_along_axis(part, order, -1), axis=-1, kind="stable")
        order = np.take_along_axis(order, again, -1)
    return np.moveaxis(order, -1, axis)


@perform.register("sort")
def _(*operands: Any, dimension: int, num_keys: int, is_stable: bool) -> list[Any]:
    order = _lexical(operands[:num_keys], dimension)
    return [np.take_along_axis(np.asarray(x), order, dimension) for x in operands]


def _best(x: Any, k: int, axis: int, most: bool, keys: Any) -> list[Any]:
    if most:  # of equal ones the first is still to be the first
        order = np.flip(_lexical([np.flip(keys, axis)], axis), axis)
        order = x.shape[axis] - 1 - order
    else:
        order = _lexical([keys], axis)
    order = np.take(order, range(k), axis)
    return [np.take_along_axis(x, order, axis), order.astype(np.int32)]


def _by_bits(x: Any) -> Any:
    """Integers in the order of all bits of floats."""
    if x.dtype.kind not in "fV":
        return x
    whole = x.view(f"i{x.dtype.itemsize}")
    return np.where(whole < 0, whole ^ np.iinfo(whole.dtype).max, whole)


@perform.register("top_k")
def _(x: Any, *, k: int, axis: int = -1, **_: Any) -> list[Any]:
    return _best(x, k, axis % x.ndim, True, _by_bits(x))


@perform.register("approx_top_k")
def _(x: Any, *, k: int, reduction_dimension: int, is_max_k: bool, **_: Any) -> list[Any]:
    return _best(x, k, reduction_dimension % x.ndim, is_max_k, x)
