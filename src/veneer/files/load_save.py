"""Save a tree of arrays with `vn.save`, and load it, or another checkpoint, with `vn.load`."""

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from .. import tree as vtree
from ..placement import match_shardings, put
from .checkpoint import LazyTensors, convert, open_checkpoint
from .folder import FolderWriter, TensorFolder, as_jax
from .new_folder import write_aside
from .tensor_file import is_text
from .tree_decoding import NotStored, decode, read_array, restore
from .tree_encoding import Node, Path, encode


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    overwrite: bool = False,
    format: str | None = None,
    config: Mapping[str, Any] | None = None,
    names: str | None = None,
) -> None:
    """Save a tree of arrays to a folder. `vn.load` returns it exactly.

    The folder holds safetensors files and a `veneer.json` that describes each tensor. A `QArray` is
    stored packed. The folder appears only when it is complete.

    **Arguments:**

    - `path`: the folder to create. For `format="gguf"`, the file.
    - `tree`: a pytree with string or integer keys and at most 100 levels. Modules of flax.nnx and
      Equinox, optimizer states and parts of a tree (`vn.tree.partition`) are allowed. See the table
      below for leaves.
    - `overwrite`: whether to replace a folder that `save` wrote, in any format, or a GGUF file. The
      old one stays until the new one is complete.
    - `format`: the format of another library: "gptq", "awq", "compressed-tensors", "mlx" or "gguf".
      Tensors are named by their paths. Values are not rounded again, so each `QArray` `[out, in]`
      must have a format and tiles that the library can store. None writes the format of Veneer.
    - `config`: a dict of further entries of `config.json` or, for GGUF, of the metadata. It needs
      `format`.
    - `names`: for `format="gguf"`: "huggingface" if the tensors have the names and the row order
      of Hugging Face, None if they have the names and the row order of GGUF.

    | leaf | stored as |
    |---|---|
    | a NumPy or JAX array (dtypes: see below) | a tensor |
    | an implicit array of any type | its arrays and its metadata |
    | a random key (`jax.random.key`) | its data and the name of its implementation |
    | a Python bool, string, integer or finite float | its value |
    | a function, a NumPy dtype or an enum member | its name; `vn.load` then needs `like` |

    Dtypes are bool, integers and floats of 8 to 64 bits, and complex64.

    **Raises:**

    - `TypeError` if `path` is not a path, or if a leaf is a tracer or has a type or dtype that is
      not listed above. The error names the path of the leaf.
    - `TypeError` if a key is neither a string nor an integer, or `config` is not JSON.
    - `ValueError` if `format` is None and `path` ends in .gguf or .safetensors. Without `format`,
      `save` writes a folder.
    - `ValueError` if `format` is not listed above or cannot hold a tensor (the error names it), if
      two tensors get the same name, if the tree is too deep, or if `config` or `names` is passed
      without `format`.
    - `FileExistsError` if `path` exists and `overwrite` is False, or if `path` has files that
      `save` did not write.
    - `BlockingIOError` if another process or thread is saving to `path`.
    - `OSError` if the files cannot be written.

    >>> import tempfile, jax.numpy as jnp, veneer as vn
    >>> q = vn.quant.quantize(jnp.ones((4, 8)), "nf4", channelwise_axes=[0])
    >>> path = tempfile.mkdtemp() + "/weights"
    >>> vn.save(path, {"layers": [{"w": q, "b": jnp.zeros(8)}]})
    >>> vn.load(path)["layers"][0]["b"].shape
    (8,)
    """
    _check_path(path, format)
    if format is not None:
        leaves, _ = vtree.flatten_with_path(tree)
        tensors = {vtree.path_string(path): x for path, x in leaves}
        if len(tensors) < len(leaves):
            raise ValueError("two arrays of the tree have the same name")
        for name in tensors:
            if not is_text(name):
                raise ValueError(f"the array name {name!r} is not valid Unicode text")
        convert(path, tensors, format, config=config, overwrite=overwrite, names=names)
        return
    if config is not None or names is not None:
        raise ValueError("config and names need format: pass format='gguf' or another")
    encoded, tensors = encode(tree)
    with write_aside(path, overwrite=overwrite) as folder:
        writer = FolderWriter(folder, tensors)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish(encoded)


def _check_path(path: Any, format: str | None) -> None:
    """Check the arguments `path` and `format` of `save`.

    **Raises:** `TypeError` if `path` is not a path. `ValueError` if `format` is None, so that a
    folder is written, and `path` ends like the name of a file: .gguf or .safetensors.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"path must be a string or a Path, not a {type(path).__name__}. "
            "Pass the path first: vn.save(path, tree)"
        )
    suffix = os.path.splitext(path)[1].lower()
    if format is None and suffix in (".gguf", ".safetensors"):
        remedy = " To write a GGUF file, pass format='gguf'." if suffix == ".gguf" else ""
        raise ValueError(
            f"vn.save writes a folder, and {os.fspath(path)!r} is the name of a file. Name the "
            f"folder without {suffix}.{remedy}"
        )


def load(
    path: str | os.PathLike[str],
    *,
    like: Any = None,
    verify: bool = False,
    raw: bool = False,
    names: str | None = None,
    shardings: Any = None,
) -> Any:
    """Load a folder that `vn.save` or `veneer quantize` wrote, or another checkpoint.

    It reads safetensors files, Hugging Face folders and GGUF files. Quantized weights of other
    libraries (GGUF, GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes, MXFP4, torchao, MLX) stay
    packed: each is one implicit array with the name and the shape of the dense weight.

    **Arguments:**

    - `path`: a folder or a file.
    - `like`: a tree with the saved structure. It is needed to restore modules, optimizer states and
      other classes. Leaves can be abstract (`jax.ShapeDtypeStruct`). A dense leaf accepts a saved
      implicit array of its shape and dtype. If a leaf has a `NamedSharding`, the loaded array gets
      the same sharding.
    - `verify`: whether to compare all data with the checksums in `veneer.json`.
    - `raw`: whether to return safetensors of other libraries as stored, without decoding them.
    - `names`: for GGUF files: "huggingface" returns tensors with the names and the row order of
      Hugging Face, None with the names and the row order of GGUF.
    - `shardings`: the shardings of the arrays, as for `vn.device_put`. Each array is placed before
      the next is read. Pass either `shardings` or `like`, not both.

    **Returns:** the tree that `vn.save` saved. Without `like`, modules, named tuples and other
    pytree classes are returned as dicts. For other checkpoints, a flat dict from names to arrays.
    Leaves are JAX arrays and implicit arrays. A leaf is a NumPy array if `like` has one at the same
    path, or if JAX would drop bits (64-bit dtypes without `jax_enable_x64`).

    **Raises:**

    - `FileNotFoundError` if nothing is at `path`.
    - `ValueError` if a file is truncated, damaged or pickled, was saved by a newer version of
      Veneer, or has packed codes of an unknown format.
    - `ValueError` if the saved tree differs from `like` (the error names the path), or if it cannot
      be restored without `like`.
    - `ValueError` if `verify` is True and a checksum differs or is missing.

    >>> import tempfile, numpy as np, safetensors.numpy, veneer as vn
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> safetensors.numpy.save_file({"encoder.weight": np.ones((2, 3))}, path)
    >>> vn.load(path)["encoder.weight"].shape
    (2, 3)
    """
    if like is not None and shardings is not None:
        raise ValueError("pass like or shardings, not both: the arrays of like have shardings")
    with open_checkpoint(path, raw=raw, verify=verify, names=names) as source:
        tensors = _TensorsByName(source)
        node = source.manifest.tree if isinstance(source, TensorFolder) else None
        if node is None:
            node = {"dict": [[name, {"tensor": name}] for name in tensors]}
        if like is None:
            return _load_placed(path, node, tensors, shardings)
        with _name_folder_in_errors(path, ValueError):
            return restore(node, tensors, like)


class _DamagedTensor(ValueError):
    """An error about one tensor, whose message already names the file."""


class _TensorsByName(LazyTensors):
    """A mapping from names to tensors of an open checkpoint. Each lookup reads the tensor.

    Errors of reading are raised as `_DamagedTensor`, so that callers can tell them from errors
    about the structure of the tree.
    """

    def __getitem__(self, name: str) -> Any:
        if name not in self.source:
            raise KeyError(name)
        try:
            return self.source.read(name)
        except ValueError as error:
            raise _DamagedTensor(*error.args) from error


class _Placeholder:
    """A leaf in place of an array that has not been read. `path` is its path in the tree."""

    def __init__(self, path: Path):
        self.path = path


def _load_placed(path: Any, node: Node, tensors: Mapping[str, Any], shardings: Any) -> Any:
    """Return the tree of a checkpoint. Each array is put on its devices before the next is read.

    **Arguments:**

    - `path`: the path of the checkpoint, for error messages.
    - `node`: the JSON of the tree.
    - `tensors`: the tensors, which are read on lookup.
    - `shardings`: as in `load`.
    """
    with _name_folder_in_errors(path, NotStored):
        tree = decode(node, lambda at, _: _Placeholder(at))
    leaves, _ = vtree.flatten_with_path(tree)
    places = [None] * len(leaves) if shardings is None else match_shardings(tree, shardings)
    destinations = {
        leaf.path: (vtree.path_string(key_path), place)
        for (key_path, leaf), place in zip(leaves, places, strict=True)
        if isinstance(leaf, _Placeholder)
    }

    def load_array(at: Path, node: Node) -> Any:
        # JAX frees the host copy of the previous array only when garbage is collected.
        gc.collect(0)
        with _name_folder_in_errors(path, NotStored):
            value = read_array(at, node, tensors)
        name, place = destinations[at]
        value = jax.tree.map(as_jax, value) if place is None else put([name], [value], [place])[0]
        return jax.block_until_ready(value)

    return decode(node, load_array)


@contextlib.contextmanager
def _name_folder_in_errors(path: Any, expected: type[Exception]) -> Iterator[None]:
    """Add `path`, the path of the folder, to errors of a `with` block.

    Errors of the type `expected` keep their message. Others mean that the JSON of the tree in
    `veneer.json` is damaged, and the message says so. All become `ValueError`. A `_DamagedTensor`
    already names the file, and is unchanged.
    """
    try:
        yield
    except _DamagedTensor:
        raise
    except expected as error:
        raise ValueError(f"{path}: {error}") from None
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the 'tree' of veneer.json is damaged: {error!r}") from error
