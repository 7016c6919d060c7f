"""`calibrate`: quantize the parameters of a model with the activations of sample data.

A calibration runs the model on the batches, records the second moments of the activations of each
weight, and rounds the weights. It can divide the weights into *stages*: groups that are rounded one
after another. In a sequential calibration, a stage uses the activations of the model in which the
weights of earlier stages are already rounded.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from ..._core.surface import some_of
from ..._jax.frames import warn_user
from ..models.arguments import (
    as_rules_or_format,
    first_arguments,
    parameters_and_program,
)
from ..models.observe import (
    record,
    split_recordings,
    statistics_of,
    warn_of_missing,
    warn_of_vanishing,
)
from ..models.quantize_tree import ChosenRules, check_rules, choose_rules
from ..models.rules import Rule, get_method
from ..recording import Recording
from ..statistics import ActivationStatistics
from .gptq import DAMPING
from .report import CalibrationReport
from .saved_progress import SavedProgress, digest_calibration
from .weight import RoundedWeight, name_errors


def calibrate(
    model: Callable,
    rules: Sequence[Rule] | DTypeLike,
    *,
    params: Any = None,
    method: str = "gptq",
    sequential: bool = False,
    propagation: float = 0.0,
    damping: float = DAMPING,
    memory: int | None = None,
    resume: str | Path | None = None,
    progress: bool = False,
) -> "Calibrator":
    """Create a calibration, which quantizes a model on sample data.

    It rounds the weights so that the outputs of the model's products change little.
    `docs/ptq.md` explains the methods and compares their results.

    **Arguments:**

    | group | arguments |
    |---|---|
    | what to quantize | `model`, `rules`, `params` |
    | how to round | `method`, `sequential`, `propagation`, `damping` |
    | resources | `memory`, `resume`, `progress` |

    - `model`: a function of `params` and a batch. If `params` is None, a callable module.
    - `rules`: a list of `Rule` or the name of a format, as for `quantize_tree`.
    - `params`: a pytree of arrays. None if `model` is a module.
    - `method`: the rounding method (see the table) for weights whose rule has no `method`.
    - `sequential`: round weights in the order of the program. The activations of a weight then come
      from the model in which all earlier weights are quantized.
    - `propagation`: a fraction from 0 to 1. Each weight compensates this fraction of the errors of
      earlier weights (QEP, arXiv 2504.09629). A fraction above 0 needs `sequential`.
    - `damping`: a number of at least 0. GPTQ increases the diagonal of the second moments by
      `damping` times the mean of the diagonal.
    - `memory`: a limit in bytes for the second moments, which are a float64 `[K, K]` array per
      weight. To stay within the limit, the calibration reads the batches several times.
    - `resume`: a folder for results. After an interruption, the same call continues from there.
    - `progress`: show a progress bar. This needs the package rich.

    | `method` | how codes are chosen |
    |---|---|
    | "gptq" | one by one; each compensates the errors of earlier codes (arXiv 2210.17323) |
    | "nearest" | the nearest codes, with the scales of least error |
    | "awq" | the nearest codes, after scaling channels by their activations (arXiv 2306.00978) |
    | "smoothquant" | the nearest codes, after moving outliers to weights (arXiv 2211.10438) |
    | "awq+gptq", "smoothquant+gptq" | as in "gptq", after the step of "awq" or "smoothquant" |

    **Returns:** a `Calibrator`. Call it with an iterable of batches to get the quantized
    parameters. Each output channel of a weight gets the codes of the method or the nearest codes,
    whichever have less error. Embeddings and convolution kernels are rounded to nearest.

    **Raises:**

    - `TypeError` if `model` is not callable, if `params` is missing and `model` is a function, or
      if `rules` is not a list of `Rule`.
    - `ValueError` if `params` holds no arrays, `method` is unknown, `memory`, `propagation` or
      `damping` is out of range, or a rule has an option for training, such as `grad_qtype`.

    `Calibrator` lists the errors and warnings of the calibration itself.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w, x = jax.random.normal(jax.random.key(0), (2, 16, 16))
    >>> model = lambda params, x: x @ params["w"]
    >>> calibration = vn.quant.calibrate(model, [vn.quant.Rule("w", "int4")], params={"w": w})
    >>> calibration([x @ jnp.tri(16)])["w"]
    QArray(q4[16,16] channelwise, 6 bits)
    """
    return Calibrator(
        model, rules, params, method, sequential, propagation, damping, memory, resume, progress
    )


class Calibrator:
    """A calibration of a model, created by `calibrate`.

    Call it with an iterable of batches. If a batch is a tuple, its entries are the arguments of the
    model. A batch of another type is the only argument. The call returns the quantized parameters
    or module. Afterwards, the attribute `report` has the error of each weight, and `print(report)`
    shows a table.

    **Arguments:** the same as for `calibrate`.

    **Raises** when called, apart from the errors of `quantize_tree`:

    - `TypeError` if the batches are a single array or dict.
    - `TypeError` if the batches can be iterated only once, and `sequential`, `memory` or `resume`
      needs several passes.
    - `ValueError` if there are no batches, or if no product uses a weight that the rules quantize.
    - `ValueError` if there are no activations, if all are 0, or if some are not finite.
    - `ValueError` if the folder `resume` has the results of another calibration.
    - `ImportError` if `progress=True` and the package rich is not installed.

    **Warns** (`UserWarning`) when called, apart from the warnings of `quantize_tree`, of:

    - weights that have no activations, or only activations whose squares are 0 or underflow;
    - weights that are rounded to nearest, because the method was no better for them;
    - damaged files in the folder `resume`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w, x = jax.random.normal(jax.random.key(0), (2, 16, 16))
    >>> model = lambda params, x: x @ params["w"]
    >>> calibration = vn.quant.calibrate(model, [vn.quant.Rule("w", "int4")], params={"w": w})
    >>> small = calibration([x @ jnp.tri(16)])
    >>> isinstance(calibration, vn.quant.Calibrator)
    True
    >>> [(row.path, row.method, row.after < row.before) for row in calibration.report.rows]
    [('w', 'gptq', True)]
    """

    report: CalibrationReport

    def __init__(
        self,
        model: Callable,
        rules: Sequence[Rule] | DTypeLike,
        params: Any,
        method: str,
        sequential: bool,
        propagation: float,
        damping: float,
        memory: int | None,
        resume: str | Path | None,
        progress: bool,
    ):
        factors_method = get_method(method).factors  # raises ValueError for an unknown method
        if memory is not None and not memory > 0:
            raise ValueError(f"memory must be a number of bytes above 0, not {memory}")
        if not 0 <= propagation <= 1:
            raise ValueError(f"propagation must be between 0 and 1, not {propagation}")
        if propagation and not sequential:
            raise ValueError(
                f"propagation={propagation} compensates weights that are rounded earlier, so it "
                "needs sequential=True"
            )
        if not damping >= 0:
            raise ValueError(f"damping must be 0 or more, not {damping}")
        rules = as_rules_or_format(rules)
        if not isinstance(rules, str):
            check_rules(rules, calibrated=True)
            has_activations = any(rule.act_qtype is not None for rule in rules)
            if factors_method == "smoothquant" and not has_activations:
                raise ValueError(
                    f"method {method!r} is for quantized activations, and no rule has an "
                    "act_qtype. Set act_qtype in a rule, or use method='awq'"
                )
        call = "calibrate(model, rules, params=params)"
        self._params, self._program = parameters_and_program(model, params, call)
        self._rules, self._method = rules, method
        self._sequential, self._propagation, self._damping = sequential, propagation, damping
        self._memory, self._resume, self._progress = memory, resume, progress

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Return the parameters, quantized with the activations of the batches."""
        # Choose the rule of each weight, which needs the shapes of one batch.
        args, batches_once = first_arguments(batches, "to calibrate with")
        chosen = choose_rules(self._params, self._rules, self._program, args, needs_products=True)
        axes = chosen.product_axes(chosen.rules)
        stages = _limit_memory(self._memory, chosen, axes)
        # Check that the batches can be read as often as needed.
        repeating = ["sequential"] if self._sequential else []
        repeating += [f"memory={self._memory:,}"] if len(stages) > 1 else []
        repeating += ["resume"] if self._resume is not None else []
        if not repeating:
            batches = batches_once
        elif isinstance(batches, Iterator):
            raise TypeError(
                f"{repeating[0]} reads the batches several times, and a {type(batches).__name__} "
                "can be read only once. Pass a list, or an object whose __iter__ starts again"
            )
        options = self._method, self._sequential, self._propagation, self._damping, self._memory
        saved = SavedProgress(
            self._resume,
            lambda: digest_calibration(
                (self._rules, *options), self._program, self._params, args, batches
            ),
        )
        weights, statistics = self._round(chosen, axes, stages, batches, saved)
        # Report the losses, and insert the rounded weights into the tree.
        results = {path: weight.result(path) for path, weight in weights.items()}
        losses = tuple(loss for _, loss in results.values() if loss is not None)
        self.report = CalibrationReport(losses)

        def quantize(path: str, leaf: Any, rule: Rule) -> Any:
            with name_errors(path):
                q, _ = results.get(path, (leaf, None))
                return rule.with_activations(q, statistics.get(path))

        new = chosen.replace_leaves(quantize)
        methods = {path: self._method_for(rule) for path, rule in chosen.rules.items()}
        nearest = [loss.path for loss in losses if loss.method == "nearest"]
        useless = [path for path in nearest if methods[path] != "nearest"]
        if useless:
            names = " and ".join(sorted({methods[path] for path in useless}))
            warn_user(
                f"{names} was no better than rounding to nearest for {some_of(useless)}, so they "
                "are rounded to nearest. More or other batches may help"
            )
        return new

    def _round(
        self,
        chosen: ChosenRules,
        axes: Mapping[str, tuple[int, ...]],
        stages: Sequence["Stage"],
        batches: Iterable[Any],
        saved: SavedProgress,
    ) -> tuple[Mapping[str, RoundedWeight], Mapping[str, ActivationStatistics]]:
        """Round all weights, one stage (a group of weights) after another.

        A sequential calibration ignores `stages`, and finds its stages in the order of the program.

        **Arguments:**

        - `chosen`: the flattened parameters and their rules.
        - `axes`: a dict from the path of each weight that products use to its contracted axes.
        - `stages`: the stages, in the order in which to round them.
        - `batches`: the sample data.
        - `saved`: the folder of results, from which finished stages are restored.

        **Returns:** a pair of dicts by path: the rounded weights, and the statistics of their
        activations.
        """
        leaves = dict(zip(chosen.paths, chosen.leaves, strict=True))
        weights = {}
        for path, rule in chosen.rules.items():
            if rule.qtype is not None:
                correction_axes = chosen.correction_axes(path)
                with name_errors(path):
                    weights[path] = RoundedWeight(leaves[path], rule, correction_axes)
        observe = functools.partial(self._observe, chosen, leaves)
        if self._sequential:
            dense = statistics_of(observe(axes, batches, gram=False))
            in_order = [path for path in chosen.uses or () if path in dense]
            stages = _order_stages({path: dense[path] for path in in_order})
            leaves |= {path: w.rounded_values() for path, w in weights.items() if path not in axes}

        def show_batches(show: Show, number: int) -> Iterator[Any]:
            for i, batch in enumerate(batches, start=1):
                show(f"stage {number + 1} of {len(stages)}, batch {i}")
                yield batch

        statistics: dict[str, ActivationStatistics] = {}
        missing: dict[str, str] = {}
        with _progress_bar(sum(map(len, stages)), is_shown=self._progress) as show:
            for number, stage in enumerate(stages):
                # Restore the weights that are saved, and observe the activations of the others.
                done = saved.restore(number, {path: weights.get(path) for path in stage})
                show("", len(done))
                remaining_axes = {path: axes[path] for path in stage if path not in done}
                shown = show_batches(show, number)
                recordings = observe(remaining_axes, shown, gram=True) if remaining_axes else {}
                observed, missing_in_stage = split_recordings(recordings)
                missing |= missing_in_stage
                # Round and save the observed weights.
                for path, of_weight in observed.items():
                    show(path)
                    if path in weights:
                        with name_errors(path):
                            weights[path].round(
                                of_weight,
                                method=self._method_for(chosen.rules[path]),
                                damping=self._damping,
                                propagation=self._propagation,
                                stacks=stage[path],
                            )
                    # The second moments are large and no longer needed.
                    done[path] = dataclasses.replace(of_weight, gram=None, cross=None)
                    saved.save(number, path, done[path], weights.get(path))
                    show(path, 1)
                statistics |= done
                if self._sequential:
                    leaves |= {path: weights[path].values for path in done if path in weights}
        warn_of_missing(missing, is_all=not statistics)
        warn_of_vanishing(statistics)
        return weights, statistics

    def _method_for(self, rule: Rule) -> str:
        """Return the rounding method for a weight with a rule.

        If the rule has no method, this is the method of the calibration, with two exceptions. The
        factors of AWQ and SmoothQuant are left out if the rule rotates the weight. The factors of
        SmoothQuant are also left out if the rule has no `act_qtype`.
        """
        if rule.method is not None:
            return rule.method
        method = get_method(self._method)
        if rule.rotate or (method.factors == "smoothquant" and rule.act_qtype is None):
            return "gptq" if method.compensates else "nearest"
        return self._method

    def _observe(
        self,
        chosen: ChosenRules,
        leaves: Mapping[str, Any],
        axes: Mapping[str, tuple[int, ...]],
        batches: Iterable[Any],
        *,
        gram: bool,
    ) -> Mapping[str, Recording]:
        """Run the model on the batches, and record the activations that multiply some weights.

        `axes` maps the paths of these weights to their contracted axes. `leaves` maps all paths to
        the leaves that the model uses, some already rounded. With `gram`, record second moments.
        With `gram` and `propagation`, also run the dense model on the batches.
        """
        run = lambda trees, *args: [self._program(tree, *args) for tree in trees]
        current = chosen.paths, [leaves[path] for path in chosen.paths], chosen.treedef
        needs_dense = gram and self._propagation > 0
        dense = (chosen.paths, chosen.leaves, chosen.treedef) if needs_dense else None
        return record(run, [current], axes, batches, gram=gram, decay=0.9, reference=dense)


#: A function of a text to show and of the number of weights that were finished since the last call.
Show = Callable[..., None]


@contextmanager
def _progress_bar(total: int, *, is_shown: bool) -> Iterator[Show]:
    """Show a progress bar for `total` weights, and yield a function `show` that updates the bar.

    `show(text, n)` displays `text` and advances the bar by n weights, by default 0. If `is_shown`
    is False, there is no bar, and `show` does nothing.
    """
    if not is_shown:
        yield lambda text, advance=0: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError("progress=True needs rich: pip install rich") from error

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, advance=0: bar.update(task, description=text, advance=advance)


#: The weights that are rounded at the same time: by path, the indices of the matrices of a stacked
#: weight, or None for all matrices.
Stage = Mapping[str, Sequence[int] | None]


def _limit_memory(
    memory: int | None, chosen: ChosenRules, axes: Mapping[str, tuple[int, ...]]
) -> list[Stage]:
    """Divide the weights into stages (groups) whose second moments fit in `memory` bytes.

    A weight that does not fit is the only weight of its stage. `axes` is a dict from the path of
    each weight to its contracted axes. If `memory` is None, there is only one stage. A stage is a
    dict from paths to None, which means all matrices of the weight.
    """
    leaves = dict(zip(chosen.paths, chosen.leaves, strict=True))
    stages: list[dict[str, None]] = [{}]
    stage_nbytes = 0
    for path, contracted in axes.items():
        shape = leaves[path].shape
        size = math.prod(shape[axis] for axis in contracted)
        # A float64 [size, size] array for each matrix, if all leading axes are stacked.
        nbytes = 8 * size**2 * math.prod(shape[:-2])
        if stages[-1] and memory is not None and stage_nbytes + nbytes > memory:
            stages.append({})
            stage_nbytes = 0
        stages[-1][path] = None  # None means all matrices of the weight
        stage_nbytes += nbytes
    return [*stages]


def _order_stages(statistics: Mapping[str, ActivationStatistics]) -> list[Stage]:
    """Divide the weights into stages (groups) that are rounded in the order of the program.

    Consecutive weights with the same activations, such as q, k and v, are in one stage. If a scan
    uses stacked weights, layer 0 of all these weights comes before layer 1.

    **Arguments:**

    - `statistics`: the statistics of the activations, by path, in the order of the program.

    **Returns:** the stages in order. Each is a dict from paths to the indices of the stacked
    matrices, such as layers, that are rounded in this stage.
    """
    stages: list[dict[str, list[int]]] = []
    previous: Any = None
    # Consecutive weights with an equal number of stacked matrices may be used by the same scan.
    for num_layers, paths in itertools.groupby(statistics, lambda path: statistics[path].stacks):
        for layer, path in itertools.product(range(num_layers), list(paths)):
            squares = statistics[path].of_stacks(statistics[path].mean_square)[layer]
            if previous is None or not np.array_equal(squares, previous, equal_nan=True):
                stages.append({})
            stages[-1].setdefault(path, []).append(layer)
            previous = squares
    return [*stages]
