"""Rules of `FakeQuantized` for products, and for casts and transposes before a product.

A `FakeQuantized` has scales for the product that contracts its `tile_axis`. Only that product
quantizes activations and gradients. Other products use the fake-quantized weight: for example, the
products of the backward pass in `implicit(grad(f))`, or a product of tangents.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._core.policy import note_how
from ..._core.primitives.scopes import may_be_tangents
from ..._core.rules import register
from ..ops.product import Plan, execute
from .fake_quantized import FakeQuantized
from .products import PRODUCTS
from .recipe import OperandRecipe, TrainingRecipe, quantized_product


@register("dot_general")
def _dense_weight(x: ArrayLike, w: FakeQuantized, **params: Any) -> Any:
    return _multiply("dot_general", params, x, w)


@register("dot_general")
def _weight_dense(w: FakeQuantized, x: ArrayLike, **params: Any) -> Any:
    return _multiply("dot_general", params, x, w, weight_side=0)


@register("conv_general_dilated")
def _convolution(x: ArrayLike, w: FakeQuantized, **params: Any) -> Any:
    return _multiply("conv_general_dilated", params, x, w)


@register("ragged_dot_general")
def _ragged_dot(x: ArrayLike, w: FakeQuantized, group_sizes: ArrayLike, **params: Any) -> Any:
    return _multiply("ragged_dot_general", params, x, w, group_sizes)


def _multiply(
    primitive: str,
    params: dict[str, Any],
    x: ArrayLike,
    w: FakeQuantized,
    *extra: Any,
    weight_side: int = 1,
) -> Any:
    """Multiply activations by a weight in training.

    **Arguments:**

    - `primitive`, `params`: the name of the primitive, and its parameters.
    - `x`, `w`: the activations and the weight.
    - `extra`: the other operands of the primitive.
    - `weight_side`: 0 if the weight is the first operand, 1 if it is the second.
    """
    x = jnp.asarray(x)
    product = PRODUCTS[primitive](tuple(params.items()))
    in_order = lambda of_x, of_w: (of_x, of_w) if weight_side == 1 else (of_w, of_x)
    contracted, w_contracted = in_order(*product.contracted)
    has_tiles = set(w.tile_axes) <= set(w_contracted)
    is_forward = has_tiles and product.is_forward and not may_be_tangents()
    of_x = OperandRecipe.of_activation(x, w, contracted if is_forward else None)
    if is_forward and w.backward is not None:
        note_how(product.description)
        of_w = OperandRecipe.of_weight(w)
        recipe = TrainingRecipe(product, in_order(of_x, of_w), in_order(*w.backward))
        operands = of_x.without_clipped_gradients(x), of_w.without_clipped_gradients(w.pruned)
        return quantized_product(recipe, *in_order(*operands), extra, _first_key(w))

    def compute(x: Any, w: FakeQuantized) -> jax.Array:
        return product.bind(*in_order(of_x.fake_quantize(x), w.materialise()), *extra)

    quantized = "weight" if of_x.qtype is None else "operands"
    how = f"quantized {quantized}, in floating point"
    return execute(Plan(how, compute, (x, w.changed(key=None))))


def _first_key(w: FakeQuantized) -> Any:
    """Return a single key for a product. A stack of weights that one product uses shares it."""
    return None if w.key is None or np.prod(w.key.shape) == 0 else w.key.reshape(-1)[0]


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
    matrix = {ndim - 2, ndim - 1}
    if w.format is not None and w.scales_are_quantised:
        # Scales are quantized in groups. A group depends on the order of axes, unless it consists
        # of all scales of a matrix.
        is_per_matrix = w.format.scale_tile == 0
        if not is_per_matrix or {permutation[-2], permutation[-1]} != matrix:
            return NotImplemented
    move = lambda axis: list(permutation).index(axis % ndim) - ndim
    tile_size = w.tile_size
    if isinstance(tile_size, tuple):
        tile_size = tuple(sorted((move(axis), size) for axis, size in tile_size))
    new = w.changed(
        w=jax.lax.transpose(w.w, permutation),
        tile_axis=tuple(map(move, w.tile_axes)),
        tile_size=tile_size,
        key=None,
        mask=None if w.mask is None else jax.lax.transpose(w.mask, permutation),
    )
    return new if w.key is None else new.changed(key=_transpose_key(w, new, permutation))


def _transpose_key(w: FakeQuantized, new: FakeQuantized, permutation: Sequence[int]) -> Any:
    """Return the keys for the axes that now precede the first axis of `tile_axis`.

    An axis that preceded it before keeps its keys. A new one repeats them. For an axis that no
    longer precedes it, the first key is used.
    """
    leading = permutation[: new.lead]
    key = w.key[tuple(slice(None) if axis in leading else 0 for axis in range(w.lead))]
    remaining = [axis for axis in range(w.lead) if axis in leading]
    key = jnp.transpose(key, [remaining.index(axis) for axis in leading if axis in remaining])
    key = jnp.expand_dims(key, [i for i, axis in enumerate(leading) if axis not in remaining])
    return jnp.broadcast_to(key, [w.shape[axis] for axis in leading])
