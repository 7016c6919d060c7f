"""`HiValue` and `register_rules`, as in `quax.experimental.hijax` of Quax's main branch.

A `HiValue` is a Quax type whose only leaf is a hijax value. Its rules run JAX functions on the
leaf. In jaxprs, the leaf has its hijax type, which defines the types of its tangents and
cotangents. The module also has hijax's names (`HiPrim`, `HiType` and others) in every supported
version of JAX.
"""

# Equinox lets `__init__` assign the fields of a frozen module.
# mypy: disable-error-code="misc"

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
from jax.core import ShapedArray
from jax.typing import ArrayLike

from ...._core.value import Value
from ...._jax.hijax import HiPrim, HiType, MappingSpec, instantiate_zeros, register_hitype
from ...._jax.primitives import Primitive
from ..core import ArrayValue, register, with_operands

__all__ = [
    "HIJAX_FLOOR",
    "HiPrim",
    "HiType",
    "HiValue",
    "MappingSpec",
    "ShapedArray",
    "instantiate_zeros",
    "register_hitype",
    "register_rules",
]

HIJAX_FLOOR: Final = "0.10.2"  # the oldest JAX that this package supports


class HiValue(ArrayValue):
    """A Quax type whose only leaf is a hijax value. Subclass it and call `register_rules`.

    A subclass may have an `__init__` that creates the leaf. For results of rules, it is called with
    the leaf itself, which can be a tracer. So it must check whether its argument is a leaf.

    **Arguments:**

    - `leaf`: a hijax value, whose type has a `shape` and a `dtype`.
    """

    leaf: Any

    def __init__(self, leaf: Any, /) -> None:
        self.leaf = leaf

    def aval(self) -> ShapedArray:
        """Return the shape and dtype of the leaf's type."""
        leaf_type: Any = jax.typeof(self.leaf)
        return ShapedArray(leaf_type.shape, leaf_type.dtype)

    def materialise(self) -> Any:
        """Raise a `ValueError`: the dense array would lose the type of the leaf."""
        raise ValueError(
            f"Refusing to materialise {type(self).__name__}, because the type information of its "
            "leaf would be lost. Register a rule for this primitive, or override `materialise`."
        )


def register_rules(cls: type[HiValue], rules: Mapping[Primitive, Callable[..., Any]], /) -> None:
    """Register functions of hijax values as the rules of primitives for a `HiValue` class.

    A function runs if at least one operand is a `cls`. It takes the operands by position: in place
    of each `cls` its only leaf, a hijax value, and dense arrays unchanged. Parameters of the
    primitive are passed if the function has keyword-only arguments with their names, or `**kwargs`.
    If the function returns a hijax value, the result is a `cls`. Other results are returned
    unchanged.

    **Arguments:**

    - `cls`: a subclass of `HiValue`.
    - `rules`: a function for each primitive: `{lax.mul_p: mul}`.

    **Raises:** `NotImplementedError` for a primitive with several results. Register its rule with
    `quax.register`. `TypeError` for a function without positional parameters, or with `*args`.
    """
    for primitive, function in rules.items():
        if primitive.multiple_results:
            raise NotImplementedError(
                f"register_rules takes primitives with one result, and {primitive} has multiple "
                "results: register a rule for it by `register`"
            )
        parameters = inspect.signature(function).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise TypeError(
                f"the function for {primitive} takes *args: give it one parameter per operand"
            )
        count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        if count == 0:
            raise TypeError(f"the function for {primitive} takes no operand")
        for kinds in itertools.product((cls, ArrayLike), repeat=count):
            if cls in kinds:
                register(primitive)(with_operands(_rule(cls, function), kinds))


def _rule(cls: type[HiValue], function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

    def rule(*operands: Any, **params: Any) -> Any:
        leaves = [x.leaf if isinstance(x, cls) else x for x in operands]
        passed = {name: x for name, x in params.items() if takes_all or name in taken}
        out = function(*leaves, **passed)
        is_hijax = not isinstance(out, Value) and isinstance(jax.typeof(out), HiType)
        return cls(out) if is_hijax else out

    return rule
