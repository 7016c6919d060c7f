"""Make implicit arrays exportable: write the metadata of their classes as JSON for `jax.export`.

`jax.export` stores the tree structures of arguments and results with a program. Each class is
registered when it is defined, so a file can be read before the program has a value of the class.
Nothing is pickled: metadata may be numbers, strings, None, dtypes, and tuples of them. It may also
be a NamedTuple if the annotation of the field contains its class.
"""

import dataclasses
import inspect
import json
import typing
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.export._export import deserialization_registry
from jax.export import register_pytree_node_serialization

_JnpScalar = type(jnp.float32)  # the type of jnp.float32, jnp.int8, ...


def make_exportable(cls: Any) -> None:
    """Register a dataclass for `jax.export`, in place of an earlier class with the same name."""
    static_names = [f.name for f in dataclasses.fields(cls) if f.metadata.get("static", False)]
    array_names = [f.name for f in dataclasses.fields(cls) if f.name not in static_names]

    def serialize(metadata: Sequence[Any]) -> bytes:
        # The metadata of our pytrees is a pair: the values of the static fields, and their types.
        # The metadata of flax.struct is the values.
        is_pair = len(metadata) == 2 and isinstance(metadata[0], tuple)
        if is_pair and metadata[1] == tuple(map(type, metadata[0])):
            metadata = metadata[0]
        fields = zip(static_names, metadata, strict=True)
        return json.dumps({name: _encode(value, cls, name) for name, value in fields}).encode()

    def deserialize(text: bytes) -> tuple[Any, ...]:
        encoded = json.loads(text)
        if encoded.keys() != set(static_names):
            raise ValueError(
                f"The file has a {cls.__name__} with metadata {sorted(encoded)}, but the class "
                f"has {sorted(static_names)}. It has changed since the program was exported."
            )
        return tuple(_decode(encoded[name], cls, name) for name in static_names)

    def from_children(aux_data: Any, children: Any) -> Any:
        value = cls.__new__(cls)  # without `__init__`, because children may be placeholders
        names = (*static_names, *array_names)
        value.__dict__.update(zip(names, (*aux_data, *children), strict=True))
        return value

    name = f"{cls.__module__}.{cls.__qualname__}"
    # JAX rejects a name that it knows, such as a class that a notebook defines again.
    deserialization_registry.pop(name, None)
    register_pytree_node_serialization(
        cls,
        serialized_name=name,
        serialize_auxdata=serialize,
        deserialize_auxdata=deserialize,
        from_children=from_children,
    )


def _encode(x: Any, cls: type, field: str) -> Any:
    """Convert the value of the static field `cls.field`, or an item of a tuple in it, to JSON.

    Raise `TypeError` if it is not a number, string, dtype, None or a tuple of these.
    """
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, tuple):
        items = [_encode(item, cls, field) for item in x]
        if type(x) is tuple:
            return {"tuple": items}
        if type(x) in _named_tuples(cls, field):
            return {"named": type(x).__qualname__, "tuple": items}
    if isinstance(x, np.dtype):
        return {"dtype": x.name}
    if isinstance(x, _JnpScalar):
        return {"jnp": x.dtype.name}
    if isinstance(x, type) and issubclass(x, np.generic):
        return {"np": np.dtype(x).name}
    raise TypeError(
        f"jax.export cannot write {cls.__name__}.{field}, which is {x!r}, a "
        f"{type(x).__qualname__}. Metadata may be numbers, strings, None, dtypes and tuples of "
        "them, or a NamedTuple that the annotation of the field names."
    )


def _decode(x: Any, cls: type, field: str) -> Any:
    """Return the value of the static field `cls.field` that `_encode` has converted to `x`."""
    if not isinstance(x, dict):
        return x
    if "tuple" in x:
        items = [_decode(item, cls, field) for item in x["tuple"]]
        if "named" not in x:
            return tuple(items)
        for named_tuple in _named_tuples(cls, field):
            if named_tuple.__qualname__ == x["named"]:
                return named_tuple(*items)
        raise ValueError(
            f"The file has a {x['named']} as {cls.__name__}.{field}, but the annotation of the "
            "field does not name it. The class has changed since the program was exported."
        )
    ((kind, name),) = x.items()
    if kind == "jnp":
        return getattr(jnp, name)
    return jnp.dtype(name) if kind == "dtype" else jnp.dtype(name).type


def _named_tuples(cls: type, field: str) -> set[type]:
    """Return the NamedTuple classes in the annotation of a field, and in their annotations."""
    classes: set[type] = set()

    def search(annotation: Any) -> None:
        for part in typing.get_args(annotation):
            search(part)
        is_tuple = isinstance(annotation, type) and issubclass(annotation, tuple)
        if is_tuple and hasattr(annotation, "_fields") and annotation not in classes:
            classes.add(annotation)
            for part in typing.get_type_hints(annotation).values():
                search(part)

    owner = next(base for base in cls.__mro__ if field in inspect.get_annotations(base))
    annotation = inspect.get_annotations(owner)[field]
    search(typing.get_type_hints(owner)[field] if isinstance(annotation, str) else annotation)
    return classes
