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

from ..._core.primitives.scopes import mark_tangents
from ..._core.surface.arguments import check_parameters
from ..._core.surface.implicit import implicit
from ..._jax.source_lines import warn_user
from ..observation.observed import Observed, boxes_of, recordings_of, tokens
from ..observation.recording import Recording
from ..observation.statistics import ActivationStatistics
from ..observation.totals import ended, store, totals_of
from ..weights.activations import PRODUCTS
from .rules import Rule, flatten_with_paths, rule_for, rules_in, warn_of_unmatched
from .uses import telling, uses_of


def observe(
    model: Callable,
    rules: Sequence[Rule],
    *,
    params: Any = None,
    gram: bool = False,
    decay: float = 0.9,
    box: Callable[[Any], Any] | None = None,
) -> Any:
    """Create a function that runs a model and records statistics of its activations.

    Activations are the operands that multiply a weight in `dot_general`, convolutions and
    `ragged_dot`. They are recorded in products that contract the `tile_axis` of the rule. If
    `tile_axis` is None, the first product of the weight in the traced program determines the axes.
    With `box`, the program is not traced, and None means axis -2. The model does not change, and
    its weights stay dense. `docs/calibration.md` lists which operands count as activations.

    **Arguments:**

    - `model`: a function of `params` and a batch. If `params` is None, a callable module or a
      `functools.partial`. Their arrays are then the parameters.
    - `rules`: a list of `Rule`, as for `quantize_tree`. A weight is observed if the first rule that
      matches it has a `qtype` or an `act_qtype`.
    - `params`: a pytree of arrays. None if `model` is a module.
    - `gram`: also record the second moments `x.T @ x` of the activations `x`, except in
      convolutions.
    - `decay`: the weight of earlier batches in the exponential average of ranges, at least 0 and
      below 1.
    - `box`: pass `vn.hijax.Box` to record on the device. `observe` then returns a model that
      records each call and has a method `statistics()`. Call this model in any program, such as a
      training step.

    **Returns:** a function. Its argument is an iterable of batches. If a batch is a tuple, its
    entries are the arguments of the model. Any other batch is the only argument. The function
    returns a dict from the path of each weight to its `ActivationStatistics`. All uses of a weight
    are combined.

    **Raises:**

    - `TypeError` if `model` is not callable, if `params` is missing and `model` is a function, if
      `rules` is not a list of `Rule`, or if the batches are a single array or dict.
    - `ValueError` if `params` holds no arrays, `decay` is below 0 or not below 1, or there are no
      batches.
    - `ValueError` if no activations are recorded for any weight.
    - `ValueError` if two arguments of a `functools.partial` have parameters with the same path.

    **Warns** (`UserWarning`) of a rule that matches no path, and of weights for which no
    activations are recorded.

    >>> import jax.numpy as jnp, veneer as vn
    >>> params, batches = {"up": jnp.eye(2)}, [jnp.array([[1.0, -3.0]]), jnp.array([[2.0, 1.0]])]
    >>> rules = [vn.quant.Rule(".*", "int8", act_qtype="int8", act_range="mean")]
    >>> statistics = vn.quant.observe(lambda p, x: x @ p["up"], rules, params=params)(batches)
    >>> statistics["up"].absmax.ravel().tolist()
    [2.0, 3.0]
    >>> small = vn.quant.quantize_tree(params, rules, statistics=statistics)
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be at least 0 and below 1, not {decay}")
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
            with mark_tangents(PRODUCTS):
                implicit(call)(parts, *args)
            jax.effects_barrier()
            for path, recording in observed.items():
                if beside is not None:
                    recording.pair(others[path])
                recording.end_batch()
    finally:
        del recordings_of[token], recordings_of[other]
    if parts is None:
        raise ValueError("there are no batches to observe. Pass at least one")
    return observed


def check_batches(batches: Any) -> None:
    """Refuses what is one batch rather than an iterable of them."""
    if isinstance(batches, Mapping | jax.Array | np.ndarray):
        raise TypeError(
            f"batches must be an iterable, such as a list of batches, not a single "
            f"{type(batches).__name__}"
        )


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """Returns the arguments of the model that a batch is."""
    return batch if type(batch) is tuple else (batch,)


class ObservedModel:
    """A model that records its activations in Boxes, created by `observe(..., box=vn.hijax.Box)`.

    Call it as the model, with `params` first if `observe` got them. It can be compiled,
    differentiated, called in a loop, and in `jax.checkpoint`, whose recomputation is not recorded
    again. Each call is a batch. `jax.vmap` around it is not supported: map inside the model.

    `boxes` maps the path of each weight to its Box.

    **Arguments:** as for `observe`.
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
                f"these parameters have weights at {', '.join(recordings)}, and the parameters "
                f"given to observe at {', '.join(self._recordings)}. Pass the same tree"
            )
        return trees

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, and record its activations as one batch."""
        if self._takes_params and not args:
            raise TypeError("pass params to the observed model as its first positional argument")
        parts, args = ([args[0]], args[1:]) if self._takes_params else (self._parts, args)
        with mark_tangents(PRODUCTS):
            out = implicit(self._call)(self._observed(parts), *args, **kwargs)
        for box in self.boxes.values():
            box.update(lambda totals: ended(totals, self._decay))
        return out

    def statistics(self) -> dict[str, ActivationStatistics]:
        """Return the statistics recorded so far, by the path of the weight.

        **Raises:** `ValueError` if no weight has activations.

        **Warns** (`UserWarning`) of weights without activations.
        """
        for path, box in self.boxes.items():
            store(box.get(), self._recordings[path])
        return statistics_of(self._recordings)


Program = tuple[Sequence[Any], Callable]


def _program(model: Callable, params: Any) -> Program:
    """The trees of parameters, and the function of them, as a list, and of other arguments."""
    shown = f"a {type(model).__name__}"
    how = "Call observe(model, rules, params=params), with a function model(params, batch)"
    if not callable(model):
        raise TypeError(f"the model must be a function or a module, not {shown}. {how}")
    if params is not None:
        check_parameters(params, "observe(model, rules, params=params)")
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
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(model)):
        return [model], lambda parts, /, *args, **kwargs: parts[0](*args, **kwargs)
    raise TypeError(
        f"the model, {shown}, holds no parameters. {how}, or pass functools.partial(model, params)"
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
                    f"two arguments of the partial have a parameter at {path!r}. Pass all "
                    "parameters as one tree, params="
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
        raise ValueError(
            "no rule has a format for any weight of the model. Add a rule that matches one"
        )
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
        f"the activations of {some}{'; ...' if len(vanishing) > 4 else ''} are too small to use. "
        "Pass other batches, scale them, or exclude these weights with a rule"
    )
    if len(vanishing) == len(met):
        raise ValueError(message)
    warn_user(message)


def tell_of_unmet(unmet: Mapping[str, str], *, all: bool) -> None:
    """Warns of weights that met no activations, by their paths with why; raises if those are `all`.

    **Raises:** `ValueError`.
    """
    some = "; ".join(f"{path} ({why})" for path, why in itertools.islice(unmet.items(), 4))
    message = f"no activations were recorded for {some}{'; ...' if len(unmet) > 4 else ''}"
    if all:
        raise ValueError(message)
    if unmet:
        warn_user(message)
