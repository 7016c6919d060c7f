"""The structure of a saved tree as JSON: how its tensors nest, and what else its leaves are.

An array type is written with its metadata, which say what its leaves mean. Of other classes
(modules, states of optimisers) the names of the children are: what else such a class holds is the
program's, which has a tree of it to load into.
"""

import contextlib
import dataclasses
import enum
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from .._core.errors import CHECK_BUGS
from .._core.primitives.sharding import leaf_destinations
from .._core.tree import checks_of
from .._core.value import Value
from ..quant import ActivationQuantized, Packing, QArray
from .folder import as_jax
from .manifest import BYTE_FLOATS, MAX_LEVELS
from .tensor_file import DTYPES, is_text

Path = tuple[str | int, ...]
Node = dict[str, Any]
Leaves = Mapping[str, Any]  # tensors by name

_HOLDS = (
    "a saved tree can hold NumPy and JAX arrays, implicit arrays, and Python's bools, numbers and "
    "strings, in any pytree"
)

_SEQUENCES: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple}


# What is written.


def encode(tree: Any) -> tuple[Node, dict[str, Any]]:
    """Returns the JSON of a tree, and its tensors by the names that it calls them.

    **Raises:** `TypeError`, naming the path, for what cannot be stored; `ValueError` for a tree of
    too many levels.
    """
    leaves: dict[str, Any] = {}
    return _encode(tree, (), leaves), leaves


def _encode(node: Any, path: Path, leaves: dict[str, Any]) -> Node:
    if len(path) > MAX_LEVELS:
        raise ValueError(f"the tree has more than {MAX_LEVELS} levels, at {_where(path[:3])}...")
    if node is None:
        return {"none": True}
    if type(node) is QArray and _is_whole(node):
        return _tensor(node, path, leaves)
    opened = _open(node, path)
    if opened is None:
        return _encode_leaf(node, path, leaves)
    # A dict has an order of its own, and JAX's is that of the keys.
    children = node if type(node) is dict else dict(zip(*opened[:2], strict=True))
    pairs = [[key, _encode(child, (*path, key), leaves)] for key, child in children.items()]
    if type(node) is dict:
        return {"dict": pairs}  # pairs, because JSON would turn integer keys into strings
    for kind, constructor in _SEQUENCES.items():
        if type(node) is constructor:
            return {kind: [child for _, child in pairs]}
    if isinstance(node, Value):
        static = _metadata(node, opened[0])
        encoded: Node = {"array": _name(type(node)), "fields": pairs, "static": static}
        # A tree with this structure, such as a state of an optimizer, need not be a valid array.
        return encoded | ({"valid": True} if _refusal(node) is None else {})
    return {"children": pairs, "of": _name(type(node))}


def _open(node: Any, path: Path) -> tuple[list[str | int], list[Any], Any] | None:
    """The keys and the children of a node, and its structure; None of a leaf."""
    treedef: Any
    below, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if treedef.node_data() is None:
        return None
    keys = [_key(at[0]) for at, _ in below]
    for key in keys:
        if type(key) not in (str, int):
            raise TypeError(f"{_where(path)} has the key {key!r}: keys are strings or integers")
        if isinstance(key, str) and not is_text(key):
            raise ValueError(f"{_where(path)} has the key {key!r}, which is not valid Unicode text")
    return keys, [child for _, child in below], treedef


def _key(entry: Any) -> Any:
    if isinstance(entry, DictKey | FlattenedIndexKey):
        return entry.key
    if isinstance(entry, SequenceKey):
        return entry.idx
    return entry.name if isinstance(entry, GetAttrKey) else str(entry)


def _encode_leaf(leaf: Any, path: Path, leaves: dict[str, Any]) -> Node:
    if type(leaf) in (bool, int, str) or (type(leaf) is float and math.isfinite(leaf)):
        return {"value": leaf}
    if _is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        _check_not_traced(leaf, path)
        data = _tensor(jax.random.key_data(leaf), path, leaves)
        return {"keys": str(jax.random.key_impl(leaf)), "data": data["tensor"]}
    if _is_opaque(leaf):
        return {"opaque": _describe(leaf)}
    return _tensor(leaf, path, leaves)


def _tensor(leaf: Any, path: Path, leaves: dict[str, Any]) -> Node:
    _check_leaf(leaf, path)
    name = ".".join(map(str, path)) or "array"
    while name in leaves:  # {"a.b": x, "a": {"b": y}}
        name += "_"
    leaves[name] = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    return {"tensor": name}


def _check_leaf(leaf: Any, path: Path) -> None:
    parts = jax.tree.leaves(leaf) if type(leaf) is QArray else [leaf]
    dtypes = [*DTYPES.values(), *BYTE_FLOATS]
    for array in parts:
        if not _is_array(array):
            raise TypeError(
                f"{_where(path)} is {_type(array)}: {_HOLDS}. Convert it with numpy.asarray, or "
                "register its class as a pytree"
            )
        _check_not_traced(array, path)
        if array.dtype.name not in dtypes:
            raise TypeError(
                f"{_where(path)} has dtype {array.dtype}, which cannot be saved: cast it to one of "
                f"{', '.join(DTYPES.values())}. A QArray can hold integers of 1 to 8 bits and "
                "floats of 4 to 8 bits."
            )


def _check_not_traced(array: Any, path: Path) -> None:
    if isinstance(array, jax.core.Tracer):
        raise TypeError(f"{_where(path)} is a tracer: call vn.save outside jit, grad and vmap")


def _is_array(x: Any) -> bool:
    return type(x) is np.ndarray or isinstance(x, jax.Array | np.generic)


def _is_opaque(x: Any) -> bool:
    """Whether something is a leaf of the program's, and no array."""
    return isinstance(x, np.dtype | enum.Enum) or (callable(x) and not _is_array(x))


def _is_whole(q: QArray) -> bool:
    """Whether a QArray has all of its leaves: in a part of a tree, some are missing."""
    leaves = [q.packed, q.scale, *(x for x in (q.zero_point, q.minimum) if x is not None)]
    return all(_is_whole(x) if type(x) is QArray else _is_array(x) for x in leaves)


# Metadata: what a type's static fields say. `load` compares them, for they are what leaves mean.


def _metadata(value: Value, children: Sequence[str | int]) -> dict[str, Any]:
    fields = dataclasses.fields(value)  # type: ignore[arg-type]
    names = [field.name for field in fields if field.name not in children]
    return {name: _encode_static(getattr(value, name, None)) for name in names}


def _encode_static(x: Any) -> Any:
    if x is None or type(x) in (bool, int, str) or (type(x) is float and math.isfinite(x)):
        return x
    if type(x) is tuple:
        return {"tuple": [_encode_static(item) for item in x]}
    if type(x) is Packing:
        return {"packing": [*x]}
    if isinstance(x, np.dtype):
        return {"dtype": x.name}
    return {"opaque": _describe(x)}


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
    _wants_like(f"{what} is {content}")


def _describe(x: Any) -> str:
    """What is said of an object that is not stored: the same in another process."""
    text = getattr(x, "__qualname__", None) or repr(x)
    return _type(x) if " at 0x" in text else text


def _name(cls: type) -> str:
    """Return the name of a class in a file: without the module for a class of Veneer.

    Classes of `veneer.interop` have the names of other libraries, so theirs have the module.
    """
    module = cls.__module__
    is_ours = module.startswith("veneer.") and not module.startswith("veneer.interop.")
    return cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}"


def _class_named(name: str, where: str) -> type[Value]:
    """The array type of this name: one of ours, or one that the program has defined by now."""
    import_module("veneer.types")  # so that all of ours are imported

    classes: list[type[Value]] = [Value]
    for cls in classes:
        classes += cls.__subclasses__()
    matching = [cls for cls in dict.fromkeys(classes) if _name(cls) == name]
    if len(matching) > 1:  # of those that a module has defined anew, as in a notebook, the last
        matching = [cls for cls in matching if _is_in_its_module(cls)] or matching
    if len(matching) != 1:
        _wants_like(f"{where} has the type {name}, the name of {len(matching)} imported classes")
    return matching[0]


def _is_in_its_module(cls: type) -> bool:
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


# What is read.


def decode(node: Node, array: Callable[[Path, Node], Any]) -> Any:
    """Returns the tree of a node by itself; dicts in the place of classes that are not known.

    **Arguments:**

    - `array`: what is put in the place of each array, by its path and its node; see `array_of`.
    """
    return _decode(node, (), array)


def array_of(path: Path, node: Node, leaves: Leaves) -> Any:
    """Returns the array of a node that `decode` comes to."""
    kind, content = next(iter(node.items()))
    if kind == "tensor":
        return leaves[content]
    if kind == "keys":
        return jax.random.wrap_key_data(jnp.asarray(leaves[node["data"]]), impl=content)
    part = partial(array_of, leaves=leaves)
    if kind == "activation_quantized":  # as it was written up to layout version 2
        parts = (_decode(content[k], (*path, k), part) for k in _ACTIVATION_LEAVES)
        return ActivationQuantized(*parts, **{k: content[k] for k in _ACTIVATION_METADATA})
    children = {key: _decode(child, (*path, key), part) for key, child in _pairs(node)}
    value = _array(_class_named(content, _where(path)), node["static"], children, path)
    why = _refusal(value) if node.get("valid") is True else None
    if why is not None:
        raise ValueError(f"{_where(path)} is not a valid {type(value).__name__}: {why}")
    return value


_ARRAYS = ("tensor", "keys", "array", "activation_quantized")


def _decode(node: Node, path: Path, array: Callable[[Path, Node], Any]) -> Any:
    kind, content = next(iter(node.items()))
    if kind in _ARRAYS:
        return array(path, node)
    if kind == "none":
        return None
    if kind == "value":
        return content
    if kind == "opaque":
        _wants_like(f"{_where(path)} is {content}")
    children = {key: _decode(child, (*path, key), array) for key, child in _pairs(node)}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](children.values())
    if kind not in ("dict", "children"):
        raise KeyError(kind)
    if len({*map(type, children)}) > 1 and kind == "children":  # as of an nnx.List
        return {str(key): child for key, child in children.items()}
    if len({*map(type, children)}) > 1:
        raise ValueError(f"{_where(path)} has both string and integer keys, which JAX cannot sort")
    return children


_ACTIVATION_LEAVES = ("array", "scale", "zero_point")
_ACTIVATION_METADATA = ("qtype", "calibration_method", "contracting")


def _pairs(node: Node) -> Iterable[tuple[str | int, Node]]:
    """Return the keys and the nodes of the children of a node.

    **Raises:** `ValueError` for a key that is there twice, or is neither text nor an integer.
    """
    kind, content = next(iter(node.items()))
    if kind in _SEQUENCES:
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


def _array(cls: type[Value], static: Any, children: Mapping[Any, Any], path: Path) -> Value:
    """Build a value from its fields, without its constructor, because leaves may be missing.

    If the file omits a static field, because an older version wrote it, the default is used.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    static = {f.name: _encode_static(f.default) for f in fields if _was_added(f)} | static
    if {*names} != {*children, *static}:
        raise ValueError(f"{_where(path)}: {cls.__name__} has the fields {', '.join(names)}")
    any_class: Any = cls  # a class with a __hash__ of its own
    value, hints = cls.__new__(cls), _static_hints(any_class)
    for name in names:
        is_static = name in static
        what = f"{_where(path)}.{name}"
        x = _decode_static(static[name], what) if is_static else children[name]
        if is_static and name in hints and not _fits(x, hints[name]):
            raise ValueError(f"{what} is {x!r}, not of type {_shown_hint(hints[name])}")
        object.__setattr__(value, name, x)
    return value


def _was_added(field: dataclasses.Field) -> bool:
    """Return whether older files do not have a static field."""
    return field.metadata.get("added", False)


@functools.cache
def _static_hints(cls: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a type of ours; those of others may not be exact."""
    return typing.get_type_hints(cls) if cls.__module__.startswith("veneer.") else {}


def _fits(x: Any, hint: Any) -> bool:
    """Return whether a stored value of a static field is of its annotated type."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(x, one) for one in of)
    if origin is tuple:
        if not isinstance(x, tuple) or (of[-1] is not Ellipsis and len(x) != len(of)):
            return False
        return all(_fits(item, of[0 if of[-1] is Ellipsis else i]) for i, item in enumerate(x))
    if origin is not None:  # such as Sequence[int], stored as a tuple
        return isinstance(x, origin)
    if hint is Any:
        return True
    if hint in (int, float):
        return isinstance(x, int | hint) and not isinstance(x, bool)
    return isinstance(x, hint)


def _shown_hint(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _refusal(value: Value) -> str | None:
    """Return why the class of a value refuses its fields, or None if it accepts them."""
    leaves, structure = jax.tree.flatten(value)
    if not all(_is_array(leaf) for leaf in leaves):
        return "leaves are missing"
    dtypes = [jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True) for x in leaves]
    avals = (jax.ShapeDtypeStruct(x.shape, t) for x, t in zip(leaves, dtypes, strict=True))
    try:
        return _refusal_of(structure, tuple(avals))
    except TypeError as error:  # metadata that is not hashable
        return str(error)


@functools.lru_cache(maxsize=4096)
def _refusal_of(structure: Any, avals: tuple[jax.ShapeDtypeStruct, ...]) -> str | None:
    def check(*leaves: Any) -> None:
        for check in checks_of(jax.tree.unflatten(structure, leaves)):
            check()

    try:
        with contextlib.suppress(*CHECK_BUGS):
            jax.eval_shape(check, *avals)
    except Exception as error:  # whatever a class raises
        return " ".join(str(error).split())
    return None


def restore(node: Node, leaves: Leaves, like: Any) -> Any:
    """Returns the tree of a node with the classes of `like`, and what of them is not stored.

    **Raises:** `ValueError`, naming the path, where it is not what was saved.
    """
    return _restore(node, like, (), leaves)


def _restore(node: Node, like: Any, path: Path, leaves: Leaves) -> Any:
    kind, content = next(iter(node.items()))
    refuse = lambda: _differs(path, _shown(node, leaves), _shown_leaf(like))
    if kind == "activation_quantized":  # its fields are those of the array that it decodes to
        node, more = encode(array_of(path, node, leaves))
        return _restore(node, like, path, more)
    if like is None or kind == "none":
        return like if like is None and kind == "none" else refuse()
    if kind == "value":
        return content if type(like) is type(content) else refuse()
    if kind == "opaque":
        return like if _is_opaque(like) and _describe(like) == content else refuse()
    if kind in ("tensor", "keys"):
        return _like_array(array_of(path, node, leaves), like, refuse)
    if kind == "array" and not isinstance(like, Value):
        return _like_array(array_of(path, node, leaves), like, refuse)
    opened = _open(like, path)
    if opened is None or (isinstance(like, Value) and kind != "array"):
        refuse()
    keys, children, treedef = opened
    saved = dict(_pairs(node))
    if kind == "array":
        if _name(type(like)) != content:
            refuse()
        static = _metadata(like, keys)
        for name in dict.fromkeys([*static, *node["static"]]):
            one, other = node["static"].get(name), static.get(name)
            if one != other:
                _differs((*path, name), _shown_static(one), _shown_static(other))
    if lacking := [key for key in [*saved, *keys] if key not in saved or key not in keys]:
        has, lacks = ("saved", "in like") if lacking[0] in saved else ("in like", "saved")
        raise ValueError(f"{_where((*path, lacking[0]))} is {has} but not {lacks}")
    restored = [
        _restore(saved[key], child, (*path, key), leaves)
        for key, child in zip(keys, children, strict=True)
    ]
    return treedef.unflatten(restored)


def _like_array(value: Any, like: Any, refuse: Callable[[], NoReturn]) -> Any:
    """A saved array in the place of one that is dense, of its own type, or abstract."""
    implicit = isinstance(like, Value)
    structures: list[Any] = [jax.tree.structure(x) for x in (value, like)]
    if implicit and structures[0] != structures[1]:
        refuse()
    kind = lambda x: (getattr(x, "shape", None), getattr(x, "dtype", None))
    if kind(value) != kind(like):
        refuse()
    if implicit:
        return jax.tree.map(lambda x, y: _like_array(x, y, refuse), value, like)
    if isinstance(like, np.ndarray | np.generic) and not isinstance(value, Value):
        return np.asarray(value)[()] if isinstance(like, np.generic) else np.asarray(value)
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return jax.tree.map(as_jax, value)
    parts, treedef = jax.tree.flatten(value)
    placed = map(jax.device_put, parts, leaf_destinations(value, sharding))
    return jax.tree.unflatten(treedef, placed)


def _shown(node: Node, leaves: Leaves) -> str:
    """What a node is, as messages say it."""
    kind, content = next(iter(node.items()))
    if kind == "tensor":
        return _shown_leaf(leaves[content])
    if kind == "value":
        return repr(content)
    return {"none": "None", "array": content, "children": node.get("of"), "opaque": content}.get(
        kind, f"a {kind}"
    )


def _shown_static(x: Any) -> str:
    return str(next(iter(x.values()))) if isinstance(x, dict) else repr(x)


def _shown_leaf(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype") and not _is_opaque(x):
        name = f"{type(x).__name__} " if isinstance(x, Value) else ""
        return f"{name}{x.dtype}{list(x.shape)}"
    is_plain = x is None or isinstance(x, bool | int | float | str)
    return repr(x) if is_plain else _type(x)


def _differs(path: Path, saved: str, found: str) -> NoReturn:
    raise ValueError(f"{_where(path)} was saved as {saved}, but is {found} in like")


class NotStored(ValueError):
    """What was saved has something that is not stored, and `like` is to say what it is."""


def _wants_like(what: str) -> NoReturn:
    raise NotStored(
        f"{what}, which files do not store: pass a tree that has it, vn.load(path, like=tree)"
    )


def _where(path: Path) -> str:
    return "tree" + "".join(f"[{key!r}]" for key in path)


def _type(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"
