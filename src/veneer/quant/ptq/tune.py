"""`tune`: train the scales and codes of a quantized model to match the outputs of the dense model.

The method is the first phase of EfficientQAT (Chen et al., arXiv 2407.11062), with the outputs of
the dense model as targets. It combines the straight-through estimator (Bengio et al., arXiv
1308.3432) and learned scales (LSQ, Esser et al., arXiv 1902.08153).

The optimizer changes variables from which the leaves of the quantized tree are computed. A
`TunedTree` has a dict of variables for each leaf:

| key | leaf | variable |
|---|---|---|
| "codes" | a `QArray` | the codes before rounding, divided by `_code_step` |
| "scales" | a `QArray` | the logarithm of `new scale / old scale` |
| "dense" | a dense array | `new - old`, divided by the root mean square of the old array |
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.surface.implicit import implicit
from ..._jax.frames import warn_user
from ...types.basis import InBasis
from ..activation_quantized import ActivationQuantized
from ..arrays import QUANTIZABLE, QArray
from ..formats.format import round_to_dtype
from ..formats.tiles import over_tiles
from ..models.arguments import arguments_of, check_batches, parameters_and_program

#: The names that the argument `train` can contain.
PARTS = ("codes", "scales", "dense")


def tune(
    model: Callable,
    quantized: Any,
    *,
    params: Any = None,
    train: Collection[str] = ("codes", "scales"),
    epochs: int = 10,
    learning_rate: float = 0.002,
    loss: Callable[[Any, Any], jax.Array] | None = None,
) -> "Tuner":
    """Create a tuner, which trains a quantized model to match the dense model.

    Use it for formats of 2 and 3 bits, which lose too much accuracy if each weight is rounded
    separately. If the model is too large to train, tune it block by block. The method combines the
    straight-through estimator (arXiv 1308.3432) and learned scales (LSQ, arXiv 1902.08153), like
    EfficientQAT (arXiv 2407.11062).

    **Arguments:**

    - `model`: a function of parameters and a batch, or the dense callable module.
    - `quantized`: the quantized parameters or module, from `quantize_tree` or, better, `calibrate`.
    - `params`: the dense parameters. None if `model` is a module.
    - `train`: what to train, a list of names in the table below.
    - `epochs`: the number of passes over the batches.
    - `learning_rate`: the initial learning rate of Adam, which decays to 0 along a cosine. For a
      scale, it is relative to the scale. For a dense array, it is relative to the root mean square
      of the array. For codes, it is four times as large and relative to the distance between codes.
    - `loss`: a function that returns a scalar for the outputs of the quantized model and of the
      dense model. None means the mean squared difference, divided by the mean square of the dense
      outputs, and averaged over floating outputs.

    | `train` | arrays |
    |---|---|
    | "codes" | the codes of each `QArray`; training takes the memory of three dense arrays |
    | "scales" | floating scales; quantized scales and powers of two stay the same |
    | "dense" | other floating arrays, such as biases and the leaves of a `LoraArray` |

    **Returns:** a `Tuner`. Call it with a list of batches to get a tuned tree like `quantized`. If
    a batch is a tuple, its entries are the arguments of the model. Afterwards, the attribute
    `losses` lists the mean loss before tuning, in each epoch, and after tuning. If the loss did not
    fall, the call returns `quantized` unchanged, with a `UserWarning`.

    **Raises:**

    - `ValueError` if `train` is empty or has an unknown name, `epochs` is below 1, or
      `learning_rate` is not above 0.

    The call of the tuner raises:

    - `ImportError` if optax is not installed.
    - `TypeError` if the batches can be iterated only once.
    - `ValueError` if there are no batches, if there is nothing to train, or if the loss is not
      finite.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w, x = jax.random.normal(jax.random.key(0), (2, 32, 32))
    >>> small = vn.quant.quantize_tree({"w": w}, [vn.quant.Rule("w", "int2", tile_size=16)])
    >>> tuning = vn.quant.tune(lambda p, x: x @ p["w"], small, params={"w": w}, epochs=20)
    >>> tuning([x])["w"], tuning.losses[-1] < tuning.losses[0]
    (QArray(q2[32,32] tile 16, 4 bits), True)
    """
    return Tuner(model, quantized, params, train, epochs, learning_rate, loss)


class Tuner:
    """A tuner of a quantized model, created by `tune`.

    Call it with a list of batches to get a tuned tree. Afterwards, the attribute `losses` lists the
    mean loss before tuning, in each epoch, and after tuning.

    >>> import jax.numpy as jnp, veneer as vn
    >>> params = {"w": jnp.ones((32, 32))}
    >>> small = vn.quant.quantize_tree(params, [vn.quant.Rule("w", "int4")])
    >>> tuner = vn.quant.tune(lambda p, x: x @ p["w"], small, params=params)
    >>> isinstance(tuner, vn.quant.Tuner)
    True
    """

    losses: list[float]

    def __init__(
        self,
        model: Callable,
        quantized: Any,
        params: Any,
        train: Collection[str],
        epochs: int,
        learning_rate: float,
        loss: Callable[[Any, Any], jax.Array] | None,
    ):
        if isinstance(train, str) or not train or not {*train} <= {*PARTS}:
            raise ValueError(f"train must be a list of names out of {PARTS}, not {train!r}")
        if epochs < 1 or not learning_rate > 0:
            raise ValueError(
                f"epochs must be 1 or more, and learning_rate above 0, not {epochs} and "
                f"{learning_rate}"
            )
        call = "tune(model, quantized, params=params)"
        self._dense, self._program = parameters_and_program(model, params, call)
        self._quantized = quantized
        self._train, self._epochs, self._rate = frozenset(train), epochs, learning_rate
        self._loss = relative_error if loss is None else loss

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Train the quantized tree to match the dense model on the batches, and return the tree."""
        check_batches(batches)
        if iter(batches) is batches:
            raise TypeError(
                f"tune reads the batches in each epoch, and a {type(batches).__name__} can be read "
                "only once. Pass a list, or an object whose __iter__ starts again"
            )
        count = sum(1 for _ in batches)
        if not count:
            raise ValueError("there are no batches to tune with. Pass at least one")
        try:
            import optax
        except ImportError as error:
            raise ImportError("vn.quant.tune needs optax: pip install optax") from error
        tuned = TunedTree(self._quantized, self._dense, self._train)
        # Arrays are arguments of the compiled functions: as constants, they would be copied.
        dense_leaves, treedef = jax.tree.flatten(self._dense)
        dense = arrays_only(dense_leaves)

        def loss(state: Any, arrays: Any, dense: Any, args: Any) -> jax.Array:
            """Return the loss of one batch, `args`, with the trained variables `state`.

            `arrays` and `dense` are the arrays of the quantized tree before training and of the
            dense tree.
            """
            outputs = implicit(self._program)(tuned.tree(state, arrays), *args)
            dense_params = jax.tree.unflatten(treedef, replace_arrays(dense_leaves, dense))
            expected = self._program(dense_params, *args)
            return self._loss(outputs, jax.lax.stop_gradient(expected))

        optimizer = optax.adam(optax.cosine_decay_schedule(self._rate, self._epochs * count))

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(state: Any, moments: Any, arrays: Any, dense: Any, args: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(state, arrays, dense, args)
            updates, moments = optimizer.update(gradients, moments)
            return jax.tree.map(jnp.add, state, updates), moments, value

        compiled_loss = jax.jit(loss)
        mean_loss = lambda state: _mean(
            [compiled_loss(state, tuned.arrays, dense, arguments_of(x)) for x in batches]
        )
        state = tuned.start()
        moments = optimizer.init(state)
        self.losses = [mean_loss(state)]
        for _ in range(self._epochs):
            values = []
            for batch in batches:
                args = arguments_of(batch)
                state, moments, value = step(state, moments, tuned.arrays, dense, args)
                values.append(value)
            self.losses.append(_mean(values))
        self.losses.append(mean_loss(state))
        if not self.losses[-1] < self.losses[0]:
            warn_user(
                f"tuning did not reduce the loss ({self.losses[0]:.3g} before, "
                f"{self.losses[-1]:.3g} after), so the tree is unchanged. Try a smaller "
                "learning_rate"
            )
            return self._quantized
        return tuned.stored(state)


def relative_error(outputs: Any, expected: Any) -> jax.Array:
    """Return the relative squared error of a tree of outputs, averaged over its floating arrays.

    The error of an array is its mean squared error, divided by the mean square of the expected
    array. Raise `ValueError` if `expected` has no floating array.
    """
    errors = []
    for output, target in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(jnp.result_type(target), jnp.floating):
            target = jnp.asarray(target, jnp.float32)
            mean_square = jnp.mean(target**2)
            error = jnp.mean((jnp.asarray(output, jnp.float32) - target) ** 2)
            errors.append(error / jnp.where(mean_square > 0, mean_square, 1))
    if not errors:
        raise ValueError("the model has no floating output, so pass a loss")
    return jnp.stack(errors).mean()


def _mean(losses: list[Any]) -> float:
    """Return the mean of losses, or raise `ValueError` if the mean is not finite."""
    mean = float(np.mean(losses))
    if not np.isfinite(mean):
        raise ValueError(
            f"the loss is {mean}, because the dense or the quantized model has outputs that are "
            "not finite. Check both on these batches"
        )
    return mean


#: The learning rate of codes, relative to the rate of scales. For int2, 4 was better than 1.
_CODES_RATE = 4.0

Variables = Mapping[str, jax.Array]


class TunedTree:
    """A tree in which the codes and scales of each QArray, or dense arrays, are trained.

    The argument `state` of the methods maps the index of each trained leaf to its variables, which
    the docstring of this module lists. The attribute `arrays` lists the leaves before training,
    with None for leaves that are not arrays.

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
    """Return `leaves`, each replaced by the entry of `arrays` at its index if that is not None."""
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

    `dense` is the tree before quantization. If a weight is stored in another basis, for example
    rotated, its dense array is converted to this basis. The entry is None for leaves that are no
    QArray, and for all leaves if the two trees do not match, as with a `LoraArray`.
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
    """Return the dense array of the leaf `x` with its trained variables applied.

    Derivatives with respect to the variables ignore the rounding (straight-through estimator).
    """
    if not isinstance(x, QArray):
        return _change_dense(x, variables["dense"])
    scale = _trained_scale(x, variables)
    if "codes" not in variables:
        codes = x.format.decode(x.codes(), jnp.float32)
    else:
        unrounded = _trained_codes(x, variables["codes"], scale)
        clipped = jnp.clip(unrounded, *x.format.value_range)
        rounded = x.format.decode(x.format.encode(unrounded), jnp.float32)
        # The value of `rounded`, with the derivative of `clipped`.
        codes = clipped + jax.lax.stop_gradient(rounded - clipped)
    return _from_codes(x, codes, scale).astype(x.dtype)


def _stored_value(x: Any, variables: Variables) -> Any:
    """Return the leaf `x` with its trained variables applied. A QArray stays a QArray."""
    if not isinstance(x, QArray):
        return _change_dense(x, variables["dense"])
    scale = _trained_scale(x, variables)
    if "codes" in variables:
        x = x.with_codes(x.format.encode(_trained_codes(x, variables["codes"], scale)))
    return x.replace(scale=scale.astype(x.scale.dtype)) if "scales" in variables else x


def _change_dense(x: Any, change: jax.Array) -> jax.Array:
    """Return an array plus a change, which is relative to the root mean square of the array."""
    wide = jnp.asarray(x, jnp.float32)
    root_mean_square = jnp.sqrt(jnp.mean(wide**2))
    return (wide + jnp.where(root_mean_square > 0, root_mean_square, 1) * change).astype(x.dtype)


def _trained_scale(q: QArray, variables: Variables) -> jax.Array:
    """Return the scales of `q` with the trained variable "scales" applied.

    They are rounded to the dtype of the stored scales. The derivative ignores the rounding.
    """
    scale = q.scales()
    if "scales" not in variables:
        return scale
    unrounded = scale * jnp.exp(variables["scales"])
    rounded = round_to_dtype(unrounded, q.scale.dtype)
    return unrounded + jax.lax.stop_gradient(rounded - unrounded)


def _trained_codes(q: QArray, variable: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the trained codes before rounding, for the trained scales `scale`.

    `variable` is the trained variable "codes", which belongs to the old scales, `q.scales()`. The
    codes are converted so that they represent the same dense values with the new scales.
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
    """Return the codes of dense values before rounding: `(x - minimum) / scale + zero_point`."""
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
    """Return the number by which codes are divided to get the variable "codes" of `q`.

    It is `_CODES_RATE` times the average distance between the values of neighboring codes. The
    optimizer then changes codes at a suitable rate.
    """
    low, high = q.format.value_range
    return _CODES_RATE * (high - low) / (2**q.format.bits - 1)
