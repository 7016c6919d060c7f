"""Random bits and keys by JAX's generator threefry2x32.

See John Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). The bits of an entry
depend only on the key and on the position of the entry, so each loop computes them where they are
read.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import random_gamma_p

from ..codegen.arrays import ArrayExpr, Index, flatten_index
from ..codegen.builder import Builder, broadcast_read
from ..codegen.loop_nest import LoopNest
from ..codegen.registry import Unsupported, evaluate_jaxpr, funcify, fused, perform
from ..maths.instructions import scalar

#: About the number of instructions of an entry.
_COST = 100
_WORD = np.uint64(0xFFFFFFFF)


@scalar
def threefry_round(x, y, by):
    """Return the words `x` and `y` after one round of threefry, which rotates by `by` bits."""
    x = np.uint32(x + y)
    rotated = np.uint32(y << np.uint32(by)) | np.uint32(y >> np.uint32(32 - by))
    return x, np.uint32(x ^ rotated)


@scalar
def four_rounds(x, y, a, b, c, d):
    """Return the words `x` and `y` after four rounds of threefry.

    The rounds rotate by `a`, `b`, `c` and `d` bits.
    """
    x, y = threefry_round(x, y, a)
    x, y = threefry_round(x, y, b)
    x, y = threefry_round(x, y, c)
    return threefry_round(x, y, d)


@scalar
def threefry_words(a, b, x, y):
    """Return two random words for the counter `x`, `y` and the key `a`, `b`.

    They are the result of 20 rounds of threefry.
    """
    m = np.uint32(np.uint32(a ^ b) ^ np.uint32(0x1BD11BDA))
    x, y = four_rounds(np.uint32(x + a), np.uint32(y + b), 13, 15, 26, 6)
    x, y = four_rounds(np.uint32(x + b), np.uint32(np.uint32(y + m) + np.uint32(1)), 17, 29, 16, 24)
    x, y = four_rounds(np.uint32(x + m), np.uint32(np.uint32(y + a) + np.uint32(2)), 13, 15, 26, 6)
    x, y = four_rounds(np.uint32(x + a), np.uint32(np.uint32(y + b) + np.uint32(3)), 17, 29, 16, 24)
    x, y = four_rounds(np.uint32(x + b), np.uint32(np.uint32(y + m) + np.uint32(4)), 13, 15, 26, 6)
    return np.uint32(x + m), np.uint32(np.uint32(y + a) + np.uint32(5))


@scalar
def threefry(key, position):
    """Return 64 random bits for a key and a position, with the first word in the high bits."""
    x, y = threefry_words(
        np.uint32(key >> np.uint64(32)),
        np.uint32(key & np.uint64(0xFFFFFFFF)),
        np.uint32(position >> np.uint64(32)),
        np.uint32(position & np.uint64(0xFFFFFFFF)),
    )
    return np.uint64(np.uint64(x) << np.uint64(32)) | np.uint64(y)


@scalar
def threefry_word(key, position):
    """Return 32 random bits for a key and a position: the exclusive or of the two random words."""
    words = threefry(key, position)
    return np.uint32(np.uint32(words >> np.uint64(32)) ^ np.uint32(words & np.uint64(0xFFFFFFFF)))


def _check_layout() -> None:
    if not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        raise Unsupported("jax_threefry_partitionable", "False is not supported.")


# Keys are uint64 numbers here: see `codegen.graph`.


@fused("random_wrap")
def _(b: Builder, x: ArrayExpr, *, impl: Any) -> ArrayExpr:
    x = b.force_costly(x)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        first, last = (k.read(x, (*index, Index((), n))) for n in (0, 1))
        return k.let(f"np.uint64(np.uint64({first}) << np.uint64(32)) | np.uint64({last})")

    return b.lazy(entry, x, cost=1)


@fused("random_unwrap")
def _(b: Builder, keys: ArrayExpr) -> ArrayExpr:
    keys = b.force_costly(keys)

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
        text = k.read(seeds, index)
        if seeds.dtype.itemsize < 8:  # the high bits are 0
            text = f"np.uint32({text})"
        return k.let(f"np.uint64({text})")

    return b.lazy(entry, seeds, cost=1)


@fused("random_split")
def _(b: Builder, keys: ArrayExpr, *, shape: Any) -> ArrayExpr:
    _check_layout()
    return _draw_by_position(b, b.force_costly(keys), shape, "np.uint64", threefry)


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
    return _draw_by_position(b, b.force_costly(keys), shape, f"np.uint{bit_width}", function)


def _draw_by_position(
    b: Builder, keys: ArrayExpr, shape: Any, name: str, function: Callable[..., Any]
) -> ArrayExpr:
    """Return a lazy array of `function(key, position)`, for each key and each position.

    `shape` is the shape of the array to draw for each key, and a position counts its entries.
    `name` is the type of the entries in generated code.
    """

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        key = k.read(keys, index[: keys.ndim])
        position = f"np.uint64({flatten_index(index[keys.ndim :], shape)})"
        return k.let(f"{name}({k.call(function, key, position)})")

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


def _gamma_jaxpr(keys: Any, a: Any, log_space: bool) -> Any:
    """Return the jaxpr of the function by which JAX draws from gamma distributions."""
    avals = [jax.ShapeDtypeStruct(keys.shape, jax.random.key(0, impl="threefry2x32").dtype)]
    avals.append(jax.ShapeDtypeStruct(a.shape, a.dtype))
    draw = functools.partial(random_gamma_p.impl, log_space=log_space)
    return jax.make_jaxpr(draw)(*avals)


@funcify.register("random_gamma")
def _(b: Builder, keys: ArrayExpr, a: ArrayExpr, *, log_space: bool) -> list[ArrayExpr]:
    return b.inline(_gamma_jaxpr(keys, a, log_space), b.force(keys), b.force(a))


# NumPy references.


@perform.register("random_gamma")
def _(keys: Any, a: Any, *, log_space: bool) -> Any:
    return evaluate_jaxpr(_gamma_jaxpr(keys, a, log_space), keys, a)


def _threefry_rounds(a: Any, b: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Return both random words of arrays of keys `a`, `b` and counters `x`, `y`."""
    keys = [a, b, a ^ b ^ np.uint32(0x1BD11BDA)]
    x, y = x + a, y + b
    for n in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[n % 2]:
            x = x + y
            y = x ^ (y << np.uint32(by) | y >> np.uint32(32 - by))
        x, y = x + keys[(n + 1) % 3], y + keys[(n + 2) % 3] + np.uint32(n + 1)
    return x, y


def _split_words(x: Any) -> tuple[Any, Any]:
    x = np.asarray(x, np.uint64)
    return (x >> np.uint64(32)).astype(np.uint32), (x & _WORD).astype(np.uint32)


def _join_words(x: Any, y: Any) -> Any:
    return np.asarray(x, np.uint64) << np.uint64(32) | np.asarray(y, np.uint64)


def _words_by_position(keys: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    positions = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    expanded = np.reshape(keys, np.shape(keys) + (1,) * len(shape))
    return _threefry_rounds(*_split_words(expanded), *_split_words(positions))


perform.register("random_wrap")(lambda x, *, impl: _join_words(x[..., 0], x[..., 1]))


perform.register("random_unwrap")(lambda keys: np.stack(_split_words(keys), -1))


perform.register("random_clone")(lambda keys: keys)


@perform.register("random_seed")
def _(seeds: Any, *, impl: Any) -> Any:
    wide = np.asarray(seeds).dtype.itemsize == 8
    return np.asarray(seeds).astype(np.uint64 if wide else np.uint32).astype(np.uint64)


@perform.register("random_split")
def _(keys: Any, *, shape: Any) -> Any:
    return _join_words(*_words_by_position(keys, shape))


@perform.register("random_fold_in")
def _(keys: Any, data: Any) -> Any:
    return _join_words(
        *_threefry_rounds(*_split_words(keys), *_split_words(np.asarray(data, np.uint32)))
    )


@perform.register("random_bits")
def _(keys: Any, *, bit_width: int, shape: Any) -> Any:
    x, y = _words_by_position(keys, shape)
    return _join_words(x, y) if bit_width == 64 else (x ^ y).astype(f"u{bit_width // 8}")


perform.register("threefry2x32")(lambda *operands: [*_threefry_rounds(*operands)])
