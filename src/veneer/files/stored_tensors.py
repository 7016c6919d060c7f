"""The stored tensors of a folder that another library quantized, and its configuration.

The modules that read the formats of other libraries, such as `gptq`, find their weights with it.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..quant import Packing, QArray
from .folder import TensorFolder


class Weight(NamedTuple):
    """A quantized weight of a folder, which several stored tensors encode.

    - `name`, `shape`, `dtype`: the name, shape and dtype of the dense weight.
    - `parts`: the names of the stored tensors.
    - `read`: a function that reads them and returns the packed weight, a `QArray` or `Permuted`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...]
    read: Callable[[], Any]


class StoredTensors:
    """The headers and data of the stored tensors of a folder, and its configuration.

    **Arguments:**

    - `folder`: an open folder.
    - `config`: the content of `config.json`.
    - `quantization`: the entry of `config` that says how the weights are quantized, such as
      `quantization_config`. It is an empty dict if `config` has no such entry.
    """

    def __init__(
        self, folder: TensorFolder, config: Mapping[str, Any], quantization: Mapping[str, Any]
    ):
        self.folder = folder
        self.config = config
        self.quantization = quantization
        self.headers = folder.dense_avals()

    def modules(self, suffix: str) -> Iterator[str]:
        """Yield the names of stored tensors that end in `suffix`, without the suffix.

        With a suffix such as ".qweight", these are the names of modules.
        """
        for name in self.headers:
            if name.endswith(suffix):
                yield name.removesuffix(suffix)

    def shape(self, name: str, *, rank: int, dtypes: Sequence[str]) -> tuple[int, ...]:
        """Return the shape of a stored tensor. Check its rank, and that its dtype is in `dtypes`.

        **Raises:** `ValueError` if the tensor is missing or has another rank or dtype.
        """
        header = self.header(name)
        if len(header.shape) != rank or header.dtype.name not in dtypes:
            raise self.error(
                name, f"is {describe(header)}, not of rank {rank} and {' or '.join(dtypes)}"
            )
        return tuple(header.shape)

    def check(self, name: str, shape: Sequence[int], dtypes: Sequence[str], of: str) -> None:
        """Check that the stored tensor `name` has the given shape and one of `dtypes`.

        **Arguments:**

        - `of`: the name of the tensor that requires this shape, for the error message.

        **Raises:** `ValueError` if the tensor is missing or differs.
        """
        header = self.header(name)
        if tuple(header.shape) != tuple(shape) or header.dtype.name not in dtypes:
            what = f"{' or '.join(dtypes)}{list(shape)}"
            raise self.error(name, f"is {describe(header)}, but {of!r} requires {what}")

    def read(self, name: str) -> np.ndarray:
        """Read a stored tensor without decoding it."""
        return np.asarray(self.folder.read(name))

    def number(self, of: Mapping[str, Any], key: str, default: int) -> int:
        """Return the integer `of[key]`, or `default` if it is missing or null.

        `of` is a part of the configuration.

        **Raises:** `ValueError` if it is not an integer, or less than 1.
        """
        value = of.get(key, default)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ValueError(
                f"{self.folder.path}: {key!r} of its configuration is invalid: {value!r:.40}"
            )
        return value

    def matches(self, pattern: str, module: str) -> bool:
        """Return whether a regular expression of the configuration matches the name of a module.

        **Raises:** `ValueError` if it is not a valid regular expression.
        """
        try:
            return re.match(pattern, module) is not None
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"{self.folder.path}: {pattern!r:.40} of its configuration is not a regular "
                f"expression: {error}"
            ) from None

    def stated_size(self, of: Mapping[str, Any], key: str = "group_size") -> int | None:
        """Return the group size `of[key]`: -1 for the whole axis, None if it is not stated.

        **Arguments:**

        - `of`: a part of the configuration.

        **Raises:** `ValueError` if it is neither -1 nor a positive integer.
        """
        size = of.get(key)
        if size is not None and size != -1:
            return self.number(of, key, 1)
        return None if size is None else -1

    def tile(self, name: str, size: int, count: int, *stated: int | None) -> int:
        """Return how many inputs of a weight share a scale.

        **Arguments:**

        - `name`: the name of the tensor with the scales, for the error message.
        - `size`, `count`: the number of inputs, and of scales along them.
        - `stated`: candidates for the group size, one per entry of the configuration that may
          apply: -1 for one group, None if the entry does not state it.

        **Raises:** `ValueError` if no candidate fits `count`, if several different ones do, or if
        none is stated and `count` is ambiguous.
        """
        tiles = (find_tile(size, count, x) for x in stated or (None,))
        fitting = {min(tile, size) for tile in tiles if tile is not None}
        if len(fitting) == 1:
            return fitting.pop()
        sizes = {"one group" if x == -1 else f"groups of {x}" for x in stated if x is not None}
        what = f"states {' or '.join(sorted(sizes))}" if sizes else "does not state the group size"
        raise self.error(
            name,
            f"has {count} groups for {size} inputs, but the configuration {what}: correct the "
            "'group_size' in the quantization_config of config.json",
        )

    def dense_dtype(self, scale_dtype: str) -> str:
        """Return the dtype of the dense checkpoint.

        It is the dtype that `config.json` states. If it states none, it is `scale_dtype`, the dtype
        of the scales, if that has 16 bits. Otherwise it is the dtype of the dense 16-bit vectors if
        all of them have the same, else float32.
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
        """Return a `ValueError` about a stored tensor, in one line that names the folder.

        `what` follows the name of the tensor in the message, such as "is not a scale".
        """
        return ValueError(f"{self.folder.path}: tensor {name!r} {' '.join(what.split())}")

    def header(self, name: str) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of a stored tensor.

        **Raises:** `ValueError` if the tensor is missing.
        """
        if name not in self.headers:
            raise ValueError(f"{self.folder.path}: tensor {name!r} is missing")
        return self.headers[name]


_DENSE = ("bfloat16", "float16", "float32")
FLOATS = ("float16", "bfloat16", "float32")


def describe(header: Any) -> str:
    """Return the shape and dtype of a tensor as error messages show them: `int32[4, 8]`."""
    return f"{header.dtype.name}{list(header.shape)}"


def make_qarray(
    packed: np.ndarray,
    scale: Any,
    zero_point: np.ndarray | QArray | None = None,
    *,
    qtype: str,
    packing: Packing | None,
    dtype: str,
    **others: Any,
) -> QArray:
    """Build a `QArray` whose leaves are contiguous NumPy arrays.

    `dtype` is the dtype of the dense array. The other arguments are as in `QArray.from_packed`.
    """
    contiguous: Any = lambda x: x if isinstance(x, QArray) else np.ascontiguousarray(x)
    zero_point = None if zero_point is None else contiguous(zero_point)
    return QArray.from_packed(
        *(contiguous(packed), contiguous(scale), zero_point),
        qtype=qtype,
        packing=packing,
        dense_dtype=dtype,
        **others,
    )


def find_tile(size: int, count: int, stated: int | None) -> int | None:
    """Return how many values share a scale along an axis: the tile size.

    The number of scales alone can be ambiguous: 1000 values with 8 scales may have tiles of 125, or
    of 128 with a shorter last tile. Return None if it is ambiguous, or does not fit `stated`.

    **Arguments:**

    - `size`, `count`: the number of values and the number of scales along the axis.
    - `stated`: the tile size in the configuration, -1 for the whole axis. If it is None, only
      unambiguous counts fit: one scale, or equal tiles whose size is a power of two.
    """
    if not size or not count:
        return None
    if stated is not None:
        tile = size if stated == -1 else stated
        return tile if count == -(-size // tile) else None
    tile, rest = divmod(size, count)
    is_power_of_two = tile & (tile - 1) == 0
    return tile if not rest and (count == 1 or is_power_of_two) else None


def even_tiles(entries: np.ndarray, axis: int, size: int, tile: int) -> np.ndarray:
    """Repeat scales along an axis to smaller tiles that divide it, as a `QArray` requires.

    **Arguments:**

    - `entries`: scales, `ceil(size / tile)` of them along `axis`. The last tile may be shorter.
    - `size`, `tile`: the number of values along the axis, and in a tile.

    **Returns:** scales of tiles of `gcd(size, tile)` values, or `entries` if nothing must be
    repeated.
    """
    if size % tile == 0 or entries.shape[axis] == 1:
        return entries
    smaller = math.gcd(size, tile)
    return np.take(entries, np.arange(0, size, smaller) // tile, axis)


def even_tiles_of_blocks(entries: np.ndarray, shape: Sequence[int], tile: int) -> np.ndarray:
    """Arrange the scales of flat blocks, which may span rows, as a matrix, as in a `QArray`.

    **Arguments:**

    - `entries`: one scale per block of consecutive values, `[ceil(rows * columns / tile)]`.
    - `shape`: `(rows, columns)` of the weight.
    - `tile`: the number of values in a block.

    **Returns:** a matrix of scales. Its sizes divide `shape`.
    """
    rows, columns = shape
    if columns % tile == 0:
        return entries.reshape(rows, columns // tile)
    if tile % columns == 0 and rows % (tile // columns) == 0:
        return entries.reshape(rows * columns // tile, 1)
    smaller = math.gcd(columns, tile)
    at = np.arange(0, rows * columns, smaller) // tile
    return entries[at].reshape(rows, columns // smaller)


def sort_by_group(groups: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Sort columns by their groups, so that the columns of a group are neighbors.

    **Arguments:**

    - `groups`: the group of each column, `int[columns]`.

    **Returns:** the order of the columns, `int32[columns]`, or None if they are already sorted; and
    the group of each tile, `int[tiles]`. Tiles have equal sizes, so a large group has several.
    """
    order = None
    if (np.diff(groups) < 0).any():
        order = np.argsort(groups, kind="stable").astype(np.int32)
        groups = groups[order]
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    tile = math.gcd(len(groups), *map(int, starts))
    return order, groups[::tile]
