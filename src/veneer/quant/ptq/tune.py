"""`tune`: scales and codes of a quantised model, trained until its outputs are the dense model's.

The straight-through estimator (Bengio et al., arXiv 1308.3432) and learned scales (LSQ, Esser et
al., arXiv 1902.08153), as EfficientQAT's first phase has them (Chen et al., arXiv 2407.11062), with
what the dense model gives for a target.
"""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.transform import implicit
from ..._jax.source_lines import warn_user
from ..models.uses import program_of
from ..observation.observe import arguments_of, check_batches
from .tuned_tree import TunedTree

PARTS = ("codes", "scales", "dense")


def tune(
    model: Callable,
    quantised: Any,
    *,
    params: Any = None,
    train: Collection[str] = ("codes", "scales"),
    epochs: int = 10,
    learning_rate: float = 0.002,
    loss: Callable[[Any, Any], jax.Array] | None = None,
) -> "Tuner":
    """Trains what a quantised model is stored as, so that it gives what the dense model gives.

    For formats of 2 and 3 bits, which lose too much however their codes are chosen one weight at a
    time: here they are for the model as a whole. A model that is too large for that is tuned block
    by block, `model` being a block.

    **Arguments:**

    - `model`: the program, of parameters and a batch; or a module that can be called, dense.
    - `quantised`: its parameters, or the module, as `quantize_tree` or better `calibrate` has
      rounded them.
    - `params`: the dense parameters; None where `model` is a module.
    - `train`: of `"codes"`, each code; `"scales"`, those of tiles that are floats; `"dense"`, every
      other floating array of the tree, such as biases, norms, and the leaves of a `LoraArray`.
      Codes take the memory of three dense arrays each while they are trained.
    - `epochs`: how often the batches are gone through.
    - `learning_rate`: of Adam; it falls to 0 by a cosine. Scales are trained by it as a share of
      each, dense values as a share of their spread, and codes by four times as much in steps of a
      code.
    - `loss`: of the outputs and the dense model's, a scalar. None is the mean square of their
      difference as a share of that of the latter, averaged over the floating outputs.

    **Returns:** a function of the batches, a list of them or what else can be gone through again. A
    batch that is a tuple is the arguments of the model, and any other its one argument. It returns
    the tree, with arrays as it had. Its `losses` then are the mean loss before, of each epoch as
    it was trained, and after.

    **Raises:** `ImportError` without optax; `TypeError` for batches that can be gone through but
    once; `ValueError` where there are none, where nothing is to be trained, and where the loss is
    not finite. Warns with `UserWarning` where the loss did not fall: the tree is as it was, then.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> keys = jax.random.split(jax.random.key(0), 2)
    >>> params = {"w": jax.random.normal(keys[0], (32, 16))}
    >>> model = lambda params, x: jnp.tanh(x @ params["w"])
    >>> x = jax.random.normal(keys[1], (64, 32))
    >>> small = vn.quant.quantize_tree(params, [vn.quant.Rule("w", "int2", tile_size=16)])
    >>> tuning = vn.quant.tune(model, small, params=params, epochs=30, learning_rate=0.02)
    >>> better = tuning([x])
    >>> better["w"]
    QArray(q2[32,16] tile 16, 4 bits)
    >>> tuning.losses[-1] < 0.7 * tuning.losses[0]
    True
    """
    return Tuner(model, quantised, params, train, epochs, learning_rate, loss)


class Tuner:
    """What `tune` returns, whose arguments it has.

    `losses`, once it was called, are those before, of each epoch, and after.
    """

    losses: list[float]

    def __init__(
        self,
        model: Callable,
        quantised: Any,
        params: Any,
        train: Collection[str],
        epochs: int,
        learning_rate: float,
        loss: Callable[[Any, Any], jax.Array] | None,
    ):
        if isinstance(train, str) or not train or not {*train} <= {*PARTS}:
            raise ValueError(f"train names some of {PARTS}, not {train!r}")
        if epochs < 1 or not learning_rate > 0:
            raise ValueError(
                f"epochs are 1 or more, and the learning rate is above 0, not {epochs} and "
                f"{learning_rate}"
            )
        program = program_of(
            model if params is None else params, None if params is None else model, (), None
        )
        assert program is not None
        self._program, self._quantised = program, quantised
        self._dense = model if params is None else params
        self._train, self._epochs, self._rate = frozenset(train), epochs, learning_rate
        self._loss = relative_error if loss is None else loss

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Returns the tree, tuned by what the dense model makes of the batches."""
        check_batches(batches)
        if iter(batches) is batches:
            raise TypeError(
                "the batches are gone through in each epoch, and these can be gone through but "
                "once: pass a list, or an object whose __iter__ begins anew"
            )
        count = sum(1 for _ in batches)
        if not count:
            raise ValueError("there are no batches to tune with")
        tuned = TunedTree(self._quantised, self._dense, self._train)
        dense, others = _split(self._dense)

        def loss(state: Any, fixed: Any, dense: Any, args: Any) -> jax.Array:
            outputs = implicit(self._program)(tuned.tree(state, fixed), *args)
            expected = self._program(others(dense), *args)
            return self._loss(outputs, jax.lax.stop_gradient(expected))

        optimiser = _adam(self._rate, self._epochs * count)

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(state: Any, moments: Any, fixed: Any, dense: Any, args: Any) -> Any:
            lost, gradients = jax.value_and_grad(loss)(state, fixed, dense, args)
            updates, moments = optimiser.update(gradients, moments)
            return jax.tree.map(jnp.add, state, updates), moments, lost

        compiled = jax.jit(loss)
        mean = lambda state: float(
            np.mean([compiled(state, tuned.fixed, dense, arguments_of(x)) for x in batches])
        )
        state = tuned.start()
        moments = optimiser.init(state)
        self.losses = [_finite(mean(state))]
        for _ in range(self._epochs):
            lost = []
            for batch in batches:
                args = arguments_of(batch)
                state, moments, of_batch = step(state, moments, tuned.fixed, dense, args)
                lost.append(of_batch)
            self.losses.append(_finite(float(np.mean(lost))))
        self.losses.append(_finite(mean(state)))
        if not self.losses[-1] < self.losses[0]:
            warn_user(
                f"tuning did not make the loss less: {self.losses[0]:.3g} before, and "
                f"{self.losses[-1]:.3g} after, so nothing is changed: try a smaller learning_rate"
            )
            return self._quantised
        return tuned.stored(state)


def relative_error(outputs: Any, expected: Any) -> jax.Array:
    """Returns the mean square of a difference by that of what is expected, a mean over leaves.

    >>> import jax.numpy as jnp
    >>> from veneer.quant.ptq.tune import relative_error
    >>> float(relative_error(jnp.array([1.0, 2.0]), jnp.array([1.0, 3.0]))).__round__(3)
    0.1
    """
    shares = []
    for out, wanted in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(jnp.result_type(wanted), jnp.floating):
            wide = jnp.asarray(wanted, jnp.float32)
            power = jnp.mean(wide**2)
            lost = jnp.mean((jnp.asarray(out, jnp.float32) - wide) ** 2)
            shares.append(lost / jnp.where(power > 0, power, 1))
    if not shares:
        raise ValueError("the model has no floating output: pass a loss")
    return jnp.stack(shares).mean()


def _split(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays of a tree, and what puts others in their places."""
    leaves, treedef = jax.tree.flatten(tree)
    at = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]

    def put(arrays: list[Any]) -> Any:
        new = list(leaves)
        for i, array in zip(at, arrays, strict=True):
            new[i] = array
        return jax.tree.unflatten(treedef, new)

    return [leaves[i] for i in at], put


def _adam(rate: float, steps: int) -> Any:
    try:
        import optax
    except ImportError as error:
        raise ImportError("vn.quant.tune needs optax: pip install optax") from error
    return optax.adam(optax.cosine_decay_schedule(rate, steps))


def _finite(loss: float) -> float:
    if not np.isfinite(loss):
        raise ValueError(f"the loss is {loss}: the model, dense or quantised, gives what is none")
    return loss
