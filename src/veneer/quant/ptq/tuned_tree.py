"""A tree whose quantised leaves are trained: what of each, and how it is stored in the end."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...types.basis import InBasis
from ..arrays.qarray import QUANTIZABLE, QArray
from ..formats.packing import pack
from ..formats.rounding import round_to_dtype
from ..formats.tiles import over_tiles
from ..weights.activations import ActivationQuantized

#: By how much more codes are trained than scales: what this found best of 1 and 4, for int2.
_OF_CODES = 4.0


class TunedTree:
    """A tree of which some leaves are trained.

    **Arguments:**

    - `quantised`, `dense`: the tree, and what it was rounded from.
    - `train`: of `"codes"`, `"scales"` and `"dense"`.

    `fixed` has its arrays, as they were.

    **Raises:** `ValueError` where there is nothing to train.
    """

    def __init__(self, quantised: Any, dense: Any, train: frozenset[str]):
        is_q = lambda x: isinstance(x, QArray)
        self._quantised, self._unrounded = quantised, dense
        self._leaves, self._treedef = jax.tree.flatten(quantised, is_leaf=is_q)
        self._codes = (
            {i: q for i, q in enumerate(self._leaves) if is_q(q)} if "codes" in train else {}
        )
        self._scales = {}
        if "scales" in train:
            self._scales = {i: q for i, q in enumerate(self._leaves) if is_q(q) and _has_floats(q)}
        self._dense = {}
        if "dense" in train:
            self._dense = {
                i: x for i, x in enumerate(self._leaves) if not is_q(x) and _is_floating(x)
            }
        if not (self._codes or self._scales or self._dense):
            raise ValueError(
                f"there is nothing to train: the tree has no {' or '.join(sorted(train))}. Only "
                "floating scales and the codes of a QArray can be trained"
            )
        arrays = [isinstance(x, jax.Array | np.ndarray | QArray) for x in self._leaves]
        self.fixed = [
            x if is_array else None for x, is_array in zip(self._leaves, arrays, strict=True)
        ]

    def start(self) -> Any:
        """Returns what is trained: codes by what they were rounded from, others by no change."""
        wanted = _dense_values(self._quantised, self._unrounded) if self._codes else {}
        codes = {i: _latent(q, wanted.get(i)) / _step(q) for i, q in self._codes.items()}
        scales = {i: jnp.zeros(q.scale.shape, jnp.float32) for i, q in self._scales.items()}
        dense = {i: jnp.zeros(x.shape, jnp.float32) for i, x in self._dense.items()}
        return {"codes": codes, "scales": scales, "dense": dense}

    def tree(self, state: Any, fixed: Sequence[Any]) -> Any:
        """Returns the tree for a state, with arrays that have derivatives in place of QArrays."""
        leaves = list(self._leaves)
        for i, array in enumerate(fixed):
            leaves[i] = leaves[i] if array is None else array
        for i in {**self._codes, **self._scales}:
            leaves[i] = _value(leaves[i], state["codes"].get(i), state["scales"].get(i))
        for i in self._dense:
            leaves[i] = _moved(leaves[i], state["dense"][i])
        return jax.tree.unflatten(self._treedef, leaves)

    def stored(self, state: Any) -> Any:
        """Returns the tree for a state, as it is stored."""
        leaves = list(self._leaves)
        for i in {**self._codes, **self._scales}:
            leaves[i] = _stored(leaves[i], state["codes"].get(i), state["scales"].get(i))
        for i in self._dense:
            leaves[i] = _moved(leaves[i], state["dense"][i])
        return jax.tree.unflatten(self._treedef, leaves)


def _has_floats(q: QArray) -> bool:
    """Whether scales are floats of a dtype that a share of one changes; not powers of two."""
    return not isinstance(q.scale, QArray) and q.scale.dtype in QUANTIZABLE


def _is_floating(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _dense_values(quantised: Any, dense: Any) -> dict[int, Any]:
    """By the number of a QArray, the dense array that it was made of, as it would be stored."""
    is_q = lambda x: isinstance(x, QArray)
    leaves = jax.tree.leaves(dense)
    found: dict[int, Any] = {}
    parts, treedef = jax.tree.flatten(quantised, is_leaf=is_q)
    numbers = jax.tree.unflatten(treedef, list(range(len(parts))))
    same = lambda x: isinstance(x, QArray | InBasis | ActivationQuantized)
    whole = jax.tree.leaves(quantised, is_leaf=same)
    of_whole = jax.tree.leaves(numbers, is_leaf=same)
    if len(whole) != len(leaves):
        return found  # other trees, as with a LoraArray: codes begin where they are
    for leaf, number, array in zip(whole, of_whole, leaves, strict=True):
        while isinstance(leaf, InBasis | ActivationQuantized):
            array = leaf.stored(jnp.asarray(array)) if isinstance(leaf, InBasis) else array
            leaf, number = leaf.array, number.array
        if is_q(leaf) and getattr(array, "shape", None) == leaf.shape:
            found[number] = array
    return found


def _units(q: QArray, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Values in steps of a code, of these scales."""
    minimum = q.minima()
    x = x if minimum is None else over_tiles(jnp.subtract, x, minimum)
    x = over_tiles(jnp.divide, x, jnp.where(scale == 0, 1, scale))
    zero_point = q.zero_points()
    return x if zero_point is None else over_tiles(jnp.add, x, zero_point.astype(x.dtype))


def _worth(q: QArray, x: jax.Array, scale: jax.Array) -> jax.Array:
    """What values in steps of a code are worth: undoes `_units`."""
    zero_point = q.zero_points()
    x = x if zero_point is None else over_tiles(jnp.subtract, x, zero_point.astype(x.dtype))
    x, minimum = over_tiles(jnp.multiply, x, scale), q.minima()
    return x if minimum is None else over_tiles(jnp.add, x, minimum)


def _latent(q: QArray, wanted: Any) -> jax.Array:
    """What is trained of codes: the value that each was rounded from, or near it.

    Where a method has chosen another code than the nearest, the end of what is rounded to it.
    """
    code = q.format.decode(q.codes(), jnp.float32)
    if wanted is None:
        return code
    exact = _units(q, jnp.asarray(wanted, jnp.float32), q.scales())
    near = code + jnp.clip(exact - code, -0.3, 0.3)
    return jnp.where(q.format.encode(near) == q.codes(), near, code)


def _scale(q: QArray, change: jax.Array | None) -> jax.Array:
    """The scales of a state, as they are stored, with a derivative as if they were not rounded."""
    scale = q.scales()
    if change is None:
        return scale
    exact = scale * jnp.exp(change)
    return exact + jax.lax.stop_gradient(round_to_dtype(exact, q.scale.dtype) - exact)


def _value(q: QArray, codes: jax.Array | None, change: jax.Array | None) -> jax.Array:
    """The values of a state, with a derivative straight through the rounding."""
    scale = _scale(q, change)
    if codes is None:
        rounded = q.format.decode(q.codes(), jnp.float32)
    else:
        now = _now(q, codes, scale)
        within = jnp.clip(now, *_range(q))
        hard = q.format.decode(q.format.encode(now), jnp.float32)
        rounded = within + jax.lax.stop_gradient(hard - within)
    return _worth(q, rounded, scale).astype(q.dtype)


def _now(q: QArray, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """What is trained of codes, in steps of the scales that are now."""
    return _units(q, _worth(q, _step(q) * codes, q.scales()), scale)


def _step(q: QArray) -> float:
    """By how much codes are trained, of what is between two."""
    low, high = _range(q)
    return _OF_CODES * (high - low) / (2**q.format.bits - 1)


def _range(q: QArray) -> tuple[float, float]:
    if q.format.codebook is not None:
        return min(q.format.codebook), max(q.format.codebook)
    if q.format.is_integer:
        low, high = q.format.code_range
        return float(low), float(high)
    largest = float(jnp.finfo(q.format.code_dtype).max)
    return -largest, largest


def _stored(q: QArray, codes: jax.Array | None, change: jax.Array | None) -> QArray:
    """What is stored of a state."""
    scale = _scale(q, change)
    if codes is not None:
        now = _now(q, codes, scale)
        new = q.format.encode(now)
        if q.packing is None:
            packed = new.astype(q.packed.dtype)
        else:
            packed, _ = pack(q.format.to_fields(new), q.format.bits, q.packing.axis)
        q = q.replace(packed=packed)
    return q if change is None else q.replace(scale=scale.astype(q.scale.dtype))


def _moved(x: Any, change: jax.Array) -> jax.Array:
    """A dense array that is changed by a share of its spread."""
    wide = jnp.asarray(x, jnp.float32)
    spread = jnp.sqrt(jnp.mean(wide**2))
    return (wide + jnp.where(spread > 0, spread, 1) * change).astype(x.dtype)
