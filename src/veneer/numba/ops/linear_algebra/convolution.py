"""Convolutions: products of a kernel with windows of an array, which are read where they are."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ...codegen.arrays import ArrayExpr
from ...codegen.builder import Builder
from ...codegen.index import Index
from ...codegen.loop_nest import LoopNest
from ...registry import funcify, perform
from ..movement import padded


@funcify.register("conv_general_dilated")
def _(
    b: Builder, x: ArrayExpr, kernel: ArrayExpr, *, window_strides: Any, padding: Any,
    lhs_dilation: Any, rhs_dilation: Any, dimension_numbers: Any, feature_group_count: int,
    batch_group_count: int, preferred_element_type: Any = None, **_: Any,
) -> ArrayExpr:  # fmt: skip
    x_axes, kernel_axes, out_axes = dimension_numbers
    groups = feature_group_count * batch_group_count
    out_shape, dtype = b.out.shape, np.dtype(b.out.dtype)
    sizes = [out_shape[axis] for axis in out_axes[2:]]
    extents = [kernel.shape[axis] for axis in kernel_axes[2:]]
    outputs, inputs = (kernel.shape[axis] for axis in kernel_axes[:2])
    n_batch, n_spatial = x.shape[x_axes[0]] // batch_group_count, len(sizes)
    if 0 in (*out_shape, *x.shape, *kernel.shape):
        return _zeros(b)
    surrounded = _padded(b, x, x_axes[2:], padding, lhs_dilation)

    def window(k: LoopNest, index: tuple[Index, ...]) -> str:
        """Of a group and of an example: the number at a place, of a channel, under the kernel."""
        group, example, channel = index[0], index[1], index[2 + n_spatial]
        places: dict[int, Index] = {
            x_axes[0]: (group * n_batch if batch_group_count > 1 else Index()) + example,
            x_axes[1]: (group * inputs if feature_group_count > 1 else Index()) + channel,
        }
        steps = zip(index[2:], index[3 + n_spatial :], window_strides, rhs_dilation, strict=False)
        for axis, (i, j, stride, dilation) in zip(x_axes[2:], steps, strict=True):
            places[axis] = i * stride + j * dilation
        return k.read(surrounded, [places[axis] for axis in range(surrounded.ndim)])

    def weight(k: LoopNest, index: tuple[Index, ...]) -> str:
        """Of a group: the number of an output, of a channel, at a place in the kernel."""
        output = index[0] * (outputs // groups) + index[1]
        places = dict(zip(kernel_axes, (output, *index[2:]), strict=True))
        return k.read(kernel, [places[axis] for axis in range(kernel.ndim)])

    shape = (groups, n_batch, *sizes, inputs, *extents)
    windows = b.lazy(window, surrounded, shape=shape, dtype=x.dtype)
    shape = (groups, outputs // groups, inputs, *extents)
    weights = b.lazy(weight, kernel, shape=shape, dtype=kernel.dtype)

    def product(windows: Any, weights: Any) -> Any:
        inner = [*range(2 + n_spatial, windows.ndim)], [*range(2, weights.ndim)]
        out = lax.dot_general(
            windows, weights, (inner, ([0], [0])), preferred_element_type=preferred_element_type
        )  # of groups, examples, places and outputs of a group
        last = out.ndim - 1
        out = lax.transpose(out, (1, 0, last, *range(2, last)))
        joined = out.reshape(n_batch, outputs, *sizes)
        return lax.transpose(joined, np.argsort(out_axes)).astype(dtype)

    avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (windows, weights)]
    (result,) = b.inline(jax.make_jaxpr(product)(*avals), windows, weights)
    return result


def _zeros(b: Builder) -> ArrayExpr:
    zero = b.constant(0, b.out.dtype)
    return b.lazy(lambda k, index: k.read(zero, ()))


def _padded(
    b: Builder, x: ArrayExpr, axes: Sequence[int], padding: Any, dilation: Sequence[int]
) -> ArrayExpr:
    """The array with zeros around it, and in between."""
    config = [(0, 0, 0)] * x.ndim
    for axis, (low, high), step in zip(axes, padding, dilation, strict=True):
        config[axis] = (int(low), int(high), int(step) - 1)
    return padded(b, x, b.constant(0, x.dtype), config)


@perform.register("conv_general_dilated")
def _(
    x: Any, kernel: Any, *, window_strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any,
    dimension_numbers: Any, feature_group_count: int, batch_group_count: int,
    preferred_element_type: Any = None, **_: Any,
) -> Any:  # fmt: skip
    x_axes, kernel_axes, out_axes = dimension_numbers
    dtype = np.dtype(preferred_element_type or x.dtype)
    wide = np.float32 if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
    x, kernel = np.transpose(x, x_axes), np.transpose(kernel, kernel_axes)
    config = [(0, 0, 0)] * 2
    for (low, high), step in zip(padding, lhs_dilation, strict=True):
        config.append((low, high, step - 1))
    x = perform["pad"](x, x.dtype.type(0), padding_config=config).astype(wide)
    extents = [(n - 1) * step + 1 for n, step in zip(kernel.shape[2:], rhs_dilation, strict=True)]
    sizes = [max(0, (n - extent) // stride + 1) for n, extent, stride in zip(
        x.shape[2:], extents, window_strides, strict=True
    )]  # fmt: skip
    groups, outputs = feature_group_count * batch_group_count, kernel.shape[0]
    n_batch = x.shape[0] // batch_group_count
    out = np.zeros((n_batch, outputs, *sizes), wide)
    group_outputs, inputs = outputs // groups, kernel.shape[1]
    for group in range(groups):
        batch = (
            slice(group * n_batch, (group + 1) * n_batch) if batch_group_count > 1 else slice(None)
        )
        channels = (
            slice(group * inputs, (group + 1) * inputs) if feature_group_count > 1 else slice(None)
        )
        result = slice(group * group_outputs, (group + 1) * group_outputs)
        for place in np.ndindex(*kernel.shape[2:]):
            part = tuple(
                slice(i * step, i * step + (size - 1) * stride + 1 if size else 0, stride)
                for i, step, size, stride in zip(
                    place, rhs_dilation, sizes, window_strides, strict=True
                )
            )
            weights = kernel[(result, slice(None), *place)].astype(wide)
            terms = np.einsum("nc...,oc->no...", x[(batch, channels, *part)], weights)
            out[:, result] += terms.astype(wide)
    return np.transpose(out, np.argsort(out_axes)).astype(dtype)
