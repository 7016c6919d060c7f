"""`ActivationQuantized`: a weight whose partner in a product is quantised as the two meet."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._core.tree import static
from .._core.value import Value
from .conversion.calibration import check_calibration
from .conversion.quantize import quantize, quantize_with_scale
from .conversion.scale_axes import check_tile_size, row_axes
from .formats import Format, get_format
from .formats.tiles import Leaf
from .product_weights import Factors, ProductWeight
from .qarray import QArray


class ActivationQuantized(ProductWeight):
    """A weight that says how the activations that it is multiplied with are quantised.

    It stands for the weight, and is the weight to every primitive but a product that contracts
    `contracting`. There the other operand, if it is dense and floating, is quantised first, so that
    with a `QArray` for a weight the product is one of codes:

    - without a `scale` dynamically: each row, which is an index of the axes that are not
      contracted, by a scale of its own; in a convolution, each entry of the batch. With a
      `tile_size`, or a format with a tile of its own, it has one for each tile of a row.
    - with a `scale` by that one, whatever the values are: a static range. What lies beyond is
      clipped.

    Derivatives go straight through the quantisation of the activations, clipped or not: they are
    those of the product of what the two operands stand for. Take them outside, as in
    `jax.grad(vn.implicit(f))`; `vn.implicit(jax.grad(f))` differentiates the program instead, in
    which activations are as they were. There, cotangents contract other axes, and are left alone;
    but the tangents of `vn.implicit(jax.jvp(f))` are taken for activations. In the rule that the
    author of a `jax.custom_jvp` function has written, under `jax.grad(vn.implicit(f))`, operands
    may be tangents, and none is quantised: the outputs are those of the function, and the tangents
    are taken at the weight. Without `vn.implicit`, with high types too, such a rule runs unseen,
    and what it multiplies with the weight is quantised.

    Two of them that meet are both weights, and neither is quantised for the other. An operand that
    is a `QArray`, or of integers, is left as it is; one of another type is multiplied with the
    weight by the rules of that type. `vn.explain` says where a product contracts other axes than
    `contracting`, and so leaves activations as they are.

    `vn.quant.quantize_tree` makes them, of a rule with an `act_qtype`.

    **Arguments:**

    - `array`: the weight, `[..., K, N]`: a `QArray`, a dense or another implicit array.
    - `scale`: of a static range: floating, of the rank of the weight, and along each axis of its
      size or 1. Stacked weights, of which each is a layer's, have a scale each: `[..., 1, 1]`.
    - `zero_point`: the code that stands for 0, of the same shape; of integer formats only.
    - `qtype`: the format of activations.
    - `calibration_method`: of dynamic scales; None is the format's own.
    - `tile_size`: how many activations, along the last axis that is contracted, share a dynamic
      scale; a float is the share of that axis. None is all of them, or the tile of the format.
    - `contracting`: the axes of the weight that are contracted with activations, counted from the
      end.
    - `op_names`: the primitives in whose products they are quantised, as in a `Rule`; none named is
      all of them.

    **Raises:** `ValueError` for an unknown format, method or primitive, a shape that does not fit,
    a scale for tiles or a format with scales of its own, a tile that is none or not the format's,
    and an axis that is not negative or out of range.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(4), "int8", channelwise_axes=[1])
    >>> w8a8 = vn.quant.ActivationQuantized(w, qtype="int8")
    >>> x = jnp.array([[0.1, 0.2, 0.3, 1.0]])
    >>> y = x @ w8a8
    >>> bool(jnp.allclose(y, vn.quant.quantize(x, "int8").dequantize() @ w.dequantize()))
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
        axes, op_names = tuple(int(axis) for axis in contracting), products_named(op_names)
        how = (get_format(qtype).name, calibration_method, tile_size, axes, op_names, False, None)
        values = (array, scale, zero_point, *how)
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)  # the dataclass is frozen

    def __post_init__(self) -> None:
        is_static = self.scale is not None
        method, tile_size = self.calibration_method, self.tile_size
        check_activation_format(self.format, method, tile_size, is_static=is_static)
        shape = self.array.shape
        for name in self.companions:
            leaf = getattr(self, name)
            if leaf is not None and not _fits(leaf.shape, shape):
                raise ValueError(
                    f"{name} has shape {leaf.shape}, and for a weight of shape {shape} it has the "
                    "same rank, and axes of the same size or of 1"
                )
        if self.zero_point is not None and not (is_static and self.format.is_integer):
            raise ValueError("a zero_point goes with a scale, and with an integer format")
        if not all(-len(shape) <= axis < 0 for axis in self.contracting):
            raise ValueError(
                f"contracting axes are counted from the end of {shape}, as -2, not "
                f"{self.contracting}"
            )

    @property
    def format(self) -> Format:
        """The row of `FORMATS` that `qtype` names."""
        return get_format(self.qtype)

    def is_for(self, primitive: str) -> bool:
        """Whether activations are quantised in products by a primitive."""
        return not self.op_names or primitive in self.op_names

    def turned_over(self) -> "ActivationQuantized":
        """Notes that codes are stored the other way round."""
        return self.changed(turned=not self.turned)

    def quantise_activations(
        self, x: jax.Array, shared: Sequence[int], batch: Sequence[tuple[int, int]] = ()
    ) -> QArray:
        """Returns the other operand of a product, quantised; without a derivative.

        **Arguments:**

        - `x`: the operand.
        - `shared`: its axes along which a dynamic scale is shared; tiles are along the last.
        - `batch`: its axes that go along with one of the weight, and that one.
        """
        if self.scale is not None:
            scale, zero_point = self._scale_for(x.ndim, batch)
            # A row each, so that NaN in one is not that of all.
            rows = [1 if axis in shared else n for axis, n in enumerate(x.shape)]
            scale = jnp.broadcast_to(scale, rows)
            return quantize_with_scale(x, self.qtype, scale, zero_point)
        axes = row_axes(x.shape, shared, self.format, self.tile_size)
        method = self.calibration_method
        try:
            return quantize(x, self.qtype, calibration_method=method, **axes.arguments)
        except ValueError as error:
            error.add_note(f"While quantising activations of shape {x.shape} for {self!r}.")
            raise

    def stacked_axes(self, summed: Sequence[int], batch: Sequence[int]) -> list[int]:
        """Returns the axes along which weights have a range each, and meet the same activations.

        **Arguments:**

        - `summed`, `batch`: the axes of the weight that a product contracts, or batches.
        """
        if self.scale is None or any(self.scale.shape[axis] > 1 for axis in summed):
            return []
        free = [axis for axis in range(self.ndim) if axis not in (*summed, *batch)]
        stacked = [axis for axis in free if self.scale.shape[axis] > 1]
        # Along the only free axis, parts of one weight lie side by side.
        return stacked if len(stacked) < len(free) else []

    def _scale_for(
        self, ndim: int, batch: Sequence[tuple[int, int]]
    ) -> tuple[jax.Array, jax.Array | None]:
        """The scale and the zero point for an operand: one, or one for each of a batch."""
        assert self.scale is not None
        scale, zero_point = jnp.asarray(self.scale), self.zero_point
        scale = scale.astype(jnp.promote_types(scale.dtype, jnp.float32))
        apart = [axis for axis in range(self.ndim) if axis not in {w for _, w in batch}]
        if math.prod(scale.shape[axis] for axis in apart) > 1:
            scale, zero_point = self._widest(scale, zero_point, apart)
        shape = [1] * ndim
        for axis, of_weight in batch:
            shape[axis] = scale.shape[of_weight]
        order = [*(of_weight for _, of_weight in sorted(batch)), *apart]
        arrange = lambda leaf: lax.transpose(jnp.asarray(leaf), order).reshape(shape)
        return arrange(scale), None if zero_point is None else arrange(zero_point)

    def _widest(
        self, scale: jax.Array, zero_point: Leaf | None, axes: Sequence[int]
    ) -> tuple[jax.Array, jax.Array | None]:
        """One range that holds all those along some axes, of weights that have become one."""
        if zero_point is None:
            return scale.max(axes, keepdims=True), None
        least, largest = self.format.code_range
        zero = zero_point.astype(scale.dtype)
        low = ((least - zero) * scale).min(axes, keepdims=True)
        high = ((largest - zero) * scale).max(axes, keepdims=True)
        scale = (high - low) / (largest - least)
        zero = jnp.clip(jnp.round(least - low / scale), least, largest)
        return scale, zero.astype(zero_point.dtype)


def check_activation_format(
    format: Format,
    method: str | None,
    tile_size: Any,
    *,
    is_static: bool,
    by_axis: bool = False,
) -> None:
    """Raises `ValueError` for a method, a tile or a scale that activations in a format cannot have.

    `TypeError` for a tile that is no number.
    """
    if method is not None:
        check_calibration(method, format)
    check_tile_size(tile_size, format, by_axis=by_axis)
    if tile_size is not None and is_static:
        raise ValueError(
            "a static range is one scale for all activations, and a tile size one for each tile of "
            "them: leave act_range 'dynamic', or leave out the tile"
        )
    if is_static and (format.tile_size is not None or format.scale_dtype is not None):
        raise ValueError(
            f"activations in {format.name} have scales of their own in each tile, and no static "
            "range: leave act_range 'dynamic', or take another act_qtype"
        )


#: The primitives that are products, and of which rules may be for some.
PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")


def products_named(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the primitives that `op_names` names.

    **Raises:** `TypeError` for what is no sequence of names, `ValueError` for an unknown one.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"op_names is a sequence of names of primitives, not {names!r}")
    for name in names:
        if name not in PRODUCTS:
            raise ValueError(
                f"unknown product {name!r} in op_names: these are {', '.join(PRODUCTS)}. To a "
                "program dot, matmul and einsum are dot_general, and ragged_dot is "
                "ragged_dot_general"
            )
    return tuple(names)


def _fits(leaf: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    pairs = zip(leaf, shape, strict=False)
    return len(leaf) == len(shape) and all(n in (1, size) for n, size in pairs)
