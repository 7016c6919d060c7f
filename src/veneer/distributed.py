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
from .quant.arrays.qarray import QUANTIZABLE, QArray
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
    sent = _sent("all_gather", axis_name, qtype, tile_size)

    def of_leaf(x: Any, key: jax.Array | None) -> jax.Array:
        x = _floating(sent, materialise_one(x))
        of_x = sent._replace(dtype=x.dtype.name)
        at = _axis(sent, axis, x.ndim + (not tiled))
        if x.size < sent.tile:
            return lax.all_gather(x, sent.names, axis=at, tiled=tiled)
        whole = _all_gather(_wide(vary_along(sent.names, x)), key, of_x, at, tiled)
        return whole.astype(x.dtype)

    return _each(of_leaf, x, key)


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
    sent = _sent("psum_scatter", axis_name, qtype, tile_size)

    def exact(x: jax.Array, at: int) -> jax.Array:
        return lax.psum_scatter(x, sent.names, scatter_dimension=at, tiled=tiled)

    def of_leaf(x: Any, key: jax.Array | None, error: Any = None) -> Any:
        x = _floating(sent, x)
        of_x = sent._replace(dtype=x.dtype.name)
        at = _axis(sent, scatter_dimension, x.ndim)
        _check_parts(sent, x.shape, at, tiled)
        rounded = lambda x: _psum_scatter(x, key, of_x, at, tiled)
        return _summed(sent, x, error, lambda x: exact(x, at), rounded)

    return _each(of_leaf, x, key, error)


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
    sent = _sent("psum", axis_name, qtype, tile_size)

    def of_leaf(x: Any, key: jax.Array | None, error: Any = None) -> Any:
        x = _floating(sent, x)
        of_x = sent._replace(dtype=x.dtype.name)
        exact = lambda x: lax.psum(x, sent.names)
        return _summed(sent, x, error, exact, lambda x: _psum(x, key, of_x))

    return _each(of_leaf, x, key, error)


class _Sent(NamedTuple):
    """How arrays are sent: hashable, for `jax.custom_vjp`."""

    collective: str
    names: tuple[str, ...]
    devices: int
    format: str
    tile: int
    is_told: bool  # whether an account is kept of what differs between devices
    dtype: str = "float32"  # the dtype of the results; the sums are in f32

    def own_key(self, key: jax.Array | None) -> jax.Array | None:
        """A key that no other device has."""
        return None if key is None else jax.random.fold_in(key, lax.axis_index(self.names))

    def quantised(self, parts: jax.Array, key: jax.Array | None) -> tuple[QArray, jax.Array]:
        """Arrays `[parts, n]` as `[parts, tiles, tile]`, and what is lost of them."""
        tiles = jnp.pad(parts, [(0, 0), (0, -parts.shape[1] % self.tile)])
        tiles = tiles.reshape(parts.shape[0], -1, self.tile)
        params = quantize_params(tiles, self.format, (0, 1), {2: self.tile}, None, None)
        q = quantize_with_params(tiles, dataclasses.replace(params, stable_in=self.dtype), key)
        lost = parts - _as_parts(q, parts.shape[1])
        return q, jnp.where(jnp.isfinite(lost), lost, 0)  # a step with NaN is one to leave out

    def exchanged(self, parts: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The sum `[n]` of what devices have for this one, and what this one lost in sending."""
        q, lost = self.quantised(parts, key)
        q = _by_bytes(lambda leaf: lax.all_to_all(leaf, self.names, 0, 0, tiled=True), q)
        return _as_parts(q, parts.shape[1]).sum(0), lost

    def gathered(
        self, x: jax.Array, key: jax.Array | None, is_same: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """What all devices have, `[devices, n]` of `[n]`, and what this one lost in sending."""
        q, lost = self.quantised(x[None], key)
        to = "invarying" if is_same else "varying"
        q = _by_bytes(lambda leaf: lax.all_gather(leaf, self.names, tiled=True, to=to), q)
        return _as_parts(q, x.size), lost[0]


def _as_parts(q: QArray, size: int) -> jax.Array:
    """The dense form of arrays of tiles, without what was added at the end: `[parts, size]`."""
    return q.dequantize().reshape(q.shape[0], -1)[:, :size]


def _by_bytes(send: Callable[[jax.Array], jax.Array], q: QArray) -> QArray:
    """A QArray each of whose leaves is sent; a float of 8 bits as the byte that it is."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        if leaf.dtype.itemsize > 1:
            return send(leaf)
        return lax.bitcast_convert_type(send(lax.bitcast_convert_type(leaf, jnp.uint8)), leaf.dtype)

    return jax.tree.map(of_leaf, q)


def _sent(collective: str, axis_name: AxisName, qtype: DTypeLike, tile: int | None) -> _Sent:
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
    is_told = bool(varying_axes(vary_along(names, jnp.zeros(()))))
    devices = math.prod(map(lax.axis_size, names))
    return _Sent(collective, names, devices, format.name, tile, is_told)


def _each(of_leaf: Callable, tree: Any, key: jax.Array | None, error: Any = None) -> Any:
    """What a function gives of each array of a tree: of several results, so many trees."""
    structure: Any  # mypy does not know PyTreeDef
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_value)
    keys = [None if key is None else jax.random.fold_in(key, i) for i in range(len(leaves))]
    if error is None:
        return jax.tree.unflatten(structure, map(of_leaf, leaves, keys))
    errors, of_errors = jax.tree.flatten(error)
    if of_errors != structure:
        raise ValueError(f"error must have the structure of x, {structure}, not {of_errors}.")
    outs = list(map(of_leaf, leaves, keys, errors))
    sums, errors = ([out[i] for out in outs] for i in range(2))
    return jax.tree.unflatten(structure, sums), jax.tree.unflatten(structure, errors)


def _floating(sent: _Sent, x: Any) -> jax.Array:
    if is_value(x):
        raise TypeError(
            f"{sent.collective} cannot tell whether {x!r} is an array or the derivatives of its "
            "leaves. For an array, pass vn.materialise(x). For derivatives, pass "
            "jax.tree.leaves(x)."
        )
    dtype = jnp.result_type(x)
    if dtype not in QUANTIZABLE:
        raise TypeError(f"{sent.collective} takes floating arrays, not {dtype.name}.")
    return jnp.asarray(x)


def _axis(sent: _Sent, axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"{sent.collective}: axis {axis} is out of range for {ndim} axes.")
    return axis % ndim


def _check_parts(sent: _Sent, shape: tuple[int, ...], axis: int, tiled: bool) -> None:
    size, devices = shape[axis], sent.devices
    if size % devices if tiled else size != devices:
        wanted = f"a multiple of {devices}" if tiled else f"{devices} (with tiled=True, a multiple)"
        raise ValueError(
            f"{sent.collective}: axis {axis} of shape {shape} cannot be split over {devices} "
            f"devices along {sent.names}. Its size must be {wanted}, not {size}."
        )


def _summed(sent: _Sent, x: jax.Array, error: Any, exact: Callable, rounded: Callable) -> Any:
    """A sum, and what is lost if there was an error before: exact of a small array."""
    total = vary_along(sent.names, _wide(x))
    if error is not None:
        if jnp.shape(error) != x.shape:
            raise ValueError(
                f"{sent.collective}: an error has shape {jnp.shape(error)}, its array {x.shape}."
            )
        total += error
    is_small = x.size < sent.tile * sent.devices
    out, lost = (exact(total), jnp.zeros_like(total)) if is_small else rounded(total)
    return out.astype(x.dtype) if error is None else (out.astype(x.dtype), lost)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# Of one array in f32 or f64. Derivatives are those of the exact collectives, in the same format;
# what is lost in rounding has none.


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _all_gather(
    x: jax.Array, key: jax.Array | None, sent: _Sent, axis: int, tiled: bool
) -> jax.Array:
    parts = sent.gathered(x.ravel(), sent.own_key(key))[0].reshape(sent.devices, *x.shape)
    stacked = jnp.moveaxis(parts, 0, axis)
    if not tiled:
        return stacked
    return stacked.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def _all_gather_bwd(
    sent: _Sent, axis: int, tiled: bool, key: jax.Array | None, g: jax.Array
) -> tuple[jax.Array, None]:
    return _psum_scatter(g, _other(key), sent, axis, tiled)[0], None


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _psum_scatter(
    x: jax.Array, key: jax.Array | None, sent: _Sent, axis: int, tiled: bool
) -> tuple[jax.Array, jax.Array]:
    parts = jnp.moveaxis(
        x.reshape(*x.shape[:axis], sent.devices, -1, *x.shape[axis + 1 :]), axis, 0
    )
    total, error = sent.exchanged(parts.reshape(sent.devices, -1), sent.own_key(key))
    shape = parts.shape[1:] if tiled else (*x.shape[:axis], *x.shape[axis + 1 :])
    return total.reshape(shape), jnp.moveaxis(error.reshape(parts.shape), 0, axis).reshape(x.shape)


def _psum_scatter_bwd(
    sent: _Sent, axis: int, tiled: bool, key: jax.Array | None, g: Any
) -> tuple[jax.Array, None]:
    return _all_gather(g[0], _other(key), sent, axis, tiled), None


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _psum(x: jax.Array, key: jax.Array | None, sent: _Sent) -> tuple[jax.Array, jax.Array]:
    own_key = sent.own_key(key)
    pad = -x.size % (sent.devices * sent.tile)
    parts = jnp.pad(x.ravel(), (0, pad)).reshape(sent.devices, -1)
    part, error = sent.exchanged(parts, own_key)
    total, lost = sent.gathered(part, _other(own_key), sent.is_told)
    error = error.at[lax.axis_index(sent.names)].add(lost)  # by who sends the sum, of the sum
    total, error = (y.ravel()[: x.size].reshape(x.shape) for y in (total, error))
    return total, error


def _psum_bwd(sent: _Sent, key: jax.Array | None, g: Any) -> tuple[jax.Array, None]:
    if sent.is_told:  # all devices have the same cotangent, and no sum is taken of it
        return vary_along(sent.names, g[0]), None
    return _psum(g[0], _other(key), sent)[0], None


for _collective, _bwd in (
    (_all_gather, _all_gather_bwd),
    (_psum_scatter, _psum_scatter_bwd),
    (_psum, _psum_bwd),
):
    _collective.defvjp(lambda x, key, *how, f=_collective: (f(x, key, *how), key), _bwd)


def _other(key: jax.Array | None) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, 2**31)


def __dir__() -> list[str]:
    return __all__
