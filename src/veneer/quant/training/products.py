"""The products of quantized training: `dot_general`, convolutions and `ragged_dot_general`.

| primitive | forward | gradients |
|---|---|---|
| `dot_general` | on codes | on codes |
| `conv_general_dilated` | on codes | on codes; floating point if grouped |
| `ragged_dot_general` | floating point | floating point |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
from jax import lax

from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ..._core.value import materialise_one
from ..._jax.primitives import find_primitive
from ..arrays.qarray import QArray
from ..formats.tiles import Shape
from ..ops.convolution import conv_general_dilated
from ..ops.dot_general import dot_general

Axes = tuple[int, ...]
Operand = jax.Array | QArray


class GradientAxes(NamedTuple):
    """The axes of the product that gives the gradient of one operand.

    **Arguments:**

    - `of_gradient`: the axes of the gradient of the output that the product contracts.
    - `of_other`: the axes of the other operand that it contracts.
    - `other_to_gradient`: maps the axes of the other operand that may have scales per index to axes
      of the gradient of the output.
    """

    of_gradient: Axes
    of_other: Axes
    other_to_gradient: Mapping[int, int]


@dataclass(frozen=True)
class TrainingProduct:
    """A product primitive with its parameters. Operand 0 is the left one, operand 1 the right one.

    `params` are the parameters of the primitive, as pairs, so that a product is hashable.
    """

    primitive: ClassVar[str]
    supports_tiles: ClassVar[bool] = False  # whether the gradient can sum codes tile by tile

    params: tuple[tuple[str, Any], ...]

    def __getitem__(self, name: str) -> Any:
        return dict(self.params)[name]

    @property
    def contracted(self) -> tuple[Axes, Axes]:
        """The axes of the two operands that the product contracts."""
        raise NotImplementedError

    @property
    def has_gradients_on_codes(self) -> bool:
        """True if gradients are products on codes. Otherwise they are in floating point."""
        return True

    @property
    def description(self) -> str:
        """The text for `vn.explain`."""
        return "on codes, forward and backward"

    @property
    def is_forward(self) -> bool:
        """True if the product can be one of the forward pass."""
        return True

    def bind(self, lhs: Any, rhs: Any, *extra: Any) -> jax.Array:
        """Return the product of dense operands."""
        return find_primitive(self.primitive).bind(lhs, rhs, *extra, **dict(self.params))

    def multiply(self, lhs: Operand, rhs: Operand, *extra: Any) -> jax.Array:
        """Return the product of quantized operands."""
        raise NotImplementedError

    def gradient_axes(self, side: int, ndims: Sequence[int]) -> GradientAxes:
        """Return the axes of the product that gives the gradient of operand `side`."""
        raise NotImplementedError

    def transpose_operand(self, side: int, other: Operand) -> Operand:
        """Return the other operand, rearranged for the gradient of operand `side`."""
        del side
        return other

    def multiply_gradient(
        self, side: int, g: Operand, other: Operand, shapes: Sequence[Shape], dtype: Any
    ) -> jax.Array:
        """Return the gradient of operand `side`. It needs `has_gradients_on_codes`.

        **Arguments:**

        - `g`: the quantized gradient of the output.
        - `other`: the result of `transpose_operand`.
        - `shapes`: the shapes of the two operands of the forward product.
        - `dtype`: the dtype of the result.
        """
        raise NotImplementedError


class _DotProduct(TrainingProduct):
    """A `dot_general`. The gradient of an operand contracts the free axes of the other one."""

    primitive = "dot_general"
    supports_tiles = True

    @property
    def _numbers(self) -> DotDimensionNumbers:
        return DotDimensionNumbers.of(self["dimension_numbers"])

    @property
    def contracted(self) -> tuple[Axes, Axes]:
        return self._numbers.contracting

    def multiply(self, lhs: Operand, rhs: Operand, *extra: Any) -> jax.Array:
        return dot_general(lhs, rhs, *extra, **dict(self.params))

    def gradient_axes(self, side: int, ndims: Sequence[int]) -> GradientAxes:
        # The output has the batch axes, the free axes of operand 0, and the free axes of operand 1.
        batch = self._numbers.batch[1 - side]
        free = self._numbers.free(1 - side, ndims[1 - side])
        start = len(batch) + (len(self._numbers.free(0, ndims[0])) if side == 0 else 0)
        of_gradient = tuple(range(start, start + len(free)))
        shared = zip((*batch, *free), (*range(len(batch)), *of_gradient), strict=True)
        return GradientAxes(of_gradient, free, dict(shared))

    def multiply_gradient(
        self, side: int, g: Operand, other: Operand, shapes: Sequence[Shape], dtype: Any
    ) -> jax.Array:
        ndims = len(shapes[0]), len(shapes[1])
        axes = self.gradient_axes(side, ndims)
        batch, other_batch = self._numbers.batch[side], self._numbers.batch[1 - side]
        numbers = (axes.of_gradient, axes.of_other), (tuple(range(len(batch))), other_batch)
        out = dot_general(g, other, numbers, preferred_element_type=dtype)
        # The result has the batch axes, the free axes of the operand, and its contracted axes in
        # the order of the other operand.
        contracted, other_contracted = self.contracted[side], self.contracted[1 - side]
        pairs = sorted(zip(other_contracted, contracted, strict=True))
        free = self._numbers.free(side, ndims[side])
        labels = (*batch, *free, *(axis for _, axis in pairs))
        return lax.transpose(out, sorted(range(len(labels)), key=labels.__getitem__))


class _Convolution(TrainingProduct):
    """A `conv_general_dilated` of images with a kernel.

    Both gradients are convolutions. The gradient of the images convolves the dilated gradient of
    the output with the reversed kernel. The gradient of the kernel convolves the images with the
    gradient of the output, with the batch axis as channels.
    """

    primitive = "conv_general_dilated"

    @property
    def contracted(self) -> tuple[Axes, Axes]:
        # One scale per image, because a convolution sums over channels and places.
        _, channels, *places = self["dimension_numbers"].lhs_spec
        return (*places, channels), tuple(self["dimension_numbers"].rhs_spec[1:])

    @property
    def has_gradients_on_codes(self) -> bool:
        return self["feature_group_count"] == self["batch_group_count"] == 1

    @property
    def description(self) -> str:
        if self.has_gradients_on_codes:
            return super().description
        return "on codes, forward only (grouped convolution)"

    def multiply(self, lhs: Operand, rhs: Operand, *extra: Any) -> jax.Array:
        return conv_general_dilated(lhs, rhs, *extra, **dict(self.params))

    def gradient_axes(self, side: int, ndims: Sequence[int]) -> GradientAxes:
        del ndims
        lhs, rhs, out = self["dimension_numbers"]
        # The gradient of images contracts output channels. The gradient of the kernel contracts
        # the batch.
        axis, of_output = (rhs[0], out[1]) if side == 0 else (lhs[0], out[0])
        places = rhs[2:] if side == 0 else lhs[2:]
        return GradientAxes((*out[2:], of_output), (*places, axis), {axis: of_output})

    def transpose_operand(self, side: int, other: Operand) -> Operand:
        return _reverse(other, self["dimension_numbers"].rhs_spec[2:]) if side == 0 else other

    def multiply_gradient(
        self, side: int, g: Operand, other: Operand, shapes: Sequence[Shape], dtype: Any
    ) -> jax.Array:
        lhs, rhs, out = self["dimension_numbers"]
        swap = lambda spec: (spec[1], spec[0], *spec[2:])
        strides, dilation = self["window_strides"], self["rhs_dilation"]
        if side == 0:
            pair, specs = (g, other), (out, swap(rhs), lhs)
            arguments = self["lhs_dilation"], strides, dilation
        else:
            pair, specs = (other, g), (swap(lhs), swap(out), swap(rhs))
            arguments = dilation, self["lhs_dilation"], strides
        window_strides, lhs_dilation, rhs_dilation = arguments
        images, kernel, output = (
            [shape[axis] for axis in spec[2:]]
            for shape, spec in zip((*shapes, g.shape), (lhs, rhs, out), strict=True)
        )
        return conv_general_dilated(
            *pair,
            window_strides=window_strides,
            padding=self._gradient_padding(side, images, kernel, output),
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            dimension_numbers=lax.ConvDimensionNumbers(*specs),
            preferred_element_type=dtype,
        )

    def _gradient_padding(
        self, side: int, images: Sequence[int], kernel: Sequence[int], output: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return the padding that gives the gradient of operand `side` the size of the operand."""
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


class _RaggedDot(TrainingProduct):
    """A `ragged_dot_general`. Quantized operands are materialized."""

    primitive = "ragged_dot_general"
    has_gradients_on_codes = False
    description = "quantized operands and gradients, in floating point"

    @property
    def contracted(self) -> tuple[Axes, Axes]:
        return self["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]

    @property
    def is_forward(self) -> bool:
        # A product that contracts the ragged axis is the gradient of the weight.
        ragged = {*self["ragged_dot_dimension_numbers"].lhs_ragged_dimensions}
        return ragged.isdisjoint(self.contracted[0])

    def multiply(self, lhs: Operand, rhs: Operand, *extra: Any) -> jax.Array:
        return self.bind(materialise_one(lhs), materialise_one(rhs), *extra)

    def gradient_axes(self, side: int, ndims: Sequence[int]) -> GradientAxes:
        numbers = self["ragged_dot_dimension_numbers"]
        groups = (), tuple(numbers.rhs_group_dimensions)
        free = []
        for i, (contracted, batch) in enumerate(zip(*numbers.dot_dimension_numbers, strict=True)):
            others = (*contracted, *batch, *groups[i])
            free.append(tuple(axis for axis in range(ndims[i]) if axis not in others))
        # The output has the batch axes, the free axes of operand 0, and the free axes of operand 1.
        start = len(numbers.dot_dimension_numbers[1][0]) + (len(free[0]) if side == 0 else 0)
        of_gradient = tuple(range(start, start + len(free[1 - side])))
        return GradientAxes(of_gradient, free[1 - side], {})


PRODUCTS: dict[str, type[TrainingProduct]] = {
    of.primitive: of for of in (_DotProduct, _Convolution, _RaggedDot)
}


def _reverse(x: Any, axes: Sequence[int]) -> Any:
    """Reverse an array along some axes. The codes of the result are not packed."""
    if not isinstance(x, QArray):
        return lax.rev(x, axes)
    codes = lax.rev(x.codes(), axes)
    fields = codes if x.format.bits >= 8 else x.format.to_fields(codes)
    parts: dict[str, Any] = {"scale": x.scale, "zero_point": x.zero_point, "minimum": x.minimum}
    parts = {name: _reverse(leaf, axes) for name, leaf in parts.items() if leaf is not None}
    return QArray.from_packed(fields, **parts, qtype=x.qtype, dense_dtype=x.dense_dtype)
