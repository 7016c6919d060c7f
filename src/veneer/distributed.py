"""Collectives that quantize the dense arrays that they send, such as gradients and activations.

Use them like the collectives of `jax.lax`, under `jax.shard_map`. Each device sums the received
values in f32. `psum` then sends the sums quantized too, so all devices have the same result.
If a device sends received values again, with the same format and tiles, there is no further
rounding error. Implicit arrays do not need these collectives: under `vn.implicit`, the collectives
of `jax.lax` send the packed leaves.

Sources: Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training
(2023). Ahmed et al., EQuARX: Efficient Quantized AllReduce in XLA for Distributed ML Acceleration
(2025).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ._core.value import is_value, materialise_one
from ._jax.tracing import vary_along, varying_axes
from .quant.arrays import QUANTIZABLE, QArray
from .quant.conversion.compute import quantize_with_params
from .quant.conversion.quantize import quantize_params
from .quant.formats import get_format

__all__ = ["all_gather", "psum", "psum_scatter"]

T = TypeVar("T")
AxisName = str | Sequence[str]


def all_gather(
    x: T,
    axis_name: AxisName,
    qtype: DTypeLike = "int8",
    *,
    axis: int = 0,
    tiled: bool = False,
    tile_size: int | None = None,
    key: jax.Array | None = None,
) -> T:
    """Gather an array from all devices like `jax.lax.all_gather`, with quantized communication.

    All devices get the same values, because each device also quantizes its own part. The backward
    pass sums cotangents with `vn.distributed.psum_scatter`, in the same format. There is no
    forward-mode derivative.

    **Arguments:**

    - `x`: a floating array, or a pytree of them. Implicit arrays are materialized. An array with
      fewer than `tile_size` values is sent unquantized.
    - `axis_name`: the name of a mesh axis, or a sequence of names.
    - `qtype`: a format of `vn.quant.FORMATS`, except "nf4_dq" and "nvfp4", because their scales are
      quantized.
    - `axis`: the position of the new axis. If `tiled` is True, the axis to concatenate along.
    - `tiled`: whether to concatenate the arrays of the devices. If False, they are stacked along a
      new axis.
    - `tile_size`: the number of consecutive values that share a scale. The default is the tile size
      of the format, or 128 if it has none.
    - `key`: a `jax.random` key for stochastic rounding. Each device derives its own key from it. If
      None, values are rounded to nearest.

    **Returns:** an array in the dtype of `x`. It has a new axis with an entry per device. If
    `tiled` is True, the size of `axis` is multiplied by the number of devices instead.

    **Raises:** `TypeError` if an array is not floating. `ValueError` if `axis` is out of range,
    `qtype` is not one of the formats above, or `tile_size` is not positive.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> gather = lambda x: vn.distributed.all_gather(x, "i", "int8", tiled=True)
    >>> x = jnp.linspace(-1, 1, 512).reshape(2, 256)
    >>> whole = jax.vmap(gather, axis_name="i")(x)  # or under jax.shard_map, on devices
    >>> whole.shape, bool(abs(whole[0] - x.ravel()).max() <= 0.5 / 127)
    ((2, 512), True)
    """
    group = _make_group("all_gather", axis_name, qtype, tile_size)

    def gather_leaf(x: Any, key: jax.Array | None) -> jax.Array:
        x = group.check_floating(materialise_one(x))
        at = group.check_axis(axis, x.ndim + (not tiled))
        if x.size < group.tile:
            return lax.all_gather(x, group.names, axis=at, tiled=tiled)
        wide = _at_least_f32(vary_along(group.names, x))
        gathered = _all_gather(wide, key, group._replace(dtype=x.dtype.name), at, tiled)
        return gathered.astype(x.dtype)

    return _map_leaves(gather_leaf, x, key)


def psum_scatter(
    x: T,
    axis_name: AxisName,
    qtype: DTypeLike = "int8",
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    tile_size: int | None = None,
    key: jax.Array | None = None,
    error: Any = None,
) -> Any:
    """Sum an array over devices and give each device one part, like `jax.lax.psum_scatter`.

    Values are sent quantized and summed in f32. The backward pass gathers cotangents with
    `vn.distributed.all_gather`, in the same format. There is no forward-mode derivative.

    **Arguments:**

    - `x`: a floating array, or a pytree of them, but no implicit arrays. An array with fewer than
      `n * tile_size` values is sent unquantized, where `n` is the number of devices.
    - `axis_name`: the name of a mesh axis, or a sequence of names.
    - `qtype`: a format of `vn.quant.FORMATS`, except "nf4_dq" and "nvfp4", because their scales are
      quantized.
    - `scatter_dimension`: the axis to split. Each device gets one part of it.
    - `tiled`: whether the parts keep this axis, whose size must then be a multiple of the number of
      devices. If False, the size must be the number of devices, and the axis is removed.
    - `tile_size`: the number of consecutive values that share a scale. The default is the tile size
      of the format, or 128 if it has none.
    - `key`: a `jax.random` key for stochastic rounding. Each device derives its own key from it. If
      None, values are rounded to nearest.
    - `error`: the rounding error that the previous call returned. It is added to `x`, so that
      rounding does not accumulate (error feedback). In the first call, pass zeros in f32 with the
      shapes of `x`.

    **Returns:** the part of the sum for this device, in the dtype of `x`. With `error`, a pair:
    this part, and the error of this device for the next call.

    **Raises:** `TypeError` if an array is implicit or not floating. `ValueError` if the axis to
    split is out of range or has another size than `tiled` requires, `error` does not have the
    structure and shapes of `x`, `qtype` is not one of the formats above, or `tile_size` is not
    positive.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> sums = lambda x: vn.distributed.psum_scatter(x, "i", "int8", tiled=True)
    >>> x = jnp.linspace(-1, 1, 1024).reshape(2, 512)
    >>> parts = jax.vmap(sums, axis_name="i")(x)
    >>> parts.shape, bool(abs(parts.ravel() - x.sum(0)).max() <= 2 * 0.5 / 127)
    ((2, 256), True)
    """
    group = _make_group("psum_scatter", axis_name, qtype, tile_size)

    def sum_leaf(x: Any, key: jax.Array | None, error: Any = None) -> Any:
        x = group.check_floating(x)
        at = group.check_axis(scatter_dimension, x.ndim)
        size, devices = x.shape[at], group.devices
        if size % devices if tiled else size != devices:
            need = f"a multiple of {devices}"
            need = need if tiled else f"{devices} (with tiled=True, a multiple)"
            raise ValueError(
                f"psum_scatter: axis {at} of shape {x.shape} cannot be split over {devices} "
                f"devices along {group.names}. Its size must be {need}, not {size}."
            )
        of_x = group._replace(dtype=x.dtype.name)
        exact = partial(lax.psum_scatter, axis_name=group.names, scatter_dimension=at, tiled=tiled)
        rounded = lambda x: _psum_scatter(x, key, of_x, at, tiled)
        return _sum_leaf(group, x, error, exact, rounded)

    return _map_leaves(sum_leaf, x, key, error)


def psum(
    x: T,
    axis_name: AxisName,
    qtype: DTypeLike = "int8",
    *,
    tile_size: int | None = None,
    key: jax.Array | None = None,
    error: Any = None,
) -> Any:
    """Sum an array over devices like `jax.lax.psum`, with quantized communication.

    Each device sums one part of the array and sends its sums to all devices, so all results are
    bitwise equal. A format of 8 bits sends about a quarter of the bytes of f32. Under
    `jax.shard_map` with `check_vma=True`, the backward pass sends nothing. Elsewhere it sums
    cotangents in the same format. There is no forward-mode derivative.

    **Arguments:**

    - `x`: a floating array, or a pytree of them, but no implicit arrays. An array with fewer than
      `n * tile_size` values is sent unquantized, where `n` is the number of devices.
    - `axis_name`: the name of a mesh axis, or a sequence of names.
    - `qtype`: a format of `vn.quant.FORMATS`, except "nf4_dq" and "nvfp4", because their scales are
      quantized.
    - `tile_size`: the number of consecutive values that share a scale. The default is the tile size
      of the format, or 128 if it has none.
    - `key`: a `jax.random` key for stochastic rounding. Each device derives its own key from it. If
      None, values are rounded to nearest.
    - `error`: the rounding error that the previous call returned. It is added to `x`, so that
      rounding does not accumulate (error feedback). In the first call, pass zeros in f32 with the
      shapes of `x`.

    **Returns:** the sum, in the shape and dtype of `x`. With `error`, a pair: the sum, and the
    error of this device for the next call.

    **Raises:** `TypeError` if an array is implicit or not floating. `ValueError` if `error` does
    not have the structure and shapes of `x`, `qtype` is not one of the formats above, or
    `tile_size` is not positive.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> sums = lambda x, e: vn.distributed.psum(x, "i", "int4", error=e)
    >>> x = jnp.linspace(-1, 1, 1024).reshape(2, 512)
    >>> total, error = jax.vmap(sums, axis_name="i")(x, jnp.zeros_like(x))
    >>> lost = x.sum(0) - total[0]                       # the next call adds the errors to x
    >>> bool(abs(lost).max() > 0.1), bool(abs(error.sum(0) - lost).max() < 1e-5)
    (True, True)
    """
    group = _make_group("psum", axis_name, qtype, tile_size)

    def sum_leaf(x: Any, key: jax.Array | None, error: Any = None) -> Any:
        x = group.check_floating(x)
        of_x = group._replace(dtype=x.dtype.name)
        exact = lambda x: lax.psum(x, group.names)
        return _sum_leaf(group, x, error, exact, lambda x: _psum(x, key, of_x))

    return _map_leaves(sum_leaf, x, key, error)


class _DeviceGroup(NamedTuple):
    """The devices of a collective, and the format of its messages.

    Hashable, because it is a static argument of `jax.custom_vjp`.

    **Arguments:**

    - `collective`: the name of the collective, for errors.
    - `names`: the names of the mesh axes.
    - `devices`: the number of devices along them.
    - `format`, `tile`: the format, and the number of consecutive values that share a scale.
    - `tracks_varying`: whether JAX tracks which values differ between devices (`check_vma`).
    - `dtype`: the dtype of the results. Sums are in f32, or f64.
    """

    collective: str
    names: tuple[str, ...]
    devices: int
    format: str
    tile: int
    tracks_varying: bool
    dtype: str = "float32"

    def check_floating(self, x: Any) -> jax.Array:
        """Return `x` as an array. Raise a `TypeError` if it is implicit or not floating."""
        if is_value(x):
            raise TypeError(
                f"{self.collective} cannot tell whether {x!r} is an array or the derivatives of "
                "its leaves. For an array, pass vn.materialise(x). For derivatives, pass "
                "jax.tree.leaves(x)."
            )
        dtype = jnp.result_type(x)
        if dtype not in QUANTIZABLE:
            raise TypeError(f"{self.collective} takes floating arrays, not {dtype.name}.")
        return jnp.asarray(x)

    def check_axis(self, axis: int, ndim: int) -> int:
        """Return `axis` as a nonnegative number. Raise a `ValueError` if it is out of range."""
        if not -ndim <= axis < ndim:
            raise ValueError(f"{self.collective}: axis {axis} is out of range for {ndim} axes.")
        return axis % ndim

    def key_of_device(self, key: jax.Array | None) -> jax.Array | None:
        """Return a random key that differs between devices, or None if `key` is None."""
        return None if key is None else jax.random.fold_in(key, lax.axis_index(self.names))

    def quantize(self, rows: jax.Array, key: jax.Array | None) -> tuple[QArray, jax.Array]:
        """Quantize rows `[n, size]`. Each tile of `tile` consecutive values has one scale.

        `key` is for stochastic rounding. None rounds to nearest.

        **Returns:** a `QArray` `[n, tiles, tile]`, with zeros after the last value of a row, and
        the rounding errors `[n, size]`. The error of a value that is not finite is 0, so that it
        does not reach the next call.
        """
        tiles = jnp.pad(rows, [(0, 0), (0, -rows.shape[1] % self.tile)])
        tiles = tiles.reshape(rows.shape[0], -1, self.tile)
        params = quantize_params(tiles, self.format, (0, 1), {2: self.tile}, None, None)
        q = quantize_with_params(tiles, dataclasses.replace(params, stable_in=self.dtype), key)
        error = rows - _dequantize_rows(q, rows.shape[1])
        return q, jnp.where(jnp.isfinite(error), error, 0)

    def reduce_scatter(self, rows: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Send row `i` of `rows` `[devices, n]`, quantized, to device `i`.

        **Returns:** the sum `[n]` of the rows that this device receives, and the rounding errors
        `[devices, n]` of the rows that it sends.
        """
        q, error = self.quantize(rows, key)
        q = _send(lambda leaf: lax.all_to_all(leaf, self.names, 0, 0, tiled=True), q)
        return _dequantize_rows(q, rows.shape[1]).sum(0), error

    def gather(
        self, x: jax.Array, key: jax.Array | None, invarying: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Gather the array `x` `[n]` of each device, quantized.

        `invarying` says whether to tell JAX that the result is the same on all devices.

        **Returns:** the arrays of all devices, `[devices, n]`, and the rounding errors of this
        device's `x`, `[n]`.
        """
        q, error = self.quantize(x[None], key)
        to = "invarying" if invarying else "varying"
        q = _send(lambda leaf: lax.all_gather(leaf, self.names, tiled=True, to=to), q)
        return _dequantize_rows(q, x.size), error[0]


def _dequantize_rows(q: QArray, size: int) -> jax.Array:
    """Return the rows `[n, size]` that `_DeviceGroup.quantize` quantized, without its padding."""
    return q.dequantize().reshape(q.shape[0], -1)[:, :size]


def _send(send: Callable[[jax.Array], jax.Array], q: QArray) -> QArray:
    """Apply the collective `send` to each leaf of `q`. Floats of 8 bits are sent as bytes."""

    def send_leaf(leaf: jax.Array) -> jax.Array:
        if leaf.dtype.itemsize > 1:
            return send(leaf)
        return lax.bitcast_convert_type(send(lax.bitcast_convert_type(leaf, jnp.uint8)), leaf.dtype)

    return jax.tree.map(send_leaf, q)


def _make_group(
    collective: str, axis_name: AxisName, qtype: DTypeLike, tile: int | None
) -> _DeviceGroup:
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    format = get_format(qtype)
    if format.scale_tile is not None:
        raise ValueError(
            f"{collective} does not support the format {format.name}, whose scales are quantized. "
            "Use a format such as 'int8' or 'mxfp8'."
        )
    tile = format.tile_size or 128 if tile is None else tile
    if tile < 1:
        raise ValueError(f"{collective}: tile_size must be positive, not {tile}.")
    tracks_varying = bool(varying_axes(vary_along(names, jnp.zeros(()))))
    devices = math.prod(map(lax.axis_size, names))
    return _DeviceGroup(collective, names, devices, format.name, tile, tracks_varying)


def _map_leaves(f: Callable, tree: Any, key: jax.Array | None, error: Any = None) -> Any:
    """Call `f(x, key)` for each array of a tree, and return the tree of results.

    Each array gets its own random key, derived from `key`, or None if `key` is None. With a tree
    `error` of the same structure, call `f(x, key, error)`, which returns a sum and a new error,
    and return two trees: the sums and the new errors.
    """
    structure: Any  # mypy does not know PyTreeDef
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_value)
    keys = [None if key is None else jax.random.fold_in(key, i) for i in range(len(leaves))]
    if error is None:
        return jax.tree.unflatten(structure, map(f, leaves, keys))
    errors, error_structure = jax.tree.flatten(error)
    if error_structure != structure:
        raise ValueError(f"error must have the structure of x, {structure}, not {error_structure}.")
    results = list(map(f, leaves, keys, errors))
    sums, errors = ([result[i] for result in results] for i in range(2))
    return jax.tree.unflatten(structure, sums), jax.tree.unflatten(structure, errors)


def _sum_leaf(
    group: _DeviceGroup, x: jax.Array, error: Any, exact: Callable, rounded: Callable
) -> Any:
    """Return the sum of the array `x` over devices, in the dtype of `x`.

    `rounded(x)` computes the sum with quantized messages, and returns it with the rounding error of
    this device. Arrays with less than one tile per device use `exact(x)` instead, which returns
    the exact sum. If `error` is not None, it is added to `x`, and the result is a pair of the sum
    and the new error.
    """
    wide = vary_along(group.names, _at_least_f32(x))
    if error is not None:
        if jnp.shape(error) != x.shape:
            raise ValueError(
                f"{group.collective}: an error has shape {jnp.shape(error)}, its array {x.shape}."
            )
        wide += error
    is_small = x.size < group.tile * group.devices
    total, new_error = (exact(wide), jnp.zeros_like(wide)) if is_small else rounded(wide)
    return total.astype(x.dtype) if error is None else (total.astype(x.dtype), new_error)


def _at_least_f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# The collectives of one array in f32 or f64. Their derivatives are the derivatives of the exact
# collectives, with messages in the same format. The rounding errors have no derivative.


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _all_gather(
    x: jax.Array, key: jax.Array | None, group: _DeviceGroup, axis: int, tiled: bool
) -> jax.Array:
    rows, _ = group.gather(x.ravel(), group.key_of_device(key))
    stacked = jnp.moveaxis(rows.reshape(group.devices, *x.shape), 0, axis)
    if not tiled:
        return stacked
    return stacked.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _psum_scatter(
    x: jax.Array, key: jax.Array | None, group: _DeviceGroup, axis: int, tiled: bool
) -> tuple[jax.Array, jax.Array]:
    parts = jnp.moveaxis(
        x.reshape(*x.shape[:axis], group.devices, -1, *x.shape[axis + 1 :]), axis, 0
    )
    total, error = group.reduce_scatter(parts.reshape(group.devices, -1), group.key_of_device(key))
    shape = parts.shape[1:] if tiled else (*x.shape[:axis], *x.shape[axis + 1 :])
    return total.reshape(shape), jnp.moveaxis(error.reshape(parts.shape), 0, axis).reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _psum(x: jax.Array, key: jax.Array | None, group: _DeviceGroup) -> tuple[jax.Array, jax.Array]:
    own_key = group.key_of_device(key)
    pad = -x.size % (group.devices * group.tile)
    rows = jnp.pad(x.ravel(), (0, pad)).reshape(group.devices, -1)
    part, error = group.reduce_scatter(rows, own_key)
    total, part_error = group.gather(part, _second_key(own_key), group.tracks_varying)
    # The device that sends a part of the sum also has the rounding error of that part.
    error = error.at[lax.axis_index(group.names)].add(part_error)
    total, error = (y.ravel()[: x.size].reshape(x.shape) for y in (total, error))
    return total, error


def _second_key(key: jax.Array | None) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, 2**31)


def _define_vjp(collective: Any, backward: Callable[..., jax.Array]) -> None:
    """Define the derivative of `collective(x, key, *static)`, a `jax.custom_vjp` function.

    `backward(g, key, *static)` returns the cotangent of `x`. `g` is the cotangent of the result.
    """

    def forward(x: jax.Array, key: jax.Array | None, *static: Any) -> tuple[Any, jax.Array | None]:
        return collective(x, key, *static), key

    collective.defvjp(forward, lambda *args: (backward(args[-1], args[-2], *args[:-2]), None))


def _psum_cotangent(g: Any, key: jax.Array | None, group: _DeviceGroup) -> jax.Array:
    if group.tracks_varying:  # all devices have the same cotangent, so there is nothing to sum
        return vary_along(group.names, g[0])
    return _psum(g[0], _second_key(key), group)[0]


_define_vjp(_all_gather, lambda g, key, *static: _psum_scatter(g, _second_key(key), *static)[0])
_define_vjp(_psum_scatter, lambda g, key, *static: _all_gather(g[0], _second_key(key), *static))
_define_vjp(_psum, _psum_cotangent)


def __dir__() -> list[str]:
    return __all__
