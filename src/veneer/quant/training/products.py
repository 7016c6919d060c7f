"""Rules for the products of weights in training.

Where a product does not contract the axes along which a weight has its tiles, it is not the one
that the recipe is for: in `implicit(grad(f))` it is that of the backward pass, whose other operand
is a gradient. There, in what a user wrote for tangents, and for what is no product, the weight is
as quantised, and no more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.policy import note_how
from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ..._core.primitives.scopes import may_be_tangents
from ..._core.rules import register
from ..._jax.primitives import find_primitive
from ..conversion.fake_quantize import fake_quantize
from ..ops.product import Plan, execute
from .convolution import ConvolutionRecipe, quantized_convolution
from .dot_general import DotRecipe, quantized_dot_general
from .fake_quantized import FakeQuantized
from .operand import OperandRecipe, activation, one_key
from .ragged_dot import RaggedDotRecipe, quantized_ragged_dot


@register("dot_general")
def _dense_weight(x: ArrayLike, w: FakeQuantized, **params: Any) -> Any:
    return _dot_general(x, w, 1, **params)


@register("dot_general")
def _weight_dense(w: FakeQuantized, x: ArrayLike, **params: Any) -> Any:
    return _dot_general(x, w, 0, **params)


def _dot_general(
    x: Any, w: FakeQuantized, at: int, *, dimension_numbers: Any, **params: Any
) -> Any:
    x = jnp.asarray(x)
    arrange = lambda x, w: (x, w) if at == 1 else (w, x)
    contracted = dimension_numbers[0]
    meant = _is_meant(w, contracted[at])
    shared = contracted[1 - at]
    if not meant or w.backward is None:
        return _fake_product(
            lambda x, w: lax.dot_general(*arrange(x, w), dimension_numbers, **params),
            x,
            w,
            shared if meant else None,
        )
    note_how("on codes, forward and backward")
    recipe = DotRecipe(
        DotDimensionNumbers.of(dimension_numbers),
        tuple(params.items()),
        arrange(_activation(x, w, shared), _weight(w)),
        arrange(*w.backward),
    )
    pair = zip(recipe.operands, arrange(x, w.pruned), strict=True)
    return quantized_dot_general(*(of.clipped(y) for of, y in pair), one_key(w.key), recipe)


def _is_meant(w: FakeQuantized, contracted: Sequence[int]) -> bool:
    """Whether a product that contracts these axes is the one that the recipe is for."""
    return set(w.tile_axes) <= set(contracted) and not may_be_tangents()


def _weight(w: FakeQuantized) -> OperandRecipe:
    method, grid = w.calibration_method, w.grid
    return OperandRecipe(w.w.dtype.name, w.dtype.name, w.qtype, method, grid, w.scale_dtype)


def _activation(x: Any, w: FakeQuantized, shared: Sequence[int] | None) -> OperandRecipe:
    qtype = None if shared is None else w.act_qtype
    return activation(x, qtype, w.act_calibration_method, w.act_tile_size, shared or ())


def _fake_product(
    product: Callable[[Any, Any], jax.Array], x: Any, w: FakeQuantized, shared: Sequence[int] | None
) -> jax.Array:
    """A product in floating point, of operands as quantised; `shared` are the axes of a row."""
    recipe = _activation(x, w, shared)
    operands = "weight" if recipe.qtype is None else "operands"

    def compute(x: Any, w: FakeQuantized) -> jax.Array:
        if recipe.qtype is not None:
            axes = recipe.scale_axes.arguments
            x = fake_quantize(x, recipe.qtype, calibration_method=recipe.method, **axes)
        return product(x, w.materialise())

    how = f"quantized {operands}, in floating point"
    return execute(Plan(how, compute, (x, w.changed(key=None))))


@register("conv_general_dilated")
def _convolution(x: ArrayLike, w: FakeQuantized, **params: Any) -> Any:
    x = jnp.asarray(x)
    numbers = params["dimension_numbers"]
    meant = _is_meant(w, numbers.rhs_spec[1:])
    # One scale for each of the batch, for all that a convolution sums over.
    shared = (*numbers.lhs_spec[2:], numbers.lhs_spec[1])
    if not meant or w.backward is None:
        conv = find_primitive("conv_general_dilated").bind
        bind = lambda x, w: conv(x, w, **params)
        return _fake_product(bind, x, w, shared if meant else None)
    more = ("precision", "preferred_element_type", "out_sharding")
    grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    note_how(f"on codes, forward {'only (grouped convolution)' if grouped else 'and backward'}")
    recipe = ConvolutionRecipe(
        operands=(_activation(x, w, shared), _weight(w)),
        backward=w.backward,
        more=tuple((name, params.pop(name)) for name in more if name in params),
        **params,
    )
    pair = zip(recipe.operands, (x, w.pruned), strict=True)
    return quantized_convolution(*(of.clipped(y) for of, y in pair), one_key(w.key), recipe)


@register("ragged_dot_general")
def _ragged_dot(x: ArrayLike, w: FakeQuantized, group_sizes: ArrayLike, **params: Any) -> Any:
    x = jnp.asarray(x)
    numbers = params["ragged_dot_dimension_numbers"]
    shared, contracted = numbers.dot_dimension_numbers[0]
    # Where groups are contracted, it is the backward pass.
    groups = {*numbers.lhs_ragged_dimensions}
    meant = groups.isdisjoint(shared) and _is_meant(w, contracted)
    if not meant or w.backward is None:
        bind = find_primitive("ragged_dot_general").bind
        dot = lambda x, w: bind(x, w, group_sizes, **params)
        return _fake_product(dot, x, w, shared if meant else None)
    note_how("quantized operands and gradients, in floating point")
    operands = (_activation(x, w, shared), _weight(w))
    recipe = RaggedDotRecipe(tuple(params.items()), operands, w.backward)
    pair = zip(operands, (x, w.pruned), strict=True)
    clipped = (of.clipped(y) for of, y in pair)
    return quantized_ragged_dot(*clipped, group_sizes, one_key(w.key), recipe)
