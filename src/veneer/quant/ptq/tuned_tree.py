"""`TunedTree`, a tree whose codes, scales and dense arrays are trained.

The optimizer changes variables from which the leaves are computed. Each leaf has a dict of them:

| key | leaf | variable |
|---|---|---|
| "codes" | a `QArray` | the codes before rounding, divided by `_code_step` |
| "scales" | a `QArray` | the logarithm of `new scale / old scale` |
| "dense" | a dense array | `new - old`, divided by the root mean square of the old array |
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...types.basis import InBasis
from ..arrays.qarray import QUANTIZABLE, QArray
from ..formats.format import round_to_dtype
from ..formats.packing import pack
from ..formats.tiles import over_tiles
from ..weights.activations import ActivationQuantized

#: The learning rate of codes, relative to the rate of scales. For int2, 4 was better than 1.
_CODES_RATE = 4.0

Variables = Mapping[str, jax.Array]


class TunedTree:
    """A tree in which the codes and scales of each QArray, or dense arrays, are trained.

    The argument `state` of the methods maps the index of each trained leaf to its variables (see
    the table above). The attribute `arrays` lists the leaves before training, with None for leaves
    that are not arrays.

    **Arguments:**

    - `quantized`: the tree.
    - `dense`: the tree before quantization.
    - `train`: what to train, a subset of "codes", "scales" and "dense".

    **Raises:** `ValueError` if the tree has nothing to train.
    """

    def __init__(self, quantized: Any, dense: Any, train: frozenset[str]):
        self._quantized, self._dense = quantized, dense
        self._leaves, self._treedef = jax.tree.flatten(quantized, is_leaf=_is_qarray)
        names = [train & _trainable_names(leaf) for leaf in self._leaves]
        self._names = {i: leaf_names for i, leaf_names in enumerate(names) if leaf_names}
        if not self._names:
            raise ValueError(
                f"there is nothing to train: the tree has no {' or '.join(sorted(train))}. Only "
                "floating scales and the codes of a QArray can be trained"
            )
        self.arrays = arrays_only(self._leaves)

    def start(self) -> dict[int, Variables]:
        """Return the initial state: the variables of each trained leaf, by the index of the leaf.

        Codes start from the dense values. Scales and dense arrays start unchanged.
        """
        dense = _dense_leaves(self._quantized, self._dense)
        state: dict[int, Variables] = {}
        for i, names in self._names.items():
            leaf = self._leaves[i]
            variables: dict[str, jax.Array] = {}
            if "codes" in names:
                variables["codes"] = _codes_before_rounding(leaf, dense[i]) / _code_step(leaf)
            if "scales" in names:
                variables["scales"] = jnp.zeros(leaf.scale.shape, jnp.float32)
            if "dense" in names:
                variables["dense"] = jnp.zeros(leaf.shape, jnp.float32)
            state[i] = variables
        return state

    def tree(self, state: Mapping[int, Variables], arrays: Sequence[Any]) -> Any:
        """Return the tree with the trained variables, differentiable with respect to `state`.

        A dense array replaces each trained QArray. Pass `self.arrays` as `arrays`: as an argument
        of a jitted function, it is not embedded in the program as constants.
        """
        leaves = replace_arrays(self._leaves, arrays)
        for i, variables in state.items():
            leaves[i] = _dense_value(leaves[i], variables)
        return jax.tree.unflatten(self._treedef, leaves)

    def stored(self, state: Mapping[int, Variables]) -> Any:
        """Return the tree with the trained variables, in which a QArray stays a QArray."""
        leaves = list(self._leaves)
        for i, variables in state.items():
            leaves[i] = _stored_value(leaves[i], variables)
        return jax.tree.unflatten(self._treedef, leaves)


def arrays_only(leaves: Sequence[Any]) -> list[Any]:
    """Return `leaves` with None in place of leaves that are not arrays or QArrays."""
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray | QArray)
    return [leaf if is_array(leaf) else None for leaf in leaves]


def replace_arrays(leaves: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Return `leaves` after replacing leaves by the entries of `arrays` that are not None."""
    return [x if array is None else array for x, array in zip(leaves, arrays, strict=True)]


def _is_qarray(x: Any) -> bool:
    return isinstance(x, QArray)


def _trainable_names(leaf: Any) -> set[str]:
    """Return which of "codes", "scales" and "dense" can be trained in a leaf."""
    if isinstance(leaf, QArray):
        # A small change of a quantized scale, or of a power of two, would be rounded away.
        has_float_scale = not isinstance(leaf.scale, QArray) and leaf.scale.dtype in QUANTIZABLE
        return {"codes", "scales"} if has_float_scale else {"codes"}
    is_floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return {"dense"} if is_floating else set()


def _dense_leaves(quantized: Any, dense: Any) -> list[Any]:
    """Return a list with the dense array before quantization for each leaf of `quantized`.

    The array is in the basis of its QArray, for example rotated. It is None for leaves that are no
    QArray, and for all leaves if the trees do not match, as with a `LoraArray`.
    """
    is_weight = lambda x: isinstance(x, QArray | InBasis | ActivationQuantized)
    weights, arrays = jax.tree.leaves(quantized, is_leaf=is_weight), jax.tree.leaves(dense)
    if len(weights) != len(arrays):
        return [None] * len(jax.tree.leaves(quantized, is_leaf=_is_qarray))
    result: list[Any] = []
    for weight, array in zip(weights, arrays, strict=True):
        # Find the innermost array of the weight, and convert `array` to its basis.
        inner = weight
        while isinstance(inner, InBasis | ActivationQuantized):
            array = inner.stored(jnp.asarray(array)) if isinstance(inner, InBasis) else array
            inner = inner.array
        # Other leaves of the weight are, for example, static scales of activations.
        for leaf in jax.tree.leaves(weight, is_leaf=_is_qarray):
            is_quantized = leaf is inner and _is_qarray(leaf)
            has_dense = is_quantized and getattr(array, "shape", None) == leaf.shape
            result.append(array if has_dense else None)
    return result


def _dense_value(x: Any, variables: Variables) -> jax.Array:
    """Return the dense array of a leaf with trained variables. Derivatives ignore the rounding."""
    if not isinstance(x, QArray):
        return _change_dense(x, variables["dense"])
    scale = _trained_scale(x, variables)
    if "codes" not in variables:
        codes = x.format.decode(x.codes(), jnp.float32)
    else:
        unrounded = _trained_codes(x, variables["codes"], scale)
        clipped = jnp.clip(unrounded, *_code_range(x))
        rounded = x.format.decode(x.format.encode(unrounded), jnp.float32)
        # The value of `rounded`, with the derivative of `clipped`.
        codes = clipped + jax.lax.stop_gradient(rounded - clipped)
    return _from_codes(x, codes, scale).astype(x.dtype)


def _stored_value(x: Any, variables: Variables) -> Any:
    """Return a leaf with its trained variables applied. A QArray stays a QArray."""
    if not isinstance(x, QArray):
        return _change_dense(x, variables["dense"])
    scale = _trained_scale(x, variables)
    changes = {}
    if "codes" in variables:
        codes = x.format.encode(_trained_codes(x, variables["codes"], scale))
        if x.packing is None:
            changes["packed"] = codes.astype(x.packed.dtype)
        else:
            bit_fields = x.format.to_fields(codes)  # unsigned integers
            changes["packed"], _ = pack(bit_fields, x.format.bits, x.packing.axis)
    if "scales" in variables:
        changes["scale"] = scale.astype(x.scale.dtype)
    return x.replace(**changes)


def _change_dense(x: Any, change: jax.Array) -> jax.Array:
    """Return an array plus a change, which is relative to the root mean square of the array."""
    wide = jnp.asarray(x, jnp.float32)
    root_mean_square = jnp.sqrt(jnp.mean(wide**2))
    return (wide + jnp.where(root_mean_square > 0, root_mean_square, 1) * change).astype(x.dtype)


def _trained_scale(q: QArray, variables: Variables) -> jax.Array:
    """Return the trained scales, rounded to their dtype. The derivative ignores the rounding."""
    scale = q.scales()
    if "scales" not in variables:
        return scale
    unrounded = scale * jnp.exp(variables["scales"])
    rounded = round_to_dtype(unrounded, q.scale.dtype)
    return unrounded + jax.lax.stop_gradient(rounded - unrounded)


def _trained_codes(q: QArray, variable: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the trained codes before rounding, relative to the trained `scale`.

    `variable` is the variable "codes", which is relative to the old scales, `q.scales()`.
    """
    dense = _from_codes(q, _code_step(q) * variable, q.scales())
    return _to_codes(q, dense, scale)


def _codes_before_rounding(q: QArray, dense: Any) -> jax.Array:
    """Return the codes of `q`, moved towards the unrounded codes of the array `dense`.

    The result still rounds to the codes of `q`. If `dense` is None, return the codes of `q`.
    """
    codes = q.format.decode(q.codes(), jnp.float32)
    if dense is None:
        return codes
    dense_codes = _to_codes(q, jnp.asarray(dense, jnp.float32), q.scales())
    # GPTQ can choose another code than the nearest. So move each code by at most 0.3.
    unrounded = codes + jnp.clip(dense_codes - codes, -0.3, 0.3)
    return jnp.where(q.format.encode(unrounded) == q.codes(), unrounded, codes)


def _to_codes(q: QArray, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the codes of dense values before rounding: `x / scale + zero_point`."""
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
    """Return the divisor of the variable "codes": `_CODES_RATE` times the distance of codes."""
    low, high = _code_range(q)
    return _CODES_RATE * (high - low) / (2**q.format.bits - 1)


def _code_range(q: QArray) -> tuple[float, float]:
    """Return the least and the largest value of a code."""
    if q.format.codebook is not None:
        return min(q.format.codebook), max(q.format.codebook)
    if q.format.is_integer:
        low, high = q.format.code_range
        return float(low), float(high)
    largest = float(jnp.finfo(q.format.code_dtype).max)
    return -largest, largest
