"""How an implicit array is shown: in a line, in a notebook, and by treescope.

What is shown follows from the fields of a class; the class adds how it is stored, if its fields do
not say it (`storage_name`).
"""

import dataclasses
import math
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp


class Shown:
    """The base of what notebooks and treescope show by title, and unfold to its fields."""

    #: The name of the type in jaxprs. None means the class name, shortened.
    type_name: Any = None

    #: The storage that notebooks and `vn.summary` show, as `"tile 64"`. None derives it.
    storage_name: Any = None

    # No method, of which treescope would take note in the class, to add a page to what it shows.
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
    """The name that jaxprs show for a value's type: `lora` of a `LoraArray`.

    A class may say another, by an attribute or a property `type_name`.
    """
    if value.type_name is not None:
        return value.type_name
    name = type(value).__name__
    return (name.removesuffix("Array") or name).lower()


def title(value: Any) -> str:
    """A value in a line: `q4[64,128] tile 64, 4.5 bits`, which are those stored for each entry.

    The name of its class alone, if it lacks leaves, or they are no arrays.
    """
    with suppress(Exception):  # whatever a type's own code raises on leaves that make no sense
        nbytes = sum(map(_nbytes, jax.tree.leaves(value)))
        value = jax.tree.map(_abstract, value)
        aval = value.aval()
        bits = 8 * nbytes / max(1, aval.size)
        dtype = [] if aval.dtype == "float32" else [aval.dtype.name]
        return ", ".join([_with_storage(value), *dtype, f"{bits:.3g} bits"])
    return type(value).__name__


def _abstract(x: Any) -> Any:
    """A leaf as a shape and a dtype: an array, what nnx puts in its place to show it, a number."""
    if not hasattr(x, "dtype"):
        return jax.ShapeDtypeStruct((), jnp.result_type(x))
    # JAX 0.12 warns of a float64 of NumPy's, unless jax_enable_x64 is set.
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(x.shape, dtype)


def has_title(value: Any) -> bool:
    """Whether a value has a title: it is of arrays."""
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
    """The fields, but those that are left out, or are as by default."""
    pairs = [(f, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return [(f.name, x) for f, x in pairs if not is_default(x, f.default)]


def is_default(x: Any, default: Any) -> bool:
    """Return whether a field is None or has its default. Only plain data has: no array does."""
    return x is None or (isinstance(x, _PLAIN) and bool(x == default))


_PLAIN = (bool, int, float, str, tuple)


def _nbytes(x: Any) -> int:
    x = x if hasattr(x, "dtype") else _abstract(x)
    return math.prod(x.shape) * x.dtype.itemsize


def _html(value: Any) -> str:
    import html  # which takes a while

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
