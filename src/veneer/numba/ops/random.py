"""Random bits, as JAX's threefry2x32 has them.

John Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). The bits of an entry are
those of its place: a loop computes each where it is read.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import random_gamma_p

from ..codegen.arrays import ArrayExpr
from ..codegen.builder import Builder, broadcast_read
from ..codegen.index import Index, flat
from ..codegen.loop_nest import LoopNest
from ..maths.scalar import scalar
from ..reference import evaluate_jaxpr
from ..registry import Unsupported, funcify, fused, perform

#: About how many instructions an entry takes.
_COST = 100
_WORD = np.uint64(0xFFFFFFFF)


@scalar
def threefry_round(x, y, by):
    """A round: two words become others."""
    x = np.uint32(x + y)
    turned = np.uint32(y << np.uint32(by)) | np.uint32(y >> np.uint32(32 - by))
    return x, np.uint32(x ^ turned)


@scalar
def four_rounds(x, y, a, b, c, d):
    """Four of them, by whose numbers of bits words are turned."""
    x, y = threefry_round(x, y, a)
    x, y = threefry_round(x, y, b)
    x, y = threefry_round(x, y, c)
    return threefry_round(x, y, d)


@scalar
def threefry_words(a, b, x, y):
    """The words `x` and `y` under the key of `a` and `b`, after 20 rounds."""
    m = np.uint32(np.uint32(a ^ b) ^ np.uint32(0x1BD11BDA))
    x, y = four_rounds(np.uint32(x + a), np.uint32(y + b), 13, 15, 26, 6)
    x, y = four_rounds(np.uint32(x + b), np.uint32(np.uint32(y + m) + np.uint32(1)), 17, 29, 16, 24)
    x, y = four_rounds(np.uint32(x + m), np.uint32(np.uint32(y + a) + np.uint32(2)), 13, 15, 26, 6)
    x, y = four_rounds(np.uint32(x + a), np.uint32(np.uint32(y + b) + np.uint32(3)), 17, 29, 16, 24)
    x, y = four_rounds(np.uint32(x + b), np.uint32(np.uint32(y + m) + np.uint32(4)), 13, 15, 26, 6)
    return np.uint32(x + m), np.uint32(np.uint32(y + a) + np.uint32(5))


@scalar
def threefry(key, place):
    """Both words, of 64 bits, under a key, the first one high."""
    x, y = threefry_words(
        np.uint32(key >> np.uint64(32)),
        np.uint32(key & np.uint64(0xFFFFFFFF)),
        np.uint32(place >> np.uint64(32)),
        np.uint32(place & np.uint64(0xFFFFFFFF)),
    )
    return np.uint64(np.uint64(x) << np.uint64(32)) | np.uint64(y)


@scalar
def threefry_word(key, place):
    """Both words taken together as one."""
    words = threefry(key, place)
    return np.uint32(np.uint32(words >> np.uint64(32)) ^ np.uint32(words & np.uint64(0xFFFFFFFF)))


def _check_layout() -> None:
    if not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        raise Unsupported("jax_threefry_partitionable", "False is not supported.")


# Keys, and what they are made of.


@fused("random_wrap")
def _(b: Builder, x: ArrayExpr, *, impl: Any) -> ArrayExpr:
    x = b.cheap(x)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        first, last = (k.read(x, (*index, Index((), n))) for n in (0, 1))
        return k.let(f"np.uint64(np.uint64({first}) << np.uint64(32)) | np.uint64({last})")

    return b.lazy(entry, x, cost=1)


@fused("random_unwrap")
def _(b: Builder, keys: ArrayExpr) -> ArrayExpr:
    keys = b.cheap(keys)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        moved = f"np.uint64({k.read(keys, index[:-1])}) >> np.uint64({(1 - index[-1]) * 32})"
        return k.let(f"np.uint32(({moved}) & np.uint64(0xFFFFFFFF))")

    return b.lazy(entry, keys, cost=1)


@fused("random_clone")
def _(b: Builder, keys: ArrayExpr) -> ArrayExpr:
    return keys


@fused("random_seed")
def _(b: Builder, seeds: ArrayExpr, *, impl: Any) -> ArrayExpr:

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        return k.let(f"np.uint64({_unsigned(k.read(seeds, index), seeds.dtype)})")

    return b.lazy(entry, seeds, cost=1)


def _unsigned(text: str, dtype: np.dtype) -> str:
    """Of integers of 32 bits or fewer, the high bits are 0."""
    return text if dtype.itemsize == 8 else f"np.uint32({text})"


@fused("random_split")
def _(b: Builder, keys: ArrayExpr, *, shape: Any) -> ArrayExpr:
    _check_layout()
    return _of_places(b, b.cheap(keys), shape, "np.uint64", threefry)


@fused("random_fold_in")
def _(b: Builder, keys: ArrayExpr, data: ArrayExpr) -> ArrayExpr:
    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        texts = [broadcast_read(k, x, index) for x in (keys, data)]
        return k.let(k.call(threefry, texts[0], k.let(f"np.uint64(np.uint32({texts[1]}))")))

    return b.lazy(entry, keys, data, cost=_COST)


@fused("random_bits")
def _(b: Builder, keys: ArrayExpr, *, bit_width: int, shape: Any) -> ArrayExpr:
    _check_layout()
    function = threefry if bit_width == 64 else threefry_word
    return _of_places(b, b.cheap(keys), shape, f"np.uint{bit_width}", function)


def _of_places(
    b: Builder, keys: ArrayExpr, shape: Any, name: str, function: Callable[..., Any]
) -> ArrayExpr:
    """A function of a key and of the place of each entry in an array of a shape."""

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        key = k.read(keys, index[: keys.ndim])
        place = f"np.uint64({flat(index[keys.ndim :], shape)})"
        return k.let(f"{name}({k.call(function, key, place)})")

    return b.lazy(entry, keys, cost=_COST)


@fused("threefry2x32")
def _(b: Builder, *operands: ArrayExpr) -> list[ArrayExpr]:
    def words(k: LoopNest, index: tuple[Index, ...]) -> str:
        key_a, key_b, x, y = (f"np.uint64({broadcast_read(k, v, index)})" for v in operands)
        high = [f"np.uint64({text} << np.uint64(32))" for text in (key_a, x)]
        pairs = [k.let(f"{h} | {low}") for h, low in zip(high, (key_b, y), strict=True)]
        return k.let(k.call(threefry, *pairs))

    def first(k: LoopNest, index: tuple[Index, ...]) -> str:
        return k.let(f"np.uint32({words(k, index)} >> np.uint64(32))")

    def second(k: LoopNest, index: tuple[Index, ...]) -> str:
        return k.let(f"np.uint32({words(k, index)} & np.uint64(0xFFFFFFFF))")

    return [b.lazy(entry, *operands, cost=_COST) for entry in (first, second)]


def _gamma(keys: Any, a: Any, log_space: bool) -> Any:
    """How JAX draws from gamma distributions, as a jaxpr."""
    avals = [jax.ShapeDtypeStruct(keys.shape, jax.random.key(0, impl="threefry2x32").dtype)]
    avals.append(jax.ShapeDtypeStruct(a.shape, a.dtype))
    draw = functools.partial(random_gamma_p.impl, log_space=log_space)
    return jax.make_jaxpr(draw)(*avals)


@funcify.register("random_gamma")
def _(b: Builder, keys: ArrayExpr, a: ArrayExpr, *, log_space: bool) -> list[ArrayExpr]:
    return b.inline(_gamma(keys, a, log_space), b.force(keys), b.force(a))


# What they are in NumPy.


@perform.register("random_gamma")
def _(keys: Any, a: Any, *, log_space: bool) -> Any:
    return evaluate_jaxpr(_gamma(keys, a, log_space), keys, a)


def _rounds(a: Any, b: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Both words of arrays of uint32."""
    keys = [a, b, a ^ b ^ np.uint32(0x1BD11BDA)]
    x, y = x + a, y + b
    for n in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[n % 2]:
            x = x + y
            y = x ^ (y << np.uint32(by) | y >> np.uint32(32 - by))
        x, y = x + keys[(n + 1) % 3], y + keys[(n + 2) % 3] + np.uint32(n + 1)
    return x, y


def _halves(x: Any) -> tuple[Any, Any]:
    x = np.asarray(x, np.uint64)
    return (x >> np.uint64(32)).astype(np.uint32), (x & _WORD).astype(np.uint32)


def _joined(x: Any, y: Any) -> Any:
    return np.asarray(x, np.uint64) << np.uint64(32) | np.asarray(y, np.uint64)


def _at_places(keys: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    places = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    expanded = np.reshape(keys, np.shape(keys) + (1,) * len(shape))
    return _rounds(*_halves(expanded), *_halves(places))


@perform.register("random_wrap")
def _(x: Any, *, impl: Any) -> Any:
    return _joined(x[..., 0], x[..., 1])


@perform.register("random_unwrap")
def _(keys: Any) -> Any:
    return np.stack(_halves(keys), -1)


@perform.register("random_clone")
def _(keys: Any) -> Any:
    return keys


@perform.register("random_seed")
def _(seeds: Any, *, impl: Any) -> Any:
    wide = np.asarray(seeds).dtype.itemsize == 8
    return np.asarray(seeds).astype(np.uint64 if wide else np.uint32).astype(np.uint64)


@perform.register("random_split")
def _(keys: Any, *, shape: Any) -> Any:
    return _joined(*_at_places(keys, shape))


@perform.register("random_fold_in")
def _(keys: Any, data: Any) -> Any:
    return _joined(*_rounds(*_halves(keys), *_halves(np.asarray(data, np.uint32))))


@perform.register("random_bits")
def _(keys: Any, *, bit_width: int, shape: Any) -> Any:
    x, y = _at_places(keys, shape)
    return _joined(x, y) if bit_width == 64 else (x ^ y).astype(f"u{bit_width // 8}")


@perform.register("threefry2x32")
def _(*operands: Any) -> list[Any]:
    return [*_rounds(*operands)]
