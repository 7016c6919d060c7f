"""`quantize_products`: products of two activations, quantised by their place in a program.

An activation is what depends on an argument. A type marks it, and goes through any primitive; its
rules for products look up where in the program they are.
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
from ..._core.primitives.scopes import Place, current_place, query_scopes, scope_query
from ..._core.rules import add_rule, register
from ..._core.surface.array import ImplicitArray
from ..._core.surface.straight_through import ste
from ..._core.transform import redispatch, run_around
from ..._core.value import MATERIALISE, Value, is_opaque_leaf
from ..._jax.primitives import Primitive, find_primitive
from ..arrays.qarray import QUANTIZABLE
from ..conversion.quantize import quantize, tile_in
from ..conversion.scale_axes import scale_axes_of
from ..formats import get_format
from .rules import Rule, rules_in


def quantize_products(fn: Callable, rules: Sequence[Rule]) -> Callable:
    """Return a function that quantizes products of two activations, such as `q @ k.T` in attention.

    Activations are arrays that depend on the arguments of `fn`. Arrays that `fn` captures, or that
    it holds as a module or a `functools.partial`, are weights. Quantize their products with
    `vn.quant.quantize_tree`.

    The `path_regex` of a rule matches the place of a product. The place consists of the names of
    the scopes (`jax.named_scope`, modules of linen and Equinox) and jitted functions around the
    product, joined with "/". Profiles show the same names. The place of an `einsum` ends with its
    subscripts.

    Each operand has one scale per index along the axes that are not contracted. If the rule has an
    `act_tile_size`, or its format a fixed tile size, each tile of the last contracted axis also has
    its own scale.

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
    rules, code = rules_in(rules), _code_of(fn)
    _products_of(rules, None, code)  # to refuse at once what it cannot do

    @wraps(fn, updated=())
    def of_activations(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_opaque_leaf)
        products = _products_of(rules, scope_query(), code)

        def run(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(treedef, leaves)
            return fn(*args, **kwargs)

        with query_scopes(products):
            out = run_around(run, *map(_marked, leaves))
        products.warn_of_unmatched()
        is_ours = lambda x: isinstance(x, Activation)
        return jax.tree.map(lambda x: x.array if is_ours(x) else x, out, is_leaf=is_opaque_leaf)

    return of_activations


def _code_of(fn: Any) -> Any:
    """What stays the same where a function is made anew for each call: its code, or its class."""
    while isinstance(fn, partial):
        fn = fn.func
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    return getattr(fn, "__code__", type(fn))


@lru_cache(maxsize=256)  # for what is traced with one is found again with an equal one
def _products_of(rules: tuple[Rule, ...], around: "_Products | None", code: Any) -> "_Products":
    del code  # of the key: which rules have matched is said of a function
    return _Products(rules, around)


class _Products:
    """The rules of a call, before those of a call around it, and what they have matched."""

    def __init__(self, rules: tuple[Rule, ...], around: "_Products | None"):
        for rule in rules:
            _check(rule)
        self.rules, self.around = rules, around
        self.unmatched = set(rules)
        self.met: dict[tuple[str, str], Rule | None] = {}

    def rule_for(self, at: Place, op: str) -> Rule | None:
        """Returns the rule of a product at a place."""
        key = "/".join(at.names), op
        if key not in self.met:
            self.met[key] = next(
                (r for r in self.rules if r.matches(key[0]) and r.is_for(op)), None
            )
        rule = self.met[key]
        self.unmatched.discard(rule)
        return self.around.rule_for(at, op) if rule is None and self.around else rule

    def warn_of_unmatched(self) -> None:
        """Warns once of the rules that nothing has matched yet."""
        unmatched, self.unmatched = self.unmatched, set()
        for rule in self.rules:
            if rule in unmatched:
                places = ", ".join(f"{at!r} ({op})" for at, op in list(self.met)[:4])
                message = (
                    f"the rule {rule.path_regex!r} matches no product of two activations. "
                    + (
                        f"The program has such products at {places}. Change path_regex to match "
                        "one of these names in full, or op_names"
                        if places
                        else "The program has no such product"
                    )
                )
                warnings.warn(message, UserWarning, stacklevel=3)


def _check(rule: Rule) -> None:
    default = Rule(
        rule.path_regex,
        None,
        act_qtype=rule.act_qtype,
        act_calibration_method=rule.act_calibration_method,
        act_tile_size=rule.act_tile_size,
        op_names=rule.op_names,
    )
    if rule != default:
        raise ValueError(
            "a rule of quantize_products can set only act_qtype, act_calibration_method, "
            f"act_tile_size and op_names. Replace {rule} with {default}"
        )


class Activation(ImplicitArray):
    """An array that depends on an argument of a function under `quantize_products`.

    It is the array to every primitive but products, and its results are activations. It has no
    metadata, and no other dense form than its leaf, so that where it meets a dense array in a loop,
    that is taken for an activation.
    """

    default_precedence: ClassVar[int] = 100  # it stands around whatever else there is

    array: Any  # [...]

    def aval(self) -> Any:
        """The shape and dtype of the array."""
        return jax.typeof(self.array)

    def materialise(self) -> Any:
        """Refuses, so that it is an activation wherever it goes."""
        raise TypeError("an activation in vn.quant.quantize_products cannot be materialized")

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """What the primitive gives on the arrays, as activations."""
        bind = lambda *xs: primitive.bind(*xs, **primitive.get_bind_params(params))
        out = redispatch(bind, *map(_array, values))
        return list(map(_marked, out)) if primitive.multiple_results else _marked(out)


def _array(x: Any) -> Any:
    return x.array if isinstance(x, Activation) else x


def _marked(x: Any) -> Any:
    """An array as an activation: numbers of any kind, for tokens are looked up in embeddings."""
    if not isinstance(x, jax.Array | np.ndarray) or isinstance(x, Value):
        return x
    return Activation(x) if jnp.issubdtype(x.dtype, np.generic) else x


# Products.

Axes = Sequence[int]


def _summed_in_dot(x: Any, y: Any, params: dict[str, Any]) -> tuple[Axes, Axes]:
    return params["dimension_numbers"][0]


def _summed_in_ragged_dot(x: Any, y: Any, params: dict[str, Any]) -> tuple[Axes, Axes]:
    return params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]


def _summed_in_convolution(x: Any, y: Any, params: dict[str, Any]) -> tuple[Axes, Axes]:
    of_x, of_y = params["dimension_numbers"].lhs_spec, params["dimension_numbers"].rhs_spec
    return (*of_x[2:], of_x[1]), (*of_y[2:], of_y[1])


#: Of each product, from the operands and parameters to the axes of either that are summed.
SUMMED = {
    "dot_general": _summed_in_dot,
    "ragged_dot_general": _summed_in_ragged_dot,
    "conv_general_dilated": _summed_in_convolution,
}


def _rule_of(name: str) -> None:
    primitive = find_primitive(name)

    def product(x: Activation, y: Activation, *others: Any, **params: Any) -> Any:
        at, products = current_place(), scope_query()
        rule = None if products is None or at.is_derivative else products.rule_for(at, name)
        operands = x.array, y.array
        dtypes = {jax.typeof(operand).dtype for operand in operands}
        if rule is None or rule.act_qtype is None or not dtypes <= set(QUANTIZABLE):
            return NotImplemented
        summed = SUMMED[name](*operands, params)
        pair = [_quantized(*of, rule, at) for of in zip(operands, summed, strict=True)]
        bind = lambda *xs: primitive.bind(*xs, **params)
        with query_scopes(None):  # the operands may be activations of a call around this one
            out = redispatch(bind, *pair, *map(_array, others))
        note_how(f"activations in {rule.act_qtype} at {'/'.join(at.names)!r}")
        return _marked(out)

    register(name)(product)


for _name in SUMMED:
    _rule_of(_name)


def _quantized(x: Any, summed: Axes, rule: Rule, at: Place) -> Any:
    assert rule.act_qtype is not None
    last = summed[-1] if summed else 0
    size = rule.act_tile_size
    tile = None if size is None else tile_in(x.shape, last, size)
    axes = scale_axes_of(x.ndim, summed, get_format(rule.act_qtype), tile)
    method = rule.act_calibration_method
    try:
        return ste(quantize)(x, rule.act_qtype, calibration_method=method, **axes.arguments)
    except ValueError as error:
        where = "/".join(at.names)
        error.add_note(
            f"This error was raised while quantizing an activation of shape {x.shape} at {where!r} "
            f"with {rule}"
        )
        raise


# What takes arrays alone, and no implicit ones.


def _branch(index: Activation, *operands: Any, branches: Any, **params: Any) -> Any:
    bind = lambda *xs: find_primitive("cond").bind(*xs, branches=branches, **params)
    return redispatch(bind, index.array, *operands)


add_rule(_branch, [find_primitive("cond")], structural=True)


def _opens(primitive: Primitive) -> None:
    def rule(*operands: Any, **params: Any) -> Any:
        if not any(isinstance(x, Activation) for x in operands):
            return NotImplemented
        return Activation.default(primitive, operands, params)

    add_rule(rule, [primitive], structural=True, conditional=True)


for _name in ("pure_callback", "io_callback", "debug_callback", "debug_print"):
    _opens(find_primitive(_name))


def _named(x: Activation, *, name: str) -> Any:
    # It is what it stands for already, of vn.materialise.
    return x if name == MATERIALISE else NotImplemented


add_rule(_named, [find_primitive("name")], precedence=0)
