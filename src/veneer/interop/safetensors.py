"""Trees of arrays in safetensors files: `save` and `load`."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._core.surface.array import ImplicitArray
from ..quant import ActivationQuantized, QArray
from .folder import DTYPES, FolderWriter, TensorFolder, as_jax, write_aside
from .manifest import BYTE_FLOATS, MAX_LEVELS

_HOLDS = (
    "a saved tree holds dicts, lists, tuples, None, NumPy and JAX arrays, QArrays, and these in an "
    "ActivationQuantized"
)


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Saves a tree of arrays as the folder `path`; `load` is the inverse, exact to the bit.

    The folder holds safetensors, in which a QArray is stored packed, and `veneer.json`, which says
    how to read each tensor without veneer.

    **Arguments:**

    - `path`: the folder to make. It appears when it is complete.
    - `tree`: dicts (of string or integer keys), lists, tuples and None, nested in at most 100
      levels; the leaves are QArrays, alone or in an `ActivationQuantized`, and NumPy or JAX arrays
      of any shape, of the dtypes bool, [u]int8 to [u]int64, float16, bfloat16, float32, float64 and
      complex64.

    **Raises:** `FileExistsError` where `path` exists. `TypeError` naming the path in the tree and
    the type of anything else, and `ValueError` for a tree of more levels, before anything is
    written.

    >>> import tempfile, jax.numpy as jnp, veneer as vn
    >>> q = vn.quant.quantize(jnp.ones((4, 8)), "nf4", channelwise_axes=[0])
    >>> path = tempfile.mkdtemp() + "/weights"
    >>> vn.save(path, {"layers": [{"w": q, "b": jnp.zeros(8)}]})
    >>> vn.load(path)["layers"][0]["b"].shape
    (8,)
    """
    leaves: dict[str, Any] = {}
    structure = _encode(tree, (), leaves)
    with write_aside(path) as folder:
        writer = FolderWriter(folder, leaves)
        for name, leaf in leaves.items():
            writer.add(name, leaf)
        writer.finish(structure)


def load(path: str | os.PathLike[str], *, verify: bool = False) -> Any:
    """Loads what `save` or `veneer quantize` wrote, or any safetensors file or Hugging Face folder.

    **Arguments:**

    - `path`: a folder or a file.
    - `verify`: whether to compare the checksums of all that is read with those in `veneer.json`, in
      which `save` and `veneer quantize` write them.

    **Returns:** the tree that was saved; for other files, a flat dict from names to arrays. Leaves
    are JAX arrays and QArrays of them, and NumPy arrays where JAX would drop bits (64-bit dtypes
    without `jax_enable_x64`).

    **Raises:** `FileNotFoundError` where there is nothing. `ValueError`, in one line, where a file
    is truncated, is not what it claims, is pickled, or has a newer layout than this version reads;
    with `verify`, also where a single bit is not what was written, and where there are no
    checksums.

    >>> import tempfile, numpy as np, safetensors.numpy, veneer as vn
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> safetensors.numpy.save_file({"encoder.weight": np.ones((2, 3))}, path)
    >>> vn.load(path)["encoder.weight"].shape
    (2, 3)
    """
    with TensorFolder(path, verify=verify) as source:
        values = {name: _as_jax(source.read(name)) for name in source}
        structure = source.manifest.tree
    if structure is None:
        return values
    try:
        return _decode(structure, values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the 'tree' of veneer.json is damaged: {error!r}") from error


def _as_jax(value: np.ndarray | QArray) -> jax.Array | np.ndarray | QArray:
    return value if isinstance(value, QArray) else as_jax(value)


def _encode(node: Any, path: tuple[str | int, ...], leaves: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a node of the tree; its leaves are put into `leaves` under new names."""
    if len(path) > MAX_LEVELS:
        raise ValueError(f"the tree has more than {MAX_LEVELS} levels, at {_where(path[:3])}...")
    # Exact types: a subclass (a namedtuple, an OrderedDict) would come back as something else.
    if node is None:
        return {"none": True}
    if type(node) is dict:
        for key in node:
            if type(key) not in (str, int):
                raise TypeError(f"{_where(path)} has the key {key!r}: keys are strings or integers")
        # Pairs, because JSON would turn integer keys into strings.
        return {"dict": [[key, _encode(x, (*path, key), leaves)] for key, x in node.items()]}
    for container, constructor in _SEQUENCES.items():
        if type(node) is constructor:
            return {container: [_encode(x, (*path, i), leaves) for i, x in enumerate(node)]}
    if type(node) is ActivationQuantized:
        parts = {k: _encode(getattr(node, k), (*path, k), leaves) for k in _ACTIVATION_LEAVES}
        how = {k: getattr(node, k) for k in _ACTIVATION_METADATA}
        return {"activation_quantized": parts | how}
    _check_leaf(node, path)
    name = ".".join(map(str, path)) or "array"
    while name in leaves:  # {"a.b": x, "a": {"b": y}}
        name += "_"
    leaves[name] = np.asarray(node) if isinstance(node, np.generic) else node
    return {"tensor": name}


_SEQUENCES: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple}

_ACTIVATION_LEAVES = ("array", "scale", "zero_point")
_ACTIVATION_METADATA = ("qtype", "calibration_method", "contracting", "op_names")


def _decode(node: Any, leaves: dict[str, Any]) -> Any:
    ((kind, content),) = node.items()
    if kind == "none":
        return None
    if kind == "tensor":
        return leaves[content]
    if kind == "dict":
        return {key: _decode(child, leaves) for key, child in content}
    if kind == "activation_quantized":
        parts = (_decode(content[k], leaves) for k in _ACTIVATION_LEAVES)
        return ActivationQuantized(
            *parts, **{k: content[k] for k in _ACTIVATION_METADATA if k in content}
        )
    return _SEQUENCES[kind](_decode(child, leaves) for child in content)


def _check_leaf(leaf: Any, path: tuple[str | int, ...]) -> None:
    arrays: Sequence[Any] = (leaf,)
    dtypes = [*DTYPES.values()]
    if type(leaf) is QArray:
        arrays = jax.tree.leaves(leaf)
        dtypes += BYTE_FLOATS
    elif isinstance(leaf, ImplicitArray):
        raise TypeError(
            f"{_where(path)} is {_type(leaf)}: {_HOLDS}. Save its leaves, or its dense form "
            "(veneer.materialise); what was trained quantised, after vn.quant.convert"
        )
    for array in arrays:
        if isinstance(array, jax.core.Tracer):
            raise TypeError(f"{_where(path)} is traced: save outside jit, grad and vmap")
        if isinstance(array, bool | int | float | complex) and not isinstance(array, np.generic):
            raise TypeError(f"{_where(path)} is {_type(array)}: {_HOLDS}. Wrap it: numpy.asarray")
        if not (type(array) is np.ndarray or isinstance(array, jax.Array | np.generic)):
            raise TypeError(
                f"{_where(path)} is {_type(array)}: {_HOLDS}. Turn containers of other types into "
                "dicts, and arrays of other libraries into NumPy's"
            )
        if array.dtype.name not in dtypes:
            raise TypeError(
                f"{_where(path)} has dtype {array.dtype}, which is not stored as it is: cast it to "
                f"one of {', '.join(DTYPES.values())}; a QArray stores integers of 1 to 8 bits and "
                "floats of 4 to 8"
            )


def _where(path: tuple[str | int, ...]) -> str:
    return "tree" + "".join(f"[{key!r}]" for key in path)


def _type(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"
