"""`observe`: statistics of the activations of a model, of which no line is changed.

Each weight that a rule matches is replaced by an `Observed`, which meets its activations in the
rules for products. Those reduce them on the device, to an array of the size of a row or of a Gram
matrix, and send that to the host, by a callback. Along with it goes where in the weight each
channel is, for of layers that a scan goes through the program is the same. Callbacks run NumPy and
no JAX, which would wait for the very threads that run it.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core.rules import register
from .._core.transform import implicit
from .._core.tree import static
from .activations import bind, sums_over_features
from .model import Rule, flatten_with_paths, rule_for, warn_of_unmatched
from .product_weights import ProductWeight
from .recording import Recording
from .statistics import ActivationStatistics
from .tiles import Leaf


def observe(
    model: Callable,
    rules: Sequence[Rule],
    *,
    params: Any = None,
    gram: bool = False,
    decay: float = 0.9,
) -> Callable[[Iterable[Any]], dict[str, ActivationStatistics]]:
    """Records what the activations of a model are, without touching its code.

    **Arguments:**

    - `model`: the program, compiled or not. Without `params`, it holds its parameters: a pytree
      that can be called, as an Equinox module is; or a `functools.partial` (or
      `jax.tree_util.Partial`) of a function, whose parameters are the arrays among its arguments.
    - `rules`: as for `quantize_tree`. Observed are the weights for which the first rule that
      matches has a format, of weights or of activations. Paths are those of `quantize_tree`, in
      `params`, in the module, or in the argument of the partial.
    - `params`: any pytree of arrays; then `model` is a function of it and of the batch.
    - `gram`: whether to record `x.T @ x`, too, for each product but those of convolutions.
    - `decay`: of the exponential average of ranges over batches: what a batch leaves of the average
      of those before.

    **Returns:** a function of the batches, any iterable of them. A batch that is a tuple is the
    arguments of the model, and any other its one argument. It returns the statistics of the
    activations that each weight was multiplied with, by the path of the weight; those of a weight
    that is used more than once are of all its uses. The weights are dense as they run, so
    activations are those of the model as it is.

    Activations are the operands of products (`dot_general`, a convolution, `ragged_dot`) that
    contract the rule's `tile_axis`, in loops and compiled functions, too. Rows that are looked up
    in an embedding are none; tokens of padding are counted as any other. In a model that takes
    gradients within itself, what `jax.checkpoint` computes again is counted again, which changes
    no mean.

    **Raises:** `TypeError` for a model of which the parameters are not known. `ValueError` where
    there are no batches, or no activations met any of the weights, and where two arguments of a
    partial have the same path. Warns with `UserWarning` of a rule that matches no path, and of
    weights that met no activations.

    >>> import functools, jax, jax.numpy as jnp, veneer as vn
    >>> def model(params, x):
    ...     return jax.nn.relu(x @ params["up"]) @ params["down"]
    >>> params = {"up": jnp.ones((2, 4)), "down": jnp.ones((4, 2))}
    >>> rules = [vn.quant.Rule(".*", "int8", act_qtype="int8", act_range="mean")]
    >>> batches = [jnp.array([[1.0, -3.0]]), jnp.array([[2.0, 1.0]])]
    >>> statistics = vn.quant.observe(model, rules, params=params)(batches)
    >>> statistics["up"].absmax.ravel().tolist(), statistics["down"].absmax.ravel().tolist()
    ([2.0, 3.0], [3.0, 3.0, 3.0, 3.0])
    >>> quantised = vn.quant.quantize_tree(params, rules, statistics=statistics)
    >>> y = vn.implicit(model)(quantised, batches[0])
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay is what is kept of an average, from 0 to below 1, not {decay}")
    program, call = _program(model, params)
    leaves = [flatten_with_paths(part) for part in program]
    paths = [path for part, _, _ in leaves for path in part]
    warn_of_unmatched(rules, paths, stacklevel=2)

    def run(batches: Iterable[Any]) -> dict[str, ActivationStatistics]:
        if isinstance(batches, Mapping | jax.Array | np.ndarray):
            raise TypeError(
                f"observe goes through an iterable of batches, as a list of them, and not through "
                f"{type(batches).__name__}"
            )
        token = next(_tokens)
        observed: dict[str, Recording] = {}
        _recordings[token] = observed
        try:
            parts = [
                _observed_tree(part, rules, token, observed, gram=gram, decay=decay)
                for part in leaves
            ]
            empty = True
            for batch in batches:
                empty = False
                implicit(call)(parts, *(batch if type(batch) is tuple else (batch,)))
                jax.effects_barrier()
                for recording in observed.values():
                    recording.end_batch()
        finally:
            del _recordings[token]
        if empty:
            raise ValueError("there are no batches to observe")
        return _results(observed)

    return run


Program = tuple[Sequence[Any], Callable]


def _program(model: Callable, params: Any) -> Program:
    """The trees of parameters, and the function of them, as a list, and of a batch."""
    if params is not None:
        return [params], lambda parts, *args: model(parts[0], *args)
    if isinstance(model, functools.partial):
        names = list(model.keywords)
        parts = [model.func, *model.args, *model.keywords.values()]
        if jax.tree_util.treedef_is_leaf(jax.tree.structure(model.func)):
            parts[0] = None
        split = 1 + len(model.args)

        def call(parts: Sequence[Any], *args: Any) -> Any:
            function = model.func if parts[0] is None else parts[0]
            keywords = dict(zip(names, parts[split:], strict=True))
            return function(*parts[1:split], *args, **keywords)

        return parts, call
    if callable(model) and not jax.tree_util.treedef_is_leaf(jax.tree.structure(model)):
        return [model], lambda parts, *args: parts[0](*args)
    raise TypeError(
        f"observe finds no parameters in {model!r}: pass them, as observe(model, rules, "
        "params=params) of a function model(params, batch); or functools.partial(model, params)"
    )


def _observed_tree(
    flat: tuple[list[str], list[Any], Any],
    rules: Sequence[Rule],
    token: int,
    observed: dict[str, Recording],
    *,
    gram: bool,
    decay: float,
) -> Any:
    paths, leaves, treedef = flat
    replaced = list(leaves)
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        rule = rule_for(path, leaf, rules)
        if rule is None or not (rule.qtype or rule.act_qtype):
            continue
        if path in observed:
            raise ValueError(
                f"two arguments of the partial have a parameter at {path!r}: pass params=, one tree"
            )
        contracting = rule.contracting(leaf.ndim)
        recording = Recording(leaf.shape, contracting, gram=gram, decay=decay)
        observed[path] = recording
        replaced[i] = Observed(
            array=jnp.asarray(leaf),
            position=recording.positions(),
            contracting=contracting,
            path=path,
            token=token,
            gram=gram,
        )
    return jax.tree.unflatten(treedef, replaced)


def _results(observed: Mapping[str, Recording]) -> dict[str, ActivationStatistics]:
    if not observed:
        raise ValueError("no rule has a format for any weight of the model, so none was observed")
    found = {path: recording for path, recording in observed.items() if recording.has_met}
    unmet = {path: recording for path, recording in observed.items() if path not in found}
    if unmet:
        some = "; ".join(
            f"{path} ({recording.why_not()})"
            for path, recording in itertools.islice(unmet.items(), 4)
        )
        message = f"no activations met {some}{'; ...' if len(unmet) > 4 else ''}"
        if not found:
            raise ValueError(message)
        warnings.warn(message, UserWarning, stacklevel=3)
    return {path: recording.statistics() for path, recording in found.items()}


_tokens = itertools.count()
_recordings: dict[int, dict[str, Recording]] = {}


class Observed(ProductWeight):
    """A weight whose activations are recorded as they meet it in a product."""

    companions: ClassVar[tuple[str, ...]] = ("position",)

    array: Any  # [..., K, N]
    position: Leaf  # [..., K, 1], where in the weight as it was an entry is
    contracting: tuple[int, ...] = static()
    path: str = static()
    token: int = static()
    gram: bool = static()

    @property
    def recording(self) -> Recording:
        """What it is recorded in."""
        return _recordings[self.token][self.path]

    def record(
        self,
        x: jax.Array,
        x_axes: tuple[Sequence[int], Sequence[int]],
        axes: tuple[Sequence[int], Sequence[int]],
        *,
        gram: bool,
    ) -> None:
        """Records the operand of a product.

        **Arguments:**

        - `x`: the operand.
        - `x_axes`, `axes`: of the operand and of the weight, those of the batch, and those of the
          channels. Along other axes of the weight, every entry meets the same.
        - `gram`: whether products of channels are recorded.
        """
        if x.size == 0:
            return
        shape = [math.prod(x.shape[axis] for axis in group) for group in _groups(x.ndim, *x_axes)]
        order = [axis for group in _groups(x.ndim, *x_axes) for axis in group]
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x = lax.transpose(x, order).reshape(shape).astype(wide)  # [batch, rows, channels]
        parts = [
            self._positions_of(*axes),
            x.min(1),
            x.max(1),
            x.sum(1),
            jnp.abs(x).sum(1),
            jnp.square(x).sum(1),
        ]
        if gram:
            parts.append(jnp.einsum("bmk,bml->bkl", x, x, precision="highest"))
        receive = functools.partial(_receive, self.token, self.path, shape[1])
        jax.debug.callback(receive, *parts)

    def _positions_of(self, batch: Sequence[int], channels: Sequence[int]) -> jax.Array:
        """The positions of channels, `[batch, channels]`: of those along other axes, the first."""
        kept = (*batch, *channels)
        position = jnp.asarray(self.position)
        for axis in range(self.ndim):
            if axis not in kept:
                position = lax.slice_in_dim(position, 0, 1, axis=axis)
        sizes = [n if axis in kept else 1 for axis, n in enumerate(self.shape)]
        position = jnp.broadcast_to(position, sizes)
        order = [axis for group in _groups(self.ndim, batch, channels) for axis in group]
        return lax.transpose(position, order).reshape(
            math.prod(self.shape[axis] for axis in batch), -1
        )


def _groups(
    ndim: int, batch: Sequence[int], channels: Sequence[int]
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The axes of the batch, the others, and those of the channels."""
    return batch, [axis for axis in range(ndim) if axis not in (*batch, *channels)], channels


def _receive(token: int, path: str, rows: int, *parts: Any) -> None:
    """What the host does: with arrays of NumPy's alone."""
    recording = _recordings.get(token, {}).get(path)
    if recording is not None:
        recording.add(rows, *map(np.asarray, parts))


# Rules for products. Each is bound again, on the weight itself.


@register("dot_general")
def _dot_general(x: ArrayLike, w: Observed, **params: Any) -> Any:
    (summed, w_summed), (batch, w_batch) = params["dimension_numbers"]
    _record_product(x, w, (batch, summed), (w_batch, w_summed))
    return bind("dot_general", (x, w.array), params)


@register("dot_general")
def _dot_general_swapped(w: Observed, x: ArrayLike, **params: Any) -> Any:
    (w_summed, summed), (w_batch, batch) = params["dimension_numbers"]
    _record_product(x, w, (batch, summed), (w_batch, w_summed))
    return bind("dot_general", (w.array, x), params)


@register("ragged_dot_general")
def _ragged_dot_general(x: ArrayLike, w: Observed, group_sizes: ArrayLike, **params: Any) -> Any:
    numbers = params["ragged_dot_dimension_numbers"]
    (summed, w_summed), (batch, w_batch) = numbers.dot_dimension_numbers
    _record_product(x, w, (batch, summed), (w_batch, w_summed))
    return bind("ragged_dot_general", (x, w.array, group_sizes), params)


def _record_product(x: ArrayLike, w: Observed, x_axes: Any, axes: Any) -> None:
    if not w.sums_over(axes[1]):
        w.recording.met_along(axis - w.ndim for axis in axes[1])
    elif jnp.issubdtype(jnp.result_type(x), jnp.floating):
        w.record(jnp.asarray(x), x_axes, axes, gram=w.gram)


@register("conv_general_dilated")
def _conv_general_dilated(x: ArrayLike, w: Observed, **params: Any) -> Any:
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    _, x_features, *_ = numbers.lhs_spec
    _, features, *_ = numbers.rhs_spec
    if not sums_over_features(w, params):
        w.recording.met_along([features - w.ndim])
    elif jnp.issubdtype(jnp.result_type(x), jnp.floating):
        # Groups go side by side along the features, and channels are those of one.
        last = jnp.moveaxis(jnp.asarray(x), x_features, -1)
        last = last.reshape(*last.shape[:-1], groups, -1)
        w.record(last, ((), [last.ndim - 1]), ((), [features]), gram=False)
    return bind("conv_general_dilated", (x, w.array), params)
