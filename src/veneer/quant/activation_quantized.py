"""`ActivationQuantized`, a weight whose products quantize the other operand, and its rules.

The rule of a product quantizes the activations and binds the primitive again. In the new call,
`w.array`, the wrapped array, replaces the weight `w`.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.typing import ArrayLike, DTypeLike

from .._core.policy import note_how
from .._core.primitives.axes import DotDimensionNumbers
from .._core.primitives.scopes import may_be_tangents
from .._core.rules import register
from .._core.sources import keep_sources
from .._core.surface.straight_through import ste
from .._core.trace import redispatch
from .._core.tree import static
from .._core.value import Value, materialise_one
from .._jax.primitives import find_primitive
from .arrays import QUANTIZABLE, QArray
from .conversion.calibration import check_calibration
from .conversion.quantize import quantize, quantize_with_scale
from .formats import Format, get_format
from .formats.tiles import Leaf, check_tile_size, choose_activation_axes
from .ops.product import weight_operand
from .product_weights import PRODUCTS, Factors, ProductWeight, product_axes


class ActivationQuantized(ProductWeight):
    """A weight whose products quantize the other operand, the activations.

    A product that contracts the axes in `contracting` first quantizes dense floating activations.
    If `array` is a `QArray`, the product multiplies two QArrays, like `vn.quant.dot_general`. All
    other operations use `array` unchanged. `vn.quant.quantize_tree` creates this type for a rule
    with an `act_qtype`.

    | `scale` | scale of the activations |
    |---|---|
    | None | dynamic: computed per row or tile of a row; in a convolution, per batch entry |
    | an array | static: this scale; values outside its range are clipped |

    Products that contract other axes leave the activations dense, and `vn.explain` reports them.

    The derivatives of `jax.grad(vn.implicit(f))` ignore the quantization of activations
    (straight-through estimator). `docs/calibration.md` describes other ways to differentiate.

    **Arguments:**

    - `array`: the weight, `[..., K, N]`, dense or implicit.
    - `scale`: the static scale, a floating array with the rank of the weight. Each axis has size 1
      or the size of that axis of the weight. For example, shape `[layers, 1, 1]` gives each layer
      of a stack its own scale.
    - `zero_point`: the code that represents 0. The allowed shapes are the same as for `scale`. A
      zero point requires a static `scale` and an integer `qtype`.
    - `qtype`: the format of the activations, such as "int8".
    - `calibration_method`: the method that chooses dynamic scales, as in `vn.quant.quantize`. None
      selects the default method of the format.
    - `tile_size`: the number of activations along the last contracted axis that share a dynamic
      scale. A float is a fraction of the axis. None means the tile size of the format, or the whole
      axis if the format has no tile size.
    - `contracting`: the axes of the weight that products with activations contract, as negative
      numbers.
    - `op_names`: the primitives in which activations are quantized, as in `vn.quant.Rule`. An empty
      list means all.

    **Raises:**

    - `ValueError` if a format, a method or a primitive is unknown, or if the shape of `scale` or
      `zero_point` is not allowed.
    - `ValueError` if a static `scale` is combined with a `tile_size`, or with a format that needs
      scales per tile, such as mxfp8.
    - `ValueError` if an axis in `contracting` is out of range or not negative.
    - `TypeError` if `tile_size` is not a number.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(4), "int8", channelwise_axes=[1])
    >>> w8a8 = vn.quant.ActivationQuantized(w, qtype="int8")
    >>> x = jnp.array([[0.1, 0.2, 0.3, 1.0]])
    >>> bool(jnp.allclose(x @ w8a8, vn.quant.quantize(x, "int8").dequantize(), atol=0.01))
    True
    >>> jax.grad(lambda x: (x @ w8a8).sum())(x).round(2).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """

    companions: ClassVar[tuple[str, ...]] = ("scale", "zero_point")

    array: Any  # [..., K, N]
    scale: Leaf | None  # [..., 1, 1]
    zero_point: Leaf | None  # [..., 1, 1]
    qtype: str = static()
    calibration_method: str | None = static()
    tile_size: int | float | None = static()
    contracting: tuple[int, ...] = static()
    op_names: tuple[str, ...] = static()
    turned: bool = static(repr=False)  # whether codes are stored with the last two axes swapped
    factors: tuple[Factors, ...] | None = static(
        default=None, repr=False, kw_only=True, metadata={"added": True}
    )

    def __init__(
        self,
        array: Any,
        scale: Leaf | None = None,
        zero_point: Leaf | None = None,
        *,
        qtype: DTypeLike,
        calibration_method: str | None = None,
        tile_size: SupportsIndex | float | None = None,
        contracting: Sequence[int] = (-2,),
        op_names: Sequence[str] = (),
    ):
        array = array if isinstance(array, Value) else jnp.asarray(array)
        if tile_size is not None and not isinstance(tile_size, float):
            tile_size = operator.index(tile_size)
        self.__dict__.update(  # The dataclass is frozen, so attributes cannot be assigned.
            array=array,
            scale=scale,
            zero_point=zero_point,
            qtype=get_format(qtype).name,
            calibration_method=calibration_method,
            tile_size=tile_size,
            contracting=tuple(int(axis) for axis in contracting),
            op_names=check_op_names(op_names),
            turned=False,
            factors=None,
        )

    def __post_init__(self) -> None:
        is_static = self.scale is not None
        method, tile_size = self.calibration_method, self.tile_size
        check_activation_format(self.format, method, tile_size, is_static=is_static)
        shape = self.array.shape
        for name, leaf in self._companions().items():  # `scale` and `zero_point`
            pairs = zip(leaf.shape, shape, strict=False)
            if leaf.ndim != len(shape) or any(n not in (1, size) for n, size in pairs):
                raise ValueError(
                    f"{name} has shape {leaf.shape}. For a weight of shape {shape} it must have "
                    "the same rank, and each axis must have the same size or size 1"
                )
        if self.zero_point is not None and not (is_static and self.format.is_integer):
            raise ValueError("zero_point needs a scale and an integer format")
        if not all(-len(shape) <= axis < 0 for axis in self.contracting):
            raise ValueError(
                f"contracting must be negative axes of shape {shape}, such as (-2,), not "
                f"{self.contracting}"
            )

    @property
    def format(self) -> Format:
        """The entry of `vn.quant.FORMATS` for `qtype`."""
        return get_format(self.qtype)

    def is_for(self, primitive: str) -> bool:
        """Return whether activations are quantized in a primitive, such as "dot_general"."""
        return not self.op_names or primitive in self.op_names

    def turned_over(self) -> "ActivationQuantized":
        """Return a copy with the flag `turned` inverted, after the last two axes were swapped."""
        return self.changed(turned=not self.turned)

    def quantize_activations(
        self, x: jax.Array, shared: Sequence[int], batch: Sequence[tuple[int, int]] = ()
    ) -> QArray:
        """Quantize the activations that multiply this weight. The result has no derivative.

        **Arguments:**

        - `x`: the activations.
        - `shared`: the contracted axes of `x`. Values along them share a dynamic scale. If
          `tile_size` is set, the tiles are along the last of these axes.
        - `batch`: the batch axes of the product, as pairs: an axis of `x` and the matching axis of
          the weight.
        """
        if self.scale is not None:
            scale, zero_point = self._scale_for(self.scale, x.ndim, batch)
            # Each row gets a copy of the scale, so that NaN stays in its row.
            scale_shape = [1 if axis in shared else n for axis, n in enumerate(x.shape)]
            scale = jnp.broadcast_to(scale, scale_shape)
            return quantize_with_scale(x, self.qtype, scale, zero_point)
        axes = choose_activation_axes(x.shape, shared, self.format, self.tile_size)
        method = self.calibration_method
        try:
            return quantize(x, self.qtype, calibration_method=method, **axes.arguments)
        except ValueError as error:
            note = f"The activations of shape {x.shape} could not be quantized for {self!r}."
            error.add_note(note)
            raise

    def stacked_axes(self, summed: Sequence[int], batch: Sequence[int]) -> list[int]:
        """Return the axes of the weight along which static scales differ and that a product keeps.

        An example is a layer axis. The product quantizes the activations once per index of these
        axes. The list is empty for dynamic scales, and for scales that differ along a contracted
        axis. It is also empty if scales differ along all free axes, as in concatenated weights.

        **Arguments:**

        - `summed`: the axes of the weight that the product contracts.
        - `batch`: the axes of the weight that are batch axes of the product.
        """
        if self.scale is None or any(self.scale.shape[axis] > 1 for axis in summed):
            return []
        free_axes = [axis for axis in range(self.ndim) if axis not in (*summed, *batch)]
        stacked = [axis for axis in free_axes if self.scale.shape[axis] > 1]
        return stacked if len(stacked) < len(free_axes) else []

    def _scale_for(
        self, scale: Leaf, ndim: int, batch: Sequence[tuple[int, int]]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the static scale and zero point as arrays that broadcast against activations.

        Both have one entry per index of the batch axes. If the scale differs along other axes, as
        for concatenated weights, use one range that covers the ranges of all scales.

        **Arguments:**

        - `scale`: the field `scale` of this weight.
        - `ndim`: the rank of the activations.
        - `batch`: the batch axes of the product, as pairs: an axis of the activations and the
          matching axis of the weight.

        **Returns:** a pair: the scale, and the zero point or None.
        """
        scale = jnp.asarray(scale, jnp.promote_types(scale.dtype, jnp.float32))
        zero_point = None if self.zero_point is None else jnp.asarray(self.zero_point)
        batch_axes = [weight_axis for _, weight_axis in sorted(batch)]
        other_axes = [axis for axis in range(self.ndim) if axis not in batch_axes]
        if math.prod(scale.shape[axis] for axis in other_axes) > 1:
            if zero_point is None:
                scale = scale.max(other_axes, keepdims=True)
            else:
                lowest_code, highest_code = self.format.code_range
                zero = zero_point.astype(scale.dtype)
                low = ((lowest_code - zero) * scale).min(other_axes, keepdims=True)
                high = ((highest_code - zero) * scale).max(other_axes, keepdims=True)
                scale = (high - low) / (highest_code - lowest_code)
                zero = jnp.round(lowest_code - low / scale)
                zero_point = jnp.clip(zero, lowest_code, highest_code).astype(zero_point.dtype)
        shape = [1] * ndim
        for axis, weight_axis in batch:
            shape[axis] = scale.shape[weight_axis]
        arrange = lambda leaf: lax.transpose(leaf, [*batch_axes, *other_axes]).reshape(shape)
        return arrange(scale), None if zero_point is None else arrange(zero_point)


def check_activation_format(
    format: Format,
    method: str | None,
    tile_size: Any,
    *,
    is_static: bool,
    by_axis: bool = False,
) -> None:
    """Check the options for quantizing activations.

    `is_static` is True if activations have a static scale, and False if their scales are computed
    in each product. With `by_axis`, `tile_size` can also be a dict from axes to tile sizes.

    **Raises:** `ValueError` if the format does not support the calibration method, the tile size or
    a static scale. `TypeError` if the tile size is not a number.
    """
    if method is not None:
        check_calibration(method, format)
    check_tile_size(tile_size, format, by_axis=by_axis)
    if tile_size is not None and is_static:
        raise ValueError(
            "a static range has one scale for all activations, so it cannot have tiles. Use "
            "act_range='dynamic', or leave out act_tile_size"
        )
    if is_static and (format.tile_size is not None or format.scale_dtype is not None):
        raise ValueError(
            f"activations in {format.name} have a scale per tile, so they have no static range. "
            "Use act_range='dynamic', or another act_qtype"
        )


def check_op_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the argument `op_names` as a tuple.

    **Raises:** `TypeError` if `names` is not a sequence of strings. `ValueError` if a name is not
    in `PRODUCTS`.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"op_names must be a list of names of primitives, not {names!r}")
    for name in names:
        if name not in PRODUCTS:
            raise ValueError(
                f"unknown product {name!r} in op_names; it must be one of {', '.join(PRODUCTS)}. "
                "Use dot_general for dot, matmul and einsum, and ragged_dot_general for ragged_dot"
            )
    return tuple(names)


def bind(primitive: str, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Bind a primitive, given its name, to operands that may be implicit arrays."""
    bind_arrays = find_primitive(primitive).bind
    return redispatch(lambda *xs: bind_arrays(*xs, **params), *operands)


def _multiply_weight_only(
    primitive: str, operands: Sequence[Any], params: dict[str, Any], w: ActivationQuantized
) -> Any:
    """Return the product with dense activations, and report to `vn.explain` why they are dense.

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
        return product(w.quantize_activations(x, x_contracted, batch), w.array)

    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        x, w = primals
        out = multiply(x, w)
        quantize = lambda x: materialise_one(w.quantize_activations(x, x_contracted, batch))
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
    numbers = DotDimensionNumbers.from_lax(params["dimension_numbers"])
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
    scale.

    **Arguments:**

    - `numbers`: the axes of the `dot_general`, with the activations as lhs.
    - `params`: the other parameters of the `dot_general`.
    - `activations_first`: whether the activations are lhs in the program. This sets the order of
      the axes of the result.
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
    contracted, batch = product_axes("ragged_dot_general", params)
    (x_contracted, w_contracted), (x_batch, w_batch) = contracted, batch
    if not (w.sums_over(w_contracted) and w.is_for("ragged_dot_general")):
        return _multiply_weight_only("ragged_dot_general", (x, w, group_sizes), params, w)
    product = lambda x, w: bind("ragged_dot_general", (x, w, group_sizes), params)
    return _multiply_straight_through(
        product, x, w, x_contracted, list(zip(x_batch, w_batch, strict=True))
    )


@register("conv_general_dilated")
def _conv_general_dilated(x: ArrayLike | QArray, w: ActivationQuantized, **params: Any) -> Any:
    (x_contracted, _), _ = product_axes("conv_general_dilated", params)
    if not (sums_over_features(w, params) and w.is_for("conv_general_dilated")):
        return _multiply_weight_only("conv_general_dilated", (x, w), params, w)
    product = lambda x, w: bind("conv_general_dilated", (x, w), params)
    return _multiply_straight_through(product, x, w, x_contracted)


def sums_over_features(w: ProductWeight, params: dict[str, Any]) -> bool:
    """Return whether a convolution with the kernel `w` sums over all axes in `w.contracting`.

    These axes must include the input features. The result is False for the convolution that
    computes the gradient of the images, because it sums over the output features.
    """
    (_, summed), _ = product_axes("conv_general_dilated", params)
    *_, features = summed
    return features - w.ndim in w.contracting and w.sums_over(summed)
