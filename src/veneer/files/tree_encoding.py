"""Encode the structure of a tree as JSON, for the entry 'tree' of `veneer.json`.

The JSON describes how the tensors nest. An implicit array is stored with its type and its metadata.
For other classes, such as modules and optimizer states, only the names of their children are
stored. To restore such a class, `vn.load` needs a tree of the same classes (`like`).
"""

import contextlib
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from .._core.errors import CHECK_BUGS
from .._core.tree import checks_of
from .._core.value import Value
from ..quant import Packing, QArray
from .manifest import BYTE_FLOATS, MAX_LEVELS
from .tensor_file import DTYPES, is_text

Path = tuple[str | int, ...]
Node = dict[str, Any]

SEQUENCES: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple}


def encode(tree: Any) -> tuple[Node, dict[str, Any]]:
    """Return the structure of a tree as JSON, and a dict from names to its tensors.

    The JSON refers to the tensors by these names, which are made from their paths.

    **Raises:** `TypeError`, naming the path, for a leaf or key that cannot be stored. `ValueError`
    if the tree is too deep.
    """
    leaves: dict[str, Any] = {}
    return _encode(tree, (), leaves), leaves


def _encode(node: Any, path: Path, leaves: dict[str, Any]) -> Node:
    if len(path) > MAX_LEVELS:
        raise ValueError(
            f"the tree has more than {MAX_LEVELS} levels, at {describe_path(path[:3])}..."
        )
    if node is None:
        return {"none": True}
    if type(node) is QArray and _has_all_leaves(node):
        return _encode_tensor(node, path, leaves)
    inside = flatten_one_level(node, path)
    if inside is None:
        return _encode_leaf(node, path, leaves)
    # JAX sorts the keys of a dict. The file keeps their order.
    children = node if type(node) is dict else dict(zip(*inside[:2], strict=True))
    pairs = [[key, _encode(child, (*path, key), leaves)] for key, child in children.items()]
    if type(node) is dict:
        return {"dict": pairs}  # pairs, because JSON would turn integer keys into strings
    for kind, constructor in SEQUENCES.items():
        if type(node) is constructor:
            return {kind: [child for _, child in pairs]}
    if isinstance(node, Value):
        static = encode_metadata(node, inside[0])
        encoded: Node = {"array": name_of_class(type(node)), "fields": pairs, "static": static}
        # Optimizer states have the structure of an array, but their leaves may not be valid for it.
        return encoded | ({"valid": True} if find_refusal(node) is None else {})
    return {"children": pairs, "of": name_of_class(type(node))}


def flatten_one_level(node: Any, path: Path) -> tuple[list[str | int], list[Any], Any] | None:
    """Return the keys, the children and the treedef of a pytree node, or None for a leaf.

    `path` is the path of the node, for errors.

    **Raises:** `TypeError` for a key that is neither a string nor an integer. `ValueError` for a
    string that is not valid Unicode text.
    """
    treedef: Any
    below, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if treedef.node_data() is None:
        return None
    keys = [_key_of(at[0]) for at, _ in below]
    for key in keys:
        if type(key) not in (str, int):
            raise TypeError(
                f"{describe_path(path)} has the key {key!r}: keys are strings or integers"
            )
        if isinstance(key, str) and not is_text(key):
            raise ValueError(
                f"{describe_path(path)} has the key {key!r}, which is not valid Unicode text"
            )
    return keys, [child for _, child in below], treedef


def _key_of(entry: Any) -> Any:
    if isinstance(entry, DictKey | FlattenedIndexKey):
        return entry.key
    if isinstance(entry, SequenceKey):
        return entry.idx
    return entry.name if isinstance(entry, GetAttrKey) else str(entry)


def _encode_leaf(leaf: Any, path: Path, leaves: dict[str, Any]) -> Node:
    if type(leaf) in (bool, int, str) or (type(leaf) is float and math.isfinite(leaf)):
        return {"value": leaf}
    if is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        _check_not_traced(leaf, path)
        data = _encode_tensor(jax.random.key_data(leaf), path, leaves)
        return {"keys": str(jax.random.key_impl(leaf)), "data": data["tensor"]}
    if is_opaque_leaf(leaf):
        return {"opaque": describe_opaque(leaf)}
    return _encode_tensor(leaf, path, leaves)


def _encode_tensor(leaf: Any, path: Path, leaves: dict[str, Any]) -> Node:
    _check_leaf(leaf, path)
    name = ".".join(map(str, path)) or "array"
    while name in leaves:  # {"a.b": x, "a": {"b": y}}
        name += "_"
    leaves[name] = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    return {"tensor": name}


def _check_leaf(leaf: Any, path: Path) -> None:
    where = describe_path(path)
    for array in jax.tree.leaves(leaf) if type(leaf) is QArray else [leaf]:
        if not is_array(array):
            raise TypeError(
                f"{where} is {describe_type(array)}: a saved tree can hold NumPy and JAX arrays, "
                "implicit arrays, and Python's bools, numbers and strings, in any pytree. Convert "
                "it with numpy.asarray, or register its class as a pytree"
            )
        _check_not_traced(array, path)
        if array.dtype.name not in (*DTYPES.values(), *BYTE_FLOATS):
            raise TypeError(
                f"{where} has dtype {array.dtype}, which cannot be saved: cast it to one of "
                f"{', '.join(DTYPES.values())}. A QArray can hold integers of 1 to 8 bits and "
                "floats of 4 to 8 bits."
            )


def _check_not_traced(array: Any, path: Path) -> None:
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{describe_path(path)} is a tracer: call vn.save outside jit, grad and vmap"
        )


def is_array(x: Any) -> bool:
    """Return whether a leaf is a dense array of NumPy or JAX."""
    return type(x) is np.ndarray or isinstance(x, jax.Array | np.generic)


def is_opaque_leaf(x: Any) -> bool:
    """Return whether `x` is a function, a dtype or an enum member.

    A file stores only the name of such a leaf, so loading takes it from the tree `like`.
    """
    return isinstance(x, np.dtype | enum.Enum) or (callable(x) and not is_array(x))


def _has_all_leaves(q: QArray) -> bool:
    """Return whether every array of a `QArray` is set. `vn.tree.partition` leaves some unset."""
    leaves = [q.packed, q.scale, *(x for x in (q.zero_point, q.minimum) if x is not None)]
    return all(_has_all_leaves(x) if type(x) is QArray else is_array(x) for x in leaves)


def encode_metadata(value: Value, children: Sequence[str | int]) -> dict[str, Any]:
    """Return a dict from the static fields of an implicit array to their JSON.

    `children` are the names of the other fields, which hold arrays.
    """
    fields = dataclasses.fields(value)  # type: ignore[arg-type]
    names = [field.name for field in fields if field.name not in children]
    return {name: encode_static(getattr(value, name, None)) for name in names}


def encode_static(x: Any) -> Any:
    """Return the value of a static field as JSON.

    Numbers, strings, tuples, dtypes and `Packing` are stored as they are. Of any other object, such
    as a function, only the name is stored.
    """
    if x is None or type(x) in (bool, int, str) or (type(x) is float and math.isfinite(x)):
        return x
    if type(x) is tuple:
        return {"tuple": [encode_static(item) for item in x]}
    if type(x) is Packing:
        return {"packing": [*x]}
    if isinstance(x, np.dtype):
        return {"dtype": x.name}
    return {"opaque": describe_opaque(x)}


def describe_opaque(x: Any) -> str:
    """Return the name of an object that files do not store, such as a function.

    Loading compares it with the name of the object in `like`. It is the same in every process,
    because it has no memory address.
    """
    text = getattr(x, "__qualname__", None) or repr(x)
    return describe_type(x) if " at 0x" in text else text


def name_of_class(cls: type) -> str:
    """Return the name of a class in a file.

    Classes of Veneer are stored without their module, so that they can move. Classes of
    `veneer.interop` are stored with it, because some have the names of other classes of Veneer.
    """
    module = cls.__module__
    is_ours = module.startswith("veneer.") and not module.startswith("veneer.interop.")
    return cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}"


def find_refusal(value: Value) -> str | None:
    """Return why the class of an implicit array rejects its fields, or None if it accepts them.

    It runs the checks of the class on abstract values.
    """
    leaves, structure = jax.tree.flatten(value)
    if not all(is_array(leaf) for leaf in leaves):
        return "leaves are missing"
    dtypes = [jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True) for x in leaves]
    avals = (jax.ShapeDtypeStruct(x.shape, t) for x, t in zip(leaves, dtypes, strict=True))
    try:
        return _check_fields(structure, tuple(avals))
    except TypeError as error:  # metadata that is not hashable
        return str(error)


@functools.lru_cache(maxsize=4096)
def _check_fields(structure: Any, avals: tuple[jax.ShapeDtypeStruct, ...]) -> str | None:
    def check(*leaves: Any) -> None:
        for check in checks_of(jax.tree.unflatten(structure, leaves)):
            check()

    try:
        with contextlib.suppress(*CHECK_BUGS):
            jax.eval_shape(check, *avals)
    except Exception as error:  # whatever a class raises
        return " ".join(str(error).split())
    return None


def describe_path(path: Path) -> str:
    """Return a path as error messages show it, such as `tree['layers'][0]`."""
    return "tree" + "".join(f"[{key!r}]" for key in path)


def describe_type(value: Any) -> str:
    """Return the type of a value as error messages show it, with its module."""
    return f"a {type(value).__module__}.{type(value).__qualname__}"
