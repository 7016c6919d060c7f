"""Products of weights that quantise what they meet: `ActivationQuantized`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.typing import ArrayLike

from ..._core.policy import note_how
from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ..._core.primitives.scopes import may_be_tangents
from ..._core.rules import register
from ..._core.sources import keep_sources
from ..._core.surface.straight_through import ste
from ..._core.transform import redispatch
from ..._core.value import Value, materialise_one
from ..._jax.primitives import find_primitive
from ..arrays.qarray import QUANTIZABLE, QArray
from ..weights.activations import ActivationQuantized
from ..weights.product_weights import ProductWeight
from .by_kernel import weight_is

# Each is bound again, on the weight itself and on quantised activations.


def bind(primitive: str, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns what a primitive gives on operands that may be implicit."""
    bound = find_primitive(primitive).bind
    return redispatch(lambda *xs: bound(*xs, **params), *operands)


def _on_the_weight(
    primitive: str, operands: Sequence[Any], params: dict[str, Any], w: ActivationQuantized
) -> Any:
    """The product on the weight itself, and tells `explain`: a rule may name the wrong axis."""
    out = bind(primitive, [w.array if x is w else x for x in operands], params)
    axes = " and ".join(map(str, w.contracting))
    why = f"the product does not contract axis {axes or '(removed)'} of the weight"
    if may_be_tangents():
        why = "the other operand may be a tangent"
    elif not w.is_for(primitive):
        why = f"op_names is {', '.join(w.op_names)}"
    note_how(f"activations not quantized to {w.qtype}: {why}")
    return out


def _straight_through(
    product: Callable[[Any, Any], Any],
    x: Any,
    w: ActivationQuantized,
    shared: Sequence[int],
    batch: Sequence[tuple[int, int]] = (),
) -> Any:
    """The product with activations quantised, whose derivative is that of the product alone.

    **Arguments:**

    - `product`: of activations, dense or quantised, and of the weight.
    - `x`, `shared`, `batch`: as for `quantise_activations`.
    """
    if isinstance(x, Value) or jnp.result_type(x) not in QUANTIZABLE:
        return product(x, w.array)

    weight = w

    @jax.custom_jvp
    def call(x: jax.Array, w: ActivationQuantized) -> Any:
        keep_sources([weight], [w])
        return product(w.quantise_activations(x, shared, batch), w.array)

    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        x, w = primals
        out = call(x, w)
        dense = ste(lambda x: materialise_one(w.quantise_activations(x, shared, batch)))
        leaves, treedef = jax.tree.flatten((dense(x), w.array))
        # What is no variable has no tangent, and costs no product.
        moves = jax.tree.leaves((tangents[0], tangents[1].array), is_leaf=_is_zero)
        moving = [i for i, tangent in enumerate(moves) if not _is_zero(tangent)]

        def of_variables(*variables: Any) -> Any:
            full = list(leaves)
            for i, variable in zip(moving, variables, strict=True):
                full[i] = variable
            return product(*jax.tree.unflatten(treedef, full))

        if not moving:
            return out, jax.tree.map(zero_from_primal, out)
        variables = [leaves[i] for i in moving]
        return out, jax.jvp(of_variables, variables, [moves[i] for i in moving])[1]

    call.defjvp(jvp, symbolic_zeros=True)
    return call(jnp.asarray(x), w)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


@register("dot_general")
def _dot_general(x: ArrayLike | QArray, w: ActivationQuantized, **params: Any) -> Any:
    numbers = DotDimensionNumbers.of(params["dimension_numbers"])
    return _product(x, w, numbers, params, activations_first=True)


@register("dot_general")
def _dot_general_swapped(w: ActivationQuantized, x: ArrayLike | QArray, **params: Any) -> Any:
    numbers = DotDimensionNumbers.of(params["dimension_numbers"]).swapped
    return _product(x, w, numbers, params, activations_first=False)


def _product(
    x: Any,
    w: ActivationQuantized,
    numbers: DotDimensionNumbers,
    params: dict[str, Any],
    *,
    activations_first: bool,
) -> Any:
    """The product, by the numbers of that of activations, which come first, with the weight."""
    (x_summed, w_summed), (x_batch, w_batch) = numbers
    if not (w.sums_over(w_summed) and w.is_for("dot_general")):
        operands = (x, w) if activations_first else (w, x)
        return _on_the_weight("dot_general", operands, params, w)
    stacked = w.stacked_axes(w_summed, w_batch)
    if stacked and params["out_sharding"] is None:
        return _one_by_one(x, w, numbers, stacked, params, activations_first)

    batch = list(zip(x_batch, w_batch, strict=True))
    last = w.ndim - 2, w.ndim - 1
    if w.turned and isinstance(w.array, QArray) and len({*last} & {*w_summed}) == 1:
        # The product sums the other side of what is stored. That is not left to be seen from where
        # the weight comes from, for there is no seeing through a function with its own derivative.
        swap = dict(zip(last, last[::-1], strict=True))
        w = w.changed(array=redispatch(lambda array: jnp.swapaxes(array, -1, -2), w.array))
        of_x, of_w = zip(*numbers, strict=True)
        stored = [tuple(swap.get(axis, axis) for axis in axes) for axes in of_w]
        numbers = DotDimensionNumbers(*zip(of_x, stored, strict=True))
        in_order = numbers if activations_first else numbers.swapped
        params = params | {"dimension_numbers": tuple(in_order)}

    def product(x: Any, w: Any) -> Any:
        with weight_is(1 if activations_first else 0):
            return bind("dot_general", (x, w) if activations_first else (w, x), params)

    return _straight_through(product, x, w, x_summed, batch)


def _one_by_one(
    x: Any,
    w: ActivationQuantized,
    numbers: DotDimensionNumbers,
    stacked: Sequence[int],
    params: dict[str, Any],
    activations_first: bool,
) -> Any:
    """The product with each of a stack of weights, which have ranges of their own.

    So the activations are one operand for each: the axes of the stack become batch axes.
    """
    shared = {of_x: of_w for pair in numbers for of_x, of_w in zip(*pair, strict=True)}
    x_labels = [shared.get(axis, w.ndim + axis) for axis in range(x.ndim)]
    batch = [shared[axis] for axis in numbers.batch[0]]
    x_free = [label for label in x_labels if label >= w.ndim]
    w_free = [axis for axis in range(w.ndim) if axis not in shared.values()]
    last = [*x_free, *w_free] if activations_first else [*w_free, *x_free]
    apart = jnp.broadcast_to(x, (*(w.shape[axis] for axis in stacked), *x.shape))

    def product(x: Any, w: Any) -> Any:
        labels = [*stacked, *x_labels], [*range(w.ndim)], [*batch, *last]
        numeric = {name: params[name] for name in ("precision", "preferred_element_type")}
        return jnp.einsum(x, labels[0], w, labels[1], labels[2], **numeric)

    return redispatch(product, apart, w)


@register("ragged_dot_general")
def _ragged_dot_general(
    x: ArrayLike | QArray, w: ActivationQuantized, group_sizes: ArrayLike, **params: Any
) -> Any:
    numbers = params["ragged_dot_dimension_numbers"]
    (x_summed, w_summed), (x_batch, w_batch) = numbers.dot_dimension_numbers
    if not (w.sums_over(w_summed) and w.is_for("ragged_dot_general")):
        return _on_the_weight("ragged_dot_general", (x, w, group_sizes), params, w)
    product = lambda x, w: bind("ragged_dot_general", (x, w, group_sizes), params)
    return _straight_through(product, x, w, x_summed, list(zip(x_batch, w_batch, strict=True)))


@register("conv_general_dilated")
def _conv_general_dilated(x: ArrayLike | QArray, w: ActivationQuantized, **params: Any) -> Any:
    _, features, *space = params["dimension_numbers"].lhs_spec
    if not (sums_over_features(w, params) and w.is_for("conv_general_dilated")):
        return _on_the_weight("conv_general_dilated", (x, w), params, w)
    product = lambda x, w: bind("conv_general_dilated", (x, w), params)
    return _straight_through(product, x, w, [*space, features])


def sums_over_features(w: ProductWeight, params: dict[str, Any]) -> bool:
    """Whether a convolution contracts the axis of the kernel that activations' features go with.

    In the derivative by the input, the two axes of features are the other way round.
    """
    _, features, *space = params["dimension_numbers"].rhs_spec
    return features - w.ndim in w.contracting and w.sums_over([features, *space])
