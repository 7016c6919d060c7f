"""Operators and methods of implicit arrays: like those in `jax.Array`, but they run rules."""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax.frames import reject_dense_update, user_line
from ..._jax.tracing import ConcreteArray, is_eager
from ..errors import check_fields, is_marked_as_derivatives
from ..policy import ALLOW, BEFORE_CALL, Event, Policy, current_policy, policy_in_force
from ..rules import clear_with_rules
from ..sources import tag_sources
from ..trace import redispatch
from ..value import Value, materialise
from .operands import check_is_array

_OPERANDS = (Value, jax.Array, np.ndarray, np.generic, bool, int, float, complex)


class _DenseResult(NamedTuple):
    """A record of an eager operation whose result is a dense matrix."""

    array: weakref.ref  # the result
    function: Callable
    structure: Any  # the tree structure of the operands
    leaves: list[Any]  # the leaves of the operands, with a `ShapedArray` in place of each array
    line: str  # file and line of the operation

    def events(self) -> list[Event]:
        """Trace the operation again, and return a `vn.Event` for each materialized operand."""
        arrays = {i: x for i, x in enumerate(self.leaves) if isinstance(x, jax.core.ShapedArray)}

        def run(traced_arrays: dict[int, Any]) -> Any:
            filled = [traced_arrays.get(i, x) for i, x in enumerate(self.leaves)]
            return redispatch(self.function, *jax.tree.unflatten(self.structure, filled))

        events: list[Event] = []
        with policy_in_force(Policy(events=events)):
            jax.eval_shape(run, arrays)
        # The report must show that the array was materialized before the explained call.
        dense_events = [event for event in events if event.made_dense]
        return [replace(event, line=self.line, how=BEFORE_CALL) for event in dense_events]


_dense_results: dict[int, _DenseResult] = {}  # by the id of the result


def _remember_dense(out: Any, function: Callable, operands: Any) -> Any:
    """Record the eager operation that computed `out`, if `out` is a dense matrix. Return `out`.

    The operation called `function` with `operands`. If `vn.explain` gets this matrix as an argument
    later, it also reports this operation. The record is deleted with the matrix and does not keep
    the operands alive.
    """
    if type(out) is ConcreteArray and out.ndim > 1:
        leaves, structure = jax.tree.flatten(operands)
        abstract = [jax.typeof(x) if isinstance(x, jax.Array | np.ndarray) else x for x in leaves]
        key = id(out)
        array = weakref.ref(out, lambda _: _dense_results.pop(key, None))
        _dense_results[key] = _DenseResult(array, function, structure, abstract, user_line())
    return out


def materialised_before(arrays: Iterable[Any]) -> list[Event]:
    """Return events for the materializations in the eager operations that computed `arrays`."""
    events: list[Event] = []
    for x in arrays:
        result = _dense_results.get(id(x))
        if result is not None and result.array() is x:  # else another array had this id
            events += result.events()
    return events


def _operator(function: Callable) -> Callable[..., Any]:
    """Return an operator that calls `function`, in which implicit operands use their rules.

    Eager calls are compiled by `jax.jit`, unless a report or `on_materialise` needs events.
    """

    def with_rules(*operands: Any) -> Any:
        for x in operands:
            if isinstance(x, Value):
                check_is_array(x)
        return redispatch(function, *tag_sources(operands))

    materializing: set[tuple[type, ...]] = set()  # types for which an operand was materialized

    def with_rules_noted(*operands: Any) -> Any:
        events: list[Event] = []
        with policy_in_force(Policy(events=events)):
            out = with_rules(*operands)
        if any(event.made_dense for event in events):
            materializing.add(_types_of_values(operands))
        return out

    @cache
    def compiled() -> Callable:
        jitted: Any = jax.jit(with_rules_noted)
        clear_with_rules(jitted.clear_cache)
        return jitted

    def apply(*operands: Any) -> Any:
        if not (is_eager() and current_policy() is ALLOW and _can_compile(operands)):
            return with_rules(*operands)
        try:
            out = compiled()(*operands)
            if _types_of_values(operands) in materializing:
                _remember_dense(out, function, operands)
            return out
        except TypeError as error:  # If a field caused it, check_fields raises a clearer error.
            for x in operands:
                if isinstance(x, Value):
                    check_fields(x, error)
            raise

    return apply


def _types_of_values(operands: Sequence[Any]) -> tuple[type, ...]:
    return tuple([type(x) for x in operands if isinstance(x, Value)])


def _can_compile(operands: Sequence[Any]) -> bool:
    """Return whether an operator may be compiled for these operands.

    All must be arrays or numbers, and no type may set `compiles_operators = False`.
    """
    for x in operands:  # faster than all(), and called in each eager operation
        if not isinstance(x, _OPERANDS):
            return False
        if isinstance(x, Value) and (not x.compiles_operators or is_marked_as_derivatives(x)):
            return False
    return True


def _reflected(function: Callable) -> Callable[[Any, Any], Any]:
    apply = _operator(function)
    return lambda self, other: apply(other, self)


def _method(name: str) -> Callable[..., Any]:
    """Return the method `name` of `jax.Array` for implicit arrays, which runs their rules."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_is_array(self)
        operands = self, args, kwargs
        out = redispatch(call, *tag_sources(operands))
        return _remember_dense(out, call, operands) if current_policy() is ALLOW else out

    def call(x: Any, args: Any, kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    method.__doc__ = f"Call `jax.Array.{name}` with the registered rules in force."
    return method


def _property(name: str) -> property:
    doc = f"`jax.Array.{name}`, with the registered rules in force."
    return property(_operator(operator.attrgetter(name)), doc=doc)


def _on_dense(name: str) -> Callable[..., Any]:
    """Return the method `name` of `jax.Array`, applied to the dense array.

    Rules cannot compute a result that is not an array, or whose shape depends on the data.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(jnp.asarray(materialise(self)), name)(*args, **kwargs)

    method.__doc__ = f"Call `jax.Array.{name}` on the dense array."
    return method


def _scalar(convert: Callable) -> Callable[[Any], Any]:
    """Return a method that converts the dense array to a number by `convert`, such as `int`."""
    return lambda self: convert(materialise(self))


class _IndexUpdate:
    """The object `array.at[index]`. Its methods, such as `set`, return updated arrays."""

    def __init__(self, array: Any, index: Any):
        self._array, self._index = array, index


def _update(name: str) -> Callable[..., Any]:
    """Return the method `name` of `jax.Array.at[index]` for implicit arrays, which runs rules."""

    def update(self: _IndexUpdate, *args: Any, **kwargs: Any) -> Any:
        call = lambda x, i, args, kwargs: getattr(x.at[i], name)(*args, **kwargs)
        return redispatch(call, *tag_sources((self._array, self._index, args, kwargs)))

    return update


for _name in "get set add subtract multiply mul divide power min max apply".split():
    setattr(_IndexUpdate, _name, _update(_name))


class _IndexUpdater:
    """The object that `array.at` returns. It is indexed like `jax.Array.at`."""

    def __init__(self, array: Any):
        self._array = array

    def __getitem__(self, index: Any) -> _IndexUpdate:
        return _IndexUpdate(self._array, index)


_add = _operator(operator.add)


class ArrayOperators:
    """The operators of `jax.Array`, and its methods for arithmetic, shape and reductions."""

    __neg__ = _operator(operator.neg)
    __pos__ = _operator(operator.pos)
    __abs__ = _operator(operator.abs)
    __invert__ = _operator(operator.invert)

    def __add__(self, other: Any) -> Any:
        reject_dense_update(self)
        return _add(self, other)

    __sub__ = _operator(operator.sub)
    __mul__ = _operator(operator.mul)
    __truediv__ = _operator(operator.truediv)
    __floordiv__ = _operator(operator.floordiv)
    __mod__ = _operator(operator.mod)
    __divmod__ = _operator(divmod)
    # Not compiled: jax.numpy computes a constant exponent by multiplications.
    __pow__ = lambda self, other: redispatch(operator.pow, *tag_sources((self, other)))
    __rpow__ = lambda self, other: redispatch(operator.pow, *tag_sources((other, self)))
    __matmul__ = _operator(operator.matmul)
    __and__ = _operator(operator.and_)
    __or__ = _operator(operator.or_)
    __xor__ = _operator(operator.xor)
    __lshift__ = _operator(operator.lshift)
    __rshift__ = _operator(operator.rshift)

    __radd__ = _reflected(operator.add)
    __rsub__ = _reflected(operator.sub)
    __rmul__ = _reflected(operator.mul)
    __rtruediv__ = _reflected(operator.truediv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __rmod__ = _reflected(operator.mod)
    __rdivmod__ = _reflected(divmod)
    __rmatmul__ = _reflected(operator.matmul)
    __rand__ = _reflected(operator.and_)
    __ror__ = _reflected(operator.or_)
    __rxor__ = _reflected(operator.xor)
    __rlshift__ = _reflected(operator.lshift)
    __rrshift__ = _reflected(operator.rshift)

    __lt__ = _operator(operator.lt)
    __le__ = _operator(operator.le)
    __gt__ = _operator(operator.gt)
    __ge__ = _operator(operator.ge)
    __eq__ = _operator(operator.eq)
    __ne__ = _operator(operator.ne)
    __hash__ = None  # type: ignore[assignment]  # as jax.Array: equality is elementwise

    __bool__ = _scalar(bool)
    __int__ = _scalar(int)
    __float__ = _scalar(float)
    __complex__ = _scalar(complex)
    __index__ = _scalar(operator.index)

    __array_priority__ = 1000
    __array_ufunc__ = None  # so that NumPy leaves numpy_array @ implicit_array to __rmatmul__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self!r} cannot share its memory as a dense array. Allow a copy.")
        return np.asarray(materialise(self), dtype)

    __getitem__ = _method("__getitem__")

    def __len__(self) -> int:
        if not self.shape:  # type: ignore[attr-defined]
            raise TypeError("len() of unsized object")
        return self.shape[0]  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    T = _property("T")
    mT = _property("mT")
    real = _property("real")
    imag = _property("imag")
    at = property(_IndexUpdater, doc="`jax.Array.at`: index it to get updated arrays.")

    @property
    def itemsize(self) -> int:
        """The number of bytes per element of the dense array."""
        return self.dtype.itemsize  # type: ignore[attr-defined]

    def block_until_ready(self) -> Any:
        """Wait until the leaves are computed, and return this array."""
        return jax.block_until_ready(self)

    all = _method("all")
    any = _method("any")
    argmax = _method("argmax")
    argmin = _method("argmin")
    argpartition = _method("argpartition")
    argsort = _method("argsort")
    astype = _method("astype")
    choose = _method("choose")
    clip = _method("clip")
    compress = _on_dense("compress")
    conj = _method("conj")
    conjugate = _method("conjugate")
    copy = _method("copy")
    cumprod = _method("cumprod")
    cumsum = _method("cumsum")
    diagonal = _method("diagonal")
    dot = _method("dot")
    flatten = _method("flatten")
    item = _on_dense("item")
    max = _method("max")
    mean = _method("mean")
    min = _method("min")
    nonzero = _on_dense("nonzero")
    prod = _method("prod")
    ptp = _method("ptp")
    ravel = _method("ravel")
    repeat = _method("repeat")
    reshape = _method("reshape")
    round = _method("round")
    searchsorted = _method("searchsorted")
    sort = _method("sort")
    squeeze = _method("squeeze")
    std = _method("std")
    sum = _method("sum")
    swapaxes = _method("swapaxes")
    take = _method("take")
    tobytes = _on_dense("tobytes")
    tolist = _on_dense("tolist")
    trace = _method("trace")
    transpose = _method("transpose")
    var = _method("var")
    view = _method("view")
