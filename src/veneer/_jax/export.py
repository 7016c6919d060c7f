"""Exported programs that take and give implicit arrays: their metadata as JSON in the file.

`jax.export` writes the structure of arguments and results beside a program. A class is registered
with it when it is defined, so that a file can be read before there is any value of the class.
Nothing is pickled: metadata may be numbers, strings, None, dtypes, and tuples of those, named ones
if the field's annotation names their class.
"""

import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.export._export import deserialization_registry
from jax.export import register_pytree_node_serialization

_ScalarType = type(jnp.float32)


def make_exportable(cls: Any) -> None:
    """Registers a dataclass of ours for `jax.export`; one defined anew replaces the former."""
    names = tuple(f.name for f in dataclasses.fields(cls) if f.metadata.get("static", False))
    data = tuple(f.name for f in dataclasses.fields(cls) if f.name not in names)

    def serialize(metadata: Sequence[Any]) -> bytes:
        # That of our own pytrees comes with its types; that of flax.struct does not.
        ours = len(metadata) == 2 and isinstance(metadata[0], tuple)
        values = metadata[0] if ours and metadata[1] == tuple(map(type, metadata[0])) else metadata
        written = {n: _encode(x, cls, n) for n, x in zip(names, values, strict=True)}
        return json.dumps(written).encode()

    def deserialize(text: bytes) -> tuple[Any, ...]:
        written = json.loads(text)
        if written.keys() != set(names):
            raise ValueError(
                f"The file has a {cls.__name__} with metadata {sorted(written)}, but the class "
                f"has {sorted(names)}. It has changed since the program was exported."
            )
        return tuple(_decode(written[n], cls, n) for n in names)

    def from_children(metadata: Sequence[Any], children: Sequence[Any]) -> Any:
        value = cls.__new__(cls)
        value.__dict__.update(
            zip(names, metadata, strict=True), **dict(zip(data, children, strict=True))
        )
        return value

    name = f"{cls.__module__}.{cls.__qualname__}"
    _register(cls, name, serialize, deserialize, from_children)


def _encode(x: Any, cls: type, field: str) -> Any:
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, tuple):
        kind = type(x)
        items = [_encode(item, cls, field) for item in x]
        if kind is tuple:
            return {"tuple": items}
        if kind in _named_tuples(cls, field):
            return {"named": kind.__qualname__, "tuple": items}
    if isinstance(x, np.dtype):
        return {"dtype": x.name}
    if isinstance(x, _ScalarType):  # jnp.float32
        return {"jnp": x.dtype.name}
    if isinstance(x, type) and issubclass(x, np.generic):
        return {"np": np.dtype(x).name}
    raise TypeError(
        f"jax.export cannot write {cls.__name__}.{field}, which is {x!r}, a "
        f"{type(x).__qualname__}. Metadata may be numbers, strings, None, dtypes and tuples of "
        "them, or a NamedTuple that the annotation of the field names."
    )


def _decode(x: Any, cls: type, field: str) -> Any:
    if not isinstance(x, dict):
        return x
    if "tuple" in x:
        items = [_decode(item, cls, field) for item in x["tuple"]]
        if "named" not in x:
            return tuple(items)
        for kind in _named_tuples(cls, field):
            if kind.__qualname__ == x["named"]:
                return kind(*items)
        raise ValueError(
            f"The file has a {x['named']} as {cls.__name__}.{field}, but the annotation of the "
            "field does not name it. The class has changed since the program was exported."
        )
    ((kind, name),) = x.items()
    if kind == "jnp":
        return getattr(jnp, name)
    return jnp.dtype(name) if kind == "dtype" else jnp.dtype(name).type


def _named_tuples(cls: type, field: str) -> set[type]:
    """The classes of named tuples that a field's annotation speaks of, and theirs in turn."""
    found: set[type] = set()

    def search(annotation: Any) -> None:
        for part in typing.get_args(annotation):
            search(part)
        is_tuple = isinstance(annotation, type) and issubclass(annotation, tuple)
        if is_tuple and hasattr(annotation, "_fields") and annotation not in found:
            found.add(annotation)
            for part in typing.get_type_hints(annotation).values():
                search(part)

    for base in cls.__mro__:
        annotation = inspect.get_annotations(base).get(field)
        if annotation is not None:
            search(
                typing.get_type_hints(base)[field] if isinstance(annotation, str) else annotation
            )
            break
    return found


def _register(
    cls: type,
    name: str,
    serialize: Callable[[Any], bytes],
    deserialize: Callable[[bytes], Any],
    from_children: Any,
) -> None:
    """Registers a pytree class for `jax.export`, in the place of one of the same name, if any.

    JAX refuses a name that it knows: that of a class defined anew in a notebook, say.
    """
    deserialization_registry.pop(name, None)
    register_pytree_node_serialization(
        cls,
        serialized_name=name,
        serialize_auxdata=serialize,
        deserialize_auxdata=deserialize,
        from_children=from_children,
    )
