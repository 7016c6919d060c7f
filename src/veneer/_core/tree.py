"""Classes of implicit values as dataclasses and pytrees."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._jax.caller_errors import check_caller
from .._jax.export import make_exportable


def static(**kwargs: Any) -> Any:
    """Declare a field of an implicit array as metadata, which JAX compares and never traces.

    If metadata names an axis, count it from the end: `vmap` and `scan` change the leading axes.

    **Arguments:**

    - `kwargs`: the keywords of `dataclasses.field`, such as `default`.

    **Returns:** a dataclass field.

    **Raises:** The constructor of the class raises `TypeError` if the value is not hashable.

    >>> import jax, veneer as vn
    >>> class Scaled(vn.ImplicitArray):
    ...     x: jax.Array
    ...     by: float = vn.static(default=1.0)
    ...     def materialise(self):
    ...         return self.x * self.by
    >>> jax.tree.leaves(Scaled(2, by=3.0))
    [2]
    """
    # jax.tree_util.register_dataclass and Equinox read "static"; flax.struct reads "pytree_node".
    metadata = {**kwargs.pop("metadata", {}), "static": True, "pytree_node": False}
    return dataclasses.field(metadata=metadata, **kwargs)


def _is_static(field: dataclasses.Field) -> bool:
    metadata = field.metadata
    return metadata.get("static", False) or not metadata.get("pytree_node", True)


def has_metadata(value: Any) -> bool:
    """Return whether a dataclass, or a dataclass in one of its fields, has static fields."""
    for field in dataclasses.fields(value):
        if _is_static(field):
            return True
        part = getattr(value, field.name, None)
        if dataclasses.is_dataclass(part) and has_metadata(part):
            return True
    return False


def check_metadata(value: Any) -> None:
    """Reject static fields that cannot be hashed."""
    for field in dataclasses.fields(value):
        if field.metadata.get("static", False):
            data = getattr(value, field.name, None)
            try:
                hash(data)
            except TypeError:
                raise TypeError(
                    f"{type(value).__name__}.{field.name} is static, so it must be hashable, but "
                    f"{data!r} is a {type(data).__name__}. Use a tuple for a list or an array."
                ) from None


def make_dataclass(cls: type) -> None:
    """Make a class a frozen dataclass that is compared by identity."""
    if not hasattr(cls, "__post_init__"):
        cls.__post_init__ = check_metadata  # type: ignore[attr-defined]
    for name in inspect.get_annotations(cls):
        if name not in vars(cls) and hasattr(cls, name):
            # dataclass() would take an attribute of a base class for the default.
            setattr(cls, name, dataclasses.field())
    declared = {k: v for k, v in vars(cls).items() if isinstance(v, dataclasses.Field)}
    has_generated_init = "__init__" not in vars(cls)
    dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    # A second decorator (such as flax.struct.dataclass) must find the class as its author wrote
    # it: with the field declarations, which dataclass() removes, and without a __setattr__.
    for name, declaration in declared.items():
        setattr(cls, name, declaration)
    for name in ("__setattr__", "__delattr__"):  # those of Value raise the same errors
        delattr(cls, name)
    cls.__init__ = _add_checks(cls.__init__, has_generated_init)  # type: ignore[misc]
    make_exportable(cls)


def _add_checks(init: Callable, calls_post_init: bool) -> Callable:
    """Return a constructor that also takes `shape` and `dtype`, and calls `__post_init__`."""
    parameters = inspect.signature(init).parameters
    claimable = [name for name in ("shape", "dtype") if name not in parameters]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        claims = {name: kwargs.pop(name) for name in claimable if name in kwargs}
        init(self, *args, **kwargs)
        if not calls_post_init and type(self).__init__ is __init__:  # not called by a subclass
            self.__post_init__()
        for name, claim in claims.items():
            claim = tuple(claim) if name == "shape" else jax.numpy.dtype(claim)
            if claim != getattr(self.aval(), name):
                raise ValueError(
                    f"{type(self).__name__} was given {name}={claim}, but its dense array has "
                    f"{name} {getattr(self.aval(), name)}: {self!r}"
                )

    return __init__


#: The methods in which a class checks the fields of a value: of dataclasses, and of Equinox.
CHECK_METHODS = ("__post_init__", "__check_init__")


def checks_of(value: Any) -> list[Callable[[], None]]:
    """Return the functions by which the class of a value checks its fields."""
    checks = [vars(c)["__check_init__"] for c in type(value).__mro__ if "__check_init__" in vars(c)]
    checks = [functools.partial(check, value) for check in checks]
    post_init = getattr(value, "__post_init__", None)
    if post_init and not inspect.signature(post_init).parameters:  # no dataclasses.InitVar
        checks.append(post_init)
    return checks


Metadata = tuple[tuple[Any, ...], tuple[type, ...]]  # the values of static fields, and their types


def make_pytree(cls: Any) -> None:
    """Register a dataclass as a pytree with keys, unless it is registered already."""
    fields = dataclasses.fields(cls)
    meta = tuple(f.name for f in fields if f.metadata.get("static", False))
    data = tuple(f.name for f in fields if f.name not in meta)
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in data)
    get_data, get_metadata = _getter(data), _getter(meta)

    def flatten(value: Any) -> tuple[tuple[Any, ...], Metadata]:
        check_caller(value, flattened=True)
        attributes = value.__dict__
        metadata = get_metadata(attributes)
        # JAX caches programs by metadata, and 2 == 2.0: so the types are part of it.
        return get_data(attributes), (metadata, tuple(map(type, metadata)))

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Metadata]:
        leaves, metadata = flatten(value)
        return list(zip(keys, leaves, strict=True)), metadata

    def unflatten(metadata: Metadata, leaves: Iterable[Any]) -> Any:
        # The constructor would check the leaves, which may be placeholders.
        value: Any = object.__new__(cls)
        value.__dict__.update(zip(data, leaves, strict=True))
        value.__dict__.update(zip(meta, metadata[0], strict=True))
        check_caller(value, flattened=False)
        return value

    with contextlib.suppress(ValueError):  # Equinox and flax.struct register their classes
        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    cls._pytree = True


def _getter(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.itemgetter(*names)
    if not names:
        return lambda items: ()
    (name,) = names
    return lambda items: (items[name],)


class ArrayFields(NamedTuple):
    """The fields of a class that hold arrays, according to the annotations."""

    required: frozenset[str]  # the fields that hold an array, dense or implicit, and never None
    is_complete: bool  # whether every other field that is not static may be None


def array_fields_of(cls: Any) -> ArrayFields:
    """Read the annotations of the fields of a dataclass."""
    leaves = [f for f in dataclasses.fields(cls) if not _is_static(f)]
    try:
        annotations = typing.get_type_hints(cls)
    except Exception:  # an annotation may name a local variable
        annotations = {f.name: f.type for f in leaves}
    may_be_none = lambda f: f.default is None or type(None) in typing.get_args(annotations[f.name])
    optional = {f.name for f in leaves if may_be_none(f)}
    required = frozenset(
        f.name for f in leaves if f.name not in optional and _is_array_type(annotations[f.name])
    )
    return ArrayFields(required, all(f.name in required | optional for f in leaves))


def _is_array_type(annotation: Any) -> bool:
    annotation = getattr(annotation, "__value__", annotation)  # a `type` statement's alias
    if isinstance(annotation, typing.TypeVar):
        return _is_array_type(annotation.__bound__)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return all(map(_is_array_type, typing.get_args(annotation)))
    if origin is typing.Annotated:
        return _is_array_type(typing.get_args(annotation)[0])
    if hasattr(annotation, "array_type"):  # jaxtyping: Float[Array, "m n"]
        return _is_array_type(annotation.array_type)
    cls = origin or annotation
    return isinstance(cls, type) and (issubclass(cls, _ARRAYS) or hasattr(cls, "materialise"))


_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)


def split_list(values: Sequence, *sizes: int) -> Iterator[list[Any]]:
    """Yield consecutive parts of these sizes, then the rest."""
    iterator = iter(values)
    for size in sizes:
        yield list(itertools.islice(iterator, size))
    yield list(iterator)
