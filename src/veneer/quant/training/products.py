"""The products of quantized training: `dot_general`, convolutions and `ragged_dot_general`.

| primitive | forward | gradients |
|---|---|---|
| `dot_general` | on codes | on codes |
| `conv_general_dilated` | on codes | on codes; floating point if grouped |
| `ragged_dot_general` | floating point | floating point |

"On codes" multiplies the codes of quantized operands. "Floating point" dequantizes them first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
from jax import lax

from ..._core.primitives.axes import Axes, DotDimensionNumbers
from ..._core.value import materialise_one
from ..._jax.primitives import find_primitive
from ..arrays import QArray
from ..formats.tiles import Shape
from ..ops.convolution import conv_general_dilated
from ..ops.dot_general import dot_general
from ..ops.operands import fixes_dtypes
from ..ops.product import Operand
from ..product_weights import product_axes


class GradientAxes(NamedTuple):
    """The axes of a gradient product, which computes the gradient of one operand of a product.

    A gradient product multiplies g, the gradient of the output, and the other operand.

    **Arguments:**

    - `of_gradient`: the axes of g that the gradient product contracts.
    - `of_other`: the axes of the other operand that the gradient product contracts.
    - `other_to_gradient`: a map from axes of the other operand to matching axes of g. Scales of the
      other operand that vary only along these axes can be multiplied into g.
    """

    of_gradient: Axes
    of_other: Axes
    other_to_gradient: Mapping[int, int]


@dataclass(frozen=True)
class TrainingProduct:
    """A base class of products in training: a primitive with its parameters, and its gradients.

    Operand 0 is lhs, and operand 1 is rhs. The argument `side` of the methods is such a number.

    **Arguments:**

    - `params`: the parameters of the primitive as pairs, so that a product is hashable.
    """

    primitive: ClassVar[str]
    supports_tiles: ClassVar[bool] = False  # True if gradients can sum codes tile by tile

    params: tuple[tuple[str, Any], ...]

    def __getitem__(self, name: str) -> Any:
        return dict(self.params)[name]

    @property
    def contracted(self) -> tuple[Axes, Axes]:
        """The contracted axes of lhs, and of rhs."""
        return product_axes(self.primitive, dict(self.params))[0]

    @property
    def _precision(self) -> Any:
        """The precision of gradient products.

        It equals the precision of the forward product, but is None if that precision fixes the
        dtypes of the operands.
        """
        precision = self["precision"]
        return None if fixes_dtypes(precision) else precision

    @property
    def has_gradients_on_codes(self) -> bool:
        """True if gradients are products of codes, False if the operands are dequantized first."""
        return True

    @property
    def description(self) -> str:
        """The description that `vn.explain` reports."""
        return "on codes, forward and backward"

    @property
    def is_forward(self) -> bool:
        """True if this product can be in a forward pass, False if it can only compute gradients."""
        return True

    def bind(self, lhs: Any, rhs: Any, *other_operands: Any) -> jax.Array:
        """Bind the primitive to dense arrays. Some primitives have more than two operands."""
        return find_primitive(self.primitive).bind(lhs, rhs, *other_operands, **dict(self.params))

    def multiply(self, lhs: Operand, rhs: Operand, *other_operands: Any) -> jax.Array:
        """Return the product of dense arrays or QArrays."""
        raise NotImplementedError

    def gradient_axes(self, side: int, ndims: Sequence[int]) -> GradientAxes:
        """Return the axes of the product that computes the gradient of operand `side`.

        `ndims` are the ranks of both operands.
        """
        raise NotImplementedError

    def transpose_operand(self, side: int, other: Operand) -> Operand:
        """Return `other`, operand `1 - side`, rearranged for the gradient of operand `side`.

        For example, the gradient of the images in a convolution needs the reversed kernel.
        """
        del side
        return other

    def multiply_gradient(
        self, side: int, g: Operand, other: Operand, shapes: Sequence[Shape], dtype: Any
    ) -> jax.Array:
        """Return the gradient of operand `side`, if `has_gradients_on_codes` is True.

        **Arguments:**

        - `g`: the gradient of the output, dense or quantized.
        - `other`: operand `1 - side`, after `transpose_operand`.
        - `shapes`: the shapes of both operands.
        - `dtype`: the dtype of the result.
        """
        raise NotImplementedError


class _DotProduct(TrainingProduct):
    """A `dot_general` in training, with gradients that are also computed by `dot_general`.

    The gradient of an operand contracts the free axes of the other operand.
    """

    primitive = "dot_general"
    supports_tiles = True

    @property
    def _numbers(self) -> DotDimensionNumbers:
        return DotDimensionNumbers.from_lax(self["dimension_numbers"])

    def _free(self, side: int, ndims: Sequence[int]) -> Axes:
        """Return the axes of operand `side` that the output keeps, other than batch axes."""
        return self._numbers.free(side, ndims[side])

    def multiply(self, lhs: Operand, rhs: Operand, *other_operands: Any) -> jax.Array:
        return dot_general(lhs, rhs, **dict(self.params))

    def gradient_axes(self, side: int, ndims: Sequence[int]) -> GradientAxes:
        # The output has the batch axes, the free axes of operand 0, and the free axes of operand 1.
        batch, free = self._numbers.batch[1 - side], self._free(1 - side, ndims)
        start = len(batch) + (len(self._free(0, ndims)) if side == 0 else 0)
        of_gradient = tuple(range(start, start + len(free)))
        pairs = zip((*batch, *free), (*range(len(batch)), *of_gradient), strict=True)
        return GradientAxes(of_gradient, free, dict(pairs))

    def multiply_gradient(
        self, side: int, g: Operand, other: Operand, shapes: Sequence[Shape], dtype: Any
    ) -> jax.Array:
        ndims = len(shapes[0]), len(shapes[1])
        axes = self.gradient_axes(side, ndims)
        batch, other_batch = self._numbers.batch[side], self._numbers.batch[1 - side]
        numbers = (axes.of_gradient, axes.of_other), (tuple(range(len(batch))), other_batch)
        out = dot_general(g, other, numbers, self._precision, dtype)
        # `operand_axes[i]` is the axis of the operand that axis i of `out` is: the batch axes, the
        # free axes, and the contracted axes in the order of the other operand.
        contracted, other_contracted = self.contracted[side], self.contracted[1 - side]
        pairs = sorted(zip(other_contracted, contracted, strict=True))
        free = self._free(side, ndims)
        operand_axes = (*batch, *free, *(axis for _, axis in pairs))
        return lax.transpose(out, sorted(range(out.ndim), key=operand_axes.__getitem__))


class _Convolution(TrainingProduct):
    """A `conv_general_dilated` of images with a kernel.

    Both gradients are convolutions. The gradient of the images convolves the dilated gradient of
    the output with the reversed kernel. The gradient of the kernel convolves the images with the
    gradient of the output, with the batch axis as channels. Scales of the images must be constant
    along the whole spatial axes, because windows overlap.
    """

    primitive = "conv_general_dilated"

    @property
    def has_gradients_on_codes(self) -> bool:
        return self["feature_group_count"] == self["batch_group_count"] == 1

    @property
    def description(self) -> str:
        if self.has_gradients_on_codes:
            return super().description
        return "on codes, forward only (grouped convolution)"

    def multiply(self, lhs: Operand, rhs: Operand, *other_operands: Any) -> jax.Array:
        return conv_general_dilated(lhs, rhs, **dict(self.params))

    def gradient_axes(self, side: int, ndims: Sequence[int]) -> GradientAxes:
        del ndims
        numbers = self["dimension_numbers"]
        lhs_batch, _, *lhs_spatial = numbers.lhs_spec
        rhs_out_channels, _, *rhs_spatial = numbers.rhs_spec
        out_batch, out_channels, *out_spatial = numbers.out_spec
        if side == 0:  # the gradient of the images contracts output channels
            axis, out_axis, spatial = rhs_out_channels, out_channels, rhs_spatial
        else:  # the gradient of the kernel contracts the batch
            axis, out_axis, spatial = lhs_batch, out_batch, lhs_spatial
        return GradientAxes((*out_spatial, out_axis), (*spatial, axis), {axis: out_axis})

    def transpose_operand(self, side: int, other: Operand) -> Operand:
        return _reverse(other, self["dimension_numbers"].rhs_spec[2:]) if side == 0 else other

    def multiply_gradient(
        self, side: int, g: Operand, other: Operand, shapes: Sequence[Shape], dtype: Any
    ) -> jax.Array:
        lhs, rhs, out = self["dimension_numbers"]
        swap_batch_and_channels = lambda spec: (spec[1], spec[0], *spec[2:])
        specs: tuple[Any, ...]
        # The distance between neighbors: the dilation of an operand, or the stride of an output.
        image_step, kernel_step = self["lhs_dilation"], self["rhs_dilation"]
        out_step = self["window_strides"]
        if side == 0:  # the kernel convolves g
            operands, specs = (g, other), (out, swap_batch_and_channels(rhs), lhs)
            lhs_step, rhs_step, result_step = out_step, kernel_step, image_step
        else:  # g convolves the images
            operands, specs = (other, g), tuple(map(swap_batch_and_channels, (lhs, out, rhs)))
            lhs_step, rhs_step, result_step = image_step, out_step, kernel_step
        image_sizes, kernel_sizes, out_sizes = (
            [shape[axis] for axis in spec[2:]]
            for shape, spec in zip((*shapes, g.shape), (lhs, rhs, out), strict=True)
        )
        return conv_general_dilated(
            *operands,
            window_strides=result_step,
            padding=self._gradient_padding(side, image_sizes, kernel_sizes, out_sizes),
            lhs_dilation=lhs_step,
            rhs_dilation=rhs_step,
            dimension_numbers=lax.ConvDimensionNumbers(*specs),
            precision=self._precision,
            preferred_element_type=dtype,
        )

    def _gradient_padding(
        self, side: int, images: Sequence[int], kernel: Sequence[int], output: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return the padding that gives the gradient of operand `side` the size of the operand.

        `images`, `kernel` and `output` are the sizes of the spatial axes in the forward product.
        Return a pair `(before, after)` per spatial axis. A convolution of n entries with a window
        of w has `n + before + after - w + 1` outputs.
        """
        dilate = lambda size, dilation: 0 if size == 0 else 1 + dilation * (size - 1)
        padding = []
        for i, (before, _) in enumerate(self["padding"]):
            image = dilate(images[i], self["lhs_dilation"][i])
            window = dilate(kernel[i], self["rhs_dilation"][i])
            gradient = dilate(output[i], self["window_strides"][i])
            if side == 0:
                before = window - 1 - before
                padding.append((before, image + window - 1 - gradient - before))
            else:
                padding.append((before, window - 1 + gradient - image - before))
        return padding


class _RaggedDot(_DotProduct):
    """A `ragged_dot_general` in training. All its operands are dequantized first.

    The gradients are computed in floating point, too.
    """

    primitive = "ragged_dot_general"
    supports_tiles = False
    has_gradients_on_codes = False
    description = "quantized operands and gradients, in floating point"

    @property
    def _numbers(self) -> DotDimensionNumbers:
        numbers = self["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return DotDimensionNumbers.from_lax(numbers)

    def _free(self, side: int, ndims: Sequence[int]) -> Axes:
        groups = self["ragged_dot_dimension_numbers"].rhs_group_dimensions if side == 1 else ()
        return tuple(axis for axis in super()._free(side, ndims) if axis not in groups)

    @property
    def is_forward(self) -> bool:
        # A product that contracts the ragged axis is the gradient of the weight.
        ragged = {*self["ragged_dot_dimension_numbers"].lhs_ragged_dimensions}
        return ragged.isdisjoint(self.contracted[0])

    def multiply(self, lhs: Operand, rhs: Operand, *other_operands: Any) -> jax.Array:
        return self.bind(materialise_one(lhs), materialise_one(rhs), *other_operands)


#: The class for each primitive.
PRODUCTS: dict[str, type[TrainingProduct]] = {
    cls.primitive: cls for cls in (_DotProduct, _Convolution, _RaggedDot)
}


def _reverse(x: Any, axes: Sequence[int]) -> Any:
    """Reverse a dense array or a QArray along some axes. The result has one code per byte."""
    if not isinstance(x, QArray):
        return lax.rev(x, axes)
    codes = lax.rev(x.codes(), axes)
    fields = codes if x.format.bits >= 8 else x.format.to_fields(codes)
    leaves: dict[str, Any] = {"scale": x.scale, "zero_point": x.zero_point, "minimum": x.minimum}
    leaves = {name: _reverse(leaf, axes) for name, leaf in leaves.items() if leaf is not None}
    return QArray.from_packed(fields, **leaves, qtype=x.qtype, dense_dtype=x.dense_dtype)
