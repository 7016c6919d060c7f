"""The operators and methods of `jax.Array` for implicit arrays, with the rules in force."""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax.caller_errors import reject_dense_update
from ..._jax.source_lines import user_line
from ..._jax.tracing import ConcreteArray, is_eager
from ..errors import check_fields, is_marked_as_derivatives
from ..event import BEFORE_CALL, Event
from ..policy import ALLOW, Policy, current_policy, policy_in_force
from ..rules import clear_with_rules
from ..sources import tag_sources
from ..transform import redispatch
from ..value import Value, materialise
from .operands import check_is_array

_OPERANDS = (Value, jax.Array, np.ndarray, np.generic, bool, int, float, complex)


class _DenseResult(NamedTuple):
    """A dense matrix that an eager operation computed, and how to stage the operation again."""

    array: weakref.ref
    function: Callable
    structure: Any  # of the operands, whose arrays are abstract among the leaves
    leaves: list[Any]
    line: str

    def events(self) -> list[Event]:
        """Return the events in which the operation materialized an operand."""
        is_array = [isinstance(x, jax.core.ShapedArray) for x in self.leaves]

        def run(arrays: Any) -> Any:
            rest = iter(arrays)
            filled = [next(rest) if a else x for a, x in zip(is_array, self.leaves, strict=True)]
            return redispatch(self.function, *jax.tree.unflatten(self.structure, filled))

        events: list[Event] = []
        with policy_in_force(Policy(events=events)):
            jax.eval_shape(run, [x for a, x in zip(is_array, self.leaves, strict=True) if a])
        events = [event for event in events if event.made_dense]
        return [replace(event, line=self.line, how=BEFORE_CALL) for event in events]


_dense_results: dict[int, _DenseResult] = {}  # by the id of the array


def _remember_dense(out: Any, function: Callable, operands: Any) -> Any:
    """Remember how a dense matrix was computed from implicit operands, as long as it exists.

    `explain` reports the eager operation later, if it is called with the matrix. The operands are
    not kept alive.
    """
    if type(out) is ConcreteArray and out.ndim > 1:
        leaves, structure = jax.tree.flatten(operands)
        abstract = [jax.typeof(x) if isinstance(x, jax.Array | np.ndarray) else x for x in leaves]
        key = id(out)
        array = weakref.ref(out, lambda _: _dense_results.pop(key, None))
        _dense_results[key] = _DenseResult(array, function, structure, abstract, user_line())
    return out


def materialised_before(arrays: Iterable[Any]) -> list[Event]:
    """Return the events of eager operations that materialized operands to compute these arrays."""
    results = [(x, _dense_results.get(id(x))) for x in arrays]
    alive = [result for x, result in results if result is not None and result.array() is x]
    return [event for result in alive for event in result.events()]


def _operator(function: Callable) -> Callable[..., Any]:
    """Return an operator that runs the rules. Eager calls are compiled."""

    def transformed(*operands: Any) -> Any:
        for x in operands:
            if isinstance(x, Value):
                check_is_array(x)
        return redispatch(function, *tag_sources(operands))

    @cache
    def compiled() -> Callable:
        jitted: Any = jax.jit(transformed)
        clear_with_rules(jitted.clear_cache)
        return jitted

    def apply(*operands: Any) -> Any:
        if not (is_eager() and current_policy() is ALLOW and _are_arrays(operands)):
            return transformed(*operands)
        try:
            return _remember_dense(compiled()(*operands), function, operands)
        except TypeError as error:  # check_fields names the field in its error
            for x in operands:
                if isinstance(x, Value):
                    check_fields(x, error)
            raise

    return apply


def _are_arrays(operands: Sequence[Any]) -> bool:
    for x in operands:  # faster than all(), and called in each eager operation
        if not isinstance(x, _OPERANDS):
            return False
        if isinstance(x, Value) and (not x.compiles_operators or is_marked_as_derivatives(x)):
            return False
    return True


def _unary(function: Callable) -> Callable[[Any], Any]:
    apply = _operator(function)
    return lambda self: apply(self)


def _binary(function: Callable) -> Callable[[Any, Any], Any]:
    apply = _operator(function)
    return lambda self, other: apply(self, other)


def _reflected(function: Callable) -> Callable[[Any, Any], Any]:
    apply = _operator(function)
    return lambda self, other: apply(other, self)


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_is_array(self)
        out = redispatch(call, *tag_sources((self, args, kwargs)))
        is_reported = current_policy() is not ALLOW
        return out if is_reported else _remember_dense(out, call, (self, args, kwargs))

    def call(x: Any, args: Any, kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    method.__doc__ = f"Call `jax.Array.{name}` with the registered rules in force."
    return method


def _property(name: str) -> property:
    doc = f"`jax.Array.{name}`, with the registered rules in force."
    return property(_unary(operator.attrgetter(name)), doc=doc)


def _on_dense(name: str) -> Callable[..., Any]:
    """Return a method for results that are not arrays, or whose shape depends on the data."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(jnp.asarray(materialise(self)), name)(*args, **kwargs)

    method.__doc__ = f"Call `jax.Array.{name}` on the dense array."
    return method


def _scalar(convert: Callable) -> Callable[[Any], Any]:
    return lambda self: convert(materialise(self))


class _IndexUpdate:
    """The object `array.at[index]`, whose methods return updated arrays."""

    def __init__(self, array: Any, index: Any):
        self._array, self._index = array, index


def _update(name: str) -> Callable[..., Any]:
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


_add = _binary(operator.add)


class ArrayOperators:
    """The operators of `jax.Array`, and its methods for arithmetic, shape and reductions."""

    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)

    def __add__(self, other: Any) -> Any:
        reject_dense_update(self)
        return _add(self, other)

    __sub__ = _binary(operator.sub)
    __mul__ = _binary(operator.mul)
    __truediv__ = _binary(operator.truediv)
    __floordiv__ = _binary(operator.floordiv)
    __mod__ = _binary(operator.mod)
    __divmod__ = _binary(divmod)
    # Not compiled: jax.numpy computes a constant exponent by multiplications.
    __pow__ = lambda self, other: redispatch(operator.pow, *tag_sources((self, other)))
    __rpow__ = lambda self, other: redispatch(operator.pow, *tag_sources((other, self)))
    __matmul__ = _binary(operator.matmul)
    __and__ = _binary(operator.and_)
    __or__ = _binary(operator.or_)
    __xor__ = _binary(operator.xor)
    __lshift__ = _binary(operator.lshift)
    __rshift__ = _binary(operator.rshift)

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

    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)
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
