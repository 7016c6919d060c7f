"""`summary`: a table of the arrays of a tree, with formats, sizes and trained values."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from . import tree as vtree
from ._core.surface.array import ImplicitArray
from ._core.value import Value, describe, is_value, materialise
from ._report.tables import Cells, Tabular, short_size_of
from .quant import QArray
from .quant.models.checkpoint import describe_format
from .training import trainable


@dataclass(frozen=True)
class Row:
    """One array of a tree. An implicit array is one row.

    **Arguments:**

    - `path`: the path of the array in the tree.
    - `type`: the class of an implicit array, or "dense".
    - `format`: the dtype of a dense array; the format and tiles of a quantized array; or the class
      of another implicit array, with its rank and the formats of the arrays inside.
    - `shape`, `dtype`: the shape and dtype of the dense array.
    - `nbytes`, `dense_nbytes`: the stored bytes, and the bytes of the dense array.
    - `trainable`: the number of stored values that `vn.trainable` selects.
    - `error`: the error of an implicit array relative to the original array in the argument `like`
      of `summary`. None for a dense array, or without `like`.
    """

    path: str
    type: str
    format: str
    shape: tuple[int, ...]
    dtype: Any  # np.dtype, or an extended one of JAX
    nbytes: int
    dense_nbytes: int
    trainable: int
    error: float | None = None

    @property
    def bits(self) -> float:
        """The number of stored bits per value; 0 for an empty array."""
        return 8 * self.nbytes / max(1, math.prod(self.shape))


@dataclass(frozen=True, repr=False)
class Summary(Tabular):
    """The table of the arrays of a tree that `summary` returns.

    `print` shows it as text, and a notebook shows it as HTML. `rows` has a `Row` for each array, in
    the order of the tree.
    """

    rows: tuple[Row, ...]

    @property
    def nbytes(self) -> int:
        """The stored bytes of all arrays."""
        return sum(row.nbytes for row in self.rows)

    @property
    def dense_nbytes(self) -> int:
        """The bytes of all arrays if they were dense."""
        return sum(row.dense_nbytes for row in self.rows)

    @property
    def trainable(self) -> int:
        """The number of stored values that `vn.trainable` selects, in all arrays."""
        return sum(row.trainable for row in self.rows)

    def _table(self) -> tuple[Cells, Sequence[Cells], Cells, Cells]:
        columns: dict[str, tuple[Callable[[Row], str], str]] = {
            "path": (lambda row: row.path, "total"),
            "format": (lambda row: row.format, ""),
            "shape": (lambda row: str(list(row.shape)), ""),
            "dtype": (lambda row: row.dtype.name, ""),
            "bits": (lambda row: f"{row.bits:.3g}", ""),
            "error": (lambda row: "" if row.error is None else f"{row.error:.2%}", ""),
            "bytes": (lambda row: short_size_of(row.nbytes), short_size_of(self.nbytes)),
            "dense bytes": (
                lambda row: short_size_of(row.dense_nbytes),
                short_size_of(self.dense_nbytes),
            ),
            "trainable": (
                lambda row: f"{row.trainable:,}" if row.trainable else "no",
                f"{self.trainable:,}",
            ),
        }
        if all(row.error is None for row in self.rows):
            del columns["error"]
        cells = [tuple(cell(row) for cell, _ in columns.values()) for row in self.rows]
        numbers = ("bits", "error", "bytes", "dense bytes", "trainable")
        return tuple(columns), cells, tuple(total for _, total in columns.values()), numbers


def summary(tree: Any, like: Any = None) -> Summary:
    """Return a table of the arrays in a tree: their formats, sizes and trainable values.

    **Arguments:**

    - `tree`: any pytree. Objects that are not arrays are left out. Arrays can be abstract
      (`jax.ShapeDtypeStruct`), so the weights need not be loaded.
    - `like`: the tree before quantization. With it, the table shows the relative error of each
      implicit array: the norm of its difference from the original array, divided by the norm of the
      original array.

    **Returns:** a `Summary`. `print` shows the table. `rows` has one entry per array. `nbytes` is
    the total of the stored bytes, and `dense_nbytes` the total of the dense arrays. `trainable` is
    the number of values that `vn.trainable` selects. An array at two paths is counted twice.

    **Raises:** `ValueError` if an implicit array of `tree` has no array of the same shape at its
    path in `like`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> params = {"w": vn.quant.quantize(jnp.ones((64, 8)), "nf4"), "b": jnp.zeros(8)}
    >>> table = vn.summary(params)
    >>> [(row.path, row.type, row.format, row.nbytes, row.trainable) for row in table.rows]
    [('b', 'dense', 'float32', 32, 8), ('w', 'QArray', 'nf4, one scale', 260, 0)]
    >>> table.nbytes, table.dense_nbytes, table.trainable
    (292, 2080, 8)
    """
    by_path = lambda tree: [(vtree.path_string(p), x) for p, x in vtree.leaves_with_path(tree)]
    before = None if like is None else dict(by_path(like))
    return Summary(
        tuple(
            _make_row(path, x, mark, before)
            for (path, x), mark in zip(by_path(tree), vtree.leaves(trainable(tree)), strict=True)
            if is_value(x) or (hasattr(x, "shape") and hasattr(x, "dtype"))
        )
    )


def _make_row(path: str, x: Any, mark: Any, before: Mapping[str, Any] | None) -> Row:
    aval = x.aval() if isinstance(x, Value) else x
    leaves = jax.tree.leaves(x)
    trained = [leaf.size for leaf, m in zip(leaves, jax.tree.leaves(mark), strict=True) if m]
    return Row(
        path=path,
        type=type(x).__name__ if isinstance(x, Value) else "dense",
        format=_describe_format(x),
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        nbytes=x.nbytes if isinstance(x, ImplicitArray) else sum(map(_nbytes, leaves)),
        dense_nbytes=_nbytes(aval),
        trainable=sum(trained),
        error=None if before is None or not isinstance(x, Value) else _error(path, x, before),
    )


def _error(path: str, x: Value, before: Mapping[str, Any]) -> float:
    """Return the error of the implicit array `x` relative to the original array.

    The original array is at the same `path` in `before`, a dict from paths to arrays.
    """
    shape = getattr(before.get(path), "shape", None)
    if shape != x.aval().shape:
        raise ValueError(
            f"like has {'no array' if shape is None else f'shape {list(shape)}'} at {path!r}, "
            f"where the tree has {describe((x,))[0]}. Pass the tree before quantization"
        )
    wide = jnp.promote_types(x.aval().dtype, jnp.float32)
    after, dense = (jnp.asarray(a).astype(wide) for a in materialise((x, before[path])))
    size = float(jnp.linalg.norm(dense))
    return float(jnp.linalg.norm(after - dense)) / size if size else 0.0


def _nbytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def _describe_format(x: Any) -> str:
    if not isinstance(x, Value):
        return x.dtype.name
    if isinstance(x, QArray):
        return describe_format(x)
    if x.storage_name is not None:
        return f"{type(x).__name__} {x.storage_name}"
    rank = [f"rank {x.rank}"] if hasattr(x, "rank") else []
    inner = [_describe_format(y) for y in vtree.flatten_one_layer(x)[0] if is_value(y)]
    return " ".join([type(x).__name__, *rank, *(["over", ", ".join(inner)] if inner else [])])
