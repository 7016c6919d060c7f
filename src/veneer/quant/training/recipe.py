"""The rules of `FakeQuantized`, and `quantized_product`, which also quantizes gradients.

A `FakeQuantized` has scales for products that contract its `tile_axis`. Only these products
quantize activations and gradients. Other products use the quantized and dequantized weight: for
example, products of tangents, and products of the backward pass in `implicit(grad(f))`.

With q for "quantize", the forward pass is `y = q(x) @ q(w)`. The backward pass is
`dx = q(g) @ q(w).T` and `dw = q(x).T @ q(g)`, where g is the gradient of y. Each of these two
products quantizes g separately, because they contract different axes of g.

A product of codes needs scales that are constant along its contracted axes. The scales of `q(w)`
and `q(x)` are constant along the axes that the forward product contracts, but the backward pass
contracts other axes. If `q(w)` has one scale per output channel, g is multiplied by that scale, and
then quantized and multiplied with the codes of `q(w)`. Likewise if `q(x)` has one scale per row. An
operand with zero points, a codebook, or tiles along another axis is quantized again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.policy import note_how
from ..._core.primitives.scopes import may_be_tangents
from ..._core.rules import register
from ..._core.value import materialise_one
from ..arrays import QUANTIZABLE, QArray
from ..conversion.calibration import check_calibration
from ..conversion.quantize import quantize
from ..formats import get_format
from ..formats.tiles import ScaleAxes, choose_activation_axes
from ..ops.operands import multiply_by_scale
from ..ops.product import Plan, execute
from .fake_quantized import FakeQuantized, fake_quantize
from .options import BackwardProduct
from .products import PRODUCTS, TrainingProduct


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
    if w.format is not None and w.has_quantized_scales:
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
    """Return the PRNG keys (`key`) of the weight `w` after a transpose.

    A weight has one key per entry of its leading axes, which precede the first axis in `tile_axis`.
    `new_leading` lists the axes of `w` that become the leading axes, in the new order. Along an
    axis that was not a leading axis before, the keys are repeated. If an axis is no longer a
    leading axis, its first key is used.
    """
    key = w.key[tuple(slice(None) if axis in new_leading else 0 for axis in range(w.lead))]
    old_axes = [axis for axis in range(w.lead) if axis in new_leading]
    key = jnp.transpose(key, [old_axes.index(axis) for axis in new_leading if axis in old_axes])
    key = jnp.expand_dims(key, [i for i, axis in enumerate(new_leading) if axis not in old_axes])
    return jnp.broadcast_to(key, [w.shape[axis] for axis in new_leading])


@dataclass(frozen=True)
class OperandRecipe:
    """The options for quantizing one operand of a product in the forward pass.

    **Arguments:**

    - `dtype`: the dtype of the array before quantization, and of its gradient.
    - `dense_dtype`: the dtype of the operand in the product.
    - `qtype`: the format. None leaves the operand dense.
    - `method`: the calibration method. None is the default method of the format.
    - `scale_axes`: the axes along which scales differ.
    - `scale_dtype`: the dtype of the scales, as for `vn.quant.quantize`.
    """

    dtype: str
    dense_dtype: str
    qtype: str | None
    method: str | None
    scale_axes: ScaleAxes
    scale_dtype: str | None = None

    @classmethod
    def of_weight(cls, w: FakeQuantized) -> "OperandRecipe":
        """Return the options for quantizing the weight `w` in the forward pass."""
        method, axes = w.calibration_method, w.grid
        return cls(w.w.dtype.name, w.dtype.name, w.qtype, method, axes, w.scale_dtype)

    @classmethod
    def of_activation(
        cls, x: Any, w: FakeQuantized, contracted: Sequence[int] | None
    ) -> "OperandRecipe":
        """Return the options for quantizing activations `x` that the weight `w` multiplies.

        **Arguments:**

        - `contracted`: the axes of `x` that the product contracts. None leaves `x` dense.
        """
        if contracted is None or w.act_qtype is None or x.dtype not in QUANTIZABLE:
            return cls(x.dtype.name, x.dtype.name, None, None, ScaleAxes(()))
        axes = choose_activation_axes(x.shape, contracted, get_format(w.act_qtype), w.act_tile_size)
        return cls(x.dtype.name, x.dtype.name, w.act_qtype, w.act_calibration_method, axes)

    @property
    def _options(self) -> dict[str, Any]:
        options = {"calibration_method": self.method, "scale_dtype": self.scale_dtype}
        return options | self.scale_axes.arguments

    def quantize(self, x: jax.Array) -> jax.Array | QArray:
        """Return the quantized operand, or the dense operand if `qtype` is None."""
        if self.qtype is None:
            return x.astype(self.dense_dtype)
        return quantize(x, self.qtype, **self._options).replace(dense_dtype=self.dense_dtype)

    def fake_quantize(self, x: jax.Array) -> jax.Array:
        """Return the quantized and dequantized operand, or `x` if `qtype` is None.

        The derivative is 1, and 0 for values that quantization clips.
        """
        return x if self.qtype is None else fake_quantize(x, self.qtype, **self._options)

    def without_clipped_gradients(self, x: jax.Array) -> jax.Array:
        """Return `x` unchanged, but with gradient 0 for the values that quantization clips."""
        if self.qtype is None:
            return x
        format = get_format(self.qtype)
        if not check_calibration(self.method or format.calibration, format).clips:
            return x
        # The second term is 0, and has the derivative of `fake_quantize`.
        fake = self.fake_quantize(x)
        return lax.stop_gradient(x) + (fake - lax.stop_gradient(fake))

    def requantize(
        self, x: jax.Array, contracted: Sequence[int], backward: BackwardProduct
    ) -> jax.Array | QArray:
        """Quantize the operand for a product of the backward pass.

        The format is `backward.residual_qtype`. If that is "forward", the format is `qtype`, and
        the operand stays dense if a tile does not divide an axis.

        **Arguments:**

        - `x`: the dense operand.
        - `contracted`: the axes of `x` that the product contracts.
        - `backward`: the options of the product.
        """
        qtype = self.qtype if backward.reuses_forward else backward.residual_qtype
        if qtype is None or x.dtype not in QUANTIZABLE:
            return x.astype(self.dense_dtype)
        format = get_format(qtype)
        tile_size = backward.tile_size if format.tile_size is None else None
        axes = choose_activation_axes(x.shape, contracted, format, tile_size)
        if not backward.reuses_forward:
            q = quantize(x, qtype, **axes.arguments)
        elif any(x.shape[axis] % size for axis, size in axes.tiled):
            return x.astype(self.dense_dtype)
        else:
            q = quantize(x, qtype, **replace(self, scale_axes=axes)._options)
        return q.replace(dense_dtype=self.dense_dtype)


@dataclass(frozen=True)
class TrainingRecipe:
    """A product, with the options for quantizing its operands and gradients.

    A recipe is hashable, because it is a static argument of `jax.custom_vjp`.

    **Arguments:**

    - `product`: the primitive with its parameters.
    - `operands`: the options for lhs and for rhs.
    - `backward`: the options of the products that give the gradients of lhs and of rhs.
    """

    product: TrainingProduct
    operands: tuple[OperandRecipe, OperandRecipe]
    backward: tuple[BackwardProduct, BackwardProduct]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def quantized_product(
    recipe: TrainingRecipe, lhs: jax.Array, rhs: jax.Array, other_operands: Sequence[Any], key: Any
) -> jax.Array:
    """Quantize two dense arrays and return their product. The derivative quantizes gradients.

    **Arguments:**

    - `recipe`: the product, and the options for quantizing its operands and gradients.
    - `lhs`, `rhs`: the operands.
    - `other_operands`: the operands of the primitive after lhs and rhs, which have no gradient.
    - `key`: a PRNG key for stochastic rounding of gradients, or None.
    """
    return _forward(recipe, lhs, rhs, other_operands, key)[0]


def _forward(
    recipe: TrainingRecipe, lhs: jax.Array, rhs: jax.Array, other_operands: Sequence[Any], key: Any
) -> tuple[jax.Array, Any]:
    """Return a pair: the result of `quantized_product`, and the residuals for `_backward`."""
    operands = zip(recipe.operands, (lhs, rhs), strict=True)
    quantized = [options.quantize(x) for options, x in operands]
    out = recipe.product.multiply(*quantized, *other_operands)
    # Save each operand for the gradient of the other operand: its codes if they can be used there.
    saved = []
    for side, (dense, q) in enumerate(zip((lhs, rhs), quantized, strict=True)):
        backward = recipe.backward[1 - side]  # if its `qtype` is None, the gradient stays dense
        can_reuse = backward.qtype is None or _can_reuse_codes(q, recipe.product, side, lhs, rhs)
        saved.append(q if backward.reuses_forward and can_reuse else dense)
    return out, (saved, other_operands, key)


def _can_reuse_codes(
    q: jax.Array | QArray, product: TrainingProduct, side: int, lhs: jax.Array, rhs: jax.Array
) -> bool:
    """Return whether the gradient of operand `1 - side` can use the codes of operand `side`.

    If not, operand `side` is quantized again. Operand 0 is lhs, and operand 1 is rhs. `q` is
    operand `side`, as quantized in the forward pass. `lhs` and `rhs` are dense.
    """
    if not product.has_gradients_on_codes:
        return True
    axes = product.gradient_axes(1 - side, (lhs.ndim, rhs.ndim))
    if _has_scales_only_along(q, axes.other_to_gradient):
        return True
    return product.supports_tiles and _has_tiles_along(q, axes.of_other)


def _backward(recipe: TrainingRecipe, residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    """Return the gradients of the array arguments of `quantized_product`, for `defvjp`.

    These are the gradients of lhs and rhs, and None for the other arguments. `g` is the gradient of
    the product, and `residuals` are from `_forward`.
    """
    saved, other_operands, key = residuals
    keys = _split_key(key, g)
    gradients: list[jax.Array | None] = []
    for side, operand in enumerate(recipe.operands):
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            gradients.append(None)
            continue
        if recipe.product.has_gradients_on_codes:
            gradient = _gradient_on_codes(recipe, side, saved, g, keys[side])
        else:
            gradient = _dense_gradient(recipe, side, saved, other_operands, g, keys[side])
        gradients.append(gradient.astype(operand.dtype))
    return *gradients, None, None


quantized_product.defvjp(_forward, _backward)


def _gradient_on_codes(
    recipe: TrainingRecipe, side: int, saved: Sequence[Any], g: jax.Array, key: Any
) -> jax.Array:
    """Return the gradient of operand `side`: a product of codes of `g` and of the other operand.

    `g` is the gradient of the output. `saved` has lhs (operand 0) and rhs (operand 1) from the
    forward pass, quantized or dense. `key` is for stochastic rounding of `g`.
    """
    product, backward = recipe.product, recipe.backward[side]
    axes = product.gradient_axes(side, (saved[0].ndim, saved[1].ndim))
    other = product.transpose_operand(side, saved[1 - side])
    wide_dtype = jnp.promote_types(g.dtype, jnp.float32)
    if not isinstance(other, QArray):
        other = recipe.operands[1 - side].requantize(other, axes.of_other, backward)
        if other.dtype not in QUANTIZABLE:
            other = other.astype(wide_dtype)  # otherwise the next line would round g to integers
        g = g.astype(other.dtype)
    elif backward.qtype is not None and _has_scales_only_along(other, axes.other_to_gradient):
        # Multiply the scales into g, so that `other` is codes with scale 1.
        g = multiply_by_scale(g.astype(wide_dtype), other.scales(), axes.other_to_gradient)
        one = jnp.ones([1] * other.ndim, wide_dtype)
        other = other.replace(scale=one, dense_dtype=wide_dtype.name)
    else:
        g, other = g.astype(wide_dtype), other.replace(dense_dtype=wide_dtype.name)
    q = _quantize_gradient(g, backward, axes.of_gradient, key)
    return product.multiply_gradient(side, q, other, (saved[0].shape, saved[1].shape), wide_dtype)


def _dense_gradient(
    recipe: TrainingRecipe,
    side: int,
    saved: Sequence[Any],
    other_operands: Sequence[Any],
    g: jax.Array,
    key: Any,
) -> jax.Array:
    """Return the gradient of operand `side` in floating point, by JAX's transpose of the product.

    `g` and the other operand are quantized and dequantized. `other_operands` are as in
    `quantized_product`, and the other arguments as in `_gradient_on_codes`.
    """
    product, backward, other = recipe.product, recipe.backward[side], saved[1 - side]
    axes = product.gradient_axes(side, (saved[0].ndim, saved[1].ndim))
    if not isinstance(other, QArray):
        other = recipe.operands[1 - side].requantize(other, axes.of_other, backward)
    other = materialise_one(other)
    q = materialise_one(_quantize_gradient(g, backward, axes.of_gradient, key))
    bind = lambda x: product.bind(*((x, other) if side == 0 else (other, x)), *other_operands)
    # The product is linear in x, so the values of x do not matter.
    x = jnp.zeros(saved[side].shape, recipe.operands[side].dense_dtype)
    return jax.vjp(bind, x)[1](q)[0]


def _has_scales_only_along(q: jax.Array | QArray, axes: Collection[int]) -> bool:
    """Return whether an operand is codes times a scale that varies only along `axes`.

    A product that contracts these axes can then use the codes, and multiply the gradient by the
    scale. The result is False for a codebook, zero points, minima or quantized scales.
    """
    if not isinstance(q, QArray) or q.format.codebook is not None:
        return False
    if q.zero_point is not None or q.minimum is not None or isinstance(q.scale, QArray):
        return False
    return all(count == 1 or axis in axes for axis, count in enumerate(q.scale.shape))


def _has_tiles_along(q: jax.Array | QArray, axes: Collection[int]) -> bool:
    """Return whether several values along each of `axes` share a scale, without a codebook.

    A product that contracts these axes can then sum the codes of each tile. For example, the square
    blocks of a matrix are also blocks of its transpose.
    """
    if not isinstance(q, QArray) or q.format.codebook is not None:
        return False
    leaves = [leaf for leaf in (q.scale, q.zero_point, q.minimum) if leaf is not None]
    pairs = [(q.shape[axis], leaf.shape[axis]) for axis in axes for leaf in leaves]
    return all(count == 1 or count < size for size, count in pairs)


def _quantize_gradient(
    g: jax.Array, backward: BackwardProduct, contracted: Sequence[int], key: Any
) -> jax.Array | QArray:
    """Quantize a gradient for a product that contracts the axes `contracted`.

    Values along these axes share a scale, or have a scale per tile. Return the dense gradient if
    `backward.qtype` is None.

    **Raises:** `ValueError` if a tile does not divide its axis.
    """
    if backward.qtype is None:
        return g
    format = get_format(backward.qtype)
    key = key if backward.stochastic else None
    method = backward.calibration_method
    is_signed_integer = format.is_integer and format.signed and format.bits >= 2
    if key is not None and method is None and is_signed_integer:
        # The default method scales the largest magnitude to `format.bound`, which is half a step
        # beyond the largest code. Stochastic rounding would always round it down. Scale the largest
        # magnitude to the largest code.
        method = f"absmax,{format.bound / format.code_range[1]}"
    try:
        axes = choose_activation_axes(g.shape, contracted, format, backward.tile_size)
        return quantize(g, backward.qtype, calibration_method=method, key=key, **axes.arguments)
    except ValueError as error:
        error.add_note(f"The gradient of shape {g.shape} could not be quantized with {backward}.")
        raise


def _split_key(key: Any, g: jax.Array) -> tuple[Any, Any]:
    """Return a pair of keys that are derived from `key` and the bits of `g`.

    Without a key, return `(None, None)`.
    They round `g` for the gradients of lhs and of rhs.
    The bits of `g` are folded in, because a weight can be used several times with the same key: in
    the steps of a loop, or for the members of a batch.
    """
    if key is None:
        return None, None
    bits = lax.bitcast_convert_type(g.astype(jnp.float32), jnp.uint32)
    first, second = jax.random.split(jax.random.fold_in(key, bits.sum(dtype=jnp.uint32)))
    return first, second
