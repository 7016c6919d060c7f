"""`observe`: record statistics of the activations of a model, without changing the model.

Each weight that a rule matches is replaced by an `ObservedWeight`. Its products reduce the
activations to sums and ranges on the device. A callback sends the sums and ranges to the host.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.primitives.scopes import mark_tangents
from ..._core.surface import some_of
from ..._core.surface.implicit import implicit
from ..._jax.frames import warn_user
from ..formats.tiles import Shape
from ..product_weights import PRODUCTS
from ..recording import (
    ObservedWeight,
    Recording,
    boxes_by_run,
    recordings_by_run,
    run_ids,
)
from ..statistics import ActivationStatistics
from .arguments import (
    arguments_of,
    as_rules,
    can_be_quantized,
    find_rule,
    first_arguments,
    flatten_with_paths,
    parameter_trees_and_program,
    warn_of_unmatched,
)
from .rules import Rule
from .uses import find_uses, uses_with_axes

FlatTree = tuple[Sequence[str], Sequence[Any], Any]  # paths, leaves and treedef


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
      `functools.partial`, whose arrays are the parameters.
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
    - `ValueError` if `params` holds no arrays, `decay` is below 0 or not below 1, there are no
      batches, or no activations are recorded for any weight.
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
    rules = as_rules(rules)
    call = (
        "observe(model, rules, params=params), or observe(functools.partial(model, params), rules)"
    )
    trees, program = parameter_trees_and_program(model, params, call)
    flat_trees = [flatten_with_paths(tree) for tree in trees]
    warn_of_unmatched(rules, [path for paths, _, _ in flat_trees for path in paths])
    if box is not None:
        return ObservedModel(
            trees, program, rules, box, takes_params=params is not None, gram=gram, decay=decay
        )

    def run(batches: Iterable[Any]) -> dict[str, ActivationStatistics]:
        args, batches = first_arguments(batches, "to observe")
        axes = _observed_axes(flat_trees, rules, _traced_axes(trees, program, rules, args))
        return statistics_of(record(program, flat_trees, axes, batches, gram=gram, decay=decay))

    return run


def record(
    program: Callable,
    trees: Sequence[FlatTree],
    axes: Mapping[str, tuple[int, ...]],
    batches: Iterable[Any],
    *,
    gram: bool,
    decay: float,
    reference: FlatTree | None = None,
) -> dict[str, Recording]:
    """Run a model on batches, and record the activations that multiply some of its weights.

    **Arguments:**

    - `program`: the model, called as `program(trees, *args)` with the arguments of each batch.
    - `trees`: the parameters of the model, a list of flattened trees.
    - `axes`: the weights to observe: a dict from the path of each of them to its contracted axes.
      These are the axes of the weight that products with activations contract, counted from the
      end.
    - `batches`: an iterable of batches.
    - `gram`: also record the second moments `x.T @ x` of the activations `x`.
    - `decay`: the weight of earlier batches in the exponential average of ranges.
    - `reference`: another version of the first tree, such as the dense weights, or None. `program`
      gets it as the last tree, and must run the model with both versions. For activations `x` of
      the first tree and `y` of the reference, the products `x.T @ y` are recorded, too.

    **Returns:** a dict from the path of each observed weight to its `Recording`.
    """
    run_id, reference_id = next(run_ids), next(run_ids)
    create = partial(Recording, gram=gram, decay=decay, paired=reference is not None)
    observed, recordings = _observe_trees(trees, axes, run_id, create)
    reference_trees = [] if reference is None else [reference]
    references, reference_recordings = _observe_trees(reference_trees, axes, reference_id, create)
    recordings_by_run[run_id], recordings_by_run[reference_id] = recordings, reference_recordings
    try:
        for batch in batches:
            with mark_tangents(PRODUCTS):
                implicit(program)([*observed, *references], *arguments_of(batch))
            jax.effects_barrier()  # wait for the callbacks that record
            for path, recording in recordings.items():
                if path in reference_recordings:
                    recording.add_cross(reference_recordings[path])
                recording.end_batch()
    finally:
        del recordings_by_run[run_id], recordings_by_run[reference_id]
    return recordings


class ObservedModel:
    """A model that records its activations in Boxes, created by `observe(..., box=vn.hijax.Box)`.

    A Box is a mutable value on the device, which compiled programs can update.

    Call this object as the model. If `observe` got `params`, pass `params` first. Each call is
    recorded as one batch. Calls can be compiled, differentiated, in a loop, or in `jax.checkpoint`,
    which does not record the recomputation. `jax.vmap` of a call is not supported: map inside the
    model.

    The attribute `boxes` is a dict from the path of each observed weight to its Box, which holds
    `Totals`: sums and ranges of the activations.
    """

    boxes: dict[str, Any]

    def __init__(
        self,
        trees: Sequence[Any],
        program: Callable,
        rules: Sequence[Rule],
        box: Callable[[Any], Any],
        *,
        takes_params: bool,
        gram: bool,
        decay: float,
    ):
        self._trees, self._program, self._rules = trees, program, rules
        self._takes_params, self._decay, self._run_id = takes_params, decay, next(run_ids)
        self._create = partial(Recording, gram=gram, decay=decay)
        _, self._recordings = self._observe(trees)
        self.boxes = {path: box(x.device_totals()) for path, x in self._recordings.items()}
        # Observed weights look up their recording and Box by run id, until this object is deleted.
        for registry, values in ((recordings_by_run, self._recordings), (boxes_by_run, self.boxes)):
            registry[self._run_id] = values
            weakref.finalize(self, registry.pop, self._run_id)

    def _observe(self, trees: Sequence[Any]) -> tuple[list[Any], dict[str, Recording]]:
        flat_trees = [flatten_with_paths(tree) for tree in trees]
        axes = _observed_axes(flat_trees, self._rules, {})
        return _observe_trees(flat_trees, axes, self._run_id, self._create)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, and record its activations as one batch."""
        if self._takes_params and not args:
            raise TypeError("pass params to the observed model as its first positional argument")
        trees, args = ([args[0]], args[1:]) if self._takes_params else (self._trees, args)
        observed, recordings = self._observe(trees)
        if recordings.keys() != self._recordings.keys():
            raise ValueError(
                f"these parameters have weights at {', '.join(recordings)}, and the parameters "
                f"given to observe at {', '.join(self._recordings)}. Pass the same tree"
            )
        with mark_tangents(PRODUCTS):
            out = implicit(self._program)(observed, *args, **kwargs)
        for box in self.boxes.values():
            box.update(lambda totals: totals.end_batch(self._decay))
        return out

    def statistics(self) -> dict[str, ActivationStatistics]:
        """Return a dict from the path of each weight to its statistics from all calls so far.

        **Raises:** `ValueError` if no activations were recorded for any weight.

        **Warns** (`UserWarning`) of weights for which no activations were recorded.
        """
        for path, box in self.boxes.items():
            self._recordings[path].set_totals(box.get())
        return statistics_of(self._recordings)


def _traced_axes(
    trees: Sequence[Any], program: Callable, rules: Sequence[Rule], args: Sequence[Any]
) -> dict[str, Sequence[int]]:
    """Trace the program to find the contracted axes of weights whose rule sets no `tile_axis`.

    `args` are the arguments of the first batch. Return a dict from the paths of these weights to
    the axes that the first product or look-up contracts, counted from the end. The dict is empty if
    the program cannot be traced, for example because a Python `if` depends on values.
    """
    weight_path = lambda path: path.split(".", 1)[-1]  # without the index of the tree

    def needs_axes(path: str, leaf: Any) -> bool:
        rule = find_rule(weight_path(path), rules)
        return rule is not None and rule.tile_axis is None and can_be_quantized(leaf)

    try:
        uses = find_uses(program, list(trees), needs_axes, args)
    except jax.errors.JAXTypeError:  # the program depends on values, such as a Python `if`
        return {}
    return {
        weight_path(path): sorted(relevant_uses[0].contracted)
        for path, all_uses in uses.items()
        if (relevant_uses := uses_with_axes(all_uses))
    }


def _observed_axes(
    trees: Sequence[FlatTree], rules: Sequence[Rule], traced: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """Return a dict from the path of each weight to observe to its contracted axes.

    The weights to observe have a rule with a `qtype` or an `act_qtype`. `traced` is the result of
    `_traced_axes`. The axes of a weight that is not in `traced` are the `tile_axis` of its rule.
    """
    axes: dict[str, tuple[int, ...]] = {}
    for paths, leaves, _ in trees:
        for path, leaf in zip(paths, leaves, strict=True):
            rule = find_rule(path, rules)
            if rule is None or not (rule.qtype or rule.act_qtype) or not can_be_quantized(leaf):
                continue
            if path in axes:
                raise ValueError(
                    f"two arguments of the partial have a parameter at {path!r}. Pass all "
                    "parameters as one tree, params="
                )
            axes[path] = tuple(traced.get(path, rule.contracting(leaf.ndim)))
    return axes


def _observe_trees(
    trees: Sequence[FlatTree],
    axes: Mapping[str, tuple[int, ...]],
    run_id: int,
    create: Callable[[Shape, Sequence[int]], Recording],
) -> tuple[list[Any], dict[str, Recording]]:
    """Replace the weights at the paths in `axes` by `ObservedWeight`s.

    **Arguments:**

    - `trees`: flattened trees of parameters.
    - `axes`: a dict from the path of each weight to observe to its contracted axes.
    - `run_id`: the number of this run, by which the callbacks find the recordings.
    - `create`: a function that creates a `Recording` from the shape of a weight and its axes.

    **Returns:** a pair: the new trees, and a dict from paths to recordings.
    """
    recordings: dict[str, Recording] = {}
    observed = []
    for paths, leaves, treedef in trees:
        new = list(leaves)
        for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            if path in axes:
                recordings[path] = create(leaf.shape, axes[path])
                new[i] = ObservedWeight(
                    array=jnp.asarray(leaf),
                    position=recordings[path].positions(),
                    contracting=axes[path],
                    path=path,
                    run_id=run_id,
                )
        observed.append(jax.tree.unflatten(treedef, new))
    return observed, recordings


def statistics_of(recordings: Mapping[str, Recording]) -> dict[str, ActivationStatistics]:
    """Return a dict from the path of each weight to the statistics of its recording.

    Warn of weights whose recording has no activations, and leave them out.

    **Raises:** `ValueError` if there are no recordings, or no recording has activations.
    """
    if not recordings:
        raise ValueError(
            "no rule has a format for any weight of the model. Add a rule that matches one"
        )
    statistics, missing = split_recordings(recordings)
    warn_of_missing(missing, is_all=not statistics)
    return statistics


def split_recordings(
    recordings: Mapping[str, Recording],
) -> tuple[dict[str, ActivationStatistics], dict[str, str]]:
    """Return a pair of dicts by path: statistics, and reasons for missing statistics.

    Each weight is in one of them. The second dict has the weights without activations, with a text
    that gives the reason.
    """
    statistics = {path: x.statistics() for path, x in recordings.items() if x.has_activations}
    missing = {p: x.explain_missing() for p, x in recordings.items() if not x.has_activations}
    return statistics, missing


def warn_of_missing(missing: Mapping[str, str], *, is_all: bool) -> None:
    """Warn of weights without activations. `missing` is a dict from their paths to reasons.

    **Raises:** `ValueError`, instead of the warning, if `is_all` is True: no weight of the model
    has activations.
    """
    described = [f"{path} ({why})" for path, why in missing.items()]
    message = f"no activations were recorded for {some_of(described)}"
    if is_all:
        raise ValueError(message)
    if missing:
        warn_user(message)


def warn_of_vanishing(statistics: Mapping[str, ActivationStatistics]) -> None:
    """Warn of weights whose activations are all 0, or so small that their squares underflow.

    **Raises:** `ValueError` if all weights have such activations.
    """
    vanishing = []
    for path, x in statistics.items():
        largest = np.max(x.absmax, where=x.count > 0, initial=0)
        if largest == 0:
            vanishing.append(f"{path} (all are 0)")
        elif largest**2 < np.finfo(np.float32).tiny:
            vanishing.append(f"{path} (the largest is {largest:.1g}, and its square underflows)")
    if not vanishing:
        return
    message = (
        f"the activations of {some_of(vanishing)} are too small to use. "
        "Pass other batches, scale them, or exclude these weights with a rule"
    )
    if len(vanishing) == len(statistics):
        raise ValueError(message)
    warn_user(message)
