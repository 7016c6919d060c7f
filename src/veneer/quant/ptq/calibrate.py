"""`calibrate`: the parameters of a model, rounded by the activations that they meet.

The model is observed as `observe` does it, with second moments: once, or in stages, of which each
sees the activations of what was rounded before it.
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

from ..._jax.source_lines import warn_user
from ..models.matching import as_rules_or_format, some_of
from ..models.observe import (
    record,
    split_recordings,
    statistics_of,
    warn_of_missing,
    warn_of_vanishing,
)
from ..models.programs import arguments_of, check_batches, parameters_and_program
from ..models.quantize_tree import ChosenRules, check_rules, choose_rules
from ..models.rules import Rule, get_method
from ..observation.recording import Recording
from ..observation.statistics import ActivationStatistics
from .gptq import DAMPING
from .kept import KeptCalibration, identity_of
from .report import CalibrationReport
from .weight import RoundedWeight, naming


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
    - `propagation`: the fraction, from 0 to 1, of the errors of earlier weights that a weight
      compensates (QEP, arXiv 2504.09629). It needs `sequential`.
    - `damping`: a number of at least 0. GPTQ adds `damping` times the mean of the diagonal of the
      second moments to that diagonal.
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
    | "awq+gptq", "smoothquant+gptq" | as in "gptq", after the same scaling or moving |

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
    - `ValueError` if there are no batches, or if products use none of the weights that the rules
      quantize.
    - `ValueError` if no activations are recorded, if all activations are 0, or if some are not
      finite.
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
        get_method(method)
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
            acts = [rule for rule in rules if rule.act_qtype is not None]
            if get_method(method).factors == "smoothquant" and not acts:
                raise ValueError(
                    f"method {method!r} is for quantized activations, and no rule has an "
                    "act_qtype. Set act_qtype in a rule, or use method='awq'"
                )
        call = "calibrate(model, rules, params=params)"
        self._params, self._program = parameters_and_program(model, params, call)
        self._rules = rules
        self._method, self._sequential, self._propagation = method, sequential, propagation
        self._damping = damping
        self._memory, self._resume, self._progress = memory, resume, progress

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Return the parameters, quantized with the activations of the batches."""
        check_batches(batches)
        first = next(again := iter(batches), _NONE)
        if first is _NONE:
            raise ValueError("there are no batches to calibrate with. Pass at least one")
        args = arguments_of(first)
        chosen = choose_rules(self._params, self._rules, self._program, args, needs_products=True)
        axes = _contracting(chosen)
        stages = _within(self._memory, chosen, axes)
        several = ["sequential"] if self._sequential else []
        several += [f"memory={self._memory:,}"] if len(stages) > 1 else []
        several += ["resume"] if self._resume is not None else []
        if not several:
            batches = itertools.chain([first], again)
        elif again is batches:
            raise TypeError(
                f"{several[0]} reads the batches several times, and a {type(batches).__name__} can "
                "be read only once. Pass a list, or an object whose __iter__ starts again"
            )
        how = self._method, self._sequential, self._propagation, self._damping, self._memory
        called = self._rules, *how
        kept = KeptCalibration(
            self._resume,
            lambda: identity_of(called, self._program, self._params, args, batches),
        )
        weights, met = self._round(chosen, axes, stages, batches, kept)

        results = {path: weight.result(path) for path, weight in weights.items()}
        losses = tuple(loss for _, loss in results.values() if loss is not None)
        self.report = CalibrationReport(losses)

        def quantized(path: str, leaf: Any, rule: Rule) -> Any:
            with naming(path):
                q, _ = results.get(path, (leaf, None))
                return rule.with_activations(q, met.get(path))

        new = chosen.replace_leaves(quantized)
        asked = {path: self._method_for(rule) for path, rule in chosen.rules.items()}
        useless = [x.path for x in losses if x.method == "nearest" != asked[x.path]]
        if useless:
            names = " and ".join(sorted({asked[path] for path in useless}))
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
        kept: KeptCalibration,
    ) -> tuple[Mapping[str, RoundedWeight], Mapping[str, ActivationStatistics]]:
        """The weights, rounded in stages, and the statistics of their activations."""
        leaves = dict(zip(chosen.paths, chosen.leaves, strict=True))
        weights = {}
        for path, rule in chosen.rules.items():
            if rule.qtype is not None:
                of_correction = chosen.correction_axes(path)
                with naming(path):
                    weights[path] = RoundedWeight(leaves[path], rule, of_correction)
        observed = functools.partial(self._observed, chosen, leaves)
        if self._sequential:
            dense = statistics_of(observed(axes, batches, gram=False))
            stages = stages_of({path: dense[path] for path in chosen.uses or () if path in dense})
            leaves |= {path: w.nearest() for path, w in weights.items() if path not in axes}
        met: dict[str, ActivationStatistics] = {}
        unmet: dict[str, str] = {}
        with _bar(sum(map(len, stages)), shown=self._progress) as tell:
            for number, stage in enumerate(stages):
                known = kept.restored(number, {path: weights.get(path) for path in stage})
                tell("", len(known))
                left = {path: axes[path] for path in stage if path not in known}
                told = _telling(batches, f"stage {number + 1} of {len(stages)}, batch", tell)
                new, others = split_recordings(observed(left, told, gram=True) if left else {})
                unmet |= others
                for path in new:
                    tell(path)
                    known[path] = dataclasses.replace(new[path], gram=None, cross=None)
                    if path in weights:
                        rule = chosen.rules[path]
                        with naming(path):
                            weights[path].round(
                                new[path],
                                method=self._method_for(rule),
                                damping=self._damping,
                                propagation=self._propagation,
                                stacks=stage[path],
                            )
                    kept.save(number, path, known[path], weights.get(path))
                    tell(path, 1)
                met |= known
                if self._sequential:
                    leaves |= {path: weights[path].values for path in known if path in weights}
        warn_of_missing(unmet, is_all=not met)
        warn_of_vanishing(met)
        return weights, met

    def _method_for(self, rule: Rule) -> str:
        """Return the rounding method of a weight, without channel factors that would not help."""
        if rule.method is not None:
            return rule.method
        method = get_method(self._method)
        if rule.rotate or (method.factors == "smoothquant" and rule.act_qtype is None):
            return "gptq" if method.compensates else "nearest"
        return self._method

    def _observed(
        self,
        chosen: ChosenRules,
        leaves: Mapping[str, Any],
        axes: Mapping[str, tuple[int, ...]],
        batches: Iterable[Any],
        *,
        gram: bool,
    ) -> Mapping[str, Recording]:
        """What some weights meet; and where nothing is rounded, if errors are propagated."""
        call = lambda parts, *args: [self._program(part, *args) for part in parts]
        tree = chosen.paths, [leaves[path] for path in chosen.paths], chosen.treedef
        pairs = gram and self._propagation > 0
        dense = (chosen.paths, chosen.leaves, chosen.treedef) if pairs else None
        return record(call, [tree], axes, batches, gram=gram, decay=0.9, reference=dense)


_NONE = object()


Tell = Callable[..., None]  # what is being done, and how many weights more are done


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Tell]:
    """A bar of so many weights, if it is to be shown."""
    if not shown:
        yield lambda doing, done=0: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError("progress=True needs rich: pip install rich") from error

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda doing, done=0: bar.update(task, description=doing, advance=done)


def _telling(batches: Iterable[Any], doing: str, tell: Tell) -> Iterator[Any]:
    for i, batch in enumerate(batches, start=1):
        tell(f"{doing} {i}")
        yield batch


def _contracting(chosen: ChosenRules) -> dict[str, tuple[int, ...]]:
    """The axes that products contract of each weight that meets activations in one."""
    assert chosen.uses is not None
    leaves = dict(zip(chosen.paths, chosen.leaves, strict=True))
    return {
        path: rule.contracting(leaves[path].ndim)
        for path, rule in chosen.rules.items()
        if rule.has_format and any(use.is_product for use in chosen.uses[path])
    }


Stage = Mapping[str, Sequence[int] | None]  # by path, the numbers of the matrices; None is all


def _within(
    memory: int | None, chosen: ChosenRules, axes: Mapping[str, tuple[int, ...]]
) -> list[Stage]:
    """Sets of weights whose second moments take so many bytes together, or one that takes more."""
    leaves = dict(zip(chosen.paths, chosen.leaves, strict=True))
    stages: list[dict[str, None]] = [{}]
    taken = 0
    for path, contracted in axes.items():
        shape = leaves[path].shape
        places = contracted, range(-len(shape), -2)  # what is summed, and what may be stacked
        summed, stacked = (math.prod(shape[axis] for axis in place) for place in places)
        size = 8 * summed**2 * stacked
        if stages[-1] and memory is not None and taken + size > memory:
            stages.append({})
            taken = 0
        stages[-1][path] = None
        taken += size
    return [*stages]


def stages_of(statistics: Mapping[str, ActivationStatistics]) -> list[Stage]:
    """Returns the sets of weights that are rounded at once, one after the other.

    Those that meet the same activations one after the other. Of weights that are stacks of as many
    matrices, as a scan goes through, all of the first matrix come before those of the second.

    **Arguments:**

    - `statistics`: of the activations, by path in the order of the program.
    """
    stages: list[dict[str, list[int]]] = []
    before: Any = None
    for count, paths in itertools.groupby(statistics, lambda path: statistics[path].stacks):
        for stack, path in itertools.product(range(count), list(paths)):
            met = statistics[path].of_stacks(statistics[path].mean_square)[stack]
            if before is None or not np.array_equal(met, before, equal_nan=True):
                stages.append({})
            stages[-1].setdefault(path, []).append(stack)
            before = met
    return [*stages]
