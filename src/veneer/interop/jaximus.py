"""The names of eformer's jaximus, implemented by Veneer: `import veneer.interop.jaximus`.

Types, rules and functions written for `eformer.jaximus` (https://github.com/erfanzar/eformer) run
after this change of the import. Other packages that import `eformer.jaximus` run with Veneer too if
`replace_jaximus` is called before they are imported. docs/jaximus.md lists the differences.
"""

import abc
import dataclasses
import functools
import inspect
import operator
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from .. import tree as _tree
from .._core import rules
from .._core.policy import ALLOW, MaterialiseWarning, current_policy
from .._core.rules import names_around, operand_types
from .._core.surface.array import ImplicitArray as _CoreArray
from .._core.surface.implicit import implicit as _implicit
from .._core.surface.straight_through import StraightThrough
from .._core.surface.straight_through import ste as _ste
from .._core.tree import static
from .._core.value import Value, describe, is_value, materialise_one
from .._jax.frames import user_place
from .._jax.primitives import Primitive, find_primitive

__all__ = [
    "WARN_ON_MATTER",
    "ArrayLike",
    "ImplicitArray",
    "OrginArray",
    "StaticScalar",
    "UninitializedAval",
    "aux_field",
    "combine_leaf_predicate",
    "default_handler",
    "flatten_one_implicit_layer",
    "implicit",
    "implicit_depth",
    "is_array",
    "leaf_predicate",
    "materialize_handler",
    "materialize_nested",
    "register",
    "replace_jaximus",
    "ste",
    "tree_flatten_with_implicit",
    "tree_flatten_with_path_with_implicit",
    "tree_leaves_with_implicit",
    "tree_map_with_implicit",
    "tree_map_with_path_with_implicit",
    "tree_structure_with_implicit",
    "use_implicit",
]

_F = TypeVar("_F", bound=Callable)

#: Whether to warn when no rule fits and an operand is materialized. The environment variable of the
#: same name sets it: "true", "yes", "1" and "on" mean yes.
WARN_ON_MATTER = os.environ.get("WARN_ON_MATTER", "true") in ("true", "yes", "1", "on")

StaticScalar = np.bool_ | np.number | bool | int | float | complex
ArrayLike = jax.Array | np.ndarray | StaticScalar


class OrginArray(abc.ABC):  # noqa: B024  # eformer's spelling
    """An abstract base of dense arrays and implicit arrays.

    As the annotation of an operand in `register`, it accepts both.

    >>> import jax.numpy as jnp
    >>> from veneer.interop.jaximus import OrginArray
    >>> isinstance(jnp.ones(2), OrginArray)
    True
    """


OrginArray.register(jax.Array)


class UninitializedAval(AttributeError):
    """The error if `materialize` reads a shape or dtype that is not known yet.

    `materialize` may read `self.shape` and `self.dtype` only if they are stated: as arguments of
    the constructor, as `default_shape` and `default_dtype`, or by `compute_shape` and
    `compute_dtype`.
    """


def aux_field(metadata: Any = None, **kwargs: Any) -> Any:
    """Declare a dataclass field to be metadata, which is never traced.

    **Arguments:**

    - `metadata`: further metadata of the dataclass field.
    - `kwargs`: the other arguments of `dataclasses.field`.

    **Returns:** a dataclass field.

    >>> from dataclasses import dataclass
    >>> import jax, jax.numpy as jnp
    >>> from veneer.interop.jaximus import ImplicitArray, aux_field
    >>> @dataclass
    ... class Scaled(ImplicitArray):
    ...     x: jax.Array
    ...     by: float = aux_field(default=2.0)
    ...     def materialize(self):
    ...         return self.x * self.by
    >>> len(jax.tree.leaves(Scaled(jnp.ones(3))))
    1
    """
    return static(metadata={**(metadata or {}), "implicit_array_aux": True}, **kwargs)


class _StatedShape(typing.NamedTuple):
    """A shape that a caller passed to the constructor of an array, or assigned to `shape`.

    - `shape`: the stated shape.
    - `leaves`: the shapes that the leaves of the array had at that time. They show later which axes
      JAX has added by stacking arrays.
    """

    shape: tuple[int, ...]
    leaves: tuple[tuple[int, ...], ...]


class _ShapeOrDtype:
    """A descriptor of the attribute `shape` or `dtype` of an `ImplicitArray`.

    Its value is the shape or dtype of the result of `materialize`. While `materialize` runs, it is
    the value that the caller or the class states. Only stated values are stored, so derived ones
    stay correct when JAX slices leaves.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, array: Any, owner: Any = None) -> Any:
        if array is None:
            return None
        if any(array is other for other in _materializing.get()):
            known = array._stated(self.name)
            if known is None:
                raise UninitializedAval(
                    f"{type(array).__name__}.materialize reads self.{self.name}, which is not "
                    f"stated. Pass {self.name}= to the constructor, or define "
                    f"compute_{self.name} or default_{self.name}."
                )
            return known
        return getattr(array.aval, self.name)

    def __set__(self, array: Any, stated: Any) -> None:
        if self.name == "shape" and stated is not None:
            stated = tuple(stated)
            names = _leaf_names(array)
            if all(name in array.__dict__ for name in names):
                stated = _StatedShape(stated, _leaf_shapes(array, names))
        array.__dict__[self.name] = stated


def _is_aux(field: Any) -> bool:
    return field.metadata.get("static", False)


def _leaf_names(array: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(array) if not _is_aux(field)]


def _leaf_shapes(array: Any, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    leaves = jax.tree.leaves([array.__dict__[name] for name in names])
    return tuple(tuple(getattr(x, "shape", ())) for x in leaves)


#: The arrays whose `materialize` is running.
_materializing: ContextVar[tuple[Any, ...]] = ContextVar("materializing", default=())


@contextmanager
def _materialize_running(array: Any) -> Iterator[None]:
    token = _materializing.set((*_materializing.get(), array))
    try:
        yield
    finally:
        _materializing.reset(token)


class _Aval:
    """An abstract value that can be read like an attribute or called like a method.

    `aval` is an attribute of arrays in eformer (`x.aval.shape`), and a method in Veneer
    (`x.aval()`).
    """

    __slots__ = ("_aval",)

    def __init__(self, aval: jax.core.ShapedArray):
        self._aval = aval

    def __call__(self) -> jax.core.ShapedArray:
        return self._aval

    def __getattr__(self, name: str) -> Any:
        return getattr(self._aval, name)

    def __eq__(self, other: object) -> bool:
        return self._aval == (other._aval if isinstance(other, _Aval) else other)

    def __hash__(self) -> int:
        return hash(self._aval)

    def __repr__(self) -> str:
        return repr(self._aval)


def _warn_of_fallback(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
    """Warn that no rule of a primitive fits its operands `values`.

    Return `NotImplemented`, so that the operands are materialized.
    """
    del params
    warns = [x for x in values if isinstance(x, ImplicitArray) and x.warn_on_materialize]
    if WARN_ON_MATTER and warns and current_policy() is ALLOW:  # a policy reports by itself
        file, line = user_place()
        warnings.warn_explicit(
            f"no rule for {primitive.name} fits {', '.join(describe(values))}: "
            f"{type(warns[0]).__name__} is materialized",
            MaterialiseWarning,
            file,
            line,
        )
    return NotImplemented


_warn_of_fallback.is_fallback = True  # type: ignore[attr-defined]


@dataclasses.dataclass(eq=False, repr=False)
class _AuxFields:
    shape: Any = aux_field(kw_only=True, default=None, repr=False)  # noqa: RUF009
    dtype: Any = aux_field(kw_only=True, default=None, repr=False)  # noqa: RUF009


class ImplicitArray(_AuxFields, _CoreArray, OrginArray, abstract=True):  # type: ignore[misc]
    """An array type written as for eformer: a dataclass with a method `materialize`.

    Decorate each subclass with `dataclasses.dataclass`. Mark metadata with `aux_field`. Other
    fields are leaves: arrays, implicit arrays or pytrees of them.

    The constructor also takes `shape=` and `dtype=`. If they are missing, they come from
    `compute_shape()` and `compute_dtype()`, or else from abstract evaluation of `materialize`.
    A stated shape that `materialize` contradicts gives a warning and is ignored. The array has the
    stated dtype: materialized values are cast to it.

    Operators and methods work at top level, as for any `veneer.ImplicitArray`.

    **Arguments** (of the class statement):

    - `commute_ops`: whether a rule for `(x, y)` of a commutative primitive also serves `(y, x)`.
    - `warn_on_materialize`: whether to warn when no rule fits and an array is materialized.

    **Raises:** `TypeError` for a class that declares fields and is not decorated, or that does not
    define `materialize`, when it is instantiated. `UninitializedAval` if `materialize` needs a
    shape or dtype that is not stated.

    >>> from dataclasses import dataclass
    >>> import jax, jax.numpy as jnp
    >>> from veneer.interop.jaximus import ImplicitArray, implicit
    >>> @dataclass
    ... class Diagonal(ImplicitArray, warn_on_materialize=False):
    ...     diagonal: jax.Array
    ...     def materialize(self):
    ...         return jnp.diag(self.diagonal)
    >>> d = Diagonal(jnp.arange(3.0))
    >>> d.shape, d.dtype.name
    ((3, 3), 'float32')
    >>> implicit(jnp.sum)(d).item()
    3.0
    """

    warn_on_materialize: ClassVar[bool] = True
    default_shape: ClassVar[Sequence[int] | None] = None
    default_dtype: ClassVar[Any] = None

    # eformer's rules may return other dtypes than the primitive does.
    keeps_dtypes: ClassVar[bool] = False
    default_precedence: ClassVar[int] = -2  # a type that says more about a fallback goes first

    shape = _ShapeOrDtype()
    dtype = _ShapeOrDtype()
    default = staticmethod(_warn_of_fallback)

    def __init_subclass__(
        cls, commute_ops: bool = True, warn_on_materialize: bool = True, **kwargs: Any
    ) -> None:
        super().__init_subclass__(abstract=True, **kwargs)  # its author makes it a dataclass
        cls.commute_ops = commute_ops
        cls.warn_on_materialize = warn_on_materialize
        own = [c for c in cls.__mro__ if issubclass(c, ImplicitArray) and c is not ImplicitArray]
        methods = ("tree_flatten_with_keys", "tree_unflatten")
        if any(method in vars(c) for c in own for method in methods):
            tree_util.register_pytree_with_keys_class(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        if not cls._pytree and "__dataclass_fields__" not in vars(cls):
            is_field = lambda annotation: "ClassVar" not in str(annotation)
            declared = [n for n, a in inspect.get_annotations(cls).items() if is_field(a)]
            if declared:
                raise TypeError(
                    f"{cls.__name__} declares {', '.join(declared)} and is not a dataclass. "
                    "Decorate the class with @dataclasses.dataclass."
                )
        return super().__new__(cls, *args, **kwargs)

    def __post_init__(self) -> None:
        """Find the shape and dtype, and warn if `materialize` contradicts the stated shape."""
        stated = self.__dict__.get("shape")
        if isinstance(stated, _StatedShape):
            return
        if stated is not None:
            # Again, because all leaves are known now.
            self.shape = stated  # type: ignore[misc, operator]
        known = self._stated("shape")
        if known is not None and tuple(known) != self.aval.shape:
            warnings.warn(
                f"{type(self).__name__} has shape={tuple(known)}, but materialize returns shape "
                f"{self.aval.shape}, which is used",
                stacklevel=3,
            )
        self.aval  # noqa: B018  # raises if the shape or dtype is unknown

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        for cache in ("_aval", "_high"):
            try:
                object.__delattr__(self, cache)
            except AttributeError:
                continue

    def compute_shape(self) -> Sequence[int] | None:
        """Return the shape of the array, or None to derive it from `materialize`.

        It is called if no shape is passed to the constructor. Override it to compute the shape.
        """
        return self.default_shape

    def compute_dtype(self) -> Any:
        """Return the dtype of the array, or None to derive it from `materialize`.

        It is called if no dtype is passed to the constructor. Override it to compute the dtype.
        """
        return self.default_dtype

    @abc.abstractmethod
    def materialize(self) -> Any:
        """Return the dense array. It may be another implicit array."""

    def materialise(self) -> Any:
        """Return the result of `materialize`, cast to the stated dtype.

        If JAX has stacked arrays of this type, so that all leaves have gained leading axes,
        `materialize` is mapped over these axes.
        """
        if self._is_stacked():
            return jax.vmap(type(self).materialise)(self)
        with _materialize_running(self):
            dense = self.materialize()
        dtype = self._stated("dtype")
        if dtype is None or getattr(dense, "dtype", None) == dtype:
            return dense
        return jnp.asarray(materialise_one(dense), dtype)

    @property
    def aval(self) -> Any:
        """The abstract value, with `shape` and `dtype`. `aval()` returns it as a `ShapedArray`."""
        return _Aval(_find_aval(self))

    def _stated(self, name: str) -> Any:
        """Return the stated value of `name`, which is "shape" or "dtype", or None.

        The caller states it in the constructor, or the class in `compute_shape` or `compute_dtype`.
        A shape includes the axes that stacking has added.
        """
        stated = self.__dict__.get(name)
        if isinstance(stated, _StatedShape):
            return (*self._added_axes(), *stated.shape)
        if stated is None:
            stated = getattr(self, f"compute_{name}")()
        if stated is None:
            return None
        return (
            tuple(stated)
            if name == "shape"
            else jax.dtypes.canonicalize_dtype(stated, allow_extended_dtype=True)
        )

    def _is_stacked(self) -> bool:
        try:
            return bool(self._added_axes())
        except ValueError:  # raised again if `materialize` reads the shape
            return False

    def _added_axes(self) -> tuple[int, ...]:
        """Return the sizes of the leading axes that all leaves have gained by stacking.

        They are counted since the shape was stated. Without a stated shape, the result is ().

        **Raises:** `ValueError` if the shapes of the leaves changed in another way.
        """
        stated = self.__dict__.get("shape")
        if not isinstance(stated, _StatedShape):
            return ()
        shapes = _leaf_shapes(self, _leaf_names(self))
        counts = [len(now) - len(then) for now, then in zip(shapes, stated.leaves, strict=True)]
        added = {now[:count] for now, count in zip(shapes, counts, strict=True)} or {()}
        kept = [now[count:] for now, count in zip(shapes, counts, strict=True)]
        if min(counts, default=0) < 0 or len(added) > 1 or kept != list(stated.leaves):
            raise ValueError(
                f"{type(self).__name__} was given shape={stated.shape} for leaves of shapes "
                f"{stated.leaves}, which are now {shapes}. So its shape is unknown. Define "
                "compute_shape(); or write implicit(jax.vmap(f)) for jax.vmap(implicit(f))."
            )
        return added.pop()

    @classmethod
    def default_handler(cls, primitive: Primitive, *args: Any, params: Any = None) -> Any:
        """Materialize the implicit operands and bind the primitive, as `materialize_handler`."""
        return materialize_handler(primitive, *args, params=params or {})

    def astype(self, new_dtype: Any) -> Any:
        """Set the dtype of this array in place, as eformer does, and return the array.

        In a function under `implicit`, `astype` is JAX's, which returns a new array.
        """
        self.dtype = new_dtype  # type: ignore[misc, operator]
        return self

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], list[Any]]:
        """Return pairs of a key and a leaf, and the values of the auxiliary fields."""
        keys = tree_util.GetAttrKey
        fields = dataclasses.fields(self)
        leaves = [(keys(f.name), self.__dict__[f.name]) for f in fields if not _is_aux(f)]
        return leaves, [self.__dict__[f.name] for f in fields if _is_aux(f)]

    @classmethod
    def tree_unflatten(cls, aux_data: Sequence[Any], children: Sequence[Any]) -> Any:
        """Return an array of the class, from the leaves and the values of the auxiliary fields."""
        array = object.__new__(cls)
        aux, leaves = iter(aux_data), iter(children)
        for field in dataclasses.fields(cls):
            array.__dict__[field.name] = next(aux if _is_aux(field) else leaves)
        return array


def _find_aval(array: ImplicitArray) -> jax.core.ShapedArray:
    """Return the abstract value of the result of `materialize`.

    If `materialize` raises, return the stated shape and dtype. If they are not stated, raise the
    same error.
    """
    try:
        with _materialize_running(array):
            return Value.aval(array)
    except Exception:  # of a type that refuses to be dense
        shape, dtype = array._stated("shape"), array._stated("dtype")
        if shape is None or dtype is None:
            raise
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        aval = jax.core.ShapedArray(shape, dtype)
        object.__setattr__(array, "_aval", (x64, aval))
        return aval


def use_implicit(fn: _F) -> _F:
    """Transform a function so that it takes implicit arrays, as `veneer.implicit(fn)` does.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer.interop.jaximus import use_implicit
    >>> w = vn.quant.quantize(jnp.eye(2), "nf4")
    >>> use_implicit(lambda x, w: x @ w)(jnp.ones((1, 2)), w).tolist()
    [[1.0, 1.0]]
    """
    return _implicit(fn)  # type: ignore[return-value]


implicit = use_implicit


def register(primitive: Primitive | str | Callable, *, precedence: int = 0) -> Callable[[_F], _F]:
    """Register a rule: the implementation of a JAX primitive for the annotated operand types.

    It works like `veneer.register`. In addition, the first parameter of the function may be the
    primitive: it is annotated `Primitive`, or has no annotation and precedes the operands. An
    operand that is annotated `Any` or `OrginArray`, or has no annotation, is a dense array or an
    array of a type of this module.

    **Arguments:**

    - `primitive`: a primitive, its name, or a function that `jax.jit` returned.
    - `precedence`: if no rule is the most specific, the rule with the highest precedence
      runs.

    **Returns:** a decorator, which returns the rule.

    **Raises:** `ValueError` for an unknown name. `TypeError` for a rule that takes only dense
    operands.

    **Warns** (`UserWarning`) if an annotation is a type that no operand can have, such as
    `Sequence`. The rule is not registered, because it would never run.

    >>> from dataclasses import dataclass
    >>> import jax, jax.numpy as jnp
    >>> from veneer.interop.jaximus import ImplicitArray, implicit, register
    >>> @dataclass
    ... class Negated(ImplicitArray):
    ...     x: jax.Array
    ...     def materialize(self):
    ...         return -self.x
    >>> @register("neg")
    ... def _(x: Negated, **params):
    ...     return x.x
    >>> implicit(jnp.negative)(Negated(jnp.arange(3.0))).tolist()
    [0.0, 1.0, 2.0]
    """
    target = find_primitive(primitive) if isinstance(primitive, str) else primitive

    def add(rule: _F) -> _F:
        parameters = _evaluate_annotations(rule)
        first = parameters[0] if parameters and parameters[0].kind in _POSITIONAL else None
        kind = None if first is None else first.annotation
        takes_primitive = isinstance(kind, type) and issubclass(kind, Primitive)
        rest = [p for p in parameters[1:] if p.kind not in _KEYWORDS]
        # eformer passes the primitive if a rule has one parameter more than there are operands.
        may_take_primitive = first is not None and first.annotation in (first.empty, Any)
        if rest and may_take_primitive and all(p.kind in _POSITIONAL for p in rest):
            _register_rule(
                target, precedence, rule, functools.partial(rule, target), parameters[1:]
            )
        if takes_primitive:
            _register_rule(
                target, precedence, rule, functools.partial(rule, target), parameters[1:]
            )
        else:
            _register_rule(target, precedence, rule, rule, parameters)
        return rule

    return add


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_KEYWORDS = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def _register_rule(
    target: Any,
    precedence: int,
    rule: Callable,
    function: Callable,
    parameters: Sequence[inspect.Parameter],
) -> None:
    """Register a function as the rule of a primitive. Warn if the rule can never run.

    **Arguments:**

    - `target`: the primitive.
    - `precedence`: as in `register`.
    - `rule`: the function that the user decorated with `register`. Reports show its name.
    - `function`: a function of the operands that calls `rule`, with the primitive if it takes it.
    - `parameters`: the parameters of `rule` for the operands, with their annotations.
    """

    @functools.wraps(rule)
    def call(*operands: Any, **params: Any) -> Any:
        return function(*operands, **params)

    operands = map(_replace_any, parameters)
    call.__signature__ = inspect.Signature(list(operands))  # type: ignore[attr-defined]
    try:
        operand_types(call)
    except TypeError as error:  # eformer accepts such a rule and never runs it
        file, line = user_place()
        warnings.warn_explicit(
            f"a rule for {target} will never run: {error}", UserWarning, file, line
        )
        return
    rules.register(target, precedence=precedence)(call)


def _evaluate_annotations(rule: Callable) -> list[inspect.Parameter]:
    """Return the parameters of a rule. String annotations of operands are evaluated."""
    names: dict[str, Any] | None = None
    parameters = []
    for parameter in inspect.signature(rule).parameters.values():
        if isinstance(parameter.annotation, str) and parameter.kind not in _KEYWORDS:
            names = names_around(rule) if names is None else names
            parameter = parameter.replace(annotation=eval(parameter.annotation, names))
        parameters.append(parameter)
    return parameters


def _replace_any(parameter: inspect.Parameter) -> inspect.Parameter:
    """Restrict an operand of a rule that is annotated `Any` or `OrginArray`, or not at all.

    The new annotation has only dense arrays and arrays of the types of this module. Rules written
    for eformer cannot compute with other types, such as `vn.quant.QArray`, which are materialized
    instead. Other annotations are returned unchanged.
    """
    if parameter.kind in _KEYWORDS:
        return parameter
    annotation = parameter.annotation
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if is_union else (annotation,)
    others = [kind for kind in kinds if kind not in (parameter.empty, Any, object, OrginArray)]
    if len(others) == len(kinds):
        return parameter
    known = ImplicitArray | ArrayLike
    return parameter.replace(annotation=functools.reduce(operator.or_, others, known))


def ste(func: Callable) -> Callable:
    """Give a function the derivative of the identity, as `veneer.ste` does.

    The gradient with respect to the first argument is dense. If `func` returns an implicit array
    for a concrete argument, this array is the result. For a traced argument, the result is an array
    with the same values and the derivative of the argument.

    **Arguments:**

    - `func`: a function `func(x, *args, **kwargs)`. The result has the shape and dtype of `x`.

    **Returns:** a function of the same arguments.

    **Raises:** `TypeError` if the result has another shape or dtype.

    >>> import jax, jax.numpy as jnp
    >>> from veneer.interop.jaximus import ste
    >>> jax.grad(ste(jnp.round))(1.7).item()
    1.0
    """
    straight_through = _ste(func)

    @functools.wraps(func, updated=())
    def call(x: Any, /, *args: Any, **kwargs: Any) -> Any:
        out = straight_through(x, *args, **kwargs)
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
        return out.value if isinstance(out, StraightThrough) and not is_traced else out

    return call


def default_handler(primitive: Primitive, *args: Any, **params: Any) -> Any:
    """Bind a primitive to operands, with its parameters.

    **Arguments:**

    - `primitive`, `args`, `params`: the primitive, its operands and its parameters.

    **Returns:** the result of the primitive.

    >>> import jax
    >>> from veneer.interop.jaximus import default_handler
    >>> default_handler(jax.lax.add_p, 1.0, 2.0).item()
    3.0
    """
    return primitive.bind(*args, **primitive.get_bind_params(params))


def materialize_handler(primitive: Primitive, *vals: Any, params: Any) -> Any:
    """Materialize the implicit operands and bind a primitive.

    **Arguments:**

    - `primitive`, `vals`: the primitive and its operands.
    - `params`: a dictionary of the parameters.

    **Returns:** the result of the primitive.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> from veneer.interop.jaximus import materialize_handler
    >>> w = vn.quant.quantize(jnp.eye(2), "nf4")
    >>> materialize_handler(jax.lax.add_p, w, jnp.ones((2, 2)), params={}).tolist()
    [[2.0, 1.0], [1.0, 2.0]]
    """
    return Value.default(primitive, vals, params)


def materialize_nested(implicit_arr: Any, full: bool = False) -> Any:
    """Materialize an implicit array once, or with `full` until the result is dense.

    **Arguments:**

    - `implicit_arr`: an implicit array. Anything else is returned unchanged.
    - `full`: repeat while the result is an implicit array.

    **Returns:** an array, dense if `full`.

    **Raises:** whatever `materialize` raises. eformer returns ones instead.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer.interop.jaximus import materialize_nested
    >>> frozen = vn.freeze(vn.quant.quantize(jnp.ones(2), "nf4"))
    >>> type(materialize_nested(frozen)).__name__
    'QArray'
    >>> materialize_nested(frozen, full=True).tolist()
    [1.0, 1.0]
    """
    return _tree.materialise_nested(implicit_arr, full)


def is_array(element: Any) -> bool:
    """Return whether `element` is a dense array or scalar of JAX or NumPy.

    >>> import numpy as np
    >>> from veneer.interop.jaximus import is_array
    >>> is_array(np.ones(2)), is_array(2.0)
    (True, False)
    """
    return isinstance(element, np.ndarray | np.generic | jax.Array)


def leaf_predicate(x: Any) -> bool:
    """Return whether `x` is an implicit array, of this module or another.

    >>> import jax.numpy as jnp
    >>> from veneer.interop.jaximus import leaf_predicate
    >>> leaf_predicate(jnp.ones(2))
    False
    """
    return is_value(x)


def combine_leaf_predicate(base_fn: Callable, is_leaf: Callable[[Any], bool]) -> Callable:
    """Return a variant of a tree function in which nodes that `is_leaf` selects are leaves.

    **Arguments:**

    - `base_fn`: a function of `jax.tree_util` that takes `is_leaf`.
    - `is_leaf`: a predicate on nodes.

    **Returns:** a function of the positional arguments of `base_fn`, and of `new_is_leaf`: another
    predicate. A node is a leaf if one of the two predicates is true.

    >>> import jax
    >>> from veneer.interop.jaximus import combine_leaf_predicate
    >>> leaves = combine_leaf_predicate(jax.tree_util.tree_leaves, lambda x: isinstance(x, tuple))
    >>> leaves([(1, 2), [3]])
    [(1, 2), 3]
    >>> leaves([(1, 2), [3]], new_is_leaf=lambda x: x == [3])
    [(1, 2), [3]]
    """

    @functools.wraps(base_fn)
    def combined(*args: Any, new_is_leaf: Callable[[Any], bool] | None = None) -> Any:
        further = new_is_leaf or (lambda x: False)
        return base_fn(*args, is_leaf=lambda x: is_leaf(x) or further(x))

    return combined


# The functions of `jax.tree_util` for trees in which an implicit array is one leaf.
tree_map_with_implicit = combine_leaf_predicate(tree_util.tree_map, leaf_predicate)
tree_map_with_path_with_implicit = combine_leaf_predicate(
    tree_util.tree_map_with_path, leaf_predicate
)
tree_flatten_with_implicit = combine_leaf_predicate(tree_util.tree_flatten, leaf_predicate)
tree_flatten_with_path_with_implicit = combine_leaf_predicate(
    tree_util.tree_flatten_with_path, leaf_predicate
)
tree_leaves_with_implicit = combine_leaf_predicate(tree_util.tree_leaves, leaf_predicate)
tree_structure_with_implicit = combine_leaf_predicate(tree_util.tree_structure, leaf_predicate)


def flatten_one_implicit_layer(tree: Any) -> tuple[list[Any], Any]:
    """Flatten a tree and its outermost implicit arrays. Implicit arrays inside them are leaves.

    **Arguments:**

    - `tree`: any pytree.

    **Returns:** the leaves and the structure, for `jax.tree.unflatten`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer.interop.jaximus import flatten_one_implicit_layer
    >>> leaves, structure = flatten_one_implicit_layer(vn.quant.quantize(jnp.ones(2), "int8"))
    >>> [x.dtype.name for x in leaves]
    ['int8', 'float32']
    """
    return _tree.flatten_one_layer(tree)


def implicit_depth(tree: Any) -> int:
    """Return how deep the implicit arrays of `tree` are nested: 0 if `tree` has no implicit array.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer.interop.jaximus import implicit_depth
    >>> implicit_depth([vn.quant.quantize(jnp.ones(2), "int8"), jnp.ones(2)])
    1
    """
    return _tree.depth(tree)


def replace_jaximus() -> None:
    """Make `import eformer.jaximus` import this module, for packages that are written for eformer.

    Call it before anything imports `eformer.jaximus`. It applies to the whole process. eformer does
    not have to be installed.

    **Raises:** `RuntimeError` if eformer's own `jaximus` is already imported.
    """
    present = sys.modules.get("eformer.jaximus")
    if present is not None and present is not sys.modules[__name__]:
        raise RuntimeError(
            "eformer.jaximus is already imported, so types made with it are eformer's: call "
            "veneer.interop.jaximus.replace_jaximus() before the first import of eformer"
        )
    if "eformer" not in sys.modules and find_spec("eformer") is None:
        sys.modules["eformer"] = types.ModuleType("eformer")  # `import eformer.jaximus` needs it
    sys.modules["eformer.jaximus"] = sys.modules[__name__]
    if package := sys.modules.get("eformer"):
        package.jaximus = sys.modules[__name__]  # type: ignore[attr-defined]
