"""Trees of arrays in safetensors files: `save` and `load`."""

import os
from typing import Any

import jax
import numpy as np

from ..quant import QArray
from . import structure
from .folder import FolderWriter, TensorFolder, as_jax, write_aside


def save(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> None:
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
    - `overwrite`: whether a folder that `save` has written may be replaced. The one that is there
      stays until the new one is complete.

    **Raises:** `FileExistsError` where `path` exists; with `overwrite`, where it holds something
    that `save` does not write. `TypeError` naming the path in the tree and the type of anything
    else, and `ValueError` for a tree of more levels, before anything is written.

    >>> import tempfile, jax.numpy as jnp, veneer as vn
    >>> q = vn.quant.quantize(jnp.ones((4, 8)), "nf4", channelwise_axes=[0])
    >>> path = tempfile.mkdtemp() + "/weights"
    >>> vn.save(path, {"layers": [{"w": q, "b": jnp.zeros(8)}]})
    >>> vn.load(path)["layers"][0]["b"].shape
    (8,)
    """
    encoded, leaves = structure.encode(tree)
    with write_aside(path, overwrite=overwrite) as folder:
        writer = FolderWriter(folder, leaves)
        for name, leaf in leaves.items():
            writer.add(name, leaf)
        writer.finish(encoded)


def load(path: str | os.PathLike[str], *, like: Any = None, verify: bool = False) -> Any:
    """Loads what `save` or `veneer quantize` wrote, or any safetensors file or Hugging Face folder.

    **Arguments:**

    - `path`: a folder or a file.
    - `like`: a tree of the structure that was saved, for one that holds more than dicts, lists,
      tuples and arrays: modules, states of optimisers. Its arrays may be abstract
      (`jax.ShapeDtypeStruct`), and dense where an array of some type was saved that stands for one
      of that shape and dtype. Those with a `NamedSharding` say where what is read goes.
    - `verify`: whether to compare the checksums of all that is read with those in `veneer.json`, in
      which `save` and `veneer quantize` write them.

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
    with TensorFolder(path, verify=verify) as source:
        values = {name: _as_jax(source.read(name)) for name in source}
        node = source.manifest.tree
    if node is None:
        node = {"dict": [[name, {"tensor": name}] for name in values]}
    try:
        tree = structure.decode(node, values) if like is None else None
    except structure.NotStored as error:
        raise ValueError(f"{path}: {error}") from None
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the 'tree' of veneer.json is damaged: {error!r}") from error
    if like is None:
        return tree
    try:
        return structure.restore(node, values, like)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (AttributeError, KeyError, StopIteration, TypeError) as error:
        raise ValueError(f"{path}: the 'tree' of veneer.json is damaged: {error!r}") from error


def _as_jax(value: np.ndarray | QArray) -> jax.Array | np.ndarray | QArray:
    return value if isinstance(value, QArray) else as_jax(value)
