"""Make classes of implicit values frozen dataclasses and pytrees, and inspect their fields."""

import contextlib
import dataclasses
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._jax.export import make_exportable
from .._jax.frames import check_caller

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)


def static(**kwargs: Any) -> Any:
    """Declare a field of an implicit array as metadata, which JAX compares and never traces.

    If the field is the index of an axis, count the axis from the end, because `vmap` and `scan`
    add and remove leading axes.

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
    """Return whether a field is metadata, marked as `static` or with `pytree_node=False` (flax)."""
    metadata = field.metadata
    return metadata.get("static", False) or not metadata.get("pytree_node", True)


def has_metadata(value: Any) -> bool:
    """Return whether a dataclass, or a dataclass in one of its fields, has static fields."""
    fields = dataclasses.fields(value)
    parts = (getattr(value, field.name, None) for field in fields)
    has_static_field = any(map(_is_static, fields))
    return has_static_field or any(dataclasses.is_dataclass(p) and has_metadata(p) for p in parts)


def check_metadata(value: Any) -> None:
    """Raise `TypeError` if a static field of a value is not hashable."""
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
    """Make a class a frozen dataclass whose instances are compared by identity."""
    if not hasattr(cls, "__post_init__"):
        cls.__post_init__ = check_metadata  # type: ignore[attr-defined]
    for name in inspect.get_annotations(cls):
        if name not in vars(cls) and hasattr(cls, name):
            # Otherwise dataclass() would use an attribute of a base class as the default.
            setattr(cls, name, dataclasses.field())
    declared = {k: v for k, v in vars(cls).items() if isinstance(v, dataclasses.Field)}
    has_generated_init = "__init__" not in vars(cls)
    dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    # A second decorator (such as flax.struct.dataclass) expects the class that its author wrote:
    # with the field declarations, which dataclass() removes, and without __setattr__ and
    # __delattr__, which dataclass() adds. The methods of Value raise the same errors.
    for name, declaration in declared.items():
        setattr(cls, name, declaration)
    for name in ("__setattr__", "__delattr__"):
        delattr(cls, name)
    cls.__init__ = _add_checks(cls.__init__, has_generated_init)  # type: ignore[misc]
    make_exportable(cls)


def _add_checks(init: Callable, calls_post_init: bool) -> Callable:
    """Wrap the constructor `init`: also take `shape` and `dtype`, and check the new value.

    Raise `ValueError` if the dense array has another shape or dtype. Call `__post_init__`, unless
    `init` does so (`calls_post_init`) or a subclass calls the constructor by `super().__init__`.
    """
    parameters = inspect.signature(init).parameters
    checkable_names = [name for name in ("shape", "dtype") if name not in parameters]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        expected = {name: kwargs.pop(name) for name in checkable_names if name in kwargs}
        init(self, *args, **kwargs)
        is_called_by_subclass = type(self).__init__ is not __init__
        if not calls_post_init and not is_called_by_subclass:
            self.__post_init__()
        for name, given in expected.items():
            given = tuple(given) if name == "shape" else jax.numpy.dtype(given)
            if given != getattr(self.aval(), name):
                raise ValueError(
                    f"{type(self).__name__} was given {name}={given}, but its dense array has "
                    f"{name} {getattr(self.aval(), name)}: {self!r}"
                )

    return __init__


Metadata = tuple[tuple[Any, ...], tuple[type, ...]]  # the values of static fields, and their types
#: The methods in which a class checks the fields of a new value. Equinox calls `__check_init__`.
CHECK_METHODS = ("__post_init__", "__check_init__")


def checks_of(value: Any) -> list[Callable[[], None]]:
    """Return each `__check_init__` and `__post_init__` of a value, bound to the value."""
    checks = [vars(c)["__check_init__"] for c in type(value).__mro__ if "__check_init__" in vars(c)]
    checks = [functools.partial(check, value) for check in checks]
    post_init = getattr(value, "__post_init__", None)
    if post_init and not inspect.signature(post_init).parameters:  # no dataclasses.InitVar
        checks.append(post_init)
    return checks


def make_pytree(cls: Any) -> None:
    """Register a dataclass as a pytree with keys, unless the class is registered already."""
    fields = dataclasses.fields(cls)
    static_names = [f.name for f in fields if f.metadata.get("static", False)]
    child_names = [f.name for f in fields if f.name not in static_names]
    keys = [jax.tree_util.GetAttrKey(name) for name in child_names]
    get_children, get_metadata = _getter(child_names), _getter(static_names)

    def flatten(value: Any) -> tuple[tuple[Any, ...], Metadata]:
        check_caller(value, flattened=True)  # may raise a clearer error than the JAX function
        metadata = get_metadata(value.__dict__)
        # JAX caches programs by metadata. The types tell apart equal values such as 2 and 2.0.
        return get_children(value.__dict__), (metadata, tuple(map(type, metadata)))

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Metadata]:
        leaves, metadata = flatten(value)
        return list(zip(keys, leaves, strict=True)), metadata

    def unflatten(metadata: Metadata, leaves: Iterable[Any]) -> Any:
        # The constructor would check the leaves, which may be placeholders.
        value: Any = object.__new__(cls)
        value.__dict__.update(zip(child_names, leaves, strict=True))
        value.__dict__.update(zip(static_names, metadata[0], strict=True))
        check_caller(value, flattened=False)
        return value

    with contextlib.suppress(ValueError):  # Equinox and flax.struct register their classes
        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    cls._pytree = True


def _getter(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return a fast function from a dict to the tuple of the entries with these names."""
    if len(names) > 1:
        return operator.itemgetter(*names)  # for one name, it would not return a tuple
    return lambda entries: tuple(entries[name] for name in names)


class ArrayFields(NamedTuple):
    """The array fields of a class, according to its annotations.

    `required` are the names of the fields that always hold an array. `is_complete` is True if each
    other field is static or annotated as possibly None.
    """

    required: frozenset[str]  # the fields that always hold an array, dense or implicit
    is_complete: bool  # whether each field is required, static, or annotated as possibly None


def array_fields_of(cls: Any) -> ArrayFields:
    """Return which fields of a dataclass hold arrays, according to the annotations."""
    fields = [f for f in dataclasses.fields(cls) if not _is_static(f)]
    try:
        annotations = typing.get_type_hints(cls)
    except Exception:  # an annotation may name a local variable
        annotations = {f.name: f.type for f in fields}
    types_of = {f.name: annotated_types(annotations[f.name]) for f in fields}
    optional = {f.name for f in fields if f.default is None or type(None) in types_of[f.name]}
    is_array_type = lambda cls: (
        isinstance(cls, type) and (issubclass(cls, _ARRAYS) or hasattr(cls, "materialise"))
    )
    arrays = {name for name, classes in types_of.items() if all(map(is_array_type, classes))}
    is_complete = types_of.keys() == arrays | optional
    return ArrayFields(required=frozenset(arrays - optional), is_complete=is_complete)


def annotated_types(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, such as `[Array, NoneType]` for `Array | None`.

    A `TypeVar` is replaced by its bound, `Annotated` and jaxtyping types by their array type, and
    a generic type such as `list[int]` by its class.
    """
    annotation = getattr(annotation, "__value__", annotation)  # a `type` statement's alias
    if isinstance(annotation, typing.TypeVar):
        return annotated_types(annotation.__bound__ or Any)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return [cls for argument in arguments for cls in annotated_types(argument)]
    if origin is typing.Annotated:
        return annotated_types(arguments[0])
    if hasattr(annotation, "array_type"):  # jaxtyping: Float[Array, "m n"]
        return annotated_types(annotation.array_type)
    return [origin or annotation]
