"""Rules for products of `ActivationQuantized`, a weight that quantizes its activations.

Each rule binds the primitive again, on the weight itself and on quantized activations.
"""

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
from .product import weight_operand


def bind(primitive: str, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Bind the primitive of a name to operands that may be implicit."""
    bound = find_primitive(primitive).bind
    return redispatch(lambda *xs: bound(*xs, **params), *operands)


def _multiply_weight_only(
    primitive: str, operands: Sequence[Any], params: dict[str, Any], w: ActivationQuantized
) -> Any:
    """Compute the product without quantizing the activations, and report the reason."""
    out = bind(primitive, [w.array if x is w else x for x in operands], params)
    axes = " and ".join(map(str, w.contracting))
    why = f"the product does not contract axis {axes or '(removed)'} of the weight"
    if may_be_tangents():
        why = "the other operand may be a tangent"
    elif not w.is_for(primitive):
        why = f"op_names is {', '.join(w.op_names)}"
    note_how(f"activations not quantized to {w.qtype}: {why}")
    return out


def _multiply_straight_through(
    product: Callable[[Any, Any], Any],
    x: Any,
    w: ActivationQuantized,
    shared: Sequence[int],
    batch: Sequence[tuple[int, int]] = (),
) -> Any:
    """Return the product with quantized activations. Derivatives ignore their rounding.

    **Arguments:**

    - `product`: a function of activations, dense or quantized, and the weight.
    - `x`, `shared`, `batch`: as for `ActivationQuantized.quantise_activations`.
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
        # Differentiate only by leaves with tangents, because each costs a product.
        is_zero = lambda tangent: isinstance(tangent, SymbolicZero)
        all_tangents = jax.tree.leaves((tangents[0], tangents[1].array), is_leaf=is_zero)
        varied = [i for i, tangent in enumerate(all_tangents) if not is_zero(tangent)]

        def multiply_varied(*varied_leaves: Any) -> Any:
            full = list(leaves)
            for i, leaf in zip(varied, varied_leaves, strict=True):
                full[i] = leaf
            return product(*jax.tree.unflatten(treedef, full))

        if not varied:
            return out, jax.tree.map(zero_from_primal, out)
        at = [leaves[i] for i in varied]
        return out, jax.jvp(multiply_varied, at, [all_tangents[i] for i in varied])[1]

    call.defjvp(jvp, symbolic_zeros=True)
    return call(jnp.asarray(x), w)


@register("dot_general")
def _dot_general(x: ArrayLike | QArray, w: ActivationQuantized, **params: Any) -> Any:
    numbers = DotDimensionNumbers.of(params["dimension_numbers"])
    return _multiply(x, w, numbers, params, activations_first=True)


@register("dot_general")
def _dot_general_swapped(w: ActivationQuantized, x: ArrayLike | QArray, **params: Any) -> Any:
    numbers = DotDimensionNumbers.of(params["dimension_numbers"]).swapped
    return _multiply(x, w, numbers, params, activations_first=False)


def _multiply(
    x: Any,
    w: ActivationQuantized,
    numbers: DotDimensionNumbers,
    params: dict[str, Any],
    *,
    activations_first: bool,
) -> Any:
    """Return the product of activations and a weight.

    **Arguments:**

    - `numbers`: the dimension numbers with the activations as lhs.
    - `params`: of the primitive, for operands in their actual order.
    """
    (x_contracted, w_contracted), (x_batch, w_batch) = numbers
    if not (w.sums_over(w_contracted) and w.is_for("dot_general")):
        operands = (x, w) if activations_first else (w, x)
        return _multiply_weight_only("dot_general", operands, params, w)
    stacked = w.stacked_axes(w_contracted, w_batch)
    if stacked and params["out_sharding"] is None:
        return _multiply_stacked(x, w, numbers, stacked, params, activations_first)

    batch = list(zip(x_batch, w_batch, strict=True))
    last = w.ndim - 2, w.ndim - 1
    if w.turned and isinstance(w.array, QArray) and len({*last} & {*w_contracted}) == 1:
        # The product contracts the other axis of the stored matrix. Kernels usually find this in
        # the program, but they cannot look through the `custom_jvp` below.
        swap = dict(zip(last, last[::-1], strict=True))
        w = w.changed(array=redispatch(lambda array: jnp.swapaxes(array, -1, -2), w.array))
        x_axes, w_axes = zip(*numbers, strict=True)
        stored = [tuple(swap.get(axis, axis) for axis in axes) for axes in w_axes]
        numbers = DotDimensionNumbers(*zip(x_axes, stored, strict=True))
        in_order = numbers if activations_first else numbers.swapped
        params = params | {"dimension_numbers": tuple(in_order)}

    def product(x: Any, w: Any) -> Any:
        with weight_operand(1 if activations_first else 0):
            return bind("dot_general", (x, w) if activations_first else (w, x), params)

    return _multiply_straight_through(product, x, w, x_contracted, batch)


def _multiply_stacked(
    x: Any,
    w: ActivationQuantized,
    numbers: DotDimensionNumbers,
    stacked: Sequence[int],
    params: dict[str, Any],
    activations_first: bool,
) -> Any:
    """Return the product with each of a stack of weights that have separate activation ranges.

    The activations are broadcast along the axes of the stack, which become batch axes.
    """
    shared = {x_axis: w_axis for pair in numbers for x_axis, w_axis in zip(*pair, strict=True)}
    x_labels = [shared.get(axis, w.ndim + axis) for axis in range(x.ndim)]
    batch = [shared[axis] for axis in numbers.batch[0]]
    x_free = [label for label in x_labels if label >= w.ndim]
    w_free = [axis for axis in range(w.ndim) if axis not in shared.values()]
    last = [*x_free, *w_free] if activations_first else [*w_free, *x_free]
    stacked_x = jnp.broadcast_to(x, (*(w.shape[axis] for axis in stacked), *x.shape))

    def product(x: Any, w: Any) -> Any:
        labels = [*stacked, *x_labels], [*range(w.ndim)], [*batch, *last]
        numeric = {name: params[name] for name in ("precision", "preferred_element_type")}
        return jnp.einsum(x, labels[0], w, labels[1], labels[2], **numeric)

    return redispatch(product, stacked_x, w)


@register("ragged_dot_general")
def _ragged_dot_general(
    x: ArrayLike | QArray, w: ActivationQuantized, group_sizes: ArrayLike, **params: Any
) -> Any:
    numbers = params["ragged_dot_dimension_numbers"]
    (x_contracted, w_contracted), (x_batch, w_batch) = numbers.dot_dimension_numbers
    if not (w.sums_over(w_contracted) and w.is_for("ragged_dot_general")):
        return _multiply_weight_only("ragged_dot_general", (x, w, group_sizes), params, w)
    product = lambda x, w: bind("ragged_dot_general", (x, w, group_sizes), params)
    return _multiply_straight_through(
        product, x, w, x_contracted, list(zip(x_batch, w_batch, strict=True))
    )


@register("conv_general_dilated")
def _conv_general_dilated(x: ArrayLike | QArray, w: ActivationQuantized, **params: Any) -> Any:
    _, features, *space = params["dimension_numbers"].lhs_spec
    if not (sums_over_features(w, params) and w.is_for("conv_general_dilated")):
        return _multiply_weight_only("conv_general_dilated", (x, w), params, w)
    product = lambda x, w: bind("conv_general_dilated", (x, w), params)
    return _multiply_straight_through(product, x, w, [*space, features])


def sums_over_features(w: ProductWeight, params: dict[str, Any]) -> bool:
    """Return whether a convolution contracts the axes of the kernel that the weight declares.

    In the derivative by the input, the two feature axes are swapped.
    """
    _, features, *space = params["dimension_numbers"].rhs_spec
    return features - w.ndim in w.contracting and w.sums_over([features, *space])
