"""`summary`: what the arrays of a tree are, what they cost, and which are trained."""

from dataclasses import dataclass
from typing import Any

import jax

from . import tree as vtree
from ._core.surface.array import ImplicitArray
from ._core.value import Value, is_value
from ._report.tables import html_table, rich_table, size_of, text_of_rich, text_table
from .quant import QArray
from .quant.models.checkpoint import describe_format
from .training import trainable


@dataclass(frozen=True)
class Row:
    """One array of a tree; an implicit one is one array.

    `type` is the class of an implicit array, and "dense" for others. `format` says how it is
    stored: as a dtype, a quantised format and its tiles, or a class, with its `rank` if it has one
    and the formats of implicit arrays that it holds. `nbytes` are those that are stored,
    `dense_nbytes` those of the dense array, and `trainable` is the number of stored values that are
    trained, by `vn.trainable`.
    """

    path: str
    type: str
    format: str
    shape: tuple[int, ...]
    dtype: Any  # np.dtype, or an extended one of JAX
    nbytes: int
    dense_nbytes: int
    trainable: int


@dataclass(frozen=True, repr=False)
class Summary:
    """The arrays of a tree: `print` it for a table; a notebook shows one of HTML.

    `rows` holds a `Row` for each array, in the order of the tree.
    """

    rows: tuple[Row, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that are stored."""
        return sum(row.nbytes for row in self.rows)

    @property
    def dense_nbytes(self) -> int:
        """The bytes of the dense arrays that are stood for."""
        return sum(row.dense_nbytes for row in self.rows)

    @property
    def trainable(self) -> int:
        """The number of values that are trained."""
        return sum(row.trainable for row in self.rows)

    def __str__(self) -> str:
        try:
            return text_of_rich(self.__rich__())
        except ImportError:  # without the extra `cli`
            return text_table(_HEADINGS, self._cells(), self._total(), _NUMBERS)

    __repr__ = __str__

    def __rich__(self) -> Any:
        return rich_table(_HEADINGS, self._cells(), self._total(), _NUMBERS)

    def _repr_html_(self) -> str:
        return html_table(_HEADINGS, self._cells(), self._total(), _NUMBERS)

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.path,
                row.format,
                str(list(row.shape)),
                row.dtype.name,
                size_of(row.nbytes),
                size_of(row.dense_nbytes),
                f"{row.trainable:,}" if row.trainable else "no",
            )
            for row in self.rows
        ]

    def _total(self) -> tuple[str, ...]:
        sizes = size_of(self.nbytes), size_of(self.dense_nbytes), f"{self.trainable:,}"
        return ("total", *[""] * (len(_HEADINGS) - 4), *sizes)


_NUMBERS = ("bytes", "dense bytes", "trainable")
_HEADINGS = ("path", "format", "shape", "dtype", *_NUMBERS)


def summary(tree: Any) -> Summary:
    """The arrays of a tree, by path: what they are, what they cost, and which are trained.

    **Arguments:**

    - `tree`: any pytree; leaves that are no arrays are left out. They may be abstract
      (`jax.ShapeDtypeStruct`), of a model that is not loaded.

    **Returns:** a `Summary`: print it for a table, or take its `rows` and totals as data. An array
    that two paths share is counted at each.

    >>> import jax.numpy as jnp, veneer as vn
    >>> params = {"w": vn.quant.quantize(jnp.ones((64, 8)), "nf4"), "b": jnp.zeros(8)}
    >>> table = vn.summary(params)
    >>> [(row.path, row.type, row.format, row.nbytes, row.trainable) for row in table.rows]
    [('b', 'dense', 'float32', 32, 8), ('w', 'QArray', 'nf4, one scale', 260, 0)]
    >>> table.nbytes, table.dense_nbytes, table.trainable
    (292, 2080, 8)
    """
    marks = vtree.leaves(trainable(tree))
    leaves = vtree.leaves_with_path(tree)
    return Summary(
        tuple(
            _row(vtree.path_string(path), x, mark)
            for (path, x), mark in zip(leaves, marks, strict=True)
            if is_value(x) or (hasattr(x, "shape") and hasattr(x, "dtype"))
        )
    )


def _row(path: str, x: Any, mark: Any) -> Row:
    aval = x.aval() if isinstance(x, Value) else x
    parts = jax.tree.leaves(x)
    trained = [p.size for p, m in zip(parts, jax.tree.leaves(mark), strict=True) if m]
    return Row(
        path=path,
        type=type(x).__name__ if isinstance(x, Value) else "dense",
        format=_format(x),
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        nbytes=x.nbytes if isinstance(x, ImplicitArray) else sum(map(_nbytes, parts)),
        dense_nbytes=_nbytes(aval),
        trainable=sum(trained),
    )


def _nbytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def _format(x: Any) -> str:
    if not isinstance(x, Value):
        return x.dtype.name
    if isinstance(x, QArray):
        return describe_format(x)
    rank = [f"rank {x.rank}"] if hasattr(x, "rank") else []
    held = [_format(y) for y in vtree.flatten_one_layer(x)[0] if is_value(y)]
    return " ".join([type(x).__name__, *rank, *(["over", ", ".join(held)] if held else [])])
