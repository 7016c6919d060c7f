"""Rules for products of `ActivationQuantized`, a weight that quantizes its activations.

Each rule quantizes the activations and binds the primitive again. In the new call, `w.array`, the
wrapped array, replaces the weight `w`.
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
    """Bind a primitive, given its name, to operands that may be implicit arrays."""
    bind_arrays = find_primitive(primitive).bind
    return redispatch(lambda *xs: bind_arrays(*xs, **params), *operands)


def _multiply_weight_only(
    primitive: str, operands: Sequence[Any], params: dict[str, Any], w: ActivationQuantized
) -> Any:
    """Return the product with dense activations, and report why they are not quantized.

    `operands` are the operands of the primitive, including `w`.
    """
    out = bind(primitive, [w.array if x is w else x for x in operands], params)
    if may_be_tangents():
        reason = "the other operand may be a tangent"
    elif not w.is_for(primitive):
        reason = f"op_names is {', '.join(w.op_names)}"
    else:
        # A weight has no contracted axes left if indexing removed them.
        axes = " and ".join(map(str, w.contracting)) or "(removed)"
        reason = f"the product does not contract axis {axes} of the weight"
    note_how(f"activations not quantized to {w.qtype}: {reason}")
    return out


def _multiply_straight_through(
    product: Callable[[Any, Any], Any],
    x: Any,
    w: ActivationQuantized,
    x_contracted: Sequence[int],
    batch: Sequence[tuple[int, int]] = (),
) -> Any:
    """Return the product of quantized activations and a weight.

    Derivatives treat the quantization of activations as the identity. Activations are not quantized
    if they are an implicit array or have no float dtype.

    **Arguments:**

    - `product`: a function that multiplies activations, dense or quantized, and `w.array`.
    - `x_contracted`: the axes of the activations `x` that the product contracts.
    - `batch`: the batch axes as pairs: an axis of `x` and the matching axis of `w`.
    """
    if isinstance(x, Value) or jnp.result_type(x) not in QUANTIZABLE:
        return product(x, w.array)

    original_w = w

    @jax.custom_jvp
    def multiply(x: jax.Array, w: ActivationQuantized) -> Any:
        # `custom_jvp` rebuilds the weight, which loses the origin that reports show.
        keep_sources([original_w], [w])
        return product(w.quantise_activations(x, x_contracted, batch), w.array)

    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        x, w = primals
        out = multiply(x, w)
        quantize = lambda x: materialise_one(w.quantise_activations(x, x_contracted, batch))
        # `ste` gives the quantized activations the derivative of the identity.
        leaves, treedef = jax.tree.flatten((ste(quantize)(x), w.array))
        # Differentiate only with respect to leaves with tangents, because each costs a product.
        is_zero = lambda tangent: isinstance(tangent, SymbolicZero)
        leaf_tangents = jax.tree.leaves((tangents[0], tangents[1].array), is_leaf=is_zero)
        varying = [i for i, tangent in enumerate(leaf_tangents) if not is_zero(tangent)]
        if not varying:
            return out, jax.tree.map(zero_from_primal, out)

        def multiply_with(*new_leaves: Any) -> Any:
            all_leaves = list(leaves)
            for i, leaf in zip(varying, new_leaves, strict=True):
                all_leaves[i] = leaf
            return product(*jax.tree.unflatten(treedef, all_leaves))

        primal_leaves = [leaves[i] for i in varying]
        return out, jax.jvp(multiply_with, primal_leaves, [leaf_tangents[i] for i in varying])[1]

    multiply.defjvp(jvp, symbolic_zeros=True)
    return multiply(jnp.asarray(x), w)


@register("dot_general")
def _dot_general(x: ArrayLike | QArray, w: ActivationQuantized, **params: Any) -> Any:
    return _multiply(x, w, params, activations_first=True)


@register("dot_general")
def _dot_general_swapped(w: ActivationQuantized, x: ArrayLike | QArray, **params: Any) -> Any:
    return _multiply(x, w, params, activations_first=False)


def _multiply(
    x: Any, w: ActivationQuantized, params: dict[str, Any], *, activations_first: bool
) -> Any:
    """Return the `dot_general` of activations and a weight, with quantized activations if possible.

    `activations_first` is True if the activations are lhs, and False if they are rhs.
    """
    numbers = DotDimensionNumbers.of(params["dimension_numbers"])
    numbers = numbers if activations_first else numbers.swapped  # now the activations are lhs
    (x_contracted, w_contracted), (x_batch, w_batch) = numbers
    if not (w.sums_over(w_contracted) and w.is_for("dot_general")):
        operands = (x, w) if activations_first else (w, x)
        return _multiply_weight_only("dot_general", operands, params, w)
    stacked = w.stacked_axes(w_contracted, w_batch)
    if stacked and params["out_sharding"] is None:
        return _multiply_stacked(x, w, numbers, stacked, params, activations_first)

    batch = list(zip(x_batch, w_batch, strict=True))
    row_axis, column_axis = w.ndim - 2, w.ndim - 1
    contracts_row_or_column = (row_axis in w_contracted) != (column_axis in w_contracted)
    if w.turned and isinstance(w.array, QArray) and contracts_row_or_column:
        # The weight is the transpose of a stored matrix. Transpose it back, and contract the other
        # axis, so that kernels read the stored matrix. XLA removes such a pair of transposes in
        # other programs, but not through the `custom_jvp` of `_multiply_straight_through`.
        w = w.changed(array=redispatch(lambda array: jnp.swapaxes(array, -1, -2), w.array))
        swapped = {row_axis: column_axis, column_axis: row_axis}
        x_axes, w_axes = zip(*numbers, strict=True)
        stored_axes = [tuple(swapped.get(axis, axis) for axis in axes) for axes in w_axes]
        stored_numbers = DotDimensionNumbers(*zip(x_axes, stored_axes, strict=True))
        stored_numbers = stored_numbers if activations_first else stored_numbers.swapped
        params = params | {"dimension_numbers": tuple(stored_numbers)}

    def product(x: Any, w: Any) -> Any:
        with weight_operand(1 if activations_first else 0):
            return bind("dot_general", (x, w) if activations_first else (w, x), params)

    return _multiply_straight_through(product, x, w, x_contracted, batch)


def _multiply_stacked(
    x: Any,
    w: ActivationQuantized,
    numbers: DotDimensionNumbers,
    stack_axes: Sequence[int],
    params: dict[str, Any],
    activations_first: bool,
) -> Any:
    """Return the product of activations and stacked weights, each with its own activation scale.

    These static scales differ along `stack_axes`, which are free axes of `w`. The activations are
    broadcast along `stack_axes`, which become batch axes. So the activations are quantized once per
    scale. In `numbers`, the activations are lhs.
    """
    # Einsum subscripts: i is axis i of `w`, and w.ndim + i is a free axis i of `x`.
    w_subscripts = list(range(w.ndim))
    x_to_w = {x_axis: w_axis for pair in numbers for x_axis, w_axis in zip(*pair, strict=True)}
    x_subscripts = [x_to_w.get(axis, w.ndim + axis) for axis in range(x.ndim)]
    x_free = [subscript for subscript in x_subscripts if subscript >= w.ndim]
    w_free = [axis for axis in w_subscripts if axis not in x_to_w.values()]
    free = [*x_free, *w_free] if activations_first else [*w_free, *x_free]
    out_subscripts = [*(x_to_w[axis] for axis in numbers.batch[0]), *free]
    numeric = {name: params[name] for name in ("precision", "preferred_element_type")}

    def product(x: Any, w: Any) -> Any:
        subscripts = [*stack_axes, *x_subscripts]
        return jnp.einsum(x, subscripts, w, w_subscripts, out_subscripts, **numeric)

    stacked_x = jnp.broadcast_to(x, (*(w.shape[axis] for axis in stack_axes), *x.shape))
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
    """Return whether a convolution with the kernel `w` sums over all axes in `w.contracting`.

    These axes must include the input features. The result is False for the convolution that
    computes the gradient of the images, because it sums over the output features.
    """
    _, features, *space = params["dimension_numbers"].rhs_spec
    return features - w.ndim in w.contracting and w.sums_over([features, *space])
