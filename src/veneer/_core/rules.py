"""Rules of JAX primitives for given operand types, selected by multiple dispatch.

The annotations of a rule are the classes of operands that it accepts. The selection depends only on
the classes of the operands. All dense operands (arrays, tracers, scalars) have one class, `Dense`.
So selected rules can be cached by the classes of the operands.
"""

import functools
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from .._jax.primitives import Primitive, find_primitive
from .tree import annotated_types
from .value import Value

# Annotations.


class Dense:
    """The class of all operands that are not implicit values."""


# The classes that one annotation accepts: `Dense`, subclasses of `Value`, or `object` for any
# operand. An operand must be an instance of one of these classes.
Alternatives = frozenset[type]

_DENSE_TYPES = (*typing.get_args(ArrayLike), np.generic, bool, int, float, complex)


def names_around(function: Callable) -> dict[str, Any]:
    """Return the global and local variables that the annotations of `function` can name."""
    # The locals come from the innermost running function of the same module.
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals is not function.__globals__:
        frame = frame.f_back
    return {**function.__globals__, **(frame.f_locals if frame else {})}


def operand_types(function: Callable) -> tuple[tuple[Alternatives, ...], Alternatives | None]:
    """Return the classes that a rule accepts for each positional operand, and for its `*args`.

    The second result is None if the rule has no `*args`. Keyword parameters are not operands.
    """
    operands: list[Alternatives] = []
    variadic: Alternatives | None = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            continue
        annotation = parameter.annotation
        if isinstance(annotation, str):  # from __future__ import annotations
            annotation = eval(annotation, names_around(function))
        alternatives = _alternatives(annotation, function, parameter.name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            variadic = alternatives
        else:
            operands.append(alternatives)
    return tuple(operands), variadic


def check_annotations(function: Callable) -> None:
    """Raise `TypeError` if no operand of a rule is annotated with an implicit type or `Any`.

    Without this check, a rule whose annotations were forgotten would run for every implicit type.
    """
    operands, variadic = operand_types(function)
    accepted = operands if variadic is None else (*operands, variadic)
    if any(issubclass(c, Value) for classes in accepted for c in classes):
        return
    if all(classes == {Dense} for classes in accepted):
        raise TypeError(
            f"{function.__qualname__} takes only dense operands. A rule runs only if an operand "
            "is implicit. Annotate that operand with its type, a subclass of vn.ImplicitArray."
        )
    # The rule accepts any type: an operand is annotated with `Any`, or has no annotation.
    keyword_kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in keyword_kinds and parameter.annotation is parameter.empty:
            raise TypeError(
                f"{function.__qualname__}: operand {parameter.name!r} has no annotation, so the "
                "rule would run for every implicit type. Annotate it with a subclass of "
                "vn.ImplicitArray, with vn.ArrayLike for a dense operand, or with Any."
            )


def _alternatives(annotation: Any, function: Callable, operand: str) -> Alternatives:
    """Return the classes that the annotation of an operand of the rule `function` accepts."""
    accepted: set[type] = set()
    for cls in annotated_types(annotation):
        if cls in (inspect.Parameter.empty, Any, object):
            accepted.add(object)
        elif isinstance(cls, type) and issubclass(cls, Value):
            accepted.add(cls)
        elif isinstance(cls, type) and issubclass(cls, _DENSE_TYPES):
            accepted.add(Dense)
        else:
            raise TypeError(
                f"{function.__qualname__}: operand {operand!r} is annotated {annotation!r}, which "
                "is neither dense (vn.ArrayLike, jax.Array) nor a subclass of vn.ImplicitArray, "
                "nor a union of those."
            )
    return frozenset(accepted)


# Rules.


_F = TypeVar("_F", bound=Callable)


class AmbiguousLookupError(TypeError):
    """The error for a call that two rules of the same precedence fit equally well.

    Register a rule for these operand types, or register one of the two with a higher `precedence`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> class Tag(vn.ImplicitArray):
    ...     x: jax.Array
    ...     def materialise(self):
    ...         return self.x
    >>> @vn.register("atan2")
    ... def _(y: Tag, x, **params): ...
    >>> @vn.register("atan2")
    ... def _(y, x: Tag, **params): ...
    >>> t = Tag(jnp.ones(2))
    >>> vn.implicit(jnp.arctan2)(t, t)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    veneer.AmbiguousLookupError: atan2(Tag, Tag) is ambiguous among the following rules: ...
    """


def _accepts(alternatives: Alternatives, operand: type) -> bool:
    return any(issubclass(operand, alternative) for alternative in alternatives)


@dataclass(frozen=True)
class RegisteredRule:
    """A function that implements a primitive for operands of some classes."""

    function: Callable
    operands: tuple[Alternatives, ...]  # for each operand, the classes that the rule accepts
    variadic: Alternatives | None  # the same for the operands in `*args`; None without `*args`
    precedence: int
    structural: bool = False  # whether the primitive contains programs, such as `scan`
    conditional: bool = False  # whether the function may return NotImplemented
    eager: Callable[[Sequence[Any], dict[str, Any]], Any] | None = None  # faster in eager calls
    swapped: bool = False  # whether this is a copy that takes the operands in the opposite order
    order: int = field(default_factory=itertools.count().__next__)  # of registration

    def _classes_of(self, i: int) -> Alternatives:
        """Return the classes that the rule accepts for operand `i`."""
        return self.operands[i] if i < len(self.operands) else (self.variadic or frozenset())

    def accepts(self, classes: Sequence[type]) -> bool:
        """Return whether the rule accepts operands of these classes."""
        count = len(classes)
        if count < len(self.operands) or (count > len(self.operands) and self.variadic is None):
            return False
        return all(_accepts(self._classes_of(i), c) for i, c in enumerate(classes))

    def is_within(self, other: "RegisteredRule", count: int) -> bool:
        """Return whether `other` accepts all tuples of `count` operands that this rule accepts.

        A rule with `*args` is never within a rule without `*args`.
        """
        if self.variadic is not None and other.variadic is None:
            return False
        return all(
            _accepts(other._classes_of(i), c) for i in range(count) for c in self._classes_of(i)
        )

    @cached_property
    def location(self) -> str:
        return location_of(self.function)

    def __str__(self) -> str:
        names = [" | ".join(sorted(c.__name__ for c in classes)) for classes in self.operands]
        if self.variadic is not None:
            names.append("*" + " | ".join(sorted(c.__name__ for c in self.variadic)))
        return f"({', '.join(names)}) at {self.location} (precedence {self.precedence})"


def location_of(function: Callable) -> str:
    """Return the file and line at which a function is defined, as `file:line`."""
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


_functions: "dict[Any, JittedFunction]" = {}  # by the function and its keywords


class JittedFunction:
    """A jitted function, such as `jnp.linalg.det`, that has rules like a primitive.

    `keywords` are the static keywords with which it is called. It has the attributes of a primitive
    that dispatch needs.

    The primitives inside `jnp.linalg.det` do not show that they compute a determinant. So the rule
    of `jit` compares each `jit` equation with the functions that have rules: by the name, and by
    the jaxpr for operands of the same types, traced directly or under `jax.vmap`. The derivative of
    a function has another jaxpr and is not recognized.
    """

    multiple_results = True

    def __init__(self, jitted: Any, keywords: dict[str, Any]):
        self._jitted, self._keywords = jitted, keywords
        self.name: str = jitted.__name__

    def jaxpr(self, avals: Sequence[Any], vmaps: int = 0) -> Any:
        """Return the jaxpr of the function for operands of the types `avals`.

        `vmaps` is the number of nested calls of `jax.vmap` around the function. Return None if
        tracing the call of the function gives no equations.
        """
        operands = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=a.sharding)
            for a in avals
        ]
        function = lambda *xs: self._jitted(*xs, **self._keywords)
        for _ in range(vmaps):
            function = jax.vmap(function)
        equations = jax.make_jaxpr(function)(*operands).jaxpr.eqns
        # The last equation is the `jit`. JAX may convert operands in the equations before.
        return equations[-1].params["jaxpr"] if equations else None

    def abstract_eval(self, *avals: Any) -> tuple[Any, Any]:
        """Return the types of the results and no effects, like `Primitive.abstract_eval`."""
        return list(self.jaxpr(avals).out_avals), set()


def get_jitted_function(function: Any) -> JittedFunction | None:
    """Return the `JittedFunction` for a result of `jax.jit`, or a `functools.partial` of one.

    Return the same object in each call, and None for anything else.
    """
    keywords: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        function, keywords = function.func, function.keywords
    if not (callable(function) and hasattr(function, "trace") and hasattr(function, "lower")):
        return None
    key = function, tuple(sorted(keywords.items()))
    return _functions.setdefault(key, JittedFunction(function, keywords))


def functions_named(name: str) -> Sequence[JittedFunction]:
    """Return the functions of this name for which `get_jitted_function` was called."""
    return [function for function in _functions.values() if function.name == name]


# The operation that a rule implements: a primitive, or a jitted function such as `jnp.linalg.det`.
Target = Primitive | JittedFunction

_rules: dict[Target, list[RegisteredRule]] = {}
_selected: dict[Any, RegisteredRule | None] = {}
#: Primitives whose rule for `(x, y)` also serves `(y, x)`, if the types set `commute_ops`.
COMMUTATIVE = frozenset("add add_any mul max min and or xor eq ne".split())
CONTAINS_PROGRAMS: set[Primitive] = set()  # primitives with programs as parameters, such as `scan`
_clear_caches: list[Callable[[], None]] = [_selected.clear]


def clear_with_rules(clear: Callable[[], None]) -> None:
    """Register `clear`, a function that clears a cache, to be called whenever a rule is added."""
    _clear_caches.append(clear)


def register(
    primitive: Primitive | str | Callable | Iterable[Primitive | str | Callable],
    *,
    precedence: int = 0,
) -> Callable[[_F], _F]:
    """Register a rule: the implementation of a JAX primitive for given operand types.

    The rule takes the operands by position and the parameters of the primitive by keyword. Its
    annotations select the operands:

    | annotation | operand |
    |---|---|
    | a subclass of `vn.ImplicitArray` | an instance of it |
    | `vn.ArrayLike`, `jax.Array` | a dense array or a number |
    | a union | one of its members |
    | `Any`; or no annotation, if another operand has an implicit type | any operand |

    The most specific rule that fits runs. If it returns `NotImplemented`, the next rule is tried.
    If no rule fits, the operands are materialized. For `add`, `mul`, `max`, `min`, `and`, `or`,
    `xor`, `eq` and `ne`, a rule for operand types `(T, U)` also serves `(U, T)` if no other rule
    fits and neither type sets `commute_ops = False`.

    **Arguments:**

    - `primitive`: a primitive, its name in jaxprs, or a sequence of them. Or a jitted function,
      such as `jnp.linalg.det`, or a partial of one with static keywords. Calls of this function
      with an implicit array then run the rule. The rule takes the array arguments of the function
      and returns the same results as the function. Inside `jax.vmap` or `jax.grad`, the function
      itself runs, with the rules of its primitives.
    - `precedence`: a number. If several rules fit and none of them is the most specific, the rule
      with the highest precedence runs.

    **Returns:** a decorator that returns the rule unchanged.

    **Raises:**

    - `ValueError` if `primitive` is an unknown name, or another module has a rule for these types.
    - `TypeError` if `primitive` is anything else, an annotation is not in the table, or no operand
      is annotated with an implicit type or `Any`.
    - `vn.AmbiguousLookupError`, when the primitive is called, if two rules fit equally well.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> class Zero(vn.ImplicitArray):
    ...     like: jax.Array  # [...]
    ...     def materialise(self):
    ...         return jnp.zeros_like(self.like)
    >>> @vn.register("mul")
    ... def _(x: Zero, y: vn.ArrayLike, **params):
    ...     return Zero(jnp.broadcast_to(x.like, jnp.broadcast_shapes(x.shape, jnp.shape(y))))
    >>> Zero(jnp.ones(3)) * jnp.arange(3.0)
    Zero(like=f32[3])
    """
    is_single = isinstance(primitive, str) or not isinstance(primitive, Iterable)
    primitives: Any = (primitive,) if is_single else primitive
    targets = list(map(_target_of, primitives))

    def add(function: _F) -> _F:
        check_annotations(function)
        add_rule(function, targets, precedence)
        return function

    return add


def _target_of(x: Any) -> Target:
    """Return the primitive or the `JittedFunction` for an argument of `register`."""
    if isinstance(x, str):
        return find_primitive(x)
    if isinstance(x, Primitive):
        return x
    if (function := get_jitted_function(x)) is not None:
        return function
    raise TypeError(
        "vn.register takes a JAX primitive, its name, a function made by jax.jit, or a sequence "
        f"of them, not {x!r}."
    )


def add_rule(
    function: Callable,
    primitives: Iterable[Target],
    precedence: int = -1,
    *,
    structural: bool = False,
    conditional: bool = False,
    eager: Callable[[Sequence[Any], dict[str, Any]], Any] | None = None,
) -> None:
    """Add a function as a rule of some primitives, and clear the caches that depend on rules.

    **Arguments:**

    - `precedence`: a number, as in `register`. Rules for all types have a negative precedence.
    - `structural`: whether the primitives contain programs or call the host. Then the rule checks
      and reports its results itself.
    - `conditional`: whether the rule may return NotImplemented. If so, it is tried before a rule
      for the same types that may not.
    - `eager`: a faster function for eager calls. It takes the list of operands and the dict of
      parameters, and may return NotImplemented.
    """
    operands, variadic = operand_types(function)
    rule = RegisteredRule(function, operands, variadic, precedence, structural, conditional, eager)
    for primitive in primitives:
        if structural and isinstance(primitive, Primitive):
            CONTAINS_PROGRAMS.add(primitive)
        _reject_duplicate(rule, _rules.setdefault(primitive, []), primitive.name)
        _rules[primitive].append(rule)
        if primitive.name in COMMUTATIVE and _can_swap_operands(rule):
            _rules[primitive].append(_swap_operands(rule))
    for clear in _clear_caches:
        clear()


def _reject_duplicate(rule: RegisteredRule, rules: Iterable[RegisteredRule], name: str) -> None:
    """Raise `ValueError` if `rule` would replace one of the `rules` that another module added.

    `rules` are the rules of a primitive or jitted function, and `name` is its name.
    """
    signature = lambda r: (r.operands, r.variadic, r.precedence, r.conditional, r.swapped)
    module = rule.function.__module__
    for other in rules:
        other_module = other.function.__module__
        if signature(other) == signature(rule) and other_module != module:
            raise ValueError(
                f"{name} already has a rule for these operands, in another module:\n  "
                f"{other}, of {other_module}\n  {rule}, of {module}\nTo replace it, register "
                "the new rule with a higher precedence."
            )


def _can_swap_operands(rule: RegisteredRule) -> bool:
    """Return whether a rule for operand types `(T, U)` also serves `(U, T)`.

    It must take two operands of different classes, and no class may set `commute_ops = False`.
    """
    if len(rule.operands) != 2 or rule.operands[0] == rule.operands[1] or rule.variadic is not None:
        return False
    classes = rule.operands[0] | rule.operands[1]
    return all(cls.commute_ops for cls in classes if issubclass(cls, Value))


def _swap_operands(rule: RegisteredRule) -> RegisteredRule:
    """Return a copy of a rule for `(x, y)` that takes the operands as `(y, x)`."""

    @functools.wraps(rule.function)
    def function(x: Any, y: Any, **params: Any) -> Any:
        return rule.function(y, x, **params)

    return replace(rule, function=function, operands=rule.operands[::-1], swapped=True)


def structural(name: str) -> Callable[[_F], _F]:
    """Return a decorator that adds a structural rule: a rule of the primitive `name` for all types.

    A structural rule is for a primitive that contains programs, like `scan`, or that calls the
    host. The rule checks and reports its results itself.
    """

    def add(function: _F) -> _F:
        add_rule(function, [find_primitive(name)], structural=True)
        return function

    return add


def structural_rule(primitive: Primitive) -> Callable:
    """Return the function that the decorator `structural` added as the rule of a primitive."""
    return next(rule.function for rule in _rules[primitive] if rule.structural)


def rules_of(cls: type[Value]) -> list[tuple[Target, RegisteredRule]]:
    """Return pairs `(target, rule)` for the rules that name `cls` in an annotation."""
    return [
        (target, rule)
        for target, rules in _rules.items()
        for rule in rules
        if not rule.structural and any(cls in classes for classes in rule.operands)
    ]


def resolve(
    primitive: Target, classes: tuple[type, ...], tried: tuple[RegisteredRule, ...] = ()
) -> RegisteredRule | None:
    """Return the most specific rule that accepts operands of these classes, or None.

    Skip the rules in `tried`. Raise `AmbiguousLookupError` if several rules fit equally well.
    """
    key = primitive, classes, tried
    try:
        return _selected[key]
    except KeyError:
        return _selected.setdefault(key, _select_rule(primitive, classes, tried))


def _select_rule(
    primitive: Target, classes: tuple[type, ...], tried: tuple[RegisteredRule, ...]
) -> RegisteredRule | None:
    """Return the most specific rule that accepts operands of these classes, without a cache."""
    fitting = [r for r in _rules.get(primitive, ()) if r.accepts(classes) and r not in tried]
    # A copy with swapped operands is used only if no other rule fits.
    fitting = [r for r in fitting if not r.swapped] or fitting
    best = [r for r in fitting if not any(_beats(s, r, len(classes)) for s in fitting)]
    highest = max((rule.precedence for rule in best), default=0)
    best = [rule for rule in best if rule.precedence == highest]
    if len(best) > 1:
        listing = "\n".join(f"  {rule}" for rule in best)
        raise AmbiguousLookupError(
            f"{primitive.name}({', '.join(c.__name__ for c in classes)}) is ambiguous "
            f"among the following rules:\n{listing}\nNone is more specific than the others. "
            "Register a rule for the combination, or give one of these a higher precedence. Or "
            "nest two calls of vn.implicit, each with a filter_spec that selects one of the types."
        )
    return best[0] if best else None


def _beats(rule: RegisteredRule, other: RegisteredRule, count: int) -> bool:
    """Return whether `rule` is tried before `other`, for `count` operands that both accept.

    The more specific rule comes first. Of rules for the same classes, the one with the highest
    precedence, then a conditional one, then the one that was registered last comes first.
    """
    if rule.is_within(other, count) and other.is_within(rule, count):
        rank = lambda r: (r.precedence, r.conditional, r.order)
        return rank(rule) > rank(other)
    return rule.is_within(other, count)
