"""The display of implicit arrays as a line of text, in notebooks and by treescope."""

import dataclasses
import math
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp


class Shown:
    """A base class of values that notebooks and treescope show as a title and a list of fields."""

    # A property, because treescope prefers the method `_repr_html_` of a class to its own display.
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

    This is the attribute `type_name`, or the class name in lower case without `Array`.
    """
    if value.type_name is not None:
        return value.type_name
    name = type(value).__name__
    return (name.removesuffix("Array") or name).lower()


def title(value: Any) -> str:
    """Return a one-line description of a value, such as `q4[64,128] tile 64, 4.5 bits`.

    `4.5 bits` are the stored bits per element. If leaves are missing or are not arrays, return only
    the class name.
    """
    with suppress(Exception):  # code of the class may raise anything
        nbytes = sum(map(nbytes_of, jax.tree.leaves(value)))
        value = jax.tree.map(_abstract, value)
        aval = value.aval()
        bits = 8 * nbytes / max(1, aval.size)
        dtype = [] if aval.dtype == "float32" else [aval.dtype.name]
        return ", ".join([_shape_and_storage(value), *dtype, f"{bits:.3g} bits"])
    return type(value).__name__


def _abstract(x: Any) -> Any:
    """Return an abstract array for a leaf: an array, a number, or a placeholder of `flax.nnx`."""
    if not hasattr(x, "dtype"):
        return jax.ShapeDtypeStruct((), jnp.result_type(x))
    # JAX 0.12 warns about a float64 NumPy array, unless jax_enable_x64 is set.
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(x.shape, dtype)


def has_title(value: Any) -> bool:
    """Return whether `title` returns more than the class name."""
    return title(value) != type(value).__name__


def _shape_and_storage(value: Any) -> str:
    """Return the start of a title, such as `lora[64,128] rank 4 over q4[64,128] tile 64`."""
    name = f"{short_name(value)}[{','.join(map(str, value.aval().shape))}]"
    if value.storage_name is not None:
        return f"{name} {value.storage_name}"
    rank = f" rank {value.rank}" if hasattr(value, "rank") else ""
    inner = [x for _, x in _fields(value) if isinstance(x, Shown)]
    over = f" over {', '.join(map(_shape_and_storage, inner))}" if inner else ""
    return name + rank + over


def _fields(value: Any) -> list[tuple[str, Any]]:
    """Return the name and content of each field that is set and differs from its default."""
    pairs = [(f, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return [(f.name, x) for f, x in pairs if not is_default(x, f.default)]


def is_default(x: Any, default: Any) -> bool:
    """Return whether a field is None, or plain data that equals its default."""
    return x is None or (isinstance(x, _PLAIN) and bool(x == default))


_PLAIN = (bool, int, float, str, tuple)


def nbytes_of(x: Any) -> int:
    """Return the number of bytes of a leaf, which may be a Python number."""
    x = x if hasattr(x, "dtype") else _abstract(x)
    return math.prod(x.shape) * x.dtype.itemsize


def _html(value: Any) -> str:
    """Return the title of a value as a line that unfolds to a table of the fields."""
    import html  # slow to import

    def content_html(x: Any) -> str:
        if isinstance(x, Shown):
            return _html(x)
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return f"{x.dtype.name}[{','.join(map(str, x.shape))}], {nbytes_of(x):,} bytes"
        if isinstance(x, tuple) and any(hasattr(y, "dtype") for y in x):
            return "<br>".join(map(content_html, x))
        return html.escape(repr(x))

    rows = "\n".join(
        f'<tr><th style="text-align: left">{html.escape(name)}</th><td>{content_html(x)}</td></tr>'
        for name, x in _fields(value)
    )
    return (
        f"<details><summary><code>{html.escape(title(value))}</code></summary>\n"
        f"<table>\n{rows}\n</table></details>"
    )
