"""`quantize_products`: quantize products of two activations by their place in the program.

The arguments of the function become `Activation`s, and so do the results of primitives with an
`Activation` as operand. In a product of two `Activation`s, the names of the scopes around the
product select a `Rule`, and both operands are quantized.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.policy import note_how
from ..._core.primitives.scopes import current_place, query_scopes, scope_query
from ..._core.rules import add_rule, register, structural
from ..._core.surface.array import ImplicitArray
from ..._core.surface.straight_through import ste
from ..._core.trace import redispatch, redispatch_isolated
from ..._core.value import MATERIALISE, Value, is_opaque_leaf
from ..._jax.primitives import Primitive, find_primitive
from ..arrays import QUANTIZABLE
from ..conversion.quantize import quantize
from ..formats import get_format
from ..formats.tiles import choose_activation_axes
from ..product_weights import PRODUCTS, product_axes
from .arguments import as_rules
from .rules import Rule


def quantize_products(fn: Callable, rules: Sequence[Rule]) -> Callable:
    """Return a function that quantizes products of two activations, such as `q @ k.T` in attention.

    Activations are arrays that depend on the arguments of `fn`. Arrays that `fn` captures are
    weights, and also the arrays in `fn` itself, if `fn` is a module or a `functools.partial`.
    Quantize products of weights with `vn.quant.quantize_tree`.

    The `path_regex` of a rule matches the place of a product. The place consists of the names of
    the scopes (`jax.named_scope`, modules of linen and Equinox) and jitted functions around the
    product, joined with "/". Profiles show the same names. The place of an `einsum` ends with its
    subscripts.

    Values along the contracted axes of an operand share a scale. If the rule or its format has a
    tile size, each tile of the last contracted axis has its own scale.

    Derivatives of the returned function ignore the rounding (straight-through estimator). If `fn`
    itself calls `jax.grad`, products with cotangents are not quantized. If `fn` calls `jax.jvp`,
    products with tangents are quantized. Products in a `custom_jvp` or `custom_vjp` rule are not
    quantized.

    **Arguments:**

    - `fn`: any function of pytrees. Implicit arrays can be arguments, and are not materialized.
    - `rules`: a list of `Rule`. A product uses the first rule whose regex matches the whole place
      and whose `op_names` allow the primitive. A rule with `act_qtype=None` leaves products dense.

    **Returns:** a function with the arguments of `fn`, which supports all transformations of JAX.

    **Raises:**

    - `TypeError` if `rules` is not a list of `Rule`.
    - `ValueError` if a rule sets more than `act_qtype`, `act_calibration_method`, `act_tile_size`
      and `op_names`.
    - `ValueError` when the returned function is called, if a tile does not divide the contracted
      axis.

    **Warns** (`UserWarning`) when the returned function is called, if a rule matches no product.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> def scores(q, k):
    ...     with jax.named_scope("attention"):
    ...         return jnp.einsum("qd,kd->qk", q, k)
    >>> rules = [vn.quant.Rule("attention.*", None, act_qtype="int8")]
    >>> q, k = jax.random.normal(jax.random.key(0), (2, 8, 4))
    >>> error = vn.quant.quantize_products(scores, rules)(q, k) - scores(q, k)
    >>> bool(0 < jnp.abs(error).max() < 0.1)
    True
    """
    rules, function_key = as_rules(rules), _function_key(fn)
    _cached_active_rules(rules, None, function_key)  # check the rules now

    @wraps(fn, updated=())
    def quantized(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_opaque_leaf)
        active_rules = _cached_active_rules(rules, scope_query(), function_key)

        def run(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(treedef, leaves)
            return fn(*args, **kwargs)

        with query_scopes(active_rules):  # `scope_query` then returns them
            out = redispatch_isolated(run, *map(_as_activation, leaves))
        active_rules.warn_of_unmatched()
        return jax.tree.map(_unwrap, out, is_leaf=is_opaque_leaf)

    return quantized


def _function_key(fn: Any) -> Any:
    """Return a cache key: the code object of a function, or the class of another callable.

    All functions that one `def` or `lambda` creates share a code object.
    """
    while isinstance(fn, partial):
        fn = fn.func
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    return getattr(fn, "__code__", type(fn))


class _ActiveRules:
    """The rules of one `quantize_products` call, in force while the returned function runs.

    `outer` holds the rules of an enclosing call of such a function, or None. `unmatched` holds the
    rules that have matched no product yet.
    """

    def __init__(self, rules: tuple[Rule, ...], outer: "_ActiveRules | None"):
        for rule in rules:
            _check_rule(rule)
        self.rules, self.outer = rules, outer
        self.unmatched = set(rules)
        self.rule_by_product: dict[tuple[str, str], Rule | None] = {}  # by place and primitive

    def find(self, place: str, op: str) -> Rule | None:
        """Return the first rule that matches a place and the primitive named `op`, or None.

        A place is the names of the scopes around a product, joined with "/". If no rule of this
        object matches, return the result of `outer.find`.
        """
        if (place, op) not in self.rule_by_product:
            self.rule_by_product[place, op] = next(
                (rule for rule in self.rules if rule.matches(place) and rule.is_for(op)), None
            )
        rule = self.rule_by_product[place, op]
        self.unmatched.discard(rule)
        return self.outer.find(place, op) if rule is None and self.outer else rule

    def warn_of_unmatched(self) -> None:
        """Warn once of each rule that has matched no product so far."""
        unmatched, self.unmatched = self.unmatched, set()
        for rule in self.rules:
            if rule in unmatched:
                products = list(self.rule_by_product)[:4]
                places = ", ".join(f"{place!r} ({op})" for place, op in products)
                hint = (
                    f"The program has such products at {places}. Change path_regex to match one of "
                    "these names in full, or op_names"
                    if places
                    else "The program has no such product"
                )
                message = f"the rule {rule.path_regex!r} matches no product of two activations. "
                warnings.warn(message + hint, UserWarning, stacklevel=3)


@lru_cache(maxsize=256)
def _cached_active_rules(
    rules: tuple[Rule, ...], outer: _ActiveRules | None, function_key: Any
) -> _ActiveRules:
    """Return an `_ActiveRules` object: the same object for equal arguments.

    A new object would make JAX trace the function again. `function_key`, the result of
    `_function_key`, gives each function its own object, because the object stores which rules the
    function has not matched yet. `outer` is as in `_ActiveRules`.
    """
    del function_key
    return _ActiveRules(rules, outer)


def _check_rule(rule: Rule) -> None:
    names = ("act_qtype", "act_calibration_method", "act_tile_size", "op_names")
    supported = Rule(rule.path_regex, None, **{name: getattr(rule, name) for name in names})
    if rule != supported:
        raise ValueError(
            "a rule of quantize_products can set only act_qtype, act_calibration_method, "
            f"act_tile_size and op_names. Replace {rule} with {supported}"
        )


class Activation(ImplicitArray):
    """An array that depends on an argument of the function passed to `quantize_products`.

    A primitive with an activation as operand runs on the wrapped array, and its result becomes an
    activation. A product of two activations first quantizes both, if a `Rule` matches the product.
    Activations cannot be materialized. Therefore each carry of a loop, such as `scan`, is an
    activation in all iterations or in none.
    """

    default_precedence: ClassVar[int] = 100  # an activation wraps all other types

    array: Any  # [...]

    def aval(self) -> Any:
        """Return the shape and dtype of the array."""
        return jax.typeof(self.array)

    def materialise(self) -> Any:
        """Raise `TypeError`, because an activation cannot be materialized."""
        raise TypeError("an activation in vn.quant.quantize_products cannot be materialized")

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run a primitive without a rule on the arrays in `values`, and wrap its results again."""
        bind = lambda *xs: primitive.bind(*xs, **primitive.get_bind_params(params))
        out = redispatch(bind, *map(_unwrap, values))
        return list(map(_as_activation, out)) if primitive.multiple_results else _as_activation(out)


def _unwrap(x: Any) -> Any:
    return x.array if isinstance(x, Activation) else x


def _as_activation(x: Any) -> Any:
    """Wrap an array of numbers in an `Activation`. Return any other value unchanged.

    Integers are wrapped too, because a look-up by token ids in an embedding is an activation.
    """
    if not isinstance(x, jax.Array | np.ndarray) or isinstance(x, Value):
        return x
    is_number = jnp.issubdtype(x.dtype, np.generic)  # False for random keys
    return Activation(x) if is_number else x


# Products of two activations.


def _register_product(name: str) -> None:
    """Register how `vn.implicit` computes the primitive `name` of two activations.

    If a `Rule` matches the product, both activations are quantized first.
    """
    primitive = find_primitive(name)

    def product(x: Activation, y: Activation, *group_sizes: Any, **params: Any) -> Any:
        place, active_rules = current_place(), scope_query()
        if active_rules is None or place.is_derivative:
            return NotImplemented
        place_name = "/".join(place.names)
        rule = active_rules.find(place_name, name)
        dtypes = {jax.typeof(operand.array).dtype for operand in (x, y)}
        if rule is None or rule.act_qtype is None or not dtypes <= set(QUANTIZABLE):
            return NotImplemented
        (x_axes, y_axes), _ = product_axes(name, params)
        x_quantized = _quantize_operand(x.array, x_axes, rule, place_name)
        y_quantized = _quantize_operand(y.array, y_axes, rule, place_name)
        bind = lambda *xs: primitive.bind(*xs, **params)
        with query_scopes(None):  # the operands may be activations of an outer call
            out = redispatch(bind, x_quantized, y_quantized, *map(_unwrap, group_sizes))
        note_how(f"activations in {rule.act_qtype} at {place_name!r}")
        return _as_activation(out)

    register(name)(product)


for _name in PRODUCTS:
    _register_product(_name)


def _quantize_operand(x: Any, contracted: Sequence[int], rule: Rule, place_name: str) -> Any:
    """Quantize an operand of a product by a rule. Values along the contracted axes share a scale.

    `place_name` names the product in an error.
    """
    assert rule.act_qtype is not None
    format, method = get_format(rule.act_qtype), rule.act_calibration_method
    axes = choose_activation_axes(x.shape, contracted, format, rule.act_tile_size)
    try:
        return ste(quantize)(x, rule.act_qtype, calibration_method=method, **axes.arguments)
    except ValueError as error:
        error.add_note(
            f"This error was raised while quantizing an activation of shape {x.shape} at "
            f"{place_name!r} with {rule}"
        )
        raise


# Primitives that need dense arrays: the index of `cond`, and the arguments of callbacks.


@structural("cond")
def _cond(index: Activation, *operands: Any, branches: Any, **params: Any) -> Any:
    bind = lambda *xs: find_primitive("cond").bind(*xs, branches=branches, **params)
    return redispatch(bind, index.array, *operands)


def _register_callback(primitive: Primitive) -> None:
    """Register a rule that passes the arrays inside activations to a callback primitive."""

    def rule(*operands: Any, **params: Any) -> Any:
        if not any(isinstance(x, Activation) for x in operands):
            return NotImplemented
        return Activation.default(primitive, operands, params)

    add_rule(rule, [primitive], structural=True, conditional=True)


for _name in ("pure_callback", "io_callback", "debug_callback", "debug_print"):
    _register_callback(find_primitive(_name))


@register("name")
def _materialise(x: Activation, *, name: str) -> Any:
    # `vn.materialise(x)` binds this primitive with a reserved name. It returns an activation
    # unchanged, because an activation cannot be materialized.
    return x if name == MATERIALISE else NotImplemented
