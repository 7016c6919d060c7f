"""What a family looks at: the stored tensors of a folder and its configuration; what it makes."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..quant import Packing, QArray
from .folder import TensorFolder


class Weight(NamedTuple):
    """One array of the dense checkpoint, and the stored tensors that it is made of.

    `shape` and `dtype` are those of the dense array, known before anything is read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...]
    read: Callable[[], Any]


class StoredTensors:
    """The stored tensors of a folder, by name, and what its `config.json` says.

    **Arguments:**

    - `folder`: open, and read as it is stored.
    - `config`: of the model.
    - `quantization`: what `config` says of the weights.
    """

    def __init__(
        self, folder: TensorFolder, config: Mapping[str, Any], quantization: Mapping[str, Any]
    ):
        self.folder = folder
        self.config = config
        self.quantization = quantization
        self.headers = folder.dense_avals()

    def modules(self, suffix: str) -> Iterator[str]:
        """The names of stored tensors that end in `suffix`, without it; in order."""
        for name in self.headers:
            if name.endswith(suffix):
                yield name.removesuffix(suffix)

    def shape(self, name: str, *, rank: int, dtypes: Sequence[str]) -> tuple[int, ...]:
        """The shape of a stored tensor.

        **Raises:** `ValueError` where there is none, or it is of another rank or dtype.
        """
        header = self.header(name)
        if len(header.shape) != rank or header.dtype.name not in dtypes:
            raise self.error(
                name, f"is {describe(header)}, not of rank {rank} and {' or '.join(dtypes)}"
            )
        return tuple(header.shape)

    def check(self, name: str, shape: Sequence[int], dtypes: Sequence[str], of: str) -> None:
        """Refuses a stored tensor that is not as that next to it asks for.

        **Raises:** `ValueError`, naming both.
        """
        header = self.header(name)
        if tuple(header.shape) != tuple(shape) or header.dtype.name not in dtypes:
            what = f"{' or '.join(dtypes)}{list(shape)}"
            raise self.error(name, f"is {describe(header)}, but {of!r} requires {what}")

    def read(self, name: str) -> np.ndarray:
        """Reads a stored tensor as it is."""
        return np.asarray(self.folder.read(name))

    def number(self, of: Mapping[str, Any], key: str, default: int, *, least: int = 1) -> int:
        """An integer of the configuration.

        **Raises:** `ValueError` where it is something else, or too small.
        """
        value = of.get(key, default)
        value = default if value is None else value
        if type(value) is not int or value < least:
            raise ValueError(
                f"{self.folder.path}: {key!r} of its configuration is invalid: {value!r:.40}"
            )
        return value

    def matches(self, pattern: str, module: str) -> bool:
        """Return whether a regular expression of the configuration matches a module's name.

        **Raises:** `ValueError` where it is not a regular expression.
        """
        try:
            return re.match(pattern, module) is not None
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"{self.folder.path}: {pattern!r:.40} of its configuration is not a regular "
                f"expression: {error}"
            ) from None

    def stated_size(self, of: Mapping[str, Any], key: str = "group_size") -> int | None:
        """Return a size that the configuration states: -1 for a whole axis, None if it is missing.

        **Raises:** `ValueError` for anything else.
        """
        size = of.get(key)
        if size is not None and size != -1:
            return self.number(of, key, 1)
        return None if size is None else -1

    def tile(self, name: str, size: int, count: int, *stated: int | None) -> int:
        """Return how many of `size` inputs share one of the `count` groups of the tensor `name`.

        **Arguments:**

        - `stated`: the group size of each configuration that may be that of the weight, -1 for one
          group, None where it states none.

        **Raises:** `ValueError` where the groups are not of a size that is stated, or of several,
        and where none is stated and the count leaves it open.
        """
        tiles = (tile_of(size, count, of) for of in stated or (None,))
        fitting = {min(tile, size) for tile in tiles if tile is not None}
        if len(fitting) == 1:
            return fitting.pop()
        of = {"one group" if x == -1 else f"groups of {x}" for x in stated if x is not None}
        what = f"states {' or '.join(sorted(of))}" if of else "does not state the group size"
        raise self.error(
            name,
            f"has {count} groups for {size} inputs, but the configuration {what}: correct the "
            "'group_size' in the quantization_config of config.json",
        )

    def dense_dtype(self, scale_dtype: str) -> str:
        """The dtype of the dense checkpoint: as the configuration says, or else as scales suggest.

        Scales of 8 bits or of f32 suggest nothing: then it is that of tensors that are dense.
        """
        parts = [self.config, self.config.get("text_config")]
        for part in (part for part in parts if isinstance(part, Mapping)):
            for stated in (part.get("dtype"), part.get("torch_dtype")):
                if stated in _DENSE:
                    return stated
        dense = {x.dtype.name for x in self.headers.values() if len(x.shape) == 1}
        narrow = sorted(dense & {"bfloat16", "float16"})
        if scale_dtype in ("bfloat16", "float16"):
            return scale_dtype
        return narrow[0] if len(narrow) == 1 else "float32"

    def error(self, name: str, what: str) -> ValueError:
        """A `ValueError` in one line, about the stored tensor `name`."""
        return ValueError(f"{self.folder.path}: tensor {name!r} {' '.join(what.split())}")

    def header(self, name: str) -> jax.ShapeDtypeStruct:
        """The shape and dtype of a stored tensor.

        **Raises:** `ValueError` where there is none.
        """
        if name not in self.headers:
            raise ValueError(f"{self.folder.path}: tensor {name!r} is missing")
        return self.headers[name]


_DENSE = ("bfloat16", "float16", "float32")
FLOATS = ("float16", "bfloat16", "float32")


def describe(header: Any) -> str:
    """As `int32[4, 8]`."""
    return f"{header.dtype.name}{list(header.shape)}"


def quantized(
    packed: np.ndarray,
    scale: Any,
    zero_point: np.ndarray | QArray | None = None,
    *,
    qtype: str,
    packing: Packing | None,
    dtype: str,
    **others: Any,
) -> QArray:
    """A `QArray` of leaves in NumPy, which are contiguous."""
    whole: Any = lambda x: x if isinstance(x, QArray) else np.ascontiguousarray(x)
    zero_point = None if zero_point is None else whole(zero_point)
    return QArray.from_packed(
        *(whole(packed), whole(scale), zero_point),
        qtype=qtype,
        packing=packing,
        dense_dtype=dtype,
        **others,
    )


def tile_of(size: int, count: int, stated: int | None) -> int | None:
    """Return how many values share a scale along an axis, or None where the numbers do not fit.

    The count alone does not say it: 1000 values under 8 scales are tiles of 128, the last of them
    shorter, or of 125.

    **Arguments:**

    - `size`, `count`: the values and the scales along the axis.
    - `stated`: the tile that the configuration states, -1 for the whole axis. With None, only a
      count that leaves no doubt fits: one scale, or even tiles of a power of two.
    """
    if not size or not count:
        return None
    if stated is not None:
        tile = size if stated == -1 else stated
        return tile if count == -(-size // tile) else None
    tile, rest = divmod(size, count)
    is_power_of_two = tile & (tile - 1) == 0
    return tile if not rest and (count == 1 or is_power_of_two) else None


def tiled_axis(entries: np.ndarray, axis: int, size: int, tile: int) -> np.ndarray:
    """Scales along an axis of `size` values, of which every `tile` share one, the last perhaps few.

    **Arguments:**

    - `entries`: with `ceil(size / tile)` along `axis`.

    **Returns:** the same, or with more entries along the axis: a divisor of `size`.
    """
    if size % tile == 0 or entries.shape[axis] == 1:
        return entries
    smaller = math.gcd(size, tile)
    return np.take(entries, np.arange(0, size, smaller) // tile, axis)


def tiled_rows(entries: np.ndarray, shape: Sequence[int], tile: int) -> np.ndarray:
    """Scales of a matrix, of which every `tile` values in the order of memory share one.

    **Arguments:**

    - `entries`: `[ceil(rows * columns / tile)]`.
    - `shape`: rows and columns.

    **Returns:** a matrix, whose axes divide those of `shape`.
    """
    rows, columns = shape
    if columns % tile == 0:
        return entries.reshape(rows, columns // tile)
    if tile % columns == 0 and rows % (tile // columns) == 0:
        return entries.reshape(rows * columns // tile, 1)
    smaller = math.gcd(columns, tile)
    at = np.arange(0, rows * columns, smaller) // tile
    return entries[at].reshape(rows, columns // smaller)


def sorted_groups(groups: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Puts columns in the order of their groups, so that tiles are neighbours.

    **Arguments:**

    - `groups`: the group of each column, `int[columns]`.

    **Returns:** the columns in their new order, None where they keep theirs; and the group of each
    tile, of which there are a divisor of the columns.
    """
    order = None
    if (np.diff(groups) < 0).any():
        order = np.argsort(groups, kind="stable").astype(np.int32)
        groups = groups[order]
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    tile = math.gcd(len(groups), *map(int, starts))
    return order, groups[::tile]
