"""Convolutions, and reductions of windows, such as pooling and its derivatives."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from jax import lax

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Index, flatten_index, scalar_expr
from ..codegen.builder import Builder, require_fused
from ..codegen.loop_nest import LoopNest
from ..codegen.registry import Unsupported, evaluate_jaxpr, funcify, perform
from .reductions import Step, highest_value, lowest_value, maximum_step, minimum_step, operator_step

Sizes = Sequence[int]


def _pad(b: Builder, x: ArrayExpr, filling: ArrayExpr, padding: Any, dilation: Sizes) -> ArrayExpr:
    """Pad an array with the scalar `filling`, at the ends of each axis and between entries.

    `padding` has a pair of numbers for each axis. `dilation` has the distance of entries along each
    axis, which is 1 if nothing is inserted.
    """
    pairs = zip(padding, dilation, strict=True)
    config = [(int(low), int(high), int(step) - 1) for (low, high), step in pairs]
    if not any(any(amounts) for amounts in config):
        return b.force_costly(x)
    return b.inline_function(lambda x, y: [lax.pad(x, y, config)], x, filling)[0]


def _index_in_window(
    window: Sequence[Index], inner: Sequence[Index], strides: Sizes, dilation: Sizes
) -> list[Index]:
    """Return the index in a padded array of an entry of a window.

    `window` is the index of the window, and `inner` the index inside the window.
    """
    axes = zip(window, inner, strides, dilation, strict=True)
    return [i * stride + j * step for i, j, stride, step in axes]


def _reduce_windows(
    b: Builder, x: ArrayExpr, start: ArrayExpr, step: Step, *,
    window_dimensions: Sizes, window_strides: Sizes, padding: Any, base_dilation: Sizes,
    window_dilation: Sizes, masked: bool = False,
) -> ArrayExpr:  # fmt: skip
    """Reduce the entries of each window. The total begins with `start`.

    `step` writes the next total. With `masked`, padding is skipped. Otherwise, padding has the
    value `start`, which must not change a total. The other arguments are as in `lax.reduce_window`.
    """
    if 0 in b.out.shape:
        return b.buffer()
    mask = None
    if masked:
        ones = b.lazy(lambda k, index: "True", shape=x.shape, dtype=bool)
        zero = b.lazy(lambda k, index: "False", shape=(), dtype=bool)
        mask = _pad(b, ones, zero, padding, base_dilation)
    x = _pad(b, x, start, padding, base_dilation)
    out = b.buffer(dtype=storage.computed_dtype(x.dtype))  # holds totals
    with b.kernel() as k, k.loops(out.shape) as window:
        total = k.assign(k.read(start, ()), "total")
        with k.loops(window_dimensions) as inner:
            at = _index_in_window(window, inner, window_strides, window_dilation)
            condition = "True" if mask is None else k.read(mask, at)
            with nullcontext() if condition == "True" else k.block(f"if {condition}:"):
                k.line(f"{total} = {step(k, x.dtype, total, k.read(x, at))}")
        k.store(out, window, total)
    return b.convert(out, x.dtype)


_REDUCTIONS: dict[str, tuple[Any, Step, Any]] = {
    "reduce_window_sum": (lambda dtype: 0, operator_step("+"), np.add),
    "reduce_window_max": (lowest_value, maximum_step, np.maximum),
    "reduce_window_min": (highest_value, minimum_step, np.minimum),
}


def _register(name: str, first: Any, step: Step, ufunc: Any) -> None:
    @funcify.register(name)
    def _(b: Builder, x: ArrayExpr, **params: Any) -> ArrayExpr:
        return _reduce_windows(b, x, b.constant(first(x.dtype), x.dtype), step, **params)

    @perform.register(name)
    def _(x: Any, **params: Any) -> Any:
        return _reduce_windows_in_numpy(x, first(x.dtype), ufunc, **params)


for _name, _parts in _REDUCTIONS.items():
    _register(_name, *_parts)


@funcify.register("reduce_window")
def _(b: Builder, *operands: ArrayExpr, jaxpr: Any, consts: Any, **params: Any) -> ArrayExpr:
    if len(operands) != 2 or consts:
        raise Unsupported("operands", "more than one array is not supported.")
    require_fused(jaxpr)

    def step(k: LoopNest, dtype: np.dtype, total: str, entry: str) -> str:
        now = k.assign(total)  # so that nothing moves out of the loop
        (result,) = b.inline_into_kernel(
            k, jaxpr, scalar_expr(now, dtype), scalar_expr(entry, dtype)
        )
        return result

    return _reduce_windows(b, operands[0], operands[1], step, masked=True, **params)


@perform.register("reduce_window")
def _(x: Any, start: Any, *, jaxpr: Any, consts: Any, **params: Any) -> Any:
    dtype = x.dtype

    def step(total: Any, x: Any) -> Any:
        pairs = zip(*(each.reshape(-1).astype(dtype) for each in (total, x)), strict=True)
        results = [evaluate_jaxpr(jaxpr, *map(np.asarray, pair))[0] for pair in pairs]
        return np.asarray(results, total.dtype).reshape(total.shape)

    return _reduce_windows_in_numpy(x, start, step, **params)


def _reduce_windows_in_numpy(
    x: Any, start: Any, step: Any, *, window_dimensions: Any, window_strides: Any, padding: Any,
    base_dilation: Any, window_dilation: Any,
) -> Any:  # fmt: skip
    total = None
    start = np.asarray(start).astype(x.dtype)
    args = window_dimensions, window_strides, padding, base_dilation, window_dilation
    inside = _iterate_windows(np.ones(x.shape, bool), np.False_, *args)
    for part, counts in zip(_iterate_windows(x, start, *args), inside, strict=True):
        wide = part.astype(storage.computed_dtype(x.dtype))
        total = np.full(part.shape, start, wide.dtype) if total is None else total
        total = np.where(counts, step(total, wide), total)
    return np.asarray(total).astype(x.dtype)


def _iterate_windows(
    x: Any, filling: Any, sizes: Any, strides: Any, padding: Any, base: Any, dilation: Any
) -> Any:
    """Yield, for each position in a window, the array of the entries of all windows there."""
    config = [(low, high, step - 1) for (low, high), step in zip(padding, base, strict=True)]
    x = perform["pad"](x, filling, padding_config=config)
    extents = [(size - 1) * step + 1 for size, step in zip(sizes, dilation, strict=True)]
    counts = [
        max(0, (n - extent) // stride + 1)
        for n, extent, stride in zip(x.shape, extents, strides, strict=True)
    ]
    for inner in np.ndindex(*sizes):
        axes = zip(counts, strides, inner, dilation, strict=True)
        yield x[np.ix_(*(np.arange(n) * stride + i * step for n, stride, i, step in axes))]


# Derivatives of pooling.


def _selection_symbol(select_prim: Any) -> str:
    """Return the operator, >= or <=, by which pooling keeps the entry that it selected before."""
    symbols = {"ge": ">=", "le": "<="}
    if select_prim.name not in symbols:
        raise Unsupported("select_prim", f"{select_prim} is not supported.")
    return symbols[select_prim.name]


@funcify.register("select_and_scatter_add")
def _(
    b: Builder, source: ArrayExpr, x: ArrayExpr, *, select_prim: Any, window_dimensions: Sizes,
    window_strides: Sizes, padding: Any,
) -> ArrayExpr:  # fmt: skip
    symbol, x, source = _selection_symbol(select_prim), b.force_costly(x), b.force_costly(source)
    out = b.buffer(dtype=storage.computed_dtype(x.dtype))  # holds sums
    entries = out.reshape((out.size,))
    with b.kernel() as k:
        with k.loops([out.size]) as (i,):
            k.store(entries, (i,), storage.literal(0, out.dtype))
        with k.loops(source.shape) as window:
            best = k.assign(storage.literal(0, x.dtype), "best")
            where = k.assign("-1", "where")
            with k.loops(window_dimensions) as inner:
                padded = _index_in_window(window, inner, window_strides, [1] * x.ndim)
                at_x = [i - int(low) for i, (low, _) in zip(padded, padding, strict=True)]
                tests = []
                for i, n in zip(at_x, x.shape, strict=True):
                    tests += [f"{i} >= 0"] if i.smallest < 0 else []
                    tests += [f"{i} < {n}"] if i.largest >= n else []
                with k.block(f"if {' and '.join(tests) or 'True'}:"):
                    entry = k.read(x, at_x)
                    with k.block(f"if {where} < 0 or not {best} {symbol} {entry}:"):
                        k.line(f"{best} = {entry}")
                        k.line(f"{where} = {flatten_index(at_x, x.shape)}")
            with k.block(f"if {where} >= 0:"):
                at = (k.variable(k.assign(where), out.size),)
                total = k.load(entries, at)
                k.store(entries, at, storage.wrap(f"{total} + {k.read(source, window)}", x.dtype))
    return b.convert(out, x.dtype)


@perform.register("select_and_scatter_add")
def _(
    source: Any, x: Any, *, select_prim: Any, window_dimensions: Any, window_strides: Any,
    padding: Any,
) -> Any:  # fmt: skip
    keeps = {"ge": np.greater_equal, "le": np.less_equal}[select_prim.name]
    out = np.zeros(x.shape, storage.computed_dtype(x.dtype))
    for window in np.ndindex(*source.shape):
        best = None
        for inner in np.ndindex(*window_dimensions):
            axes = zip(window, inner, window_strides, padding, strict=True)
            place = tuple(i * stride + j - low for i, j, stride, (low, _) in axes)
            if all(0 <= i < n for i, n in zip(place, x.shape, strict=True)):
                best = place if best is None or not keeps(x[best], x[place]) else best
        if best is not None:
            out[best] += source[window]
    return out.astype(x.dtype)


@funcify.register("select_and_gather_add")
def _(
    b: Builder, source: ArrayExpr, x: ArrayExpr, *, select_prim: Any, window_dimensions: Sizes,
    window_strides: Sizes, padding: Any, base_dilation: Sizes, window_dilation: Sizes,
) -> ArrayExpr:  # fmt: skip
    # The first of equal entries is selected, as in the transpose. XLA may select another one.
    symbol, dtype = _selection_symbol(select_prim), x.dtype
    if dtype.kind == "c":
        raise Unsupported("dtype", f"{dtype} has no order.")
    first = b.constant(lowest_value(dtype) if symbol == ">=" else highest_value(dtype), dtype)
    zero = b.constant(0, dtype)
    x = _pad(b, x, first, padding, base_dilation)
    source = _pad(b, source, zero, padding, base_dilation)
    out = b.buffer()
    with b.kernel() as k, k.loops(out.shape) as window:
        best, gathered = k.assign(k.read(first, ()), "best"), k.assign(k.read(zero, ()), "gathered")
        with k.loops(window_dimensions) as inner:
            at = _index_in_window(window, inner, window_strides, window_dilation)
            entry, other = k.read(x, at), k.read(source, at)
            with k.block(f"if not {best} {symbol} {entry}:"):
                k.line(f"{best} = {entry}")
                k.line(f"{gathered} = {other}")
        k.store(out, window, gathered)
    return out


@perform.register("select_and_gather_add")
def _(source: Any, x: Any, *, select_prim: Any, **params: Any) -> Any:
    greatest = select_prim.name == "ge"
    start = (lowest_value if greatest else highest_value)(x.dtype)
    start = np.asarray(start).astype(x.dtype)
    names = "window_dimensions window_strides padding base_dilation window_dilation".split()
    args = [params[name] for name in names]
    pairs = zip(_iterate_windows(x, start, *args), _iterate_windows(source, 0, *args), strict=True)
    best = gathered = None
    for part, other in pairs:
        best = np.full(part.shape, start) if best is None else best
        gathered = np.zeros(part.shape, x.dtype) if gathered is None else gathered
        keep = best >= part if greatest else best <= part
        best, gathered = np.where(keep, best, part), np.where(keep, gathered, other)
    return gathered


# Convolutions.


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
        zero = b.constant(0, dtype)
        return b.lazy(lambda k, index: k.read(zero, ()))
    all_padding, all_dilation = [(0, 0)] * x.ndim, [1] * x.ndim
    for axis, amounts, step in zip(x_axes[2:], padding, lhs_dilation, strict=True):
        all_padding[axis], all_dilation[axis] = amounts, step
    padded = _pad(b, x, b.constant(0, x.dtype), all_padding, all_dilation)

    def window(k: LoopNest, index: tuple[Index, ...]) -> str:
        """Return an expression for the entry of the input that a product reads.

        `index` is (group, example, *output position, channel, *kernel position).
        """
        group, example, channel = index[0], index[1], index[2 + n_spatial]
        parts: dict[int, Index] = {
            x_axes[0]: (group * n_batch if batch_group_count > 1 else Index()) + example,
            x_axes[1]: (group * inputs if feature_group_count > 1 else Index()) + channel,
        }
        steps = zip(index[2:], index[3 + n_spatial :], window_strides, rhs_dilation, strict=False)
        for axis, (i, j, stride, dilation) in zip(x_axes[2:], steps, strict=True):
            parts[axis] = i * stride + j * dilation
        return k.read(padded, [parts[axis] for axis in range(padded.ndim)])

    def weight(k: LoopNest, index: tuple[Index, ...]) -> str:
        """Return an expression for the entry of the convolution kernel that a product reads.

        `index` is (group, output, channel, *kernel position).
        """
        output = index[0] * (outputs // groups) + index[1]
        parts = dict(zip(kernel_axes, (output, *index[2:]), strict=True))
        return k.read(kernel, [parts[axis] for axis in range(kernel.ndim)])

    shape = (groups, n_batch, *sizes, inputs, *extents)
    windows = b.lazy(window, padded, shape=shape, dtype=x.dtype)
    shape = (groups, outputs // groups, inputs, *extents)
    weights = b.lazy(weight, kernel, shape=shape, dtype=kernel.dtype)

    def product(windows: Any, weights: Any) -> list[Any]:
        inner = [*range(2 + n_spatial, windows.ndim)], [*range(2, weights.ndim)]
        out = lax.dot_general(
            windows, weights, (inner, ([0], [0])), preferred_element_type=preferred_element_type
        )  # (group, example, *output position, output)
        last = out.ndim - 1
        out = lax.transpose(out, (1, 0, last, *range(2, last)))
        joined = out.reshape(n_batch, outputs, *sizes)
        return [lax.transpose(joined, np.argsort(out_axes)).astype(dtype)]

    return b.inline_function(product, windows, weights)[0]


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
        of_group = lambda n, group=group: slice(group * n, (group + 1) * n)
        batch = of_group(n_batch) if batch_group_count > 1 else slice(None)
        channels = of_group(inputs) if feature_group_count > 1 else slice(None)
        result = of_group(group_outputs)
        for at in np.ndindex(*kernel.shape[2:]):
            spatial = tuple(
                slice(i * step, i * step + (size - 1) * stride + 1 if size else 0, stride)
                for i, step, size, stride in zip(
                    at, rhs_dilation, sizes, window_strides, strict=True
                )
            )
            weights = kernel[(result, slice(None), *at)].astype(wide)
            terms = np.einsum("nc...,oc->no...", x[(batch, channels, *spatial)], weights)
            out[:, result] += terms.astype(wide)
    return np.transpose(out, np.argsort(out_axes)).astype(dtype)
