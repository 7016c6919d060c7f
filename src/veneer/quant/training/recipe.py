"""The recipe of quantized training: a product on codes whose derivative quantizes gradients.

Forward, `y = q(x) @ q(w)`. Backward, `dx = q(g) @ q(w).T` and `dw = q(x).T @ q(g)`, where each
product quantizes the gradient `g` of `y` with scales along its own contracted axes.

A product on codes needs scales that are constant along the axes that it contracts, and the products
of the backward pass contract other axes than the forward product. If the other operand has one
scale per channel, `g` is therefore multiplied by that scale before it is quantized. An operand with
zero points, a codebook, or tiles along another axis is quantized again from the dense array.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.value import materialise_one
from ..arrays.qarray import QUANTIZABLE, QArray
from ..conversion.calibration import check_calibration
from ..conversion.fake_quantize import fake_quantize
from ..conversion.quantize import quantize
from ..conversion.scale_axes import ScaleAxes, choose_activation_axes
from ..formats import get_format
from ..formats.tiles import over_tiles
from .backward import BackwardProduct
from .fake_quantized import FakeQuantized
from .products import TrainingProduct


@dataclass(frozen=True)
class OperandRecipe:
    """The quantization of one operand in the forward pass.

    **Arguments:**

    - `dtype`: the dtype of the array before quantization, and of its gradient.
    - `dense_dtype`: the dtype in which the product uses the operand.
    - `qtype`: the format. None leaves the operand dense.
    - `method`: the calibration method. None is the default method of the format.
    - `scale_axes`: the axes along which scales differ.
    - `scale_dtype`: the dtype of the scales, as for `quantize`.
    """

    dtype: str
    dense_dtype: str
    qtype: str | None
    method: str | None
    scale_axes: ScaleAxes
    scale_dtype: str | None = None

    @classmethod
    def of_weight(cls, w: FakeQuantized) -> "OperandRecipe":
        """Return the recipe of a weight."""
        method, axes = w.calibration_method, w.grid
        return cls(w.w.dtype.name, w.dtype.name, w.qtype, method, axes, w.scale_dtype)

    @classmethod
    def of_activation(
        cls, x: Any, w: FakeQuantized, contracted: Sequence[int] | None
    ) -> "OperandRecipe":
        """Return the recipe of the operand that multiplies the weight `w`.

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
        """Return the operand as the forward product uses it."""
        if self.qtype is None:
            return x.astype(self.dense_dtype)
        return quantize(x, self.qtype, **self._options).replace(dense_dtype=self.dense_dtype)

    def fake_quantize(self, x: jax.Array) -> jax.Array:
        """Return the quantized and dequantized operand, with a derivative."""
        return x if self.qtype is None else fake_quantize(x, self.qtype, **self._options)

    def without_clipped_gradients(self, x: jax.Array) -> jax.Array:
        """Return `x` unchanged, but with gradient 0 for the values that quantization clips."""
        if self.qtype is None:
            return x
        format = get_format(self.qtype)
        if not check_calibration(self.method or format.calibration, format).clips:
            return x
        fake = self.fake_quantize(x)
        return lax.stop_gradient(x) + (fake - lax.stop_gradient(fake))

    def requantize(
        self, x: jax.Array, contracted: Sequence[int], backward: BackwardProduct
    ) -> jax.Array | QArray:
        """Return the operand, quantized from the dense array for a product of the backward pass.

        If `backward` reuses the format of the forward pass, and a tile of that format does not
        divide its axis of `x`, return the dense operand.

        **Arguments:**

        - `contracted`: the axes of `x` that the product contracts.
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
    """A product with the quantization of its operands and gradients. It is a static argument.

    **Arguments:**

    - `product`: the product.
    - `operands`: the quantization of the two operands.
    - `backward`: the options of the two products that give the gradients of the operands.
    """

    product: TrainingProduct
    operands: tuple[OperandRecipe, OperandRecipe]
    backward: tuple[BackwardProduct, BackwardProduct]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def quantized_product(
    recipe: TrainingRecipe, lhs: jax.Array, rhs: jax.Array, extra: Sequence[Any], key: Any
) -> jax.Array:
    """Multiply two dense arrays as a recipe says.

    **Arguments:**

    - `recipe`: the product, and the quantization of its operands and gradients.
    - `lhs`, `rhs`: the operands.
    - `extra`: the other operands of the primitive, which have no gradient.
    - `key`: a PRNG key for stochastic rounding of gradients, or None.
    """
    return _forward(recipe, lhs, rhs, extra, key)[0]


def _forward(
    recipe: TrainingRecipe, lhs: jax.Array, rhs: jax.Array, extra: Sequence[Any], key: Any
) -> tuple[jax.Array, Any]:
    quantized = [of.quantize(x) for of, x in zip(recipe.operands, (lhs, rhs), strict=True)]
    out = recipe.product.multiply(*quantized, *extra)
    saved = []
    for side, (dense, q) in enumerate(zip((lhs, rhs), quantized, strict=True)):
        # An operand is needed for the gradient of the other one.
        backward = recipe.backward[1 - side]
        can_reuse = backward.qtype is None or _fits_gradient(q, recipe.product, side, lhs, rhs)
        saved.append(q if backward.reuses_forward and can_reuse else dense)
    return out, (saved, extra, key)


def _fits_gradient(
    q: jax.Array | QArray, product: TrainingProduct, side: int, lhs: jax.Array, rhs: jax.Array
) -> bool:
    """Return whether the gradient of the other operand can use an operand as quantized forward."""
    if not product.has_gradients_on_codes:
        return True
    axes = product.gradient_axes(1 - side, (lhs.ndim, rhs.ndim))
    if _has_scales_only_along(q, axes.other_to_gradient):
        return True
    return product.supports_tiles and _has_tiles_along(q, axes.of_other)


def _backward(recipe: TrainingRecipe, residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    saved, extra, key = residuals
    keys = _split_key(key, g)
    gradients: list[jax.Array | None] = []
    for side, operand in enumerate(recipe.operands):
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            gradients.append(None)
            continue
        if recipe.product.has_gradients_on_codes:
            gradient = _gradient_on_codes(recipe, side, saved, g, keys[side])
        else:
            gradient = _dense_gradient(recipe, side, saved, extra, g, keys[side])
        gradients.append(gradient.astype(operand.dtype))
    return *gradients, None, None


quantized_product.defvjp(_forward, _backward)


def _gradient_on_codes(
    recipe: TrainingRecipe, side: int, saved: Sequence[Any], g: jax.Array, key: Any
) -> jax.Array:
    """Return the gradient of operand `side`: a product of codes of `g` and of the other operand."""
    product, backward = recipe.product, recipe.backward[side]
    axes = product.gradient_axes(side, (saved[0].ndim, saved[1].ndim))
    other = product.transpose_operand(side, saved[1 - side])
    wide = jnp.promote_types(g.dtype, jnp.float32)
    if not isinstance(other, QArray):
        other = recipe.operands[1 - side].requantize(other, axes.of_other, backward)
        if other.dtype not in QUANTIZABLE:
            other = other.astype(wide)  # otherwise the next line would round g to integers
        g = g.astype(other.dtype)
    elif backward.qtype is not None and _has_scales_only_along(other, axes.other_to_gradient):
        g = _multiply_by_scale(g.astype(wide), other, axes.other_to_gradient)
        one = jnp.ones([1] * other.ndim, wide)
        other = other.replace(scale=one, dense_dtype=wide.name)
    else:
        g, other = g.astype(wide), other.replace(dense_dtype=wide.name)
    q = _quantize_gradient(g, backward, axes.of_gradient, key)
    return product.multiply_gradient(side, q, other, (saved[0].shape, saved[1].shape), wide)


def _dense_gradient(
    recipe: TrainingRecipe,
    side: int,
    saved: Sequence[Any],
    extra: Sequence[Any],
    g: jax.Array,
    key: Any,
) -> jax.Array:
    """Return the gradient of operand `side` in floating point, by JAX's transpose of the product.

    `g` and the other operand are quantized and dequantized.
    """
    product, backward, other = recipe.product, recipe.backward[side], saved[1 - side]
    axes = product.gradient_axes(side, (saved[0].ndim, saved[1].ndim))
    if not isinstance(other, QArray):
        other = recipe.operands[1 - side].requantize(other, axes.of_other, backward)
    other = materialise_one(other)
    q = materialise_one(_quantize_gradient(g, backward, axes.of_gradient, key))
    bind = lambda x: product.bind(*((x, other) if side == 0 else (other, x)), *extra)
    # The product is linear in x, so the values of x do not matter.
    x = jnp.zeros(saved[side].shape, recipe.operands[side].dense_dtype)
    return jax.vjp(bind, x)[1](q)[0]


def _has_scales_only_along(q: jax.Array | QArray, axes: Collection[int]) -> bool:
    """Return whether an operand is codes times a scale that is constant along all other axes.

    A product that contracts `axes` can then use the codes: the scale multiplies the gradient.
    """
    if not isinstance(q, QArray) or q.format.codebook is not None:
        return False
    if q.zero_point is not None or q.minimum is not None or isinstance(q.scale, QArray):
        return False
    return all(count == 1 or axis in axes for axis, count in enumerate(q.scale.shape))


def _has_tiles_along(q: jax.Array | QArray, axes: Collection[int]) -> bool:
    """Return whether neighbors along each of `axes` share scales, in a format without a codebook.

    A product that contracts these axes can then sum the codes of each tile, as in the forward pass.
    For example, the square blocks of a matrix are also blocks of its transpose.
    """
    if not isinstance(q, QArray) or q.format.codebook is not None:
        return False
    leaves = [leaf for leaf in (q.scale, q.zero_point, q.minimum) if leaf is not None]
    pairs = [(q.shape[axis], leaf.shape[axis]) for axis in axes for leaf in leaves]
    return all(count == 1 or count < size for size, count in pairs)


def _multiply_by_scale(g: jax.Array, q: QArray, axes: Mapping[int, int]) -> jax.Array:
    """Multiply a gradient by the scale of an operand. `axes` maps axes of `q` to axes of `g`."""
    order = sorted(axes, key=axes.__getitem__)
    others = [axis for axis in range(q.ndim) if axis not in axes]
    shape = [1] * g.ndim
    for axis in order:
        shape[axes[axis]] = q.scale.shape[axis]
    scale = lax.transpose(q.scales(), (*order, *others)).reshape(shape)
    return over_tiles(jnp.multiply, g, scale.astype(g.dtype))


def _quantize_gradient(
    g: jax.Array, backward: BackwardProduct, contracted: Sequence[int], key: Any
) -> jax.Array | QArray:
    """Quantize a gradient with one scale per index of the axes that the product does not contract.

    **Raises:** `ValueError` if a tile does not divide the last contracted axis.
    """
    if backward.qtype is None:
        return g
    format = get_format(backward.qtype)
    key = key if backward.stochastic else None
    method = backward.calibration_method
    has_bound = format.is_integer and format.signed and format.bits >= 2
    if key is not None and method is None and has_bound:
        # The default method scales the largest magnitude to half a step beyond the largest code, so
        # stochastic rounding would always round it down.
        method = f"absmax,{format.bound / format.code_range[1]}"
    try:
        axes = choose_activation_axes(g.shape, contracted, format, backward.tile_size)
        return quantize(g, backward.qtype, calibration_method=method, key=key, **axes.arguments)
    except ValueError as error:
        error.add_note(f"The gradient of shape {g.shape} could not be quantized with {backward}.")
        raise


def _split_key(key: Any, g: jax.Array) -> tuple[Any, Any]:
    """Return a key for each of the two products that quantize the gradient `g`.

    The bits of `g` are folded in, because a weight can be used several times with the same key: in
    the steps of a loop, or in the members of a batch.
    """
    if key is None:
        return None, None
    bits = lax.bitcast_convert_type(g.astype(jnp.float32), jnp.uint32)
    first, second = jax.random.split(jax.random.fold_in(key, bits.sum(dtype=jnp.uint32)))
    return first, second
