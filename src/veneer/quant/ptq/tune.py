"""`tune`: train the scales and codes of a quantized model to match the outputs of the dense model.

The method is the first phase of EfficientQAT (Chen et al., arXiv 2407.11062), with the outputs of
the dense model as targets. It combines the straight-through estimator (Bengio et al., arXiv
1308.3432) and learned scales (LSQ, Esser et al., arXiv 1902.08153).
"""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.surface.implicit import implicit
from ..._jax.frames import warn_user
from ..models.programs import arguments_of, check_batches, parameters_and_program
from .tuned_tree import TunedTree, arrays_only, replace_arrays

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
            """Return the loss of one batch, `args`, with the trained variables `state`."""
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
