"""`observe`: statistics of the activations of a model, of which no line is changed.

Each weight that a rule matches is replaced by an `Observed`, which meets its activations in the
rules for products. Those reduce them on the device, to an array of the size of a row or of a Gram
matrix, and send that to the host, by a callback. Along with it goes where in the weight each
channel is, for of layers that a scan goes through the program is the same. Callbacks run NumPy and
no JAX, which would wait for the very threads that run it.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.primitives.scopes import telling_tangents
from ..._core.transform import implicit
from ..._jax.source_lines import warn_user
from ..activations import PRODUCTS
from ..models.rules import Rule, flatten_with_paths, rule_for, rules_in, warn_of_unmatched
from ..models.uses import telling, uses_of
from .observed import Observed, boxes_of, recordings_of, tokens
from .recording import Recording
from .statistics import ActivationStatistics
from .totals import ended, store, totals_of


def observe(
    model: Callable,
    rules: Sequence[Rule],
    *,
    params: Any = None,
    gram: bool = False,
    decay: float = 0.9,
    box: Callable[[Any], Any] | None = None,
) -> Any:
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
    - `box`: `vn.hijax.Box`, to record on the device, in one Box for each weight, and not on the
      host. Then the result is the model, for any program to call: see `ObservedModel`.

    **Returns:** a function of the batches, any iterable of them. A batch that is a tuple is the
    arguments of the model, and any other its one argument. It returns the statistics of the
    activations that each weight was multiplied with, by the path of the weight; those of a weight
    that is used more than once are of all its uses. The weights are dense as they run, so
    activations are those of the model as it is.

    Activations are the operands of products (`dot_general`, a convolution, `ragged_dot`) that
    contract the rule's `tile_axis`, in loops and compiled functions, too; where a rule has none,
    what the program contracts, or -2 with a `box`. Rows that are looked up in an embedding are
    none; tokens of padding are counted as any other. If the model takes derivatives itself, its
    tangents and cotangents are not activations. What `jax.checkpoint` computes again is counted
    again, which changes no mean.

    **Raises:** `TypeError` for a model of which the parameters are not known, and for rules that
    are no sequence of `Rule`. `ValueError` where there are no batches, or no activations met any of
    the weights, and where two arguments of a partial have the same path. Warns with `UserWarning`
    of a rule that matches no path, and of weights that met no activations.

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

    While a model is trained, in the compiled program that computes its gradient:

    >>> observed = vn.quant.observe(model, rules, params=params, box=vn.hijax.Box)
    >>> loss = lambda params, x: (observed(params, x) ** 2).sum()
    >>> step = jax.jit(jax.grad(loss))
    >>> for batch in batches:
    ...     gradient = step(params, batch)
    >>> observed.statistics()["up"].absmax.ravel().tolist()
    [2.0, 3.0]
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay is what is kept of an average, from 0 to below 1, not {decay}")
    rules = rules_in(rules)
    program, call = _program(model, params)
    leaves = [flatten_with_paths(part) for part in program]
    paths = [path for part, _, _ in leaves for path in part]
    warn_of_unmatched(rules, paths)
    if box is not None:
        return ObservedModel(
            program, call, rules, box, takes_params=params is not None, gram=gram, decay=decay
        )

    def run(batches: Iterable[Any]) -> dict[str, ActivationStatistics]:
        check_batches(batches)

        def contracting(args: Sequence[Any]) -> dict[str, tuple[int, ...]]:
            return _contracting(leaves, rules, _contracted(program, call, rules, args))

        return statistics_of(record(call, leaves, contracting, batches, gram=gram, decay=decay))

    return run


Flat = tuple[Sequence[str], Sequence[Any], Any]  # paths, leaves and structure of a tree


def record(
    call: Callable,
    trees: Sequence[Flat],
    contracting: Callable[[Sequence[Any]], Mapping[str, tuple[int, ...]]],
    batches: Iterable[Any],
    *,
    gram: bool,
    decay: float,
    beside: Flat | None = None,
) -> dict[str, Recording]:
    """Records the activations that weights meet, by their paths.

    **Arguments:**

    - `call`: a function of the trees, as a list, and of the arguments that a batch is.
    - `contracting`: of the arguments of the first batch, which weights are observed, by their paths
      with the axes that are contracted with activations, counted from the end.
    - `beside`: another tree like the first, which `call` takes after the others; then products of
      what each weight meets with what it meets there are recorded, too.

    **Raises:** `ValueError` where there are no batches.
    """
    token, other = next(tokens), next(tokens)
    observed: dict[str, Recording] = {}
    others: dict[str, Recording] = {}
    recordings_of[token], recordings_of[other] = observed, others
    how: dict[str, Any] = {"gram": gram, "decay": decay, "paired": beside is not None}
    try:
        parts = None
        for batch in batches:
            args = arguments_of(batch)
            if parts is None:
                axes = contracting(args)
                parts = [_observed_tree(tree, axes, token, observed, **how) for tree in trees]
                if beside is not None:
                    parts.append(_observed_tree(beside, axes, other, others, **how))
            with telling_tangents(PRODUCTS):
                implicit(call)(parts, *args)
            jax.effects_barrier()
            for path, recording in observed.items():
                if beside is not None:
                    recording.pair(others[path])
                recording.end_batch()
    finally:
        del recordings_of[token], recordings_of[other]
    if parts is None:
        raise ValueError("there are no batches to observe")
    return observed


def check_batches(batches: Any) -> None:
    """Refuses what is one batch rather than an iterable of them."""
    if isinstance(batches, Mapping | jax.Array | np.ndarray):
        raise TypeError(
            f"a model is run on an iterable of batches, as a list of them, and not on "
            f"{type(batches).__name__}"
        )


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """Returns the arguments of the model that a batch is."""
    return batch if type(batch) is tuple else (batch,)


class ObservedModel:
    """A model that writes what its activations are to Boxes, wherever it runs.

    It is called as the model is: with `params` first, where `observe` was given them. It may be
    compiled, differentiated, in a loop, and under `jax.checkpoint`, where what is computed again is
    not recorded again. Each call is a batch. Not under a `jax.vmap` around it, which would map what
    is written: map within the model.

    **Arguments:** those of `observe`, from which it comes.
    """

    boxes: dict[str, Any]  # by the path of the weight, with `totals.Totals`

    def __init__(
        self,
        parts: Sequence[Any],
        call: Callable,
        rules: Sequence[Rule],
        box: Callable[[Any], Any],
        *,
        takes_params: bool,
        gram: bool,
        decay: float,
    ):
        self._parts, self._call, self._rules = parts, call, rules
        self._takes_params, self._gram, self._decay = takes_params, gram, decay
        self._token = next(tokens)
        self._recordings: dict[str, Recording] = {}
        self._observed(parts)
        self.boxes = {path: box(totals_of(one)) for path, one in self._recordings.items()}
        recordings_of[self._token], boxes_of[self._token] = self._recordings, self.boxes
        for kept in (recordings_of, boxes_of):
            weakref.finalize(self, kept.pop, self._token)

    def _observed(self, parts: Sequence[Any]) -> list[Any]:
        recordings: dict[str, Recording] = {}
        flat = [flatten_with_paths(part) for part in parts]
        axes = _contracting(flat, self._rules, {})
        gram, decay = self._gram, self._decay
        trees = [
            _observed_tree(tree, axes, self._token, recordings, gram=gram, decay=decay)
            for tree in flat
        ]
        self._recordings = self._recordings or recordings
        if recordings.keys() != self._recordings.keys():
            raise ValueError(
                f"the parameters have weights at {', '.join(recordings)}, and those that observe "
                f"was given at {', '.join(self._recordings)}"
            )
        return trees

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model, and records its activations as those of a batch."""
        if self._takes_params and not args:
            raise TypeError("the model takes its params first, by position")
        parts, args = ([args[0]], args[1:]) if self._takes_params else (self._parts, args)
        with telling_tangents(PRODUCTS):
            out = implicit(self._call)(self._observed(parts), *args, **kwargs)
        for box in self.boxes.values():
            box.update(lambda totals: ended(totals, self._decay))
        return out

    def statistics(self) -> dict[str, ActivationStatistics]:
        """Returns what has been recorded so far, by the path of the weight.

        **Raises:** `ValueError` where no activations have met any of the weights. Warns with
        `UserWarning` of those that met none.
        """
        for path, box in self.boxes.items():
            store(box.get(), self._recordings[path])
        return statistics_of(self._recordings)


Program = tuple[Sequence[Any], Callable]


def _program(model: Callable, params: Any) -> Program:
    """The trees of parameters, and the function of them, as a list, and of other arguments."""
    if params is not None:
        return [params], lambda parts, /, *args, **kwargs: model(parts[0], *args, **kwargs)
    if isinstance(model, functools.partial):
        names = list(model.keywords)
        parts = [model.func, *model.args, *model.keywords.values()]
        if jax.tree_util.treedef_is_leaf(jax.tree.structure(model.func)):
            parts[0] = None
        split = 1 + len(model.args)

        def call(parts: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
            function = model.func if parts[0] is None else parts[0]
            keywords = dict(zip(names, parts[split:], strict=True))
            return function(*parts[1:split], *args, **{**keywords, **kwargs})

        return parts, call
    if callable(model) and not jax.tree_util.treedef_is_leaf(jax.tree.structure(model)):
        return [model], lambda parts, /, *args, **kwargs: parts[0](*args, **kwargs)
    raise TypeError(
        f"observe finds no parameters in {model!r}: pass them, as observe(model, rules, "
        "params=params) of a function model(params, batch); or functools.partial(model, params)"
    )


def _contracted(
    program: Sequence[Any], call: Callable, rules: Sequence[Rule], args: Sequence[Any]
) -> dict[str, Sequence[int]]:
    """The axes that the program contracts, by path, where no rule states them."""
    axes: dict[str, Sequence[int]] = {}

    def asks(path: str, leaf: Any) -> bool:
        rule = rule_for(path.split(".", 1)[-1], leaf, rules)  # the first key is that of the part
        return rule is not None and rule.tile_axis is None

    try:
        found = uses_of(call, list(program), asks, args)
    except jax.errors.JAXTypeError:  # a program that runs, and cannot be traced
        return {}
    for path, uses in found.items():
        for use in telling(uses)[:1]:
            axes[path.split(".", 1)[-1]] = sorted(use.contracted)
    return axes


def _contracting(
    trees: Sequence[Flat], rules: Sequence[Rule], axes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """Which axes of each weight are contracted: as the program says, or else as its rule does."""
    contracting: dict[str, tuple[int, ...]] = {}
    for paths, leaves, _ in trees:
        for path, leaf in zip(paths, leaves, strict=True):
            rule = rule_for(path, leaf, rules)
            if rule is None or not (rule.qtype or rule.act_qtype):
                continue
            if path in contracting:
                raise ValueError(
                    f"two arguments of the partial have a parameter at {path!r}: pass params=, one "
                    "tree"
                )
            contracting[path] = tuple(axes.get(path, rule.contracting(leaf.ndim)))
    return contracting


def _observed_tree(
    flat: Flat,
    contracting: Mapping[str, tuple[int, ...]],
    token: int,
    observed: dict[str, Recording],
    *,
    gram: bool,
    decay: float,
    paired: bool = False,
) -> Any:
    paths, leaves, treedef = flat
    replaced = list(leaves)
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if path not in contracting:
            continue
        recording = Recording(leaf.shape, contracting[path], gram=gram, decay=decay, paired=paired)
        observed[path] = recording
        replaced[i] = Observed(
            array=jnp.asarray(leaf),
            position=recording.positions(),
            contracting=contracting[path],
            path=path,
            token=token,
            gram=gram,
        )
    return jax.tree.unflatten(treedef, replaced)


def statistics_of(observed: Mapping[str, Recording]) -> dict[str, ActivationStatistics]:
    """Returns what was recorded, by the path of the weight.

    **Raises:** `ValueError` where no activations met any of them. Warns of those that met none.
    """
    if not observed:
        raise ValueError("no rule has a format for any weight of the model, so none was observed")
    met, unmet = split(observed)
    tell_of_unmet(unmet, all=not met)
    return met


def split(
    observed: Mapping[str, Recording],
) -> tuple[dict[str, ActivationStatistics], dict[str, str]]:
    """Returns what was recorded, by the path of the weight; and of others why nothing was."""
    met = {path: one.statistics() for path, one in observed.items() if one.has_met}
    return met, {path: one.why_not() for path, one in observed.items() if not one.has_met}


def tell_of_vanishing(met: Mapping[str, ActivationStatistics]) -> None:
    """Warn of weights whose activations are zeros, or so small that their squares are.

    **Raises:** `ValueError` if all of them are such.
    """
    vanishing = {}
    for path, statistics in met.items():
        largest = np.max(statistics.absmax, where=statistics.count > 0, initial=0)
        if largest == 0:
            vanishing[path] = "all are 0"
        elif largest**2 < np.finfo(np.float32).tiny:
            vanishing[path] = f"the largest is {largest:.1g}, and its square underflows"
    if not vanishing:
        return
    some = "; ".join(f"{path} ({why})" for path, why in itertools.islice(vanishing.items(), 4))
    message = (
        f"the activations say nothing of {some}{'; ...' if len(vanishing) > 4 else ''}: give "
        "batches with other activations, scale them, or give these weights rules of their own"
    )
    if len(vanishing) == len(met):
        raise ValueError(message)
    warn_user(message)


def tell_of_unmet(unmet: Mapping[str, str], *, all: bool) -> None:
    """Warns of weights that met no activations, by their paths with why; raises if those are `all`.

    **Raises:** `ValueError`.
    """
    some = "; ".join(f"{path} ({why})" for path, why in itertools.islice(unmet.items(), 4))
    message = f"no activations met {some}{'; ...' if len(unmet) > 4 else ''}"
    if all:
        raise ValueError(message)
    if unmet:
        warn_user(message)
