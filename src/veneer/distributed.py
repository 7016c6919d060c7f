"""Collectives that send dense arrays quantised: gradients, activations, weights kept in full.

As `jax.lax` has them, under `jax.shard_map`, and with the format in which values are sent. Sums are
taken in f32 of what each device was sent, and then sent in turn, so that all devices have the same.
Values that were sent and are sent again do not change: the scales are those of caches.
An implicit array needs none of it: under `vn.implicit`, JAX's own send it as it is stored.

Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training (2023);
Ahmed et al., EQuARX: Efficient Quantized AllReduce in XLA for Distributed ML Acceleration (2025).
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
from .quant.conversion.quantize import quantize_by, quantize_params
from .quant.formats import get_format
from .quant.qarray import QUANTIZABLE, QArray

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
    """`lax.all_gather` of what each device has, quantised.

    Each device has the same, its own part quantised, too. In the backward pass cotangents are
    summed by `psum_scatter` in the same format. There is no forward-mode derivative.

    **Arguments:**

    - `x`: an array, `[...]`, or a tree of them; f16, bf16, f32 or f64. An implicit array is made
      dense. One of fewer values than a tile is sent as it is.
    - `axis_name`: of the mesh, or several, as for `lax.all_gather`; and so `axis` and `tiled`.
    - `qtype`: the format, by its name in `vn.quant.FORMATS`.
    - `tile_size`: how many values, neighbours in memory, share a scale in f32: that of the format,
      or else 128.
    - `key`: of `jax.random`, to round up or down at random: each device by a key of its own.

    **Returns:** the array `[..., devices, ...]`, or with an axis that is as many times longer, in
    the dtype of `x`.

    **Raises:** `TypeError` for an array that is not floating. `ValueError` for an axis out of
    range, and for a format or a tile as `vn.quant.quantize` does.

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
    """`lax.psum_scatter` of arrays that are sent quantised; sums are in f32.

    In the backward pass cotangents are gathered by `all_gather` in the same format. There is no
    forward-mode derivative.

    **Arguments:** those of `all_gather`, and

    - `x`: as there, but that an implicit array is refused, for as a tree it may be its derivatives.
      One of which a device would have fewer values than a tile is sent as it is.
    - `scatter_dimension`, `tiled`: as for `lax.psum_scatter`.
    - `error`: what was lost in the call before: the tree of that call, or one of zeros, each in
      f32 (or f64) with the shape of its array in `x`. It is added before rounding, so that over
      many steps nothing is lost: error feedback, for gradients.

    **Returns:** the part of the sum that a device is given, in the dtype of `x`; with `error`, a
    pair of that and the error to give to the next call, which is another on each device.

    **Raises:** what `all_gather` does, and `ValueError` where devices cannot have equal parts of an
    axis, or an error has another shape than its array.

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
    """`lax.psum` of arrays that are sent quantised: each device sums a part, and sends the sums.

    All devices have the same sums, to the bit, in about a quarter of the bytes of f32 with a format
    of 8 bits. The derivative is that of `lax.psum`: where a `shard_map` keeps account of what
    varies, cotangents are what all devices have, and nothing is sent; elsewhere they are summed in
    the same format. There is no forward-mode derivative.

    **Arguments:** those of `psum_scatter` but for the axis. An array with fewer values than a tile
    for each device is summed as it is.

    **Returns:** the sum, in the shape and dtype of `x`; with `error`, a pair of that and the error
    to give to the next call, which is another on each device: of what a device sends, and of the
    sums that it sends on.

    **Raises:** what `psum_scatter` does.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> sums = lambda x, e: vn.distributed.psum(x, "i", "int4", error=e)
    >>> x = jnp.linspace(-1, 1, 1024).reshape(2, 512)
    >>> total, error = jax.vmap(sums, axis_name="i")(x, jnp.zeros_like(x))
    >>> lost = x.sum(0) - total[0]                       # is in the errors, to be sent next time
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
        q = quantize_by(tiles, dataclasses.replace(params, stable_in=self.dtype), key)
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
            f"{collective} in {format.name}: its scales are quantised in turn, some of several "
            "devices together; take a format whose scales are not, as 'int8' or 'mxfp8'"
        )
    tile = format.tile_size or 128 if tile is None else tile
    if tile < 1:
        raise ValueError(f"{collective}: a tile of {tile} has no values")
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
        raise ValueError(f"the errors are {of_errors}, and the arrays {structure}")
    outs = list(map(of_leaf, leaves, keys, errors))
    sums, errors = ([out[i] for out in outs] for i in range(2))
    return jax.tree.unflatten(structure, sums), jax.tree.unflatten(structure, errors)


def _floating(sent: _Sent, x: Any) -> jax.Array:
    if is_value(x):
        raise TypeError(
            f"{sent.collective} of {x!r}: a tree with these leaves may be an array, or its "
            "derivatives by each leaf, as of jax.grad. Of an array, give vn.materialise of it; of "
            "derivatives, their leaves: jax.tree.leaves of the whole tree"
        )
    dtype = jnp.result_type(x)
    if dtype not in QUANTIZABLE:
        raise TypeError(f"{sent.collective} in {sent.format} takes floats, not {dtype.name}")
    return jnp.asarray(x)


def _axis(sent: _Sent, axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"{sent.collective}: axis {axis} is out of range for {ndim} axes")
    return axis % ndim


def _check_parts(sent: _Sent, shape: tuple[int, ...], axis: int, tiled: bool) -> None:
    size, devices = shape[axis], sent.devices
    if size % devices if tiled else size != devices:
        wanted = f"a multiple of {devices}" if tiled else f"{devices}, or tiled=True"
        raise ValueError(
            f"{sent.collective}: {devices} devices along {sent.names} cannot have equal parts of "
            f"axis {axis} (size {size}) of shape {shape}, which should be {wanted}"
        )


def _summed(sent: _Sent, x: jax.Array, error: Any, exact: Callable, rounded: Callable) -> Any:
    """A sum, and what is lost if there was an error before: exact of a small array."""
    total = vary_along(sent.names, _wide(x))
    if error is not None:
        if jnp.shape(error) != x.shape:
            raise ValueError(
                f"{sent.collective}: an error has shape {jnp.shape(error)}, and its array {x.shape}"
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
