"""`allocate_bits`: choose a format for each weight within a budget of bits.

Each weight has several choices with known bits and loss, and the losses of different weights add
up. That is a multiple-choice knapsack problem (Kellerer, Pferschy and Pisinger 2004, "Knapsack
Problems", chapter 11). `solve_knapsack` uses dynamic programming over Pareto fronts.
"""

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.surface import some_of
from ..._core.surface.implicit import implicit
from ..._core.value import is_value, materialise_one
from ..models.arguments import (
    as_rules,
    first_arguments,
    parameters_and_program,
    warn_of_unmatched,
)
from ..models.correction import LowRankAxes, quantize_with_correction
from ..models.observe import record, statistics_of, warn_of_vanishing
from ..models.quantize_tree import ChosenRules, check_rules, choose_rules
from ..models.rules import Rule
from ..statistics import ActivationStatistics
from .report import AllocationReport, WeightBits
from .weight import MatrixStack, finite, name_errors

#: The largest number of sums (bits, loss) that `solve_knapsack` keeps after each weight. If there
#: are more, the bits are divided into this many ranges, and the sum of least loss in each is kept.
_MAX_SUMS = 8192


def allocate_bits(
    model: Callable, choices: Sequence[Rule], bits: float | int, *, params: Any = None
) -> "BitAllocator":
    """Create an allocator, which chooses a format for each weight within a budget of bits.

    This is mixed-precision quantization. For each weight and each matching rule, the allocator
    estimates a loss: how much rounding changes the outputs of the weight's products. The estimate
    uses the second moments of the activations. To compare weights, the allocator rounds one weight
    at a time, measures the error of the model's output, and scales the weight's losses to match.
    It minimizes the sum of the losses of all weights within the budget.

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
    weight. Afterwards, the attribute `report` has the format, bits and errors of each weight. If no
    product uses a weight, such as an embedding, its error is the rounding error of the weight.

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
        args, batches = first_arguments(batches, "to allocate bits with")
        # Find the candidates for each weight, and check that the smallest fit in the budget.
        tree, candidates = self._find_candidates(args)
        leaves = dict(zip(tree.paths, tree.leaves, strict=True))
        sizes = {path: math.prod(leaves[path].shape) for path in candidates}
        total = sum(sizes.values())  # values in all weights
        least = sum(min(x.bits for x in options) for options in candidates.values())
        if least > self._bits * total:
            raise ValueError(
                f"the budget of {self._bits} bits per value is below the {least / total:.3g} of "
                "the smallest choices. Raise bits, or add smaller choices"
            )
        # Estimate the loss of each candidate from the activations.
        statistics = self._observe(tree, candidates, batches)
        losses = {
            path: [x.loss(path, leaves[path], statistics.get(path)) for x in options]
            for path, options in candidates.items()
        }
        # Measure the loss of the model with one candidate per weight: the one nearest to the budget
        # that has a loss. Scale the losses of all candidates for the weight by the same factor.
        measured_index = {}
        for path, options in candidates.items():
            lossy = [i for i, loss in enumerate(losses[path]) if loss] or range(len(options))
            budget = self._bits * sizes[path]
            measured_index[path] = min(lossy, key=lambda i: abs(options[i].bits - budget))
        measured = {path: options[measured_index[path]] for path, options in candidates.items()}
        model_losses = self._measure_model_losses(tree, measured, args)
        choices = {}
        for path, options in candidates.items():
            estimate = losses[path][measured_index[path]]
            scale = model_losses[path] / estimate if path in model_losses and estimate else 1.0
            pairs = zip(options, losses[path], strict=True)
            choices[path] = [Choice(i, x.bits, scale * loss) for i, (x, loss) in enumerate(pairs)]
        # Choose a candidate for each weight.
        rules, rows = [], []
        for path, choice in solve_knapsack(choices, self._bits * total).items():
            candidate = candidates[path][choice.number]
            shape, qtype = tuple(leaves[path].shape), str(candidate.rule.qtype)
            errors = math.sqrt(losses[path][choice.number]), math.sqrt(choice.loss)
            rows.append(WeightBits(path, shape, qtype, choice.bits, *errors))
            rules.append(dataclasses.replace(candidate.choice, path_regex=re.escape(path)))
        self.report = AllocationReport(tuple(rows))
        return rules

    def _find_candidates(
        self, args: Sequence[Any]
    ) -> tuple[ChosenRules, dict[str, list["_WeightCandidate"]]]:
        """Return a pair: the flattened parameters, and a dict from paths to lists of candidates.

        The candidates for a weight are the choices that match its path, fitted to the weight.
        `args` are the arguments of the first batch.

        **Raises:** `ValueError` if there are no candidates for any weight.
        """
        with warnings.catch_warnings():
            # `quantize_tree` or `calibrate` will repeat these warnings for the allocated rules.
            warnings.simplefilter("ignore", UserWarning)
            trees = [
                choose_rules(self._params, [rule], self._program, args) for rule in self._choices
            ]
        tree = trees[0]  # all trees have the same leaves and differ only in their rules
        warn_of_unmatched(self._choices, tree.paths)
        candidates: dict[str, list[_WeightCandidate]] = {}
        for path, leaf in zip(tree.paths, tree.leaves, strict=True):
            for choice, tree_of_choice in zip(self._choices, trees, strict=True):
                rule = tree_of_choice.rules.get(path)
                if rule is not None and rule.qtype is not None:
                    axes = tree_of_choice.correction_axes(path)
                    quantize = functools.partial(quantize_with_correction, rule=rule, axes=axes)
                    bits = 8 * jax.eval_shape(quantize, leaf).nbytes
                    candidates.setdefault(path, []).append(
                        _WeightCandidate(choice, rule, axes, bits)
                    )
        if not candidates:
            raise ValueError(
                "no choice has a format for a weight that the program uses. Change the path_regex "
                f"of a choice, which must match a whole path, such as {some_of(tree.paths)}"
            )
        return tree, candidates

    def _observe(
        self,
        tree: ChosenRules,
        candidates: Mapping[str, Sequence["_WeightCandidate"]],
        batches: Iterable[Any],
    ) -> Mapping[str, ActivationStatistics]:
        """Run the model on the batches, and return the statistics of activations by path.

        Weights that no product uses are left out.
        """
        rules = {path: options[0].rule for path, options in candidates.items()}
        axes = tree.product_axes(rules)
        if not axes:
            return {}
        # `record` passes a list of parameter trees. Here, the list has one tree.
        run = lambda trees, *args: self._program(trees[0], *args)
        flat_tree = tree.paths, tree.leaves, tree.treedef
        statistics = statistics_of(record(run, [flat_tree], axes, batches, gram=True, decay=0.9))
        warn_of_vanishing(statistics)
        return statistics

    def _measure_model_losses(
        self, tree: ChosenRules, candidates: Mapping[str, "_WeightCandidate"], args: Sequence[Any]
    ) -> dict[str, float]:
        """Round one weight at a time, and return the relative squared errors of the model's output.

        `candidates` is a dict from the path of each weight to the candidate by which to round it.
        `args` are the arguments of the model. The result is a dict by path, which is empty if the
        outputs of the model are 0 or not floating.
        """

        def run(leaves: Sequence[Any]) -> list[np.ndarray]:
            """Run the model with the parameters `leaves`. Return the floating arrays it outputs."""
            out = implicit(self._program)(jax.tree.unflatten(tree.treedef, leaves), *args)
            arrays = [
                jnp.asarray(materialise_one(x))
                for x in jax.tree.leaves(out, is_leaf=is_value)
                if hasattr(x, "dtype")
            ]
            return [np.asarray(x, float) for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]

        expected = run(tree.leaves)
        expected_sum = sum(np.square(y).sum() for y in expected)
        if not expected_sum:
            return {}
        losses = {}
        for i, (path, leaf) in enumerate(zip(tree.paths, tree.leaves, strict=True)):
            if path in candidates:
                rounded = candidates[path].round(leaf)
                outs = run([*tree.leaves[:i], rounded, *tree.leaves[i + 1 :]])
                loss = sum(np.square(y - z).sum() for y, z in zip(outs, expected, strict=True))
                losses[path] = float(loss / expected_sum)
        return losses


class _WeightCandidate(NamedTuple):
    """A possible format for a weight: one of the caller's choices, fitted to the weight.

    **Arguments:**

    - `choice`: the rule that the caller passed.
    - `rule`: a copy of `choice`, whose `tile_axis` holds the contracted axes of the weight.
    - `axes`: the input and output axes for a low-rank correction. None without a correction.
    - `bits`: the bits of the whole weight.
    """

    choice: Rule
    rule: Rule
    axes: LowRankAxes | None
    bits: int

    def round(self, leaf: Any) -> jax.Array:
        """Return the dense array of the weight `leaf` after quantization in this format."""
        return jnp.asarray(materialise_one(quantize_with_correction(leaf, self.rule, self.axes)))

    def loss(self, path: str, leaf: Any, statistics: ActivationStatistics | None) -> float:
        """Return the relative squared error that rounding the weight causes in its products.

        If `statistics` has no second moments of activations, return the relative squared error of
        the weight itself. `path` names the weight in an error.
        """
        if statistics is not None and statistics.gram is None:
            statistics = None  # no second moments, as for the kernel of a convolution
        stacked_axes = () if statistics is None else statistics.stacked_axes
        matrices = MatrixStack(leaf.shape, self.rule.contracting(leaf.ndim), stacked_axes)
        dense, rounded = (finite(matrices.split(x)) for x in (leaf, self.round(leaf)))
        if statistics is None:
            loss, power = np.square(dense - rounded).sum(), np.square(dense).sum()
        else:
            with name_errors(path):
                moments = matrices.moments(statistics)
            triples = [*zip(moments, dense, rounded, strict=True)]
            loss = sum(moment.loss(w, q).sum() for moment, w, q in triples)
            power = sum(moment.power(w).sum() for moment, w, _ in triples)
        return float(loss / power) if power else 0.0


class Choice(NamedTuple):
    """One of the choices for a weight in a knapsack problem.

    **Arguments:**

    - `number`: the index of this choice in the list of choices for the weight.
    - `bits`, `loss`: the bits and the loss of the whole weight.
    """

    number: int
    bits: int
    loss: float


def solve_knapsack(
    choices: Mapping[str, Sequence[Choice]], budget: float | int
) -> dict[str, Choice]:
    """Return one choice per weight with the least total loss within a budget of bits.

    The result is exact if the Pareto front of (total bits, total loss) has at most `_MAX_SUMS`
    entries, as for a few weights. Otherwise the result is approximate.

    **Arguments:**

    - `choices`: a dict from the path of each weight to its choices, at least one.
    - `budget`: the bits of all weights together.

    **Raises:** `ValueError` if the budget is too small for the smallest choices.

    >>> from veneer.quant.ptq.allocate_bits import Choice, solve_knapsack
    >>> small, large = Choice(0, 40, 1.0), Choice(1, 80, 0.1)
    >>> solution = solve_knapsack({"a": [small, large], "b": [small, Choice(1, 80, 0.5)]}, 120)
    >>> {path: choice.bits for path, choice in solution.items()}
    {'a': 80, 'b': 40}
    """
    # The least bits of the weights that are not added yet.
    later_bits = sum(min(x.bits for x in options) for options in choices.values())
    if not later_bits <= budget:
        raise ValueError(
            f"the weights take at least {later_bits} bits, and the budget is {budget:.0f}"
        )
    # Add one weight at a time. `bits` and `losses` hold the Pareto front of the sums so far.
    bits, losses, origins = np.zeros(1), np.zeros(1), []
    for options in choices.values():
        later_bits -= min(x.bits for x in options)
        # Combine each old sum with each choice for this weight, and keep the new front.
        all_bits = (bits[:, None] + np.array([x.bits for x in options], float)).ravel()
        all_losses = (losses[:, None] + np.array([x.loss for x in options], float)).ravel()
        front = _pareto_front(all_bits, all_losses, budget - later_bits)
        bits, losses = all_bits[front], all_losses[front]
        # For each new sum: the index of the old sum, and the index of the choice.
        origins.append(np.divmod(front, len(options)))
    # The last sum has the least loss. Trace its choices back to the first weight.
    index, solution = len(losses) - 1, {}
    for path, (old_sum, choice) in zip(reversed([*choices]), reversed(origins), strict=True):
        solution[path] = choices[path][choice[index]]
        index = old_sum[index]
    return {path: solution[path] for path in choices}


def _pareto_front(bits: np.ndarray, losses: np.ndarray, budget: float | int) -> np.ndarray:
    """Return the indices of the Pareto front of (bits, loss) within a budget, ordered by bits.

    `bits` and `losses` have one entry per option. An option is on the front if no option with at
    most as many bits has a smaller loss.
    If the front has more than `_MAX_SUMS` entries, divide it into equal ranges of bits, and return
    only the entry with the least loss of each range.
    """
    order = np.lexsort((losses, bits))
    order = order[bits[order] <= budget]
    # An entry is on the front if its loss is below the losses of all entries with fewer bits.
    least_before = np.minimum.accumulate(losses[order])[:-1]
    front = order[np.append(True, losses[order][1:] < least_before)]
    if len(front) <= _MAX_SUMS:
        return front
    # The last entry of each range has the least loss, because the front is ordered by bits.
    offsets = bits[front] - bits[front[0]]
    ranges = (offsets / offsets[-1] * _MAX_SUMS).astype(int)
    return front[np.append(ranges[1:] > ranges[:-1], True)]
