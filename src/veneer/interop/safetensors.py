"""Trees of arrays in safetensors files: `save` and `load`."""

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from .. import tree as vtree
from ..placement import put, shardings_of
from . import structure
from .checkpoints.opened import OnReading, open_checkpoint
from .checkpoints.writing import convert
from .folder import FolderWriter, TensorFolder, as_jax
from .new_folder import write_aside
from .tensor_file import is_text


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    overwrite: bool = False,
    format: str | None = None,
    config: Mapping[str, Any] | None = None,
    names: str | None = None,
) -> None:
    """Saves a tree of arrays as the folder `path`; `load` is the inverse, exact to the bit.

    The folder holds safetensors, in which a QArray is stored packed, and `veneer.json`, which says
    how to read each tensor without veneer.

    **Arguments:**

    - `path`: the folder to make. It appears when it is complete.
    - `tree`: any pytree (of string or integer keys, in at most 100 levels): dicts and lists, the
      modules of flax.nnx and Equinox and their states, those of optimisers, a part of a tree
      (`vn.tree.partition`). Leaves are NumPy or JAX arrays of any shape, of the dtypes bool,
      [u]int8 to [u]int64, float16, bfloat16, float32, float64 and complex64; keys of random
      numbers; bools, finite numbers and strings of Python's; and arrays of every type, with their
      metadata. Of functions and other objects that are no arrays the name is saved.
    - `overwrite`: whether a folder that `save` has written, of whatever format, may be replaced, or
      by a GGUF file another. What is there stays until the new one is complete.
    - `format`: "gptq", "awq", "compressed-tensors", "mlx" or "gguf", for a folder (of GGUF, a file)
      as other libraries read it, of arrays by the names that their paths make. A `QArray`
      `[out, in]` is stored packed, if that format has its bits; nothing is rounded.
    - `config`: what else the `config.json` of such a folder says, of the model; of GGUF, metadata.
    - `names`: "huggingface" where a GGUF file is made of arrays by those names, in that order of
      rows; None where they are GGUF's own.

    **Raises:** `ValueError` naming a tensor that `format` cannot hold, and why.
    `FileExistsError` where `path` exists; with `overwrite`, where it holds something
    that `save` does not write. `BlockingIOError` where another process or thread saves `path` at
    the moment. `TypeError` naming the path in the tree and the type of anything
    else, and `ValueError` for a tree of more levels, before anything is written.

    >>> import tempfile, jax.numpy as jnp, veneer as vn
    >>> q = vn.quant.quantize(jnp.ones((4, 8)), "nf4", channelwise_axes=[0])
    >>> path = tempfile.mkdtemp() + "/weights"
    >>> vn.save(path, {"layers": [{"w": q, "b": jnp.zeros(8)}]})
    >>> vn.load(path)["layers"][0]["b"].shape
    (8,)
    """
    if format is not None:
        found, _ = vtree.flatten_with_path(tree)
        tensors = {vtree.path_string(path): x for path, x in found}
        if len(tensors) < len(found):
            raise ValueError("two arrays of the tree have the same name")
        for name in tensors:
            if not is_text(name):
                raise ValueError(f"the array name {name!r} is not valid Unicode text")
        convert(path, tensors, format, config=config, overwrite=overwrite, names=names)
        return
    if config is not None or names is not None:
        raise ValueError("config and names need format: pass format='gguf' or another")
    encoded, leaves = structure.encode(tree)
    with write_aside(path, overwrite=overwrite) as folder:
        writer = FolderWriter(folder, leaves)
        for name, leaf in leaves.items():
            writer.add(name, leaf)
        writer.finish(encoded)


def load(
    path: str | os.PathLike[str],
    *,
    like: Any = None,
    verify: bool = False,
    raw: bool = False,
    names: str | None = None,
    shardings: Any = None,
) -> Any:
    """Loads what `save` or `veneer quantize` wrote, or any safetensors file or Hugging Face folder.

    What another library quantised (GGUF, GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes, MXFP4,
    MLX) gives the names and shapes of the dense checkpoint, and each quantised weight is one
    array, packed. An error is raised for packed codes of an unknown library, and for a folder
    of `save` without its `veneer.json`.

    **Arguments:**

    - `path`: a folder or a file.
    - `like`: a tree of the structure that was saved, for one that holds more than dicts, lists,
      tuples and arrays: modules, states of optimisers. Its arrays may be abstract
      (`jax.ShapeDtypeStruct`), and dense where an array of some type was saved that stands for one
      of that shape and dtype. Those with a `NamedSharding` say where what is read goes.
    - `verify`: whether to compare the checksums of all that is read with those in `veneer.json`, in
      which `save` and `veneer quantize` write them.
    - `raw`: whether to give the tensors of others' files as they are stored, whatever they mean.
    - `names`: "huggingface" for the names and the order of rows of that checkpoint of which a GGUF
      file was made; None for GGUF's. Folders have no others.
    - `shardings`: where arrays go, as for `vn.device_put`: a sharding for all, a tree of them, or
      rules by name. Each array goes to its devices as it is read, so that memory holds the result
      and one array.

    **Returns:** the tree that was saved: with `like`, of its classes; else with a dict in the place
    of each object of a class that is no array type. For other files, a flat dict from names to
    arrays. Leaves are JAX arrays and arrays of their types, and NumPy arrays where JAX would drop
    bits (64-bit dtypes without `jax_enable_x64`), or where they are such in `like`.

    **Raises:** `FileNotFoundError` where there is nothing. `ValueError`, in one line, where a file
    is truncated, is not what it claims, is pickled, or has a newer layout than this version reads;
    where `like` is not what was saved, with the path of what differs, metadata of array types
    included, and where it is needed and missing, for a function among the leaves; with `verify`,
    also where a single bit is not what was written, and where there are no checksums.

    >>> import tempfile, numpy as np, safetensors.numpy, veneer as vn
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> safetensors.numpy.save_file({"encoder.weight": np.ones((2, 3))}, path)
    >>> vn.load(path)["encoder.weight"].shape
    (2, 3)

    The state of an optimiser, to go on where one was:

    >>> import jax, jax.numpy as jnp, optax
    >>> optimiser, params = optax.adam(1e-3), {"w": jnp.ones(2)}
    >>> path = tempfile.mkdtemp() + "/state"
    >>> vn.save(path, optimiser.init(params))
    >>> state = vn.load(path, like=jax.eval_shape(optimiser.init, params))
    >>> type(state[0]).__name__
    'ScaleByAdamState'
    """
    if like is not None and shardings is not None:
        raise ValueError("pass like or shardings, not both: the arrays of like have shardings")
    with open_checkpoint(path, raw=raw, verify=verify, names=names) as source:
        leaves = _TensorsByName(source)
        node = source.manifest.tree if isinstance(source, TensorFolder) else None
        if node is None:
            node = {"dict": [[name, {"tensor": name}] for name in leaves]}
        if like is None:
            return _placed(path, node, leaves, shardings)
        with _told_of(path, ValueError):
            return structure.restore(node, leaves, like)


class _Unreadable(ValueError):
    """What is wrong with a tensor, said of its file already."""


class _TensorsByName(OnReading):
    """The tensors of a checkpoint by name, each read when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.source:
            raise KeyError(name)
        try:
            return self.source.read(name)
        except ValueError as error:
            raise _Unreadable(*error.args) from error


def _placed(path: Any, node: Any, leaves: Mapping[str, Any], shardings: Any) -> Any:
    """The tree of a node, each array where it goes before the next is read."""
    with _told_of(path, structure.NotStored):
        tree = structure.decode(node, lambda at, _: _Awaited(at))
    found, _ = vtree.flatten_with_path(tree)
    asked = [None] * len(found) if shardings is None else shardings_of(tree, shardings)
    goes = {
        awaited.at: (vtree.path_string(at), device)
        for (at, awaited), device in zip(found, asked, strict=True)
        if isinstance(awaited, _Awaited)
    }

    def array(at: structure.Path, node: Any) -> Any:
        # What was read is held until it has been copied, and JAX lets go of it as garbage.
        gc.collect(0)
        with _told_of(path, structure.NotStored):
            value = structure.array_of(at, node, leaves)
        name, device = goes[at]
        value = jax.tree.map(as_jax, value) if device is None else put([name], [value], [device])[0]
        return jax.block_until_ready(value)

    return structure.decode(node, array)


class _Awaited:
    """In the place of an array that has not been read: where in the tree it is."""

    def __init__(self, at: structure.Path):
        self.at = at


@contextlib.contextmanager
def _told_of(path: Any, plain: type[Exception]) -> Iterator[None]:
    """Says of which folder a tree is that is wrong; errors other than `plain` are damage."""
    try:
        yield
    except _Unreadable:
        raise
    except plain as error:
        raise ValueError(f"{path}: {error}") from None
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the 'tree' of veneer.json is damaged: {error!r}") from error
