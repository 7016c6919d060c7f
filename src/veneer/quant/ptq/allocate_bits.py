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

from ..._core.transform import implicit
from ..._core.value import is_value, materialise_one
from ..models.correction import LowRankAxes, quantize_corrected
from ..models.quantize_tree import Chosen, check_rules, choose
from ..models.rules import Rule, rules_in, some_of, warn_of_unmatched
from ..models.uses import program_of
from ..observation.observe import (
    arguments_of,
    check_batches,
    record,
    statistics_of,
    tell_of_vanishing,
)
from ..observation.statistics import ActivationStatistics
from .allocation import Choice, allocated
from .report import AllocationReport, WeightBits
from .weight import MatrixStack, finite, moments_of, naming


def allocate_bits(
    model: Callable, choices: Sequence[Rule], bits: float | int, *, params: Any = None
) -> "BitAllocator":
    """Chooses a format for each weight, so that a model loses least in so many bits a value.

    Mixed precision by what is measured. Of each weight and choice: how far the outputs of its
    products are from those of the dense weight, by the second moments of the activations that it
    meets. Of each weight: how far the output of the model then is from what it was, as it runs with
    that weight alone rounded, by the choice nearest to the budget. The loss of a choice is the
    square of the latter, in proportion to the squares of the former; losses add up, as errors of
    different weights have little to do with each other. Of all ways within the budget, the one of
    the least loss is taken.

    **Arguments:**

    - `model`, `params`: as for `calibrate`.
    - `choices`: rules, each a choice for all the weights that it matches, with whatever a `Rule`
      says: a tile, a rotation, a correction. A weight that none matches stays as it is, and does
      not count.
    - `bits`: the budget: of so many bits a value on average, over all weights that are matched,
      scales and corrections included.

    **Returns:** a function of the batches, as `calibrate` does. It returns a list of `Rule`s, one
    for each weight, which `quantize_tree` and `calibrate` take. Its `report` then says what each
    weight takes, and what it loses if it is rounded to nearest. The model runs on all batches once,
    and on the first one more time for each weight.

    A weight that meets no activations in a product, as an embedding whose rows are looked up, loses
    what its own values do.

    **Raises:** `TypeError` for a model of which the parameters are not known, and choices that are
    no sequence of `Rule`; `ValueError` where none of them matches a weight that products have,
    where the budget is below what the smallest choices take, where there are no batches, where all
    activations are zeros or their squares underflow, and for what `quantize_tree` refuses. Warns
    with `UserWarning` of a choice that matches no path, and of weights whose activations are zeros
    or underflow.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> params = {"up": jax.random.normal(keys[0], (64, 64)), "head": jnp.eye(64)}
    >>> model = lambda params, x: x @ params["up"] @ params["head"]
    >>> choices = [vn.quant.Rule(".*", qtype) for qtype in ("int2", "int4", "int8")]
    >>> allocation = vn.quant.allocate_bits(model, choices, 6.5, params=params)
    >>> rules = allocation([jax.random.normal(keys[1], (128, 64))])
    >>> rules  # of an identity less is lost
    [Rule('head', 'int4'), Rule('up', 'int8')]
    >>> small = vn.quant.quantize_tree(params, rules)
    """
    return BitAllocator(model, choices, bits, params)


class BitAllocator:
    """What `allocate_bits` returns, whose arguments it has.

    `report`, once it was called, says what each weight takes.
    """

    report: AllocationReport

    def __init__(self, model: Callable, choices: Sequence[Rule], bits: float | int, params: Any):
        if not bits > 0:
            raise ValueError(f"bits is the budget per value, a number above 0, not {bits}")
        self._choices = rules_in(choices)
        check_rules(self._choices, calibrated=any(rule.method for rule in self._choices))
        if params is None and jax.tree_util.treedef_is_leaf(jax.tree.structure(model)):
            raise TypeError(
                f"allocate_bits finds no parameters in {model!r}: pass them, as "
                "allocate_bits(model, choices, bits, params=params) of a function model(params, "
                "batch)"
            )
        self._params: Any = model if params is None else params
        program = program_of(self._params, None if params is None else model, (), None)
        assert program is not None
        self._program, self._bits = program, bits

    def __call__(self, batches: Iterable[Any]) -> list[Rule]:
        """Returns a rule for each weight, by what the weights meet in the batches."""
        check_batches(batches)
        first = next(again := iter(batches), _NONE)
        if first is _NONE:
            raise ValueError("there are no batches to allocate bits by")
        args, batches = arguments_of(first), itertools.chain([first], again)
        tree, candidates = self._candidates(args)
        leaves = dict(zip(tree.paths, tree.leaves, strict=True))
        count = sum(math.prod(leaves[path].shape) for path in candidates)
        least = sum(min(x.bits for x in of) for of in candidates.values())
        if least > self._bits * count:
            raise ValueError(
                f"a budget of {self._bits} bits a value is below the {least / count:.3g} that the "
                "smallest choices take"
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

    def _candidates(self, args: Sequence[Any]) -> tuple[Chosen, dict[str, list["_Alternative"]]]:
        """The tree of parameters, and how each weight may be stored, in the order of the tree."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # whoever takes the rules will tell
            by_rule = [choose(self._params, [rule], self._program, args) for rule in self._choices]
        tree = by_rule[0]
        warn_of_unmatched(self._choices, tree.paths)
        found: dict[str, list[_Alternative]] = {}
        for path, leaf in zip(tree.paths, tree.leaves, strict=True):
            for asked, chosen in zip(self._choices, by_rule, strict=True):
                rule = chosen.rules.get(path)
                if rule is not None and rule.qtype is not None:
                    axes = chosen.corrected_axes(path)
                    found.setdefault(path, []).append(_Alternative.of(leaf, asked, rule, axes))
        if not found:
            raise ValueError(
                "no choice has a format for a weight that the program has in a product: "
                f"{some_of(tree.paths)}"
            )
        return tree, found

    def _met(
        self,
        tree: Chosen,
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
        met = statistics_of(record(call, [flat], lambda _: axes, batches, gram=True, decay=0.9))
        tell_of_vanishing(met)
        return met

    def _measured(
        self,
        tree: Chosen,
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
        stored = jax.eval_shape(lambda x: quantize_corrected(x, rule, axes), leaf)
        return cls(asked, rule, axes, 8 * stored.nbytes)

    def values(self, leaf: Any) -> jax.Array:
        """What it is worth, rounded to nearest."""
        return jnp.asarray(materialise_one(quantize_corrected(leaf, self.rule, self.axes)))


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
