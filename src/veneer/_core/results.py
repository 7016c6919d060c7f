"""Checks what a rule returns against what JAX says that its primitive gives."""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jax

from .rules import Target
from .value import Value, describe


def check_result(
    primitive: Target,
    values: Sequence[Any],
    params: dict[str, Any],
    out: Any,
    source: str,
) -> None:
    """Reject a result with other shapes or dtypes than the primitive gives, if these are known."""
    several = primitive.multiple_results
    results = out if several else [out]
    found = None
    if isinstance(results, list | tuple):  # to iterate over anything else may never end
        with suppress(TypeError):
            found = [_shape_and_dtype(_aval(x)) for x in results]
    if found is None:
        kind = "a sequence of arrays" if several else "one array"
        raise TypeError(
            f"{source} for {primitive.name}({', '.join(describe(values))}) returns {out!r}. "
            f"It must return {kind}, like {primitive.name}. A rule can also return NotImplemented."
        )
    avals = tuple(map(_aval, values))
    items = tuple(params.items())
    try:
        expected = _abstract_results(primitive, avals, items)
    except TypeError:  # parameters that cannot be hashed
        expected = _abstract_results.__wrapped__(primitive, avals, items)
    keeps_dtypes = all(v.keeps_dtypes for v in values if isinstance(v, Value))
    seen = lambda kinds: kinds if keeps_dtypes else [kind and kind[0] for kind in kinds]
    if expected is not None and seen(found) != seen(expected):
        show = lambda kinds: ", ".join("?" if kind is None else _short(*kind) for kind in kinds)
        raise TypeError(
            f"{source} for {primitive.name}({', '.join(describe(values))}) returns "
            f"{show(found)}, where {primitive.name} gives {show(expected)}"
        )


def _short(shape: Any, dtype: Any) -> str:
    return jax.core.ShapedArray(shape, dtype).str_short(short_dtypes=True)


def _aval(x: Any) -> Any:
    return x.aval() if isinstance(x, Value) else jax.typeof(x)


def _shape_and_dtype(aval: Any) -> tuple[Any, Any] | None:
    return (aval.shape, aval.dtype) if hasattr(aval, "shape") else None


@lru_cache(maxsize=4096)
def _abstract_results(primitive: Target, avals: Any, items: Any) -> list[Any] | None:
    try:
        out, _ = primitive.abstract_eval(*avals, **dict(items))
    except Exception:  # whatever a primitive raises that does not take such operands
        return None
    outs = out if primitive.multiple_results else [out]
    return list(map(_shape_and_dtype, outs))
