"""`write_gguf`: a GGUF file, whole or not at all."""

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from ....quant import QArray
from ...new_folder import replacing
from .blocks import BLOCK_TYPES, DENSE_TYPES
from .container import LONGEST_NAME, MAGIC, MOST_AXES, VERSIONS, aligned, alignment_of, nbytes_of
from .metadata import write_string, write_value
from .names import order_of_rows, stored_names
from .tensors import Encoded, encode, without_factors

_NUMBER_OF = {dtype: number for number, (_, dtype) in DENSE_TYPES.items()}

# The version of the layouts of blocks, which llama.cpp asks for.
_QUANTIZATION_VERSION = ("general.quantization_version", 2)


def write_gguf(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    *,
    names: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a GGUF file of version 3, which holds every code, scale and minimum exactly.

    A QArray is written in the smallest type of blocks that holds it: int4 with a scale for 32
    values along the last axis as Q4_0, int8 as Q8_0, what `GgufFile` has read as what it was.
    Scales of wider tiles are repeated, those of f32 written where they are numbers of f16, and
    zero points taken into the codes.

    **Arguments:**

    - `path`: the file to make, usually `.gguf`. It appears when it is complete.
    - `tensors`: arrays `[out, in]`, of up to 4 axes, by names of at most 63 bytes: QArrays, and
      NumPy or JAX arrays of float16, bfloat16, float32, float64 and int8 to int64. A mapping that
      reads each when it is looked up is looked up twice, and one tensor at a time.
    - `metadata`: as that of `GgufFile`. Python's integers are written in 4 bytes if they fit, its
      floats as f32, NumPy's numbers and arrays in their dtypes. What says that a file is in parts
      is left out.
    - `names`: None where the names are GGUF's, or "huggingface" where they, and the order of rows
      of queries and keys, are those of the model's own checkpoint, of the architecture that
      `metadata` says. Vectors of 16 bits, norms and biases, are then f32, as llama.cpp has them.
    - `overwrite`: whether a GGUF file that is there may be replaced.

    **Raises:** `ValueError` naming the tensor that GGUF cannot hold, and why; `TypeError` for what
    is no array and for metadata that GGUF does not have; `FileExistsError` where `path` exists;
    `BlockingIOError` where another process or thread saves `path`. In each case nothing is written.

    >>> import tempfile, jax.numpy as jnp, veneer as vn
    >>> from veneer.interop.checkpoints.gguf import GgufFile, write_gguf
    >>> w = vn.quant.quantize(
    ...     jnp.ones((2, 64)), "int4", channelwise_axes=[0], tiled_axes={1: 32},
    ...     scale_dtype="float16",
    ... )
    >>> path = tempfile.mkdtemp() + "/model.gguf"
    >>> write_gguf(path, {"w": w, "b": jnp.zeros(2)})
    >>> with GgufFile(path) as file:
    ...     file.types()
    {'w': 'Q4_0', 'b': 'F32'}
    """
    metadata = {k: v for k, v in (metadata or {}).items() if not str(k).startswith("split.")}
    # Each tensor is looked up twice, and not kept: it may be one that is read when it is asked for.
    layout: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, tensor, _ in _stored(tensors, metadata, names):
        if name in layout:
            raise ValueError(f"there are two tensors for {name!r}")
        layout[name] = _layout(tensor)
    if any(type in BLOCK_TYPES for type, _ in layout.values()):
        metadata.setdefault(*_QUANTIZATION_VERSION)
    alignment = alignment_of(metadata)
    header = _header(metadata, layout, alignment)
    with _aside(Path(path), overwrite) as file:
        file.write(header)
        for name, tensor, order in _stored(tensors, metadata, names):
            _pad(file, alignment)
            if _layout(tensor) != layout[name]:
                raise ValueError(
                    f"tensor {name!r} changed from {layout[name]} to {_layout(tensor)}"
                )
            if isinstance(tensor, Encoded):
                file.writelines(part.data for part in tensor.parts(order))
            else:
                file.write((tensor if order is None else tensor[order]).tobytes())
        _pad(file, alignment)


def _stored(
    tensors: Mapping[str, Any], metadata: Mapping[str, Any], names: str | None
) -> Iterator[tuple[str, "Encoded | np.ndarray", np.ndarray | None]]:
    """The tensors as they are stored, one at a time: GGUF's name, and which row comes where."""
    stored: dict[str, str | list[str]] = {name: name for name in tensors}
    if names == "huggingface":
        stored = stored_names(metadata, tensors)
    elif names is not None:
        raise ValueError(f"names must be 'huggingface' or None, not {names!r}")
    for name, of in stored.items():
        if isinstance(of, str):
            value = _array(of, tensors[of])
        else:
            value = _stacked(name, [_array(expert, tensors[expert]) for expert in of])
        order = None
        if names is not None:
            order = order_of_rows(name, value.shape, metadata)
            if value.ndim == 1 and value.dtype.name in ("float16", "bfloat16"):
                value = value.astype(np.float32)
        factors = None
        if isinstance(value, QArray) and name.endswith(".weight"):
            value, factors = without_factors(value)
        encoded = _encoded(name, value)
        yield name, encoded, None if order is None else np.argsort(order)
        if factors is not None:
            # The factors of scales of NVFP4 are a tensor beside it.
            yield f"{name.removesuffix('weight')}scale", factors, None


def _layout(tensor: "Encoded | np.ndarray") -> tuple[int, tuple[int, ...]]:
    """The number of the type of a tensor, and its shape."""
    if isinstance(tensor, Encoded):
        return tensor.type.number, tensor.q.shape
    return _NUMBER_OF[tensor.dtype], tensor.shape


def _array(name: str, value: Any) -> "QArray | np.ndarray":
    if isinstance(value, QArray):
        return value
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        with contextlib.suppress(TypeError):  # of a key, and of what is traced
            array = np.asarray(value)
            return array.astype(array.dtype.newbyteorder("="), copy=False)
    raise TypeError(
        f"tensor {name!r} is a {type(value).__name__}, but GGUF can hold only QArrays and dense "
        "arrays: convert it, for example with vn.materialise"
    )


def _stacked(name: str, values: "list[QArray | np.ndarray]") -> Any:
    """The experts of a layer as one tensor."""
    if len({(jax.tree.structure(value), value.shape, value.dtype) for value in values}) > 1:
        raise ValueError(f"the experts of {name!r} differ in shape or format")
    return jax.tree.map(lambda *leaves: np.stack(leaves), *values)


def _encoded(name: str, value: "QArray | np.ndarray") -> "Encoded | np.ndarray":
    if not 0 < len(name.encode()) <= LONGEST_NAME:
        raise ValueError(f"names in GGUF have at most {LONGEST_NAME} bytes: shorten {name!r}")
    if value.ndim > MOST_AXES:
        raise ValueError(
            f"tensor {name!r} has shape {value.shape}, but GGUF has at most {MOST_AXES} axes"
        )
    if isinstance(value, QArray):
        try:
            return encode(value)
        except ValueError as error:
            raise ValueError(
                f"GGUF cannot hold tensor {name!r}, a QArray of {value.qtype} {list(value.shape)} "
                f"in tiles of {list(value.tile_shape)}: {error}. Quantize it accordingly "
                "(vn.quant.Rule has tile_size, tile_axis and scale_dtype='float16'), or save "
                "vn.materialise of it"
            ) from None
    if value.dtype not in _NUMBER_OF:
        raise ValueError(
            f"tensor {name!r} is {value.dtype.name}, but GGUF has only "
            f"{', '.join(dtype.name for dtype in _NUMBER_OF)}: convert it with astype"
        )
    return value


def _header(
    metadata: Mapping[str, Any], layout: Mapping[str, tuple[int, tuple[int, ...]]], alignment: int
) -> bytes:
    header = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(layout), len(metadata))]
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise TypeError(f"keys of metadata must be strings, not {key!r}")
        try:
            header += [write_string(key), write_value(value)]
        except TypeError as error:
            raise TypeError(f"metadata {key!r}: {error}") from None
    offset = 0
    for name, (type, shape) in layout.items():
        header += [write_string(name), struct.pack("<I", len(shape))]
        header.append(struct.pack(f"<{len(shape)}Q", *reversed(shape)))
        header.append(struct.pack("<IQ", type, offset))
        offset = aligned(offset + nbytes_of(shape, type), alignment)
    return b"".join(header)


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


@contextlib.contextmanager
def _aside(path: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """Opens a new file that becomes `path` when the block ends, and vanishes when it fails."""
    refusal = lambda path: None if _is_gguf(path) else "it is not a GGUF file"
    with (
        replacing(path, overwrite=overwrite, refusal=refusal) as aside,
        aside.open("xb") as file,
    ):
        yield file


def _is_gguf(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
