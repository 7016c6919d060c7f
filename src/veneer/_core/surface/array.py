"""`ImplicitArray`, the class that users subclass, and its display."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax.tracing import set_operand_conversion, set_type_function
from ..value import Value
from . import operands
from .operators import ArrayOperators


class Shaped:
    """A base class with `shape`, `dtype`, `ndim` and `size`, computed from the method `aval`."""

    @property
    def shape(self: Any) -> tuple[int, ...]:
        """The shape of the dense array."""
        return self.aval().shape

    @property
    def dtype(self: Any) -> np.dtype:
        """The dtype of the dense array."""
        return self.aval().dtype

    @property
    def ndim(self: Any) -> int:
        """The number of axes of the dense array."""
        return self.aval().ndim

    @property
    def size(self: Any) -> int:
        """The number of elements of the dense array."""
        return self.aval().size


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


class ImplicitArray(ArrayOperators, Shaped, Shown, Value, abstract=True):
    """An array that looks dense to every JAX program and stores something cheaper.

    Subclass it with annotated fields for arrays, `vn.static` fields for metadata, and a method
    `materialise` that returns the dense array. The subclass is a frozen dataclass and a pytree.
    In its methods, count axes from the end, because `vmap` and `scan` add and remove leading axes.

    The constructor also takes `shape` and `dtype`. It raises `ValueError` if the dense array has
    others. Operators and array methods work without `vn.implicit`. Functions of `jax.numpy`
    must be wrapped: `vn.implicit(jnp.sin)(x)`.

    A subclass may override these methods:

    | method | returns | default |
    |---|---|---|
    | `aval()` | the `jax.core.ShapedArray` of the dense array | traces `materialise` |
    | `default(primitive, values, params)` | the results if no rule fits | materializes operands |
    | `leaf_axes()` | a `vn.LeafAxis` for each axis of each leaf | returns None: not declared |
    | `partition(spec, shape)` | the `PartitionSpec` of each leaf | uses `leaf_axes` |

    `default` is a static method. Override `aval` if `materialise` always raises an error. A
    subclass may also set these class attributes:

    | attribute | default | meaning |
    |---|---|---|
    | `batch_transparent` | True | slicing all leaves along a leading axis slices the dense array |
    | `metadata_is_meaning` | True | loops and branches that change static fields raise an error |
    | `is_label` | None | whether the only leaf is the dense array; None: Veneer tests it |
    | `keeps_dtypes` | True | rules must return the dtype that the primitive has for dense arrays |
    | `commute_ops` | True | a rule for `x + y` also serves `y + x`; also for `mul`, `max`, ... |
    | `compiles_operators` | True | `x + y` outside `vn.implicit` may be compiled with `jax.jit` |
    | `default_precedence` | 0 | the operand type with the highest number runs its `default` |
    | `dense_tangent` | False | with `vn.hijax`, a tangent is one dense array, not one per leaf |
    | `is_cache` | False | True for key-value caches, whose bytes reports count separately |
    | `trainable` | None | the names of the fields that `vn.trainable` selects; None: all |
    | `type_name` | None | the name in jaxprs and notebooks; None: the class name, shortened |
    | `storage_name` | None | how `vn.summary` describes the storage, such as `"tile 64"` |

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> class Diagonal(vn.ImplicitArray):
    ...     diagonal: jax.Array  # [..., n]
    ...     def materialise(self):
    ...         return self.diagonal[..., None] * jnp.eye(self.diagonal.shape[-1])
    >>> d = Diagonal(jnp.arange(3.0))
    >>> d.shape, d.dtype.name
    ((3, 3), 'float32')
    >>> d
    Diagonal(diagonal=f32[3])
    >>> (d @ jnp.ones(3)).tolist()
    [0.0, 1.0, 2.0]
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.materialise is Value.materialise and hasattr(cls, "materialize"):
            raise TypeError(
                f"{cls.__qualname__} defines materialize, but veneer calls materialise, with an s. "
                "Rename the method. If the class is written for eformer, subclass "
                "veneer.interop.jaximus.ImplicitArray."
            )

    @property
    def __jax_array__(self) -> Callable[[], Any]:
        """The function that `jax.numpy` calls to convert an operand to an array or a tracer."""
        return operands.conversion.jax_array(self)

    #: The names of the fields whose floating leaves are trained. None means all of them.
    trainable: ClassVar[tuple[str, ...] | None] = None

    @property
    def nbytes(self) -> int:
        """The number of stored bytes: the total size of the leaves."""
        return sum(map(nbytes_of, jax.tree.leaves(self)))


set_operand_conversion(ImplicitArray, lambda value: operands.conversion.convert(value))
set_type_function(Value, lambda value: operands.conversion.type_of(value))


# The display as a line of text, in notebooks and by treescope.


def short_name(value: Any) -> str:
    """Return the name of the type of an implicit array in jaxprs: `lora` for a `LoraArray`.

    This is the attribute `type_name`, or the class name in lower case without `Array`.
    """
    if value.type_name is not None:
        return value.type_name
    name = type(value).__name__
    return (name.removesuffix("Array") or name).lower()


def title(value: Any) -> str:
    """Return a one-line description of an implicit array: `q4[64,128] tile 64, 4.5 bits`.

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
    """Return the shape and dtype of a leaf as a `jax.ShapeDtypeStruct`.

    The leaf is an array, a number, or a placeholder of `flax.nnx`.
    """
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
    """Return the names and contents of the fields that are set and differ from their defaults."""
    pairs = [(f, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return [(f.name, x) for f, x in pairs if not is_default(x, f.default)]


def is_default(x: Any, default: Any) -> bool:
    """Return whether `x`, the content of a field, is None or plain data that equals `default`."""
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
