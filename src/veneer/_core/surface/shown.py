"""The display of implicit arrays: in a line, in a notebook, and by treescope.

The display shows the fields of a class. A class can set `storage_name` to describe its storage.
"""

import dataclasses
import math
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp


class Shown:
    """The base class of values that notebooks and treescope show as a title with fields."""

    # A property, because treescope shows the HTML of a class that has this method.
    _repr_html_ = property(lambda self: lambda: _html(self))

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        from treescope import rendering_parts

        names = [name for name, _ in _fields(self)]
        return rendering_parts.build_foldable_tree_node_from_children(
            prefix=rendering_parts.text(f"{title(self)} ("),
            children=rendering_parts.build_field_children(self, path, subtree_renderer, names),
            suffix=")",
            path=path,
        )


def short_name(value: Any) -> str:
    """Return the name of the type of a value in jaxprs, such as `lora` for a `LoraArray`.

    A class can set another name with the attribute or property `type_name`.
    """
    if value.type_name is not None:
        return value.type_name
    name = type(value).__name__
    return (name.removesuffix("Array") or name).lower()


def title(value: Any) -> str:
    """Describe a value in one line with the bits per element: `q4[64,128] tile 64, 4.5 bits`.

    If it lacks leaves, or they are not arrays, return only the name of its class.
    """
    with suppress(Exception):  # code of the class may raise anything
        nbytes = sum(map(_nbytes, jax.tree.leaves(value)))
        value = jax.tree.map(_abstract, value)
        aval = value.aval()
        bits = 8 * nbytes / max(1, aval.size)
        dtype = [] if aval.dtype == "float32" else [aval.dtype.name]
        return ", ".join([_with_storage(value), *dtype, f"{bits:.3g} bits"])
    return type(value).__name__


def _abstract(x: Any) -> Any:
    """Return the shape and dtype of a leaf: an array, a number, or a placeholder of flax.nnx."""
    if not hasattr(x, "dtype"):
        return jax.ShapeDtypeStruct((), jnp.result_type(x))
    # JAX 0.12 warns about a float64 NumPy array, unless jax_enable_x64 is set.
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(x.shape, dtype)


def has_title(value: Any) -> bool:
    """Return whether `title` describes more than the class."""
    return title(value) != type(value).__name__


def _with_storage(value: Any) -> str:
    name = f"{short_name(value)}[{','.join(map(str, value.aval().shape))}]"
    if value.storage_name is not None:
        return f"{name} {value.storage_name}"
    rank = f" rank {value.rank}" if hasattr(value, "rank") else ""
    held = [x for _, x in _fields(value) if isinstance(x, Shown)]
    over = f" over {', '.join(map(_with_storage, held))}" if held else ""
    return name + rank + over


def _fields(value: Any) -> list[tuple[str, Any]]:
    """Return the fields that are set and differ from their defaults."""
    pairs = [(f, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return [(f.name, x) for f, x in pairs if not is_default(x, f.default)]


def is_default(x: Any, default: Any) -> bool:
    """Return whether a field is None, or plain data that equals its default."""
    return x is None or (isinstance(x, _PLAIN) and bool(x == default))


_PLAIN = (bool, int, float, str, tuple)


def _nbytes(x: Any) -> int:
    x = x if hasattr(x, "dtype") else _abstract(x)
    return math.prod(x.shape) * x.dtype.itemsize


def _html(value: Any) -> str:
    import html  # slow to import

    def shown(x: Any) -> str:
        if isinstance(x, Shown):
            return _html(x)
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return f"{x.dtype.name}[{','.join(map(str, x.shape))}], {_nbytes(x):,} bytes"
        if isinstance(x, tuple) and any(hasattr(y, "dtype") for y in x):
            return "<br>".join(map(shown, x))
        return html.escape(repr(x))

    def row(name: str, x: Any) -> str:
        name = html.escape(name)
        return f'<tr><th style="text-align: left">{name}</th><td>{shown(x)}</td></tr>'

    rows = "\n".join(row(name, x) for name, x in _fields(value))
    return (
        f"<details><summary><code>{html.escape(title(value))}</code></summary>\n"
        f"<table>\n{rows}\n</table></details>"
    )
