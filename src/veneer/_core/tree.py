"""Pytrees: the classes of implicit values as such, and flat lists of leaves."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from .._jax.caller_errors import check_caller
from .._jax.export import make_exportable
from .surface.mistakes import check_metadata


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


def has_metadata(value: Any) -> bool:
    """Whether a dataclass, or one in its fields, has static fields."""
    for field in dataclasses.fields(value):
        # jax.tree_util and Equinox mark them by the first, flax.struct by the second.
        if field.metadata.get("static", False) or not field.metadata.get("pytree_node", True):
            return True
        part = getattr(value, field.name, None)
        if dataclasses.is_dataclass(part) and has_metadata(part):
            return True
    return False


def make_dataclass(cls: type) -> None:
    """Makes a class a frozen dataclass, compared by identity."""
    if not hasattr(cls, "__post_init__"):
        cls.__post_init__ = check_metadata  # type: ignore[attr-defined]
    for name in inspect.get_annotations(cls):
        if name not in vars(cls) and hasattr(cls, name):  # or the base's method becomes its default
            setattr(cls, name, dataclasses.field())
    declared = {k: v for k, v in vars(cls).items() if isinstance(v, dataclasses.Field)}
    checks_itself = "__init__" not in vars(cls)  # as dataclass() makes them
    dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    # A second decorator (flax.struct.dataclass, say) must find the class as its author wrote it:
    # with the declarations, which dataclass() takes off, and with no __setattr__ of its own.
    for name, declaration in declared.items():
        setattr(cls, name, declaration)
    for name in ("__setattr__", "__delattr__"):  # Value's refuse as well
        delattr(cls, name)
    cls.__init__ = _checked(cls.__init__, checks_itself)  # type: ignore[misc]
    make_exportable(cls)


def _checked(init: Callable, checks_itself: bool) -> Callable:
    """Return a constructor that also takes `shape` and `dtype`, and calls `__post_init__`."""
    parameters = inspect.signature(init).parameters
    claimable = [name for name in ("shape", "dtype") if name not in parameters]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        claims = {name: kwargs.pop(name) for name in claimable if name in kwargs}
        init(self, *args, **kwargs)
        if not checks_itself and type(self).__init__ is __init__:  # and not called by a subclass
            self.__post_init__()
        for name, claim in claims.items():
            claim = tuple(claim) if name == "shape" else jax.numpy.dtype(claim)
            if claim != getattr(self.aval(), name):
                raise ValueError(
                    f"{type(self).__name__} was given {name}={claim}, but its dense array has "
                    f"{name} {getattr(self.aval(), name)}: {self!r}"
                )

    return __init__


def checks_of(value: Any) -> list[Callable[[], None]]:
    """What its class asks of the fields of a value, once they are set."""
    checks = [vars(c)["__check_init__"] for c in type(value).__mro__ if "__check_init__" in vars(c)]
    checks = [functools.partial(check, value) for check in checks]  # of an equinox.Module
    post_init = getattr(value, "__post_init__", None)
    if post_init and not inspect.signature(post_init).parameters:  # it sees the fields alone
        checks.append(post_init)
    return checks


Metadata = tuple[tuple[Any, ...], tuple[type, ...]]  # the values of static fields, and their types


def make_pytree(cls: Any) -> None:
    """Registers a dataclass as a pytree with keys, unless it is one."""
    fields = dataclasses.fields(cls)
    meta = tuple(f.name for f in fields if f.metadata.get("static", False))
    data = tuple(f.name for f in fields if f.name not in meta)
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in data)

    get_data, get_metadata = _getter(data), _getter(meta)

    def flatten(value: Any) -> tuple[tuple[Any, ...], Metadata]:
        check_caller(value, flattened=True)
        attributes = value.__dict__
        metadata = get_metadata(attributes)
        # With their types, for 2 == 2.0 and what is compiled for one does not do for the other.
        return get_data(attributes), (metadata, tuple(map(type, metadata)))

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Metadata]:
        leaves, metadata = flatten(value)
        return list(zip(keys, leaves, strict=True)), metadata

    def unflatten(metadata: Metadata, leaves: Iterable[Any]) -> Any:
        # Not by the constructor: leaves may be placeholders, which it has no way to check.
        value: Any = object.__new__(cls)
        value.__dict__.update(zip(data, leaves, strict=True))
        value.__dict__.update(zip(meta, metadata[0], strict=True))
        check_caller(value, flattened=False)
        return value

    with contextlib.suppress(ValueError):  # the framework that made the class has registered it
        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    cls._pytree = True


def _getter(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.itemgetter(*names)
    if not names:
        return lambda items: ()
    (name,) = names
    return lambda items: (items[name],)


def split_list(values: Sequence, *sizes: int) -> Iterator[list[Any]]:
    iterator = iter(values)
    for size in sizes:
        yield list(itertools.islice(iterator, size))
    yield list(iterator)
