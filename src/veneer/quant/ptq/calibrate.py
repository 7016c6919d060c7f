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

import jax
import numpy as np
from jax.typing import DTypeLike

from ..._jax.source_lines import warn_user
from ..models.quantize_tree import Chosen, check_rules, choose
from ..models.rules import Rule, rules_or_format, some_of
from ..models.uses import program_of
from ..observation.observe import (
    arguments_of,
    check_batches,
    record,
    split,
    statistics_of,
    tell_of_unmet,
    tell_of_vanishing,
)
from ..observation.recording import Recording
from ..observation.statistics import ActivationStatistics
from .gptq import DAMPING
from .kept import KeptCalibration, identity_of
from .methods import get_method, method_for
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
    """Quantises the parameters of a model so that the outputs of their products change least.

    **Arguments:**

    - `model`: the program, compiled or not: of `params` and a batch; or, without `params`, a module
      that can be called, such as one of Equinox or flax.nnx.
    - `rules`: as for `quantize_tree`, which finds the axes of each weight in the program.
    - `params`: any pytree of arrays.
    - `method`:
        - "gptq": codes are found one after the other, each making up for the errors of those before
          (Frantar et al., arXiv 2210.17323), the channels of the largest activations first.
        - "nearest": each value to the nearest code.
        - "awq": channels are multiplied by a power of the mean magnitude of their activations, of
          21 the one by which the outputs lose least, and kept in a `vn.types.Scaled` (Lin et al.,
          arXiv 2306.00978). "awq+gptq" finds codes as "gptq" does, then.
        - "smoothquant": for activations in few bits, which are divided by factors of channels, in a
          `vn.types.Scaled`, that make them and the weight alike (Xiao et al., arXiv 2211.10438).
          It is kept whatever weights lose. "smoothquant+gptq" likewise.

      A rule may name its own. What a rule rotates is rounded as it is rotated, and has no factors.
      With all, a rule that has no `calibration_method` of its own takes the scales of the least
      error to the power 2.4 ("mse,40,2.4").
      A rule with a `correction_rank` has what rounding lost made up for by as few products more
      as that: by the matrix of this rank with which outputs lose least (QERA: Zhang et al., arXiv
      2410.06040). The weight is a `vn.types.LoraArray` then.
    - `sequential`: whether weights are rounded in the order of the program, each by the activations
      of the model in which those before are rounded. The batches are gone through once more for
      each set of weights that meet the same activations, in each layer.
    - `propagation`: with `sequential`, by how much a weight makes up for what was lost before it,
      from 0 to 1: what is rounded is `W + propagation * H^-1 @ X.T @ (X_dense - X) @ W`, for
      activations X of the rounded model, `H = X.T @ X`, and those of the dense one (QEP: Arai and
      Ichikawa, arXiv 2504.09629; at 1 the outputs of GPTAQ: Li et al., arXiv 2504.02692). 0.5 does
      for most: at 1 it follows the batches closely. Each batch runs through both models. A weight
      that meets several activations at one place of the program, or experts that tokens are sent
      to, are as without it. What the report says each loses is of what is rounded, too.
    - `damping`: of "gptq", what is added to the diagonal of the second moments, as a share of its
      mean.
    - `memory`: bytes for second moments, 8 for each entry of a `[K, K]`; None is no bound. Where
      those of all weights take more, the batches are gone through several times, for some weights
      each; those of one weight take what they do. With `sequential` there are those of one set at a
      time anyway.
    - `resume`: a folder, in which what is found of each weight is kept, and from which the same
      call goes on after it was stopped. The folder belongs to one model, its parameters, the rules,
      the options and all batches, which are read once more to compare them. A weight whose file is
      damaged is calibrated again, with a warning.
    - `progress`: whether to show a bar of the weights that are done; it needs `rich`.

    **Returns:** a function of the batches, any iterable of them. It has to be one that can be gone
    through again, as a list, if `sequential`, with `resume`, or if `memory` does not do for all at
    once. A batch
    that is a tuple is the arguments of the model, and any other its one argument. It returns the
    quantised parameters, or the module. Its `report` then says what each weight lost.

    Of a weight, the codes are kept that lose less, rounded to nearest or by the method, on the
    batches, for each output. Embeddings, whose rows are looked up, and kernels of convolutions are
    rounded to nearest, with the scales of the least error.

    **Raises:** `TypeError` for a model of which the parameters are not known, and for batches that
    can be gone through but once where that will not do; `ValueError` for an unknown method, where
    there are no batches, where no product of the program has a weight with a rule or activations
    met none of them, where they have a NaN or infinity in them, where all are zeros or their
    squares underflow, and for a folder to `resume` from that is of another calibration; and what
    `quantize_tree` raises. Warns with `UserWarning` of weights that met no activations, of those
    whose activations are zeros or underflow, and of those for which the method was no better than
    rounding to nearest.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> params = {"w": jax.random.normal(keys[0], (64, 32))}
    >>> model = lambda params, x: jax.nn.relu(x @ params["w"])
    >>> x = jax.random.normal(keys[1], (512, 64)) @ jax.random.normal(keys[2], (64, 64))
    >>> calibration = vn.quant.calibrate(model, [vn.quant.Rule("w", "int4")], params=params)
    >>> small = calibration([x[:256], x[256:]])
    >>> small["w"]
    QArray(q4[64,32] channelwise, 4.5 bits)
    >>> row = calibration.report.rows[0]
    >>> row.after < 0.7 * row.before
    True
    """
    return Calibrator(
        model, rules, params, method, sequential, propagation, damping, memory, resume, progress
    )


class Calibrator:
    """What `calibrate` returns, whose arguments it has.

    `report`, once it was called, says what each weight lost.
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
            raise ValueError(f"memory is a number of bytes above 0, not {memory}")
        if not 0 <= propagation <= 1:
            raise ValueError(f"propagation is a part of what was lost, 0 to 1, not {propagation}")
        if propagation and not sequential:
            raise ValueError(
                f"propagation={propagation} makes up for weights that are rounded before: it goes "
                "with sequential=True"
            )
        if not damping >= 0:
            raise ValueError(f"damping is a share of the mean second moment, not {damping}")
        rules = rules_or_format(rules)
        if not isinstance(rules, str):
            check_rules(rules, calibrated=True)
            acts = [rule for rule in rules if rule.act_qtype is not None]
            if get_method(method).factors == "smoothquant" and not acts:
                raise ValueError(
                    f"method {method!r} is for activations in few bits, and no rule has an "
                    "act_qtype: name their format, or choose 'awq'"
                )
        if params is None and jax.tree_util.treedef_is_leaf(jax.tree.structure(model)):
            raise TypeError(
                f"calibrate finds no parameters in {model!r}: pass them, as calibrate(model, "
                "rules, params=params) of a function model(params, batch)"
            )
        self._params: Any = model if params is None else params
        program = program_of(self._params, None if params is None else model, (), None)
        assert program is not None
        self._program, self._rules = program, rules
        self._method, self._sequential, self._propagation = method, sequential, propagation
        self._damping = damping
        self._memory, self._resume, self._progress = memory, resume, progress

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Returns the parameters, quantised by what the weights meet in the batches."""
        check_batches(batches)
        first = next(again := iter(batches), _NONE)
        if first is _NONE:
            raise ValueError("there are no batches to calibrate with")
        args = arguments_of(first)
        chosen = choose(self._params, self._rules, self._program, args, in_products=True)
        axes = _contracting(chosen)
        stages = _within(self._memory, chosen, axes)
        several = ["sequential"] if self._sequential else []
        several += [f"memory={self._memory:,}"] if len(stages) > 1 else []
        several += ["resume"] if self._resume is not None else []
        if not several:
            batches = itertools.chain([first], again)
        elif again is batches:
            raise TypeError(
                f"{several[0]} goes through the batches several times, and these can be gone "
                "through but once: pass a list, or an object whose __iter__ begins anew"
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

        new = chosen.replaced(quantized)
        asked = {path: self._method_for(rule) for path, rule in chosen.rules.items()}
        useless = [x.path for x in losses if x.method == "nearest" != asked[x.path]]
        if useless:
            names = " and ".join(sorted({asked[path] for path in useless}))
            warn_user(
                f"{names} was no better than rounding to nearest for {some_of(useless)}, "
                "which are rounded so: more batches, or others, may tell more of the activations"
            )
        return new

    def _round(
        self,
        chosen: Chosen,
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
                of_correction = chosen.corrected_axes(path)
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
                new, others = split(observed(left, told, gram=True) if left else {})
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
        tell_of_unmet(unmet, all=not met)
        tell_of_vanishing(met)
        return weights, met

    def _method_for(self, rule: Rule) -> str:
        return method_for(rule.method, self._method, rotate=rule.rotate, act_qtype=rule.act_qtype)

    def _observed(
        self,
        chosen: Chosen,
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
        return record(call, [tree], lambda _: axes, batches, gram=gram, decay=0.9, beside=dense)


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


def _contracting(chosen: Chosen) -> dict[str, tuple[int, ...]]:
    """The axes that products contract of each weight that meets activations in one."""
    assert chosen.uses is not None
    leaves = dict(zip(chosen.paths, chosen.leaves, strict=True))
    return {
        path: rule.contracting(leaves[path].ndim)
        for path, rule in chosen.rules.items()
        if rule.has_format and any(use.is_product for use in chosen.uses[path])
    }


Stage = Mapping[str, Sequence[int] | None]  # by path, the numbers of the matrices; None is all


def _within(memory: int | None, chosen: Chosen, axes: Mapping[str, tuple[int, ...]]) -> list[Stage]:
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
