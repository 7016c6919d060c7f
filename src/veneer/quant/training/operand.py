"""The operands of a product that runs on codes: how each is quantised, and its derivative."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core.value import materialise_one
from ..arrays.qarray import QUANTIZABLE, QArray
from ..conversion.calibration import check_calibration
from ..conversion.fake_quantize import fake_quantize
from ..conversion.quantize import quantize
from ..conversion.scale_axes import ScaleAxes, choose_activation_axes
from ..formats import get_format
from .backward import BackwardProduct


@dataclass(frozen=True)
class OperandRecipe:
    """How an operand of a product is quantised.

    **Arguments:**

    - `dtype`: of the array that is given.
    - `dense_dtype`: in which the product takes it.
    - `qtype`: the format; None leaves it as it is.
    - `method`: of calibration; None is the format's own.
    - `scale_axes`: which values share a scale.
    - `scale_dtype`: of the scale; None is that of `x`, or the format's own.
    """

    dtype: str
    dense_dtype: str
    qtype: str | None
    method: str | None
    scale_axes: ScaleAxes
    scale_dtype: str | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether there is a derivative by it: not by integers."""
        return jnp.issubdtype(self.dtype, jnp.floating)

    @property
    def _how(self) -> dict[str, Any]:
        method, scale = self.method, self.scale_dtype
        return {"calibration_method": method, "scale_dtype": scale} | self.scale_axes.arguments

    def quantized(self, x: jax.Array) -> jax.Array | QArray:
        """Returns what the product takes."""
        if self.qtype is None:
            return x.astype(self.dense_dtype)
        q = quantize(x, self.qtype, **self._how)
        return q.replace(dense_dtype=self.dense_dtype)

    def clipped(self, x: Any) -> Any:
        """Returns the array itself, without a derivative where the format does not reach."""
        if self.qtype is None:
            return x
        format = get_format(self.qtype)
        if not check_calibration(self.method or format.calibration, format).clips:
            return x
        fake = fake_quantize(x, self.qtype, **self._how)
        return lax.stop_gradient(x) + (fake - lax.stop_gradient(fake))

    def requantized(
        self, x: jax.Array, contracted: Sequence[int], product: BackwardProduct
    ) -> jax.Array | QArray:
        """Returns what a product of the backward pass takes, which contracts other axes.

        In the format of the forward pass it is dense where that has a tile which does not divide.
        """
        again = product.reuses_forward
        qtype = self.qtype if again else product.residual_qtype
        if qtype is None or x.dtype not in QUANTIZABLE:
            return x.astype(self.dense_dtype)
        format = get_format(qtype)
        tile_size = product.tile_size if format.tile_size is None else None
        axes = choose_activation_axes(x.shape, contracted, format, tile_size)
        if again and any(x.shape[axis] % size for axis, size in axes.tiled):
            return x.astype(self.dense_dtype)
        how = replace(self, scale_axes=axes)._how if again else axes.arguments
        q = quantize(x, qtype, **how)
        return q.replace(dense_dtype=self.dense_dtype)


def activation(
    x: Any,
    qtype: str | None,
    method: str | None,
    tile_size: Any,
    shared: Sequence[int],
) -> OperandRecipe:
    """How the other operand of a product is quantised: not at all, if it is not floating."""
    if qtype is None or x.dtype not in QUANTIZABLE:
        return OperandRecipe(x.dtype.name, x.dtype.name, None, None, ScaleAxes(()))
    axes = choose_activation_axes(x.shape, shared, get_format(qtype), tile_size)
    return OperandRecipe(x.dtype.name, x.dtype.name, qtype, method, axes)


def has_scale_along(q: jax.Array | QArray, axes: Sequence[int]) -> bool:
    """Whether an operand is codes times a scale that varies along no other axes than these.

    Then that scale can be multiplied with the gradient in its place, where these are contracted.
    """
    if not isinstance(q, QArray) or q.format.codebook is not None:
        return False
    if q.zero_point is not None or q.minimum is not None or isinstance(q.scale, QArray):
        return False
    return all(count == 1 or axis in axes for axis, count in enumerate(q.scale.shape))


def quantized_operands(
    recipes: Sequence[OperandRecipe], operands: Sequence[jax.Array]
) -> list[jax.Array | QArray]:
    """Returns what a product takes for its operands."""
    return [recipe.quantized(x) for recipe, x in zip(recipes, operands, strict=True)]


def has_tiles_along(q: jax.Array | QArray, axes: Sequence[int]) -> bool:
    """Whether an operand is codes of which neighbours along each of these axes share a scale.

    Then a product which contracts these sums tiles of the codes as they are, as that of the
    forward pass does: blocks of a matrix are the same blocks of its transpose.
    """
    if not isinstance(q, QArray) or q.format.codebook is not None:
        return False
    leaves = [leaf for leaf in (q.scale, q.zero_point, q.minimum) if leaf is not None]
    pairs = [(q.shape[axis], leaf.shape[axis]) for axis in axes for leaf in leaves]
    return all(count == 1 or count < size for size, count in pairs)


def saved_operands(
    operands: Sequence[Any],
    quantized: Sequence[Any],
    fits: Sequence[bool],
    backward: Sequence[BackwardProduct],
) -> list[Any]:
    """Returns what derivatives take for operands: as they were multiplied, or as they were.

    **Arguments:**

    - `fits`: of each, whether it will do for a product of the backward pass as it was multiplied.
    - `backward`: the products that give the gradients of the operands, of which each takes the
      other operand.
    """
    of_each = zip(operands, quantized, fits, reversed(backward), strict=True)
    return [
        q if product.reuses_forward and (fit or product.qtype is None) else x
        for x, q, fit, product in of_each
    ]


def codes_of(q: QArray, dtype: Any) -> QArray:
    """The codes as a QArray that stands for them, in the place of the scaled values."""
    one = jnp.ones([1] * q.ndim, dtype)
    return q.replace(scale=one, dense_dtype=jnp.dtype(dtype).name)


def reversed_codes(q: QArray, dtype: Any, axes: Sequence[int]) -> QArray:
    """As `codes_of`, in the reverse order along some axes; of these, one may be packed."""
    codes = lax.rev(q.codes(), axes)
    fields = codes if q.format.bits >= 8 else q.format.to_fields(codes)
    one = jnp.ones([1] * q.ndim, dtype)
    return QArray.from_packed(fields, one, qtype=q.qtype, dense_dtype=jnp.dtype(dtype).name)


def quantize_gradient(
    g: jax.Array, product: BackwardProduct, contracted: Sequence[int], key: Any
) -> jax.Array | QArray:
    """Returns a gradient as a product takes it: with a scale for each index that it does not sum.

    **Raises:** `ValueError` where a tile does not divide the last contracted axis.
    """
    if product.qtype is None:
        return g
    format = get_format(product.qtype)
    key = key if product.stochastic else None
    method = product.calibration_method
    integers = format.is_integer and format.signed and format.bits >= 2
    if key is not None and method is None and integers:
        # Half a step beyond the largest code, the magnitude that is scaled to the bound would
        # always be rounded down.
        method = f"absmax,{format.bound / format.code_range[1]}"
    try:
        axes = choose_activation_axes(g.shape, contracted, format, product.tile_size)
        return quantize(g, product.qtype, calibration_method=method, key=key, **axes.arguments)
    except ValueError as error:
        error.add_note(f"The gradient of shape {g.shape} could not be quantized with {product}.")
        raise


def dense_residual(
    recipe: OperandRecipe, saved: Any, contracted: Sequence[int], product: BackwardProduct
) -> jax.Array:
    """Returns a saved operand for a product of the backward pass in floating point."""
    if not isinstance(saved, QArray):
        saved = recipe.requantized(saved, contracted, product)
    return materialise_one(saved)


def keys_for(key: Any, g: jax.Array) -> tuple[Any, Any]:
    """Two keys for the rounding of a gradient, one for each product that takes it.

    The bits of the gradient are folded in, for a weight may be used more than once with one key: in
    the steps of a loop, in the members of a batch.
    """
    if key is None:
        return None, None
    bits = lax.bitcast_convert_type(g.astype(jnp.float32), jnp.uint32)
    first, second = jax.random.split(jax.random.fold_in(key, bits.sum(dtype=jnp.uint32)))
    return first, second


def one_key(key: Any) -> Any:
    """The key of a product, of the keys of its weight."""
    return None if key is None or np.prod(key.shape) == 0 else key.reshape(-1)[0]
