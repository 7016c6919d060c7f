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

_ScalarType = type(jnp.float32)


def make_exportable(cls: Any) -> None:
    """Register a dataclass for `jax.export`. It replaces an earlier class with the same name."""
    names = tuple(f.name for f in dataclasses.fields(cls) if f.metadata.get("static", False))
    data = tuple(f.name for f in dataclasses.fields(cls) if f.name not in names)

    def serialize(metadata: Sequence[Any]) -> bytes:
        # Our pytrees have pairs of values and their types as metadata, flax.struct only values.
        is_pair = len(metadata) == 2 and isinstance(metadata[0], tuple)
        if is_pair and metadata[1] == tuple(map(type, metadata[0])):
            metadata = metadata[0]
        written = {n: _encode(x, cls, n) for n, x in zip(names, metadata, strict=True)}
        return json.dumps(written).encode()

    def deserialize(text: bytes) -> tuple[Any, ...]:
        written = json.loads(text)
        if written.keys() != set(names):
            raise ValueError(
                f"The file has a {cls.__name__} with metadata {sorted(written)}, but the class "
                f"has {sorted(names)}. It has changed since the program was exported."
            )
        return tuple(_decode(written[n], cls, n) for n in names)

    def from_children(aux_data: Any, children: Any) -> Any:
        value = cls.__new__(cls)
        value.__dict__.update(zip((*names, *data), (*aux_data, *children), strict=True))
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

    for base in cls.__mro__:
        annotation = inspect.get_annotations(base).get(field)
        if annotation is not None:
            search(
                typing.get_type_hints(base)[field] if isinstance(annotation, str) else annotation
            )
            break
    return classes
