"""The names of Quax's core: `Value`, `ArrayValue`, `quaxify` and `register`.

`Delegating` and `delegate` let a Quax type compute with a Veneer type. The examples use them.
"""

import abc
import functools
import inspect
import itertools
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from jax.core import ShapedArray
from jax.typing import ArrayLike

from ..._core import rules
from ..._core.errors import install_command
from ..._core.rules import add_rule
from ..._core.surface.array import ImplicitArray, Shaped, Shown
from ..._core.surface.implicit import FilterSpec, implicit
from ..._core.trace import redispatch
from ..._core.value import Value as _CoreValue
from ..._core.value import materialise_one
from ..._jax.primitives import Primitive, find_primitive, inlines_early, jaxpr_as_fun

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError(f"veneer.interop.quax needs equinox: {install_command('interop')}") from error

_F = TypeVar("_F", bound=Callable)
_T = TypeVar("_T", bound="type[Delegating]")


class Value(eqx.Module, _CoreValue):
    """An `equinox.Module` that JAX functions take under `quaxify`.

    Subclass `ArrayValue` for a type that looks like an array. If no rule fits, the static method
    `default(primitive, values, params)` is called if a type overrides it. Otherwise the operands
    are materialized.
    """

    keeps_dtypes: typing.ClassVar[bool] = False  # a sum of integers in two units may be a float

    @abc.abstractmethod
    def aval(self) -> Any:
        """Return the abstract value that JAX sees, usually a `jax.core.ShapedArray`."""

    @abc.abstractmethod
    def materialise(self) -> Any:
        """Return the dense form. It may raise, to reject operations without a rule."""

    def __getattribute__(self, name: str) -> Any:
        # Equinox makes a module of every bound method, in 20 µs; this one is called all the time.
        if name == "aval":
            return object.__getattribute__(self, name)
        return super().__getattribute__(name)


class ArrayValue(Shaped, Shown, Value):
    """A `Value` that represents an array: the base of types that are written for Quax.

    It has a shape and a dtype, but no operators such as `x + y`. A subclass may define operators.

    >>> import equinox as eqx, jax, jax.numpy as jnp, veneer.interop.quax as quax
    >>> class Unitful(quax.ArrayValue):
    ...     array: jax.Array = eqx.field(converter=jnp.asarray)
    ...     unit: str = eqx.field(static=True)
    ...     def aval(self):
    ...         return jax.typeof(self.array)
    ...     def materialise(self):
    ...         raise ValueError("refusing to lose a unit")
    >>> @quax.register(jax.lax.mul_p)
    ... def _(x: Unitful, y: Unitful, **params):
    ...     return Unitful(x.array * y.array, f"{x.unit} {y.unit}")
    >>> area = jax.jit(quax.quaxify(jnp.multiply))(Unitful(2.0, "m"), Unitful(3.0, "m"))
    >>> area.unit, area.array.item()
    ('m m', 6.0)
    """

    @abc.abstractmethod
    def aval(self) -> ShapedArray:
        """Return the shape and dtype of the array."""

    @abc.abstractmethod
    def materialise(self) -> Any:
        """Return the dense array. It may raise, to reject operations without a rule."""


class AmbiguousLookupError(rules.AmbiguousLookupError, LookupError):
    """The error if two rules fit the operands and neither is more specific than the other.

    If plum is imported, `except plum.AmbiguousLookupError` also catches this error of a quaxified
    function, as with Quax. It is a subclass of `veneer.AmbiguousLookupError`.
    """

    # plum's own methods need the attributes of a plum lookup.
    __str__ = Exception.__str__
    __repr__ = Exception.__repr__

    def __reduce__(self) -> Any:
        return AmbiguousLookupError, self.args  # a class with plum's base has no name in a module


def _to_plum_error(error: rules.AmbiguousLookupError) -> AmbiguousLookupError:
    message = str(error).replace("calls of vn.implicit", "calls of quaxify")
    # Importing plum takes a quarter of a second. Whoever catches its error has imported it.
    plum = sys.modules.get("plum")
    if plum is None:
        return AmbiguousLookupError(message)
    return _error_class_with_base(plum.AmbiguousLookupError)(message)


@functools.cache
def _error_class_with_base(base: type[Exception]) -> type[AmbiguousLookupError]:
    name = AmbiguousLookupError.__name__
    return type(name, (AmbiguousLookupError, base), {"__module__": __name__})


class _Quaxified(eqx.Module):
    """The function that `quaxify` returns.

    It is a module whose leaves are the leaves of the original function.
    """

    fn: Callable
    filter_spec: FilterSpec

    def __init__(self, fn: Callable, filter_spec: FilterSpec):
        # Not by assignment, at which Equinox warns that `jax.jit(module)` has no parameters.
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "filter_spec", filter_spec)

    @property
    def __wrapped__(self) -> Callable:
        return self.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return implicit(self.fn, self.filter_spec)(*args, **kwargs)
        except AmbiguousLookupError:  # of a quaxified function within this one
            raise
        except rules.AmbiguousLookupError as error:
            raise _to_plum_error(error).with_traceback(error.__traceback__) from None

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else eqx.Partial(self, instance)


def quaxify(fn: _F, /, filter_spec: FilterSpec = True) -> _F:
    """Transform a function so that it takes `Value`s and runs their rules, like `veneer.implicit`.

    **Arguments:**

    - `fn`: any function of pytrees. It may be a module that holds `Value`s.
    - `filter_spec`: selects the `Value`s that use their rules, as in `equinox.partition`: a bool, a
      predicate, or a pytree of them that is a prefix of `(fn, args, kwargs)`. The other `Value`s
      are left to nested calls of `quaxify`.

    **Returns:** a function of the same arguments: an `equinox.Module` with the leaves of `fn`.

    **Raises:** The returned function raises `AmbiguousLookupError` if two rules fit and neither is
    more specific.

    >>> import jax.numpy as jnp, veneer as vn, veneer.interop.quax as quax
    >>> w = vn.quant.quantize(jnp.eye(2), "nf4")
    >>> quax.quaxify(jnp.matmul)(jnp.ones((1, 2)), w).tolist()
    [[1.0, 1.0]]
    """
    quaxified: Any = eqx.module_update_wrapper(_Quaxified(fn, filter_spec))
    return quaxified


def register(primitive: Primitive, /, *, precedence: int = 0) -> Callable[[_F], _F]:
    """Register a rule: how a JAX primitive acts on operands of the annotated types.

    It works like `veneer.register`. In addition, an annotation of jaxtyping (`Float[Array, "n"]`)
    restricts a rule to operands of this dtype and shape. Such a rule is preferred to an
    unrestricted rule for the same types.

    **Arguments:**

    - `primitive`: a JAX primitive.
    - `precedence`: if no rule is the most specific, the rule with the highest precedence
      runs.

    **Returns:** a decorator, which returns the rule. See `ArrayValue` for an example.
    """

    def add(rule: _F) -> _F:
        declining = _restrict_to_annotations(rule)
        conditional = declining is not None
        add_rule(declining or rule, [primitive], precedence, conditional=conditional)
        return rule

    return add


def with_operands(rule: Callable, kinds: Sequence[Any]) -> Callable:
    """Give a function `rule(*operands, **params)` a signature that `register` reads.

    `kinds` are the types of the operands, as annotations. Return the function.
    """
    parameter = inspect.Parameter
    operands = [
        parameter(f"x{i}", parameter.POSITIONAL_ONLY, annotation=kind)
        for i, kind in enumerate(kinds)
    ]
    params = parameter("params", parameter.VAR_KEYWORD)
    rule.__signature__ = inspect.Signature([*operands, params])  # type: ignore[attr-defined]
    return rule


def _restrict_to_annotations(rule: Callable) -> Callable | None:
    """Return a variant of a rule that checks the dtypes and shapes in its annotations (jaxtyping).

    If an operand does not fit, it returns `NotImplemented`, so that another rule is tried. Return
    None if no annotation of the rule states a dtype or shape.
    """
    signature = inspect.signature(rule, eval_str=True)
    operands, more = [], []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            more.append(parameter.annotation)
        elif parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            operands.append(parameter.annotation)
    if not any(map(_has_condition, operands + more)):
        return None

    @functools.wraps(rule)
    def declining(*values: Any, **params: Any) -> Any:
        annotations = itertools.chain(operands, itertools.cycle(more))
        pairs = zip(values, annotations, strict=False)
        if all(not _has_condition(a) or isinstance(x, _union_members(a)) for x, a in pairs):
            return rule(*values, **params)
        return NotImplemented

    declining.__signature__ = signature  # type: ignore[attr-defined]
    return declining


def _union_members(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) or (annotation,)


def _has_condition(annotation: Any) -> bool:
    return any(hasattr(member, "array_type") for member in _union_members(annotation))


def _inline_jit(*values: Value | ArrayLike, jaxpr: Any, inline: Any, **params: Any) -> Any:
    # Quax inlines functions of jax.numpy, so that a rule sees concrete arguments: the unit of a
    # power depends on the exponent.
    del params
    return redispatch(jaxpr_as_fun(jaxpr), *values) if inlines_early(inline) else NotImplemented


add_rule(_inline_jit, [find_primitive("jit")], structural=True)


class RefusesToMaterialise(ImplicitArray, abstract=True):
    """A base of Veneer types that have rules, but whose `materialise` raises an error.

    `name_in_quax` is the name of the type in this error.
    """

    name_in_quax: typing.ClassVar[str]

    def materialise(self) -> Any:
        """Raise a `RuntimeError`, because `allow_materialise` is False."""
        raise RuntimeError(
            f"Refusing to materialise `{self.name_in_quax}` with `allow_materialise=False`."
        )


class Delegating(ArrayValue):
    """A base of Quax types that compute with a Veneer type.

    A subclass defines `to_veneer` and `from_veneer`, and `delegate` registers its rules.
    """

    @abc.abstractmethod
    def to_veneer(self) -> ImplicitArray:
        """Convert this array to an array of the type of Veneer that its class corresponds to.

        If this array must not be materialized, `materialise` of the result raises an error.
        """

    @abc.abstractmethod
    def from_veneer(self, ours: Any) -> Any:
        """Convert `ours`, a result of a rule of the Veneer type, to this Quax type.

        The result gets the settings of this array, such as `allow_materialise`.
        """

    def materialise(self) -> Any:
        """Return the dense array, or raise if the Veneer type does."""
        return materialise_one(self.to_veneer())


def delegate(cls: _T, names: Iterable[str], operands: int = 2) -> None:
    """Register rules that run Veneer's rule of each primitive and convert the result to `cls`.

    **Arguments:**

    - `cls`: a subclass of `Delegating`.
    - `names`: the names of the primitives.
    - `operands`: the number of operands of each primitive. With two, one of them may have any type.
      If it is another `Value`, Veneer's rule runs inside a nested `quaxify`, so that the rules of
      this other type apply too.
    """
    other = ArrayLike | _CoreValue
    for name in names:
        for kinds in itertools.product((cls, other), repeat=operands):
            if cls in kinds:
                _delegate_rule(find_primitive(name), cls, kinds)


def _delegate_rule(primitive: Primitive, cls: type[Delegating], kinds: tuple[Any, ...]) -> None:
    def rule(*operands: Any, **params: Any) -> Any:
        bind = lambda *xs: primitive.bind(*xs, **primitive.get_bind_params(params))
        own = [isinstance(x, cls) for x in operands]
        values = [x.to_veneer() if o else x for o, x in zip(own, operands, strict=True)]
        others = [isinstance(x, _CoreValue) and not o for o, x in zip(own, operands, strict=True)]
        ours = {type(x) for x in itertools.compress(values, own)}

        def on_ours(*traced: Any) -> Any:
            rest = iter(traced)
            xs = [next(rest) if o else x for o, x in zip(others, values, strict=True)]
            return implicit(bind, lambda value: type(value) in ours)(*xs)

        out = redispatch(on_ours, *itertools.compress(values, others))
        return next(itertools.compress(operands, own)).from_veneer(out)

    register(primitive)(with_operands(rule, kinds))
