"""`allocate_bits`: which weight takes which format, so that a model loses least in so many bits."""

import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.surface.implicit import implicit
from ..._core.value import is_value, materialise_one
from ..models.correction import LowRankAxes, quantize_with_correction
from ..models.matching import as_rules, some_of, warn_of_unmatched
from ..models.observe import record, statistics_of, warn_of_vanishing
from ..models.programs import arguments_of, check_batches, parameters_and_program
from ..models.quantize_tree import ChosenRules, check_rules, choose_rules
from ..models.rules import Rule
from ..observation.statistics import ActivationStatistics
from .allocation import Choice, allocated
from .report import AllocationReport, WeightBits
from .weight import MatrixStack, finite, moments_of, naming


def allocate_bits(
    model: Callable, choices: Sequence[Rule], bits: float | int, *, params: Any = None
) -> "BitAllocator":
    """Create an allocator, which chooses a format for each weight within a budget of bits.

    This is mixed-precision quantization. For each weight and each rule that matches it, the
    allocator estimates the loss: how much rounding changes the outputs of the weight's products.
    The estimate uses the second moments of the activations. It is scaled by the error of the
    model's output when only that weight is rounded. The allocator assumes that the losses of the
    weights add up, and minimizes their total within the budget.

    **Arguments:**

    - `model`: a function of `params` and a batch. If `params` is None, a callable module.
    - `choices`: a list of `Rule`. All rules that match a weight are choices for it, not only the
      first. Weights that no rule matches stay dense, and the budget does not include them.
    - `bits`: the budget in bits per value: the average over all matched weights, including scales
      and low-rank corrections.
    - `params`: a pytree of arrays. None if `model` is a module.

    **Returns:** a `BitAllocator`. Call it with an iterable of batches to get a list of `Rule`, one
    for each weight, for `quantize_tree` or `calibrate`.

    **Raises:**

    - `TypeError` if `params` is missing and `model` is a function, or if `choices` is not a list of
      `Rule`.
    - `ValueError` if `bits` is not positive, or a rule has an option for training, such as
      `grad_qtype`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> params = {"up": jax.random.normal(jax.random.key(0), (64, 64)), "head": jnp.eye(64)}
    >>> model = lambda params, x: x @ params["up"] @ params["head"]
    >>> choices = [vn.quant.Rule(".*", qtype) for qtype in ("int2", "int4", "int8")]
    >>> allocation = vn.quant.allocate_bits(model, choices, 6.5, params=params)
    >>> allocation([jax.random.normal(jax.random.key(1), (128, 64))])
    [Rule('head', 'int4'), Rule('up', 'int8')]
    """
    return BitAllocator(model, choices, bits, params)


class BitAllocator:
    """An allocator of bits to the weights of a model, created by `allocate_bits`.

    Call it with an iterable of batches, like a `Calibrator`. It returns a list of `Rule`, one for
    each weight. The call runs the model once on all batches, and then on the first batch once per
    weight. Afterwards, the attribute `report` has the format, bits and errors of each weight. The
    errors are estimated from the activations. For a weight that no product uses, such as an
    embedding, they are estimated from the rounding error of the weight itself.

    **Arguments:** the same as for `allocate_bits`.

    **Raises** when called, apart from the errors of `quantize_tree`:

    - `TypeError` if the batches are a single array or dict.
    - `ValueError` if there are no batches, or the choices match none of the weights that the model
      uses.
    - `ValueError` if the budget is too small even for the smallest choice of each weight.
    - `ValueError` if all activations are 0, or so small that their squares underflow.

    **Warns** (`UserWarning`) when called, if a choice matches no path, or if all activations of a
    weight are 0 or so small that their squares underflow.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> params = {"up": jax.random.normal(jax.random.key(0), (64, 64)), "head": jnp.eye(64)}
    >>> choices = [vn.quant.Rule(".*", qtype) for qtype in ("int2", "int4", "int8")]
    >>> model = lambda params, x: x @ params["up"] @ params["head"]
    >>> allocation = vn.quant.allocate_bits(model, choices, 6.5, params=params)
    >>> rules = allocation([jax.random.normal(jax.random.key(1), (128, 64))])
    >>> isinstance(allocation, vn.quant.BitAllocator), allocation.report.bits
    (True, 6.5)
    """

    report: AllocationReport

    def __init__(self, model: Callable, choices: Sequence[Rule], bits: float | int, params: Any):
        if not bits > 0:
            raise ValueError(f"bits must be a number of bits per value above 0, not {bits}")
        self._choices = as_rules(choices)
        check_rules(self._choices, calibrated=any(rule.method for rule in self._choices))
        call = "allocate_bits(model, choices, bits, params=params)"
        self._params, self._program = parameters_and_program(model, params, call)
        self._bits = bits

    def __call__(self, batches: Iterable[Any]) -> list[Rule]:
        """Return a rule for each weight, chosen with the activations of the batches."""
        check_batches(batches)
        first = next(again := iter(batches), _NONE)
        if first is _NONE:
            raise ValueError("there are no batches to allocate bits with. Pass at least one")
        args, batches = arguments_of(first), itertools.chain([first], again)
        tree, candidates = self._candidates(args)
        leaves = dict(zip(tree.paths, tree.leaves, strict=True))
        count = sum(math.prod(leaves[path].shape) for path in candidates)
        least = sum(min(x.bits for x in of) for of in candidates.values())
        if least > self._bits * count:
            raise ValueError(
                f"the budget of {self._bits} bits per value is below the {least / count:.3g} of "
                "the smallest choices. Raise bits, or add smaller choices"
            )
        met = self._met(tree, candidates, batches)
        losses = {
            path: [_lost(path, leaves[path], x, met.get(path)) for x in of]
            for path, of in candidates.items()
        }
        probes = {
            path: _probe(of, losses[path], self._bits * math.prod(leaves[path].shape))
            for path, of in candidates.items()
        }
        measured = self._measured(tree, candidates, probes, args)
        found = allocated(
            {
                path: _choices(of, losses[path], probes[path], measured.get(path))
                for path, of in candidates.items()
            },
            self._bits * count,
        )
        chosen = {path: candidates[path][choice.number] for path, choice in found.items()}
        self.report = AllocationReport(
            tuple(
                WeightBits(
                    path,
                    tuple(leaves[path].shape),
                    str(chosen[path].rule.qtype),
                    choice.bits,
                    math.sqrt(losses[path][choice.number]),
                    math.sqrt(choice.loss),
                )
                for path, choice in found.items()
            )
        )
        return [
            dataclasses.replace(x.asked, path_regex=re.escape(path)) for path, x in chosen.items()
        ]

    def _candidates(
        self, args: Sequence[Any]
    ) -> tuple[ChosenRules, dict[str, list["_Alternative"]]]:
        """The tree of parameters, and how each weight may be stored, in the order of the tree."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # whoever takes the rules will tell
            by_rule = [
                choose_rules(self._params, [rule], self._program, args) for rule in self._choices
            ]
        tree = by_rule[0]
        warn_of_unmatched(self._choices, tree.paths)
        found: dict[str, list[_Alternative]] = {}
        for path, leaf in zip(tree.paths, tree.leaves, strict=True):
            for asked, chosen in zip(self._choices, by_rule, strict=True):
                rule = chosen.rules.get(path)
                if rule is not None and rule.qtype is not None:
                    axes = chosen.correction_axes(path)
                    found.setdefault(path, []).append(_Alternative.of(leaf, asked, rule, axes))
        if not found:
            raise ValueError(
                "no choice has a format for a weight that the program uses. Change the path_regex "
                f"of a choice, which must match a whole path, such as {some_of(tree.paths)}"
            )
        return tree, found

    def _met(
        self,
        tree: ChosenRules,
        candidates: Mapping[str, Sequence["_Alternative"]],
        batches: Iterable[Any],
    ) -> Mapping[str, ActivationStatistics]:
        """What each weight that is in a product meets, along the axes that it contracts."""
        uses, ndims = tree.uses or {}, dict(zip(tree.paths, map(np.ndim, tree.leaves), strict=True))
        axes = {
            path: of[0].rule.contracting(ndims[path])
            for path, of in candidates.items()
            if any(use.is_product for use in uses[path])
        }
        if not axes:
            return {}
        call = lambda parts, *args: self._program(parts[0], *args)
        flat = tree.paths, tree.leaves, tree.treedef
        met = statistics_of(record(call, [flat], axes, batches, gram=True, decay=0.9))
        warn_of_vanishing(met)
        return met

    def _measured(
        self,
        tree: ChosenRules,
        candidates: Mapping[str, Sequence["_Alternative"]],
        probes: Mapping[str, int],
        args: Sequence[Any],
    ) -> dict[str, float]:
        """By path, what the model loses by one of the choices for that weight alone.

        Nothing of a model whose outputs are no numbers, or zeros.
        """
        run = lambda leaves: _outputs(
            implicit(self._program)(jax.tree.unflatten(tree.treedef, leaves), *args)
        )
        expected = run(tree.leaves)
        power = sum(np.square(y).sum() for y in expected)
        if not power:
            return {}
        found = {}
        for i, (path, leaf) in enumerate(zip(tree.paths, tree.leaves, strict=True)):
            if path in candidates:
                values = candidates[path][probes[path]].values(leaf)
                outs = run([*tree.leaves[:i], values, *tree.leaves[i + 1 :]])
                lost = sum(np.square(y - z).sum() for y, z in zip(outs, expected, strict=True))
                found[path] = float(lost / power)
        return found


_NONE = object()


class _Alternative(NamedTuple):
    """A way to store a weight: the rule that was asked for, as it is for the weight, and bits."""

    asked: Rule
    rule: Rule
    axes: LowRankAxes | None
    bits: int

    @classmethod
    def of(cls, leaf: Any, asked: Rule, rule: Rule, axes: LowRankAxes | None) -> "_Alternative":
        stored = jax.eval_shape(lambda x: quantize_with_correction(x, rule, axes), leaf)
        return cls(asked, rule, axes, 8 * stored.nbytes)

    def values(self, leaf: Any) -> jax.Array:
        """What it is worth, rounded to nearest."""
        return jnp.asarray(materialise_one(quantize_with_correction(leaf, self.rule, self.axes)))


def _probe(candidates: Sequence[_Alternative], losses: Sequence[float], budget: float | int) -> int:
    """The choice by which a model is asked: the nearest to a budget of those that lose anything."""
    numbers = range(len(candidates))
    losing = [i for i in numbers if losses[i]] or numbers
    return min(losing, key=lambda i: abs(candidates[i].bits - budget))


def _choices(
    candidates: Sequence[_Alternative],
    losses: Sequence[float],
    probe: int,
    measured: float | None,
) -> list[Choice]:
    """Choices whose losses are the model's: that of the probe, and of others in proportion."""
    factor = measured / losses[probe] if measured is not None and losses[probe] else 1.0
    return [Choice(i, x.bits, factor * losses[i]) for i, x in enumerate(candidates)]


def _lost(
    path: str, leaf: Any, candidate: _Alternative, statistics: ActivationStatistics | None
) -> float:
    """The mean square of what outputs lose, by that of the outputs; or of a weight without any."""
    values = candidate.values(leaf)
    met = statistics is not None and statistics.gram is not None
    stacked = statistics.stacked_axes if met and statistics is not None else ()
    matrices = MatrixStack(leaf.shape, candidate.rule.contracting(leaf.ndim), stacked)
    dense, rounded = finite(matrices.of(leaf)), finite(matrices.of(values))
    if not met or statistics is None:
        power = np.square(dense).sum()
        return float(np.square(dense - rounded).sum() / power) if power else 0.0
    with naming(path):
        moments = moments_of(statistics, matrices)
    each = zip(moments, dense, rounded, strict=True)
    lost = sum(moment.loss(w, q).sum() for moment, w, q in each)
    power = sum(moment.power(w).sum() for moment, w in zip(moments, dense, strict=True))
    return float(max(0.0, lost / power)) if power else 0.0


def _outputs(tree: Any) -> list[np.ndarray]:
    """The floating arrays of a tree, in float64."""
    arrays = [
        jnp.asarray(materialise_one(x))
        for x in jax.tree.leaves(tree, is_leaf=is_value)
        if hasattr(x, "dtype")
    ]
    return [np.asarray(x, float) for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
