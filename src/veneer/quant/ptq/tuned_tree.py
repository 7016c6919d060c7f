"""`TunedTree`, a tree whose codes, scales and dense arrays are trained.

The trained variables of a leaf are a dict:

| name | of | variable |
|---|---|---|
| "codes" | a `QArray` | the codes before rounding, divided by `_code_step` |
| "scales" | a `QArray` | the logarithm of the change of each scale |
| "dense" | a dense array | the change, divided by the root mean square of the array |
"""

from collections.abc import Mapping, Sequence
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

#: The learning rate of codes, relative to the rate of scales. For int2, 4 was better than 1.
_CODES_RATE = 4.0

Variables = Mapping[str, jax.Array]


class TunedTree:
    """A tree with some trained leaves.

    `fixed` is the list of the arrays of the tree before training, None for leaves of other types.

    **Arguments:**

    - `quantized`: the tree.
    - `dense`: the tree before quantization.
    - `train`: the trained parts, a subset of "codes", "scales" and "dense".

    **Raises:** `ValueError` if the tree has none of these parts.
    """

    def __init__(self, quantized: Any, dense: Any, train: frozenset[str]):
        self._quantized, self._dense = quantized, dense
        self._leaves, self._treedef = jax.tree.flatten(quantized, is_leaf=_is_qarray)
        parts = [train & _trainable_parts(leaf) for leaf in self._leaves]
        self._parts = {i: names for i, names in enumerate(parts) if names}
        if not self._parts:
            raise ValueError(
                f"there is nothing to train: the tree has no {' or '.join(sorted(train))}. Only "
                "floating scales and the codes of a QArray can be trained"
            )
        self.fixed = arrays_only(self._leaves)

    def start(self) -> dict[int, Variables]:
        """Return the initial variables of each trained leaf.

        Codes start from the dense values, and all other parts start unchanged.
        """
        needs_dense = any("codes" in names for names in self._parts.values())
        dense = _dense_leaves(self._quantized, self._dense) if needs_dense else {}
        state: dict[int, Variables] = {}
        for i, names in self._parts.items():
            leaf = self._leaves[i]
            variables: dict[str, jax.Array] = {}
            if "codes" in names:
                variables["codes"] = _codes_before_rounding(leaf, dense.get(i)) / _code_step(leaf)
            if "scales" in names:
                variables["scales"] = jnp.zeros(leaf.scale.shape, jnp.float32)
            if "dense" in names:
                variables["dense"] = jnp.zeros(leaf.shape, jnp.float32)
            state[i] = variables
        return state

    def tree(self, state: Mapping[int, Variables], fixed: Sequence[Any]) -> Any:
        """Return the tree for some variables, with dense arrays, which have derivatives."""
        leaves = replace_arrays(self._leaves, fixed)
        for i, variables in state.items():
            leaves[i] = _dense_value(leaves[i], variables)
        return jax.tree.unflatten(self._treedef, leaves)

    def stored(self, state: Mapping[int, Variables]) -> Any:
        """Return the tree for some variables, with quantized arrays."""
        leaves = list(self._leaves)
        for i, variables in state.items():
            leaves[i] = _stored_value(leaves[i], variables)
        return jax.tree.unflatten(self._treedef, leaves)


def arrays_only(leaves: Sequence[Any]) -> list[Any]:
    """Return leaves with None in place of those that are not arrays, to pass to `jax.jit`."""
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray | QArray)
    return [leaf if is_array(leaf) else None for leaf in leaves]


def replace_arrays(leaves: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Return leaves with arrays from another list. None keeps a leaf."""
    return [x if array is None else array for x, array in zip(leaves, arrays, strict=True)]


def _is_qarray(x: Any) -> bool:
    return isinstance(x, QArray)


def _trainable_parts(leaf: Any) -> set[str]:
    if isinstance(leaf, QArray):
        # A small change of a quantized scale, or of a power of two, would be rounded away.
        has_float_scale = not isinstance(leaf.scale, QArray) and leaf.scale.dtype in QUANTIZABLE
        return {"codes", "scales"} if has_float_scale else {"codes"}
    is_floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return {"dense"} if is_floating else set()


def _dense_leaves(quantized: Any, dense: Any) -> dict[int, Any]:
    """Return the dense array of each QArray, in its basis, by the index of the leaf.

    The result is empty if the trees have different structures, as with a `LoraArray`. Codes then
    start from their quantized values.
    """
    parts, treedef = jax.tree.flatten(quantized, is_leaf=_is_qarray)
    indices = jax.tree.unflatten(treedef, list(range(len(parts))))
    is_weight = lambda x: isinstance(x, QArray | InBasis | ActivationQuantized)
    weights = jax.tree.leaves(quantized, is_leaf=is_weight)
    dense_leaves = jax.tree.leaves(dense)
    found: dict[int, Any] = {}
    if len(weights) != len(dense_leaves):
        return found
    indices = jax.tree.leaves(indices, is_leaf=is_weight)
    for weight, index, array in zip(weights, indices, dense_leaves, strict=True):
        while isinstance(weight, InBasis | ActivationQuantized):
            array = weight.stored(jnp.asarray(array)) if isinstance(weight, InBasis) else array
            weight, index = weight.array, index.array
        if isinstance(weight, QArray) and getattr(array, "shape", None) == weight.shape:
            found[index] = array
    return found


def _dense_value(x: Any, variables: Variables) -> jax.Array:
    """Return the dense array of a leaf. Its derivative ignores the rounding of codes and scales."""
    if not isinstance(x, QArray):
        return _change_dense(x, variables["dense"])
    scale = _trained_scale(x, variables)
    if "codes" not in variables:
        codes = x.format.decode(x.codes(), jnp.float32)
    else:
        exact = _trained_codes(x, variables["codes"], scale)
        clipped = jnp.clip(exact, *_code_range(x))
        rounded = x.format.decode(x.format.encode(exact), jnp.float32)
        codes = clipped + jax.lax.stop_gradient(rounded - clipped)
    return _from_codes(x, codes, scale).astype(x.dtype)


def _stored_value(x: Any, variables: Variables) -> Any:
    """Return the stored form of a leaf."""
    if not isinstance(x, QArray):
        return _change_dense(x, variables["dense"])
    scale = _trained_scale(x, variables)
    changes = {}
    if "codes" in variables:
        codes = x.format.encode(_trained_codes(x, variables["codes"], scale))
        if x.packing is None:
            changes["packed"] = codes.astype(x.packed.dtype)
        else:
            fields = x.format.to_fields(codes)
            changes["packed"], _ = pack(fields, x.format.bits, x.packing.axis)
    if "scales" in variables:
        changes["scale"] = scale.astype(x.scale.dtype)
    return x.replace(**changes)


def _change_dense(x: Any, change: jax.Array) -> jax.Array:
    wide = jnp.asarray(x, jnp.float32)
    size = jnp.sqrt(jnp.mean(wide**2))
    return (wide + jnp.where(size > 0, size, 1) * change).astype(x.dtype)


def _trained_scale(q: QArray, variables: Variables) -> jax.Array:
    """Return the scales, rounded to their dtype. The derivative ignores the rounding."""
    scale = q.scales()
    if "scales" not in variables:
        return scale
    exact = scale * jnp.exp(variables["scales"])
    return exact + jax.lax.stop_gradient(round_to_dtype(exact, q.scale.dtype) - exact)


def _trained_codes(q: QArray, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the codes before rounding, converted from the old scales to `scale`."""
    return _to_codes(q, _from_codes(q, _code_step(q) * codes, q.scales()), scale)


def _codes_before_rounding(q: QArray, dense: Any) -> jax.Array:
    """Return codes before rounding that round to the codes of `q`.

    They come from the dense values. Where GPTQ chose another code than the nearest, they are as
    close to the dense values as its rounding allows.
    """
    codes = q.format.decode(q.codes(), jnp.float32)
    if dense is None:
        return codes
    exact = _to_codes(q, jnp.asarray(dense, jnp.float32), q.scales())
    near = codes + jnp.clip(exact - codes, -0.3, 0.3)
    return jnp.where(q.format.encode(near) == q.codes(), near, codes)


def _to_codes(q: QArray, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return dense values in units of codes, without rounding."""
    minimum, zero_point = q.minima(), q.zero_points()
    x = x if minimum is None else over_tiles(jnp.subtract, x, minimum)
    x = over_tiles(jnp.divide, x, jnp.where(scale == 0, 1, scale))
    return x if zero_point is None else over_tiles(jnp.add, x, zero_point.astype(x.dtype))


def _from_codes(q: QArray, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the dense values of codes: the inverse of `_to_codes`."""
    minimum, zero_point = q.minima(), q.zero_points()
    x = x if zero_point is None else over_tiles(jnp.subtract, x, zero_point.astype(x.dtype))
    x = over_tiles(jnp.multiply, x, scale)
    return x if minimum is None else over_tiles(jnp.add, x, minimum)


def _code_step(q: QArray) -> float:
    """Return the change of codes that a change of 1 of their variable makes."""
    low, high = _code_range(q)
    return _CODES_RATE * (high - low) / (2**q.format.bits - 1)


def _code_range(q: QArray) -> tuple[float, float]:
    if q.format.codebook is not None:
        return min(q.format.codebook), max(q.format.codebook)
    if q.format.is_integer:
        low, high = q.format.code_range
        return float(low), float(high)
    largest = float(jnp.finfo(q.format.code_dtype).max)
    return -largest, largest
