"""Rules of `FakeQuantized` for products, and for casts and transposes before a product.

A `FakeQuantized` has scales for products that contract its `tile_axis`. Only these products
quantize activations and gradients. Other products use the quantized and dequantized weight: for
example, products of tangents, and products of the backward pass in `implicit(grad(f))`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._core.policy import note_how
from ..._core.primitives.scopes import may_be_tangents
from ..._core.rules import register
from ..ops.product import Plan, execute
from .fake_quantized import FakeQuantized
from .products import PRODUCTS
from .recipe import OperandRecipe, TrainingRecipe, quantized_product


@register("dot_general")
def _dot_general(x: ArrayLike, w: FakeQuantized, **params: Any) -> Any:
    return _multiply("dot_general", params, x, w)


@register("dot_general")
def _dot_general_swapped(w: FakeQuantized, x: ArrayLike, **params: Any) -> Any:
    return _multiply("dot_general", params, x, w, weight_side=0)


@register("conv_general_dilated")
def _conv_general_dilated(x: ArrayLike, w: FakeQuantized, **params: Any) -> Any:
    return _multiply("conv_general_dilated", params, x, w)


@register("ragged_dot_general")
def _ragged_dot_general(
    x: ArrayLike, w: FakeQuantized, group_sizes: ArrayLike, **params: Any
) -> Any:
    return _multiply("ragged_dot_general", params, x, w, group_sizes)


def _multiply(
    primitive: str,
    params: dict[str, Any],
    x: ArrayLike,
    w: FakeQuantized,
    *other_operands: Any,
    weight_side: int = 1,
) -> Any:
    """Return the product of activations and a weight in training.

    **Arguments:**

    - `primitive`, `params`: the name of the primitive, and its parameters.
    - `x`, `w`: the activations and the weight.
    - `other_operands`: the operands of the primitive after `x` and `w`.
    - `weight_side`: 0 if the weight is the first operand, 1 if it is the second.
    """
    x = jnp.asarray(x)
    product = PRODUCTS[primitive](tuple(params.items()))
    # Swap a pair (for x, for w) to (for lhs, for rhs) if the weight is lhs, or swap it back.
    in_order = lambda for_x, for_w: (for_x, for_w) if weight_side == 1 else (for_w, for_x)
    x_contracted, w_contracted = in_order(*product.contracted)
    contracts_tiles = set(w.tile_axes) <= set(w_contracted)
    is_forward = contracts_tiles and product.is_forward and not may_be_tangents()
    x_recipe = OperandRecipe.of_activation(x, w, x_contracted if is_forward else None)

    if is_forward and w.backward is not None:  # the gradients are quantized
        note_how(product.description)
        w_recipe = OperandRecipe.of_weight(w)
        recipe = TrainingRecipe(product, in_order(x_recipe, w_recipe), in_order(*w.backward))
        x = x_recipe.without_clipped_gradients(x)
        dense_w = w_recipe.without_clipped_gradients(w.pruned)
        # If one product multiplies a whole stack of weights, use the first key for all of them.
        has_key = w.key is not None and w.key.size > 0
        key = w.key.reshape(-1)[0] if has_key else None
        return quantized_product(recipe, *in_order(x, dense_w), other_operands, key)

    def compute(x: Any, w: FakeQuantized) -> jax.Array:
        operands = in_order(x_recipe.fake_quantize(x), w.materialise())
        return product.bind(*operands, *other_operands)

    quantized = "weight" if x_recipe.qtype is None else "operands"
    how = f"quantized {quantized}, in floating point"
    return execute(Plan(how, compute, (x, w.changed(key=None))))


@register("convert_element_type")
def _convert_element_type(
    w: FakeQuantized, *, new_dtype: Any, weak_type: bool, sharding: Any
) -> Any:
    if weak_type or sharding is not None or not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    if jnp.dtype(new_dtype).itemsize < 2:
        return NotImplemented
    return w.changed(dense_dtype=jnp.dtype(new_dtype).name)


@register("transpose")
def _transpose(w: FakeQuantized, *, permutation: Sequence[int]) -> Any:
    ndim = w.ndim
    if w.format is not None and w.scales_are_quantised:
        # Scales are quantized in groups that share an outer scale. A group depends on the order of
        # axes, unless it consists of all scales of a matrix.
        is_per_matrix = w.format.scale_tile == 0  # 0 stands for all scales of a matrix
        if not is_per_matrix or {*permutation[-2:]} != {ndim - 2, ndim - 1}:
            return NotImplemented
    new_axis = lambda axis: list(permutation).index(axis % ndim) - ndim
    tile_size = w.tile_size
    if isinstance(tile_size, tuple):
        tile_size = tuple(sorted((new_axis(axis), size) for axis, size in tile_size))
    transposed = w.changed(
        w=jax.lax.transpose(w.w, permutation),
        tile_axis=tuple(map(new_axis, w.tile_axes)),
        tile_size=tile_size,
        key=None,
        mask=None if w.mask is None else jax.lax.transpose(w.mask, permutation),
    )
    if w.key is None:
        return transposed
    return transposed.changed(key=_transpose_key(w, permutation[: transposed.lead]))


def _transpose_key(w: FakeQuantized, new_leading: Sequence[int]) -> Any:
    """Return the PRNG keys of a transposed weight, one per entry of its leading axes.

    Leading axes precede the first axis in `tile_axis`. `new_leading` lists the axes of `w` that
    become the leading axes, in the new order. A new leading axis repeats the keys. If an axis is no
    longer a leading axis, its first key is used.
    """
    key = w.key[tuple(slice(None) if axis in new_leading else 0 for axis in range(w.lead))]
    old_axes = [axis for axis in range(w.lead) if axis in new_leading]
    key = jnp.transpose(key, [old_axes.index(axis) for axis in new_leading if axis in old_axes])
    key = jnp.expand_dims(key, [i for i, axis in enumerate(new_leading) if axis not in old_axes])
    return jnp.broadcast_to(key, [w.shape[axis] for axis in new_leading])
