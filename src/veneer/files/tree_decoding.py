"""Restore a tree from the JSON of its structure: alone, or into the classes of a model tree.

`decode` needs only the JSON. `restore` also takes a tree `like`, with the classes and the objects
that files do not store.
"""

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .._core.primitives.sharding import leaf_destinations
from .._core.value import Value
from ..quant import ActivationQuantized, Packing
from .folder import as_jax
from .tensor_file import is_text
from .tree_encoding import (
    SEQUENCES,
    Node,
    Path,
    describe_opaque,
    describe_path,
    describe_type,
    encode,
    encode_metadata,
    encode_static,
    find_refusal,
    flatten_one_level,
    is_opaque_leaf,
    name_of_class,
)

Tensors = Mapping[str, Any]  # by name

_ARRAYS = ("tensor", "keys", "array", "activation_quantized")

# The fields of an `activation_quantized`, a node of layout versions 1 and 2.
_ACTIVATION_LEAVES = ("array", "scale", "zero_point")
_ACTIVATION_METADATA = ("qtype", "calibration_method", "contracting")


class NotStored(ValueError):
    """The error if a saved tree needs `like`, because it has an object that files do not store."""


def _require_like(what: str) -> NoReturn:
    raise NotStored(
        f"{what}, which files do not store: pass a tree that has it, vn.load(path, like=tree)"
    )


def decode(node: Node, array: Callable[[Path, Node], Any]) -> Any:
    """Return the tree that JSON from `tree_encoding.encode` describes.

    Modules, named tuples and other pytree classes become dicts of their children.

    **Arguments:**

    - `node`: the JSON of a tree.
    - `array`: a function that takes the path and the JSON of an array, and returns the array or a
      placeholder, which becomes the leaf. See `read_array`.

    **Raises:** `NotStored` if the tree has an object that files do not store.
    """
    return _decode(node, (), array)


def _decode(node: Node, path: Path, array: Callable[[Path, Node], Any]) -> Any:
    kind, content = next(iter(node.items()))
    if kind in _ARRAYS:
        return array(path, node)
    if kind == "none":
        return None
    if kind == "value":
        return content
    if kind == "opaque":
        _require_like(f"{describe_path(path)} is {content}")
    children = {key: _decode(child, (*path, key), array) for key, child in _children(node)}
    if kind in SEQUENCES:
        return SEQUENCES[kind](children.values())
    if kind not in ("dict", "children"):
        raise KeyError(kind)
    if len({*map(type, children)}) > 1:
        if kind == "children":  # such as an nnx.List
            return {str(key): child for key, child in children.items()}
        raise ValueError(
            f"{describe_path(path)} has both string and integer keys, which JAX cannot sort"
        )
    return children


def _children(node: Node) -> Iterable[tuple[str | int, Node]]:
    """Return the keys and the JSON of the children of a JSON node.

    **Raises:** `ValueError` for a key that occurs twice, or is neither a string nor an integer.
    """
    kind, content = next(iter(node.items()))
    if kind in SEQUENCES:
        return list(enumerate(content))
    if kind not in ("array", "dict", "children"):
        return []
    pairs = [(key, child) for key, child in (node["fields"] if kind == "array" else content)]
    keys: set[str | int] = set()
    for key, _ in pairs:
        if not (type(key) is int or (type(key) is str and is_text(key))):
            raise ValueError(f"the key {key!r} is neither a string nor an integer")
        if key in keys:
            raise ValueError(f"the key {key!r} occurs twice")
        keys.add(key)
    return pairs


def read_array(path: Path, node: Node, tensors: Tensors) -> Any:
    """Return the array that JSON from `tree_encoding.encode` describes.

    It is a dense array, an array of random keys, or an implicit array.

    **Arguments:**

    - `path`: the path of the array in the tree, for error messages.
    - `node`: the JSON of the array.
    - `tensors`: a dict of all tensors. Only the tensors of this array are looked up.

    **Raises:** `ValueError` if the class of an implicit array rejects its fields.
    """
    kind, content = next(iter(node.items()))
    if kind == "tensor":
        return tensors[content]
    if kind == "keys":
        return jax.random.wrap_key_data(jnp.asarray(tensors[node["data"]]), impl=content)
    read = partial(read_array, tensors=tensors)
    if kind == "activation_quantized":
        leaves = (_decode(content[k], (*path, k), read) for k in _ACTIVATION_LEAVES)
        return ActivationQuantized(*leaves, **{k: content[k] for k in _ACTIVATION_METADATA})
    children = {key: _decode(child, (*path, key), read) for key, child in _children(node)}
    value = _build(_find_class(content, describe_path(path)), node["static"], children, path)
    why = find_refusal(value) if node.get("valid") is True else None
    if why is not None:
        raise ValueError(f"{describe_path(path)} is not a valid {type(value).__name__}: {why}")
    return value


def _find_class(name: str, where: str) -> type[Value]:
    """Return the imported class of implicit arrays that has the name `name` in files.

    `where` is the path of the array, for errors.

    **Raises:** `NotStored` if no imported class, or several classes, have this name.
    """
    import_module("veneer.types")

    classes: list[type[Value]] = [Value]
    for cls in classes:
        classes += cls.__subclasses__()
    matching = [cls for cls in dict.fromkeys(classes) if name_of_class(cls) == name]
    if len(matching) > 1:
        # A notebook may define a class several times. Only the last one is in its module.
        is_current = lambda cls: getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
        matching = [*filter(is_current, matching)] or matching
    if len(matching) != 1:
        _require_like(f"{where} has the type {name}, the name of {len(matching)} imported classes")
    return matching[0]


def _build(cls: type[Value], static: Any, children: Mapping[Any, Any], path: Path) -> Value:
    """Build an implicit array without its constructor, which could reject missing leaves.

    **Arguments:**

    - `cls`: the class of the array.
    - `static`: a dict from its static fields to their JSON. A static field that older versions did
      not write can be missing, and gets its default value.
    - `children`: a dict from the other fields to their values.
    - `path`: the path of the array in the tree, for errors.

    **Raises:** `ValueError` if a field is missing or unknown, or a static field has a wrong type.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    added = {f.name: encode_static(f.default) for f in fields if f.metadata.get("added", False)}
    static = added | static
    if {*names} != {*children, *static}:
        raise ValueError(f"{describe_path(path)}: {cls.__name__} has the fields {', '.join(names)}")
    any_class: Any = cls  # mypy requires a hashable argument
    value, hints = cls.__new__(cls), _type_hints(any_class)
    for name in names:
        is_static = name in static
        what = f"{describe_path(path)}.{name}"
        x = _decode_static(static[name], what) if is_static else children[name]
        if is_static and name in hints and not _has_type(x, hints[name]):
            hint = hints[name]
            is_class = isinstance(hint, type) and not typing.get_args(hint)
            raise ValueError(f"{what} is {x!r}, not of type {hint.__name__ if is_class else hint}")
        object.__setattr__(value, name, x)
    return value


def _decode_static(x: Any, what: str) -> Any:
    if not isinstance(x, dict):
        return x
    ((kind, content),) = x.items()
    if kind == "tuple":
        return tuple(_decode_static(item, what) for item in content)
    if kind == "packing":
        return Packing(*content)
    if kind == "dtype":
        return np.dtype(content)
    _require_like(f"{what} is {content}")


@functools.cache
def _type_hints(cls: Any) -> dict[str, Any]:
    """Return the type hints of the fields of a class of Veneer.

    Return {} for classes of others, whose hints may be inexact.
    """
    return typing.get_type_hints(cls) if cls.__module__.startswith("veneer.") else {}


def _has_type(x: Any, hint: Any) -> bool:
    """Return whether `x`, the stored value of a static field, has the annotated type `hint`.

    A sequence may be stored as a tuple, and a float as an integer.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(x, arg) for arg in args)
    if origin is tuple:
        if not isinstance(x, tuple) or (args[-1] is not Ellipsis and len(x) != len(args)):
            return False
        item_types = args[:1] * len(x) if args[-1] is Ellipsis else args
        return all(map(_has_type, x, item_types))
    if origin is not None:  # such as Sequence[int], stored as a tuple
        return isinstance(x, origin)
    if hint is Any:
        return True
    if hint in (int, float):
        return isinstance(x, int | hint) and not isinstance(x, bool)
    return isinstance(x, hint)


def restore(node: Node, tensors: Tensors, like: Any) -> Any:
    """Return the saved tree with the classes of the tree `like`.

    Objects that files do not store, such as functions, are taken from `like`.

    **Arguments:**

    - `node`: the JSON of the saved tree, from `tree_encoding.encode`.
    - `tensors`: a dict from the names in this JSON to the saved tensors.
    - `like`: a tree of the same structure. Its arrays may be abstract.

    **Raises:** `ValueError`, naming the path, if the saved tree differs from `like`.
    """
    return _restore(node, like, (), tensors)


def _restore(node: Node, like: Any, path: Path, tensors: Tensors) -> Any:
    kind, content = next(iter(node.items()))
    reject = lambda: _raise_difference(path, _describe_node(node, tensors), _describe_leaf(like))
    if kind == "activation_quantized":
        node, more = encode(read_array(path, node, tensors))  # in the current layout
        return _restore(node, like, path, more)
    if like is None or kind == "none":
        return like if like is None and kind == "none" else reject()
    if kind == "value":
        return content if type(like) is type(content) else reject()
    if kind == "opaque":
        return like if is_opaque_leaf(like) and describe_opaque(like) == content else reject()
    if kind in ("tensor", "keys") or (kind == "array" and not isinstance(like, Value)):
        return _match_array(read_array(path, node, tensors), like, reject)
    level = flatten_one_level(like, path)
    if level is None or (isinstance(like, Value) and kind != "array"):
        reject()
    keys, children, treedef = level
    saved = dict(_children(node))
    if kind == "array":
        if name_of_class(type(like)) != content:
            reject()
        expected = encode_metadata(like, keys)
        for name in dict.fromkeys([*expected, *node["static"]]):
            pair = node["static"].get(name), expected.get(name)
            if pair[0] != pair[1]:
                shown = [str(*x.values()) if isinstance(x, dict) else repr(x) for x in pair]
                _raise_difference((*path, name), *shown)
    if missing := [key for key in [*saved, *keys] if key not in saved or key not in keys]:
        here, not_there = ("saved", "in like") if missing[0] in saved else ("in like", "saved")
        where = describe_path((*path, missing[0]))
        raise ValueError(f"{where} is {here} but not {not_there}")
    restored = [
        _restore(saved[key], child, (*path, key), tensors)
        for key, child in zip(keys, children, strict=True)
    ]
    return treedef.unflatten(restored)


def _match_array(value: Any, like: Any, reject: Callable[[], NoReturn]) -> Any:
    """Convert a saved array to NumPy or JAX, like the array `like`, and with its sharding.

    If its shape or dtype differs, or its class while `like` is implicit, call `reject`, which
    raises an error.
    """
    is_implicit = isinstance(like, Value)
    structures: list[Any] = [jax.tree.structure(x) for x in (value, like)]
    if is_implicit and structures[0] != structures[1]:
        reject()
    layout = lambda x: (getattr(x, "shape", None), getattr(x, "dtype", None))
    if layout(value) != layout(like):
        reject()
    if is_implicit:
        return jax.tree.map(lambda x, y: _match_array(x, y, reject), value, like)
    if isinstance(like, np.ndarray | np.generic) and not isinstance(value, Value):
        return np.asarray(value)[()] if isinstance(like, np.generic) else np.asarray(value)
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return jax.tree.map(as_jax, value)
    leaves, treedef = jax.tree.flatten(value)
    placed = map(jax.device_put, leaves, leaf_destinations(value, sharding))
    return jax.tree.unflatten(treedef, placed)


def _raise_difference(path: Path, saved: str, expected: str) -> NoReturn:
    raise ValueError(f"{describe_path(path)} was saved as {saved}, but is {expected} in like")


def _describe_node(node: Node, tensors: Tensors) -> str:
    kind, content = next(iter(node.items()))
    if kind == "tensor":
        return _describe_leaf(tensors[content])
    if kind == "value":
        return repr(content)
    names = {"none": "None", "array": content, "children": node.get("of"), "opaque": content}
    return names.get(kind, f"a {kind}")


def _describe_leaf(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype") and not is_opaque_leaf(x):
        name = f"{type(x).__name__} " if isinstance(x, Value) else ""
        return f"{name}{x.dtype}{list(x.shape)}"
    is_plain = x is None or isinstance(x, bool | int | float | str)
    return repr(x) if is_plain else describe_type(x)
