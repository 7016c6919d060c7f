"""The fields of a type that hold an array, by their annotations."""

import dataclasses
import types
import typing
from typing import Any, NamedTuple

import jax
import numpy as np


class Fields(NamedTuple):
    """What the annotations of the leaves of a type tell."""

    arrays: frozenset[str]  # hold an array, dense or implicit, and never None
    tell: bool  # all do, of every other that it may be None


def fields_of(cls: Any) -> Fields:
    """What the annotations of a dataclass tell."""
    metadata = lambda f: f.metadata.get("static", False) or not f.metadata.get("pytree_node", True)
    leaves = [f for f in dataclasses.fields(cls) if not metadata(f)]
    try:
        annotations = typing.get_type_hints(cls)
    except Exception:  # names that are local to where the class is defined
        annotations = {f.name: f.type for f in leaves}
    may_be_none = lambda f: f.default is None or type(None) in typing.get_args(annotations[f.name])
    optional = {f.name for f in leaves if may_be_none(f)}
    arrays = frozenset(
        f.name for f in leaves if f.name not in optional and _is_array(annotations[f.name])
    )
    return Fields(arrays, all(f.name in arrays | optional for f in leaves))


def _is_array(annotation: Any) -> bool:
    annotation = getattr(annotation, "__value__", annotation)  # a `type` statement's alias
    if isinstance(annotation, typing.TypeVar):
        return _is_array(annotation.__bound__)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return all(map(_is_array, typing.get_args(annotation)))
    if origin is typing.Annotated:
        return _is_array(typing.get_args(annotation)[0])
    if hasattr(annotation, "array_type"):  # jaxtyping: Float[Array, "m n"]
        return _is_array(annotation.array_type)
    cls = origin or annotation
    return isinstance(cls, type) and (issubclass(cls, _ARRAYS) or hasattr(cls, "materialise"))


_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)
