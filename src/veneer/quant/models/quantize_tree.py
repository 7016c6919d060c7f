"""`quantize_tree`: the parameters of a model, by rules on their paths.

Where the program is given, too, the axes along which a weight is quantised are those that its
products contract.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.typing import DTypeLike

from ..._core.surface.arguments import check_parameters
from ..._jax.source_lines import warn_user
from ..arrays.qarray import QArray
from ..observation.statistics import ActivationStatistics
from ..training import FakeQuantized
from .correction import LowRankAxes, free_without_program, low_rank_axes, quantize_corrected
from .notices import (
    tell_of_held,
    tell_of_large,
    tell_of_quantised,
    tell_of_small,
    tell_of_tiles,
    tell_of_unmatched,
    tell_of_unrotated,
    tell_of_unused,
)
from .rules import (
    TRAINING,
    Rule,
    can_be_quantized,
    flatten_with_paths,
    rule_for,
    rules_or_format,
    some_of,
    warn_of_unmatched,
)
from .uses import Use, can_be_rotated, program_of, telling, use_for_axes, uses_of
from .usual_rules import fit_usual, usual_rules

T = TypeVar("T")


def quantize_tree(
    params: T,
    rules: Sequence[Rule] | DTypeLike,
    *,
    model: Callable | None = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    train: bool = False,
    statistics: Mapping[str, ActivationStatistics] | None = None,
) -> T:
    """Quantize the weights of a model.

    The program is traced on shapes only, to find the axes that each product contracts. Values of a
    weight along these axes share a scale: per channel, or per tile if the rule or its format has a
    group size.

    **Arguments:**

    - `params`: a pytree of arrays (nnx, linen, Equinox, plain dicts), or a callable module. If the
      leaves are abstract (`jax.ShapeDtypeStruct`), the result is abstract, too.
    - `rules`: a list of `Rule`, or the name of a format, such as "int8". In a list, the first rule
      that matches the path of a leaf applies. A name selects the default rules for language models,
      and needs a program.
    - `model`, `args`, `kwargs`: the program, called as `model(params, *args, **kwargs)`. If `model`
      is None, `params` itself is called. If all three are None, nothing is traced, and the
      `tile_axis` of each rule names the axes along which values share scales.
    - `train`: keep full-precision weights and quantize them on use (QAT).
    - `statistics`: activation statistics from `observe`, for rules with a static `act_range`.

    **Returns:** `params`, with each floating array of rank 2 or more that a rule matches replaced.
    If several rows of this table apply, each type wraps the one above it.

    | the rule sets | the leaf becomes |
    |---|---|
    | `qtype` | `QArray` |
    | `act_qtype` | `ActivationQuantized` |
    | `rotate` | `vn.types.Rotated` |
    | `correction_rank` | `vn.types.LoraArray` |

    With `train=True`, each of these leaves becomes a `FakeQuantized` instead. A rule with an
    `act_qtype` and no `qtype` also wraps leaves that are already a `QArray`. All other leaves are
    unchanged.

    **Raises:**

    - `TypeError` if `rules` is not a list of `Rule`, or the program cannot be called.
    - `ValueError`, with the path, if statistics are missing.
    - `ValueError`, with the path, if a tile of a rule does not divide its axis and cannot be
      changed: it is a tile of activations, the rule sets `tile_axis`, `tile_size` is a dict, the
      format has a fixed tile size, there is no program, or no tile of 8 or more values divides the
      axis.
    - `ValueError` if `params` holds no arrays.
    - `ValueError` if an option of a rule cannot be combined with `train`, such as `rotate` with
      `train=True`, or `grad_qtype` with `train=False`.
    - `ValueError` if a format name is given without a program.

    **Warns** (`UserWarning`, with paths and a remedy) if:

    - a rule matches no path, or most values stay dense because no rule matches them;
    - a weight stays dense or unchanged: the program uses it in no product, it is inside another
      implicit array, or it is already quantized;
    - `rules` is the name of a format, and all weights have fewer than 4,096 values, so they stay
      dense;
    - a tile does not divide the axes that the program contracts, so a weight gets a smaller tile;
    - `rules` is the name of a format with a fixed tile size, and no contracted axis of a weight is
      a multiple of it, so the weight becomes int8;
    - `rules` is the name of a format, and no tile of 8 or more values divides the contracted axes
      of a weight, so the weight gets one scale per channel;
    - a weight is not rotated, because another use of it would undo the rotation;
    - a quantized weight is hardly smaller than the dense weight;
    - two products contract different axes of a weight;
    - `statistics` are given, but no rule has a static `act_range`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> params = {"dense": {"kernel": jnp.ones((64, 8)), "bias": jnp.ones(8)}}
    >>> vn.quant.quantize_tree(params, [vn.quant.Rule("dense.*", "int8")])["dense"]["kernel"].nbytes
    544
    """
    rules = rules_or_format(rules)
    check_parameters(params, "quantize_tree(params, 'int8', model=f, args=(x,))")
    program = program_of(params, model, args, kwargs)
    if not isinstance(rules, str):
        check_rules(rules, train=train, statistics=statistics)
    chosen = choose(params, rules, program, args or (), kwargs, of_quantized=not train)
    return chosen.replaced(
        lambda path, leaf, rule: _quantized(
            path, leaf, rule, chosen.corrected_axes(path), train, statistics
        )
    )


class Chosen(NamedTuple):
    """A tree, and what rules make of it.

    **Arguments:**

    - `paths`, `leaves`, `treedef`: of the tree.
    - `rules`: by the path of each leaf that is quantised, along the axes that products contract.
    - `uses`: what the program does with each leaf that rules apply to; None without a program.
    """

    paths: Sequence[str]
    leaves: Sequence[Any]
    treedef: Any
    rules: Mapping[str, Rule]
    uses: Mapping[str, Sequence[Use]] | None

    def corrected_axes(self, path: str) -> LowRankAxes | None:
        """Returns the axes of the correction of a leaf, or None where its rule asks for none.

        **Raises:** `ValueError`, naming the path, where no `LoraArray` has the axes as they lie.
        """
        rule = self.rules[path]
        if rule.correction_rank is None:
            return None
        shape = self.leaves[self.paths.index(path)].shape
        contracted = set(rule.contracting(len(shape)))
        uses = telling(self.uses[path]) if self.uses is not None else []
        fitting = [use.free for use in uses if use.contracted == contracted]
        free = fitting[0] if fitting else free_without_program(len(shape), contracted)
        axes = low_rank_axes(len(shape), contracted, free)
        if axes is None:
            raise ValueError(
                f"{path}: correction_rank does not support shape {list(shape)}, because the "
                f"contracted axes {sorted(contracted)} and the other axes {sorted(free)} of its "
                "products are not contiguous. Add a rule for it without correction_rank"
            )
        return axes

    def replaced(self, quantized: Callable[[str, Any, Rule], Any]) -> Any:
        """Returns the tree with what a function makes of each leaf that is quantised.

        Warns of what is hardly smaller.
        """
        new = [
            quantized(path, leaf, self.rules[path]) if path in self.rules else leaf
            for path, leaf in zip(self.paths, self.leaves, strict=True)
        ]
        tell_of_large(self.paths, new, self.rules, located=self.uses is not None)
        return jax.tree.unflatten(self.treedef, new)


def choose(
    params: Any,
    rules: Sequence[Rule] | str,
    program: Callable | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    in_products: bool = False,
    of_quantized: bool = False,
) -> Chosen:
    """Finds the rule of each leaf of a tree, and the axes along which it is quantised.

    Warns and raises as `quantize_tree`, to which the arguments belong.

    **Arguments:**

    - `in_products`: whether to refuse rules none of which is for a weight that a product has.
    - `of_quantized`: whether rules that are of activations alone are for quantised weights, too.
    """
    paths, leaves, treedef = flatten_with_paths(params)
    quantized: dict[str, Rule] = {}
    if of_quantized and not isinstance(rules, str):
        quantized = _of_activations(paths, leaves, rules, located=program is not None)
    weights = {
        path: leaf
        for path, leaf in zip(paths, leaves, strict=True)
        if can_be_quantized(leaf) or path in quantized
    }
    uses = None
    if program is not None:
        is_weight = lambda path, leaf: path in weights
        try:
            uses = uses_of(program, params, is_weight, args, kwargs)
        except Exception as error:
            error.add_note(
                "This error was raised while the program was traced on shapes. It is called as "
                "model(params, *args, **kwargs), or as params(*args, **kwargs) without a model."
            )
            if callable(params) and _is_of_shapes(error):
                error.add_note(
                    "If the module takes one example and these arguments are a batch, pass "
                    "model=lambda m, x: jax.vmap(m)(x)."
                )
            raise
    if isinstance(rules, str):
        if uses is None:
            raise ValueError(
                f"the default rules for {rules!r} need the program: call quantize_tree(params, "
                f"{rules!r}, model=f, args=(x,)), or pass a list of Rule"
            )
        asked = usual_rules(rules, weights, uses)
    else:
        asked = {path: rule for path, x in weights.items() if (rule := rule_for(path, x, rules))}
    asked |= quantized
    if in_products:
        assert uses is not None
        _check_products(asked, uses)
    if isinstance(rules, str):
        tell_of_small(weights, asked, rules)
    else:
        warn_of_unmatched(rules, paths)
        tell_of_unmatched(weights, asked)
    chosen: Mapping[str, Rule] = asked
    if uses is not None:
        fit = fit_usual if isinstance(rules, str) else Rule.along
        chosen = _along_the_program(asked, weights, uses, fit)
    tell_of_held(paths, leaves, rules)
    tell_of_quantised(paths, leaves, rules)
    return Chosen(paths, leaves, treedef, chosen, uses)


def _is_of_shapes(error: Exception) -> bool:
    """Return whether an error of a program is about the shapes of its arguments."""
    words = ("shape", "rank", "dimension", "axis", "axes", "ndim", "unpack", "vmap")
    text = str(error).lower()
    return isinstance(error, TypeError | ValueError) and any(word in text for word in words)


def _of_activations(
    paths: Sequence[str], leaves: Sequence[Any], rules: Sequence[Rule], *, located: bool
) -> dict[str, Rule]:
    """The rules that say of quantised weights what activations are to be.

    What products contract is what shares scales, unless the rule says it or a program tells.
    """
    of = {}
    for path, leaf in zip(paths, leaves, strict=True):
        rule = next((rule for rule in rules if rule.matches(path)), None)
        if not isinstance(leaf, QArray) or rule is None or rule.qtype or not rule.act_qtype:
            continue
        if rule.tile_axis is None and not located:
            sizes = zip(leaf.shape, leaf.scale.shape, strict=True)
            shared = [i - leaf.ndim for i, (size, scales) in enumerate(sizes) if size > scales]
            if not 0 < len(shared) < leaf.ndim:
                raise ValueError(
                    f"{path}: the contracted axes of shape {list(leaf.shape)} do not follow from "
                    f"its scales of shape {list(leaf.scale.shape)}. Set tile_axis, or pass model="
                )
            rule = dataclasses.replace(rule, tile_axis=shared)
        of[path] = rule
    return of


def check_rules(
    rules: Sequence[Rule],
    *,
    train: bool = False,
    calibrated: bool = False,
    statistics: Mapping[str, ActivationStatistics] | None = None,
) -> None:
    """Refuses rules that say how to train without `train`, and the other way round.

    And those that say how to calibrate, where nothing is `calibrated`.
    """
    for rule in rules:
        if rule.method is not None and not calibrated:
            raise ValueError(
                f"method {rule.method!r} needs activations, so use vn.quant.calibrate: {rule}"
            )
        stated = [name for name in TRAINING if getattr(rule, name) is not None]
        if stated and not train:
            raise ValueError(
                f"{stated[0]} is for training, so pass train=True to quantize_tree: {rule}"
            )
        if rule.act_range != "dynamic" and train:
            raise ValueError(
                f"train=True needs act_range='dynamic', not {rule.act_range!r}: {rule}"
            )
        if rule.correction_rank is not None and train:
            raise ValueError(
                "train=True does not support correction_rank, because weights change. Quantize "
                f"without train, and train the correction as a LoRA: {rule}"
            )
        if rule.correction_steps > 1 and calibrated:
            raise ValueError(
                "correction_steps is for quantize_tree. calibrate computes the best correction "
                f"in one step, so leave it out: {rule}"
            )
        if rule.rotate and train:
            raise ValueError(f"train=True does not support rotate=True, so leave it out: {rule}")
        if rule.op_names and train:
            raise ValueError(f"train=True does not support op_names, so leave it out: {rule}")
    if statistics is not None and all(rule.act_range == "dynamic" for rule in rules):
        warn_user(
            "statistics= has no effect, because every rule has act_range='dynamic'. Set "
            "act_range='mean' in a rule, or leave out statistics="
        )


def _check_products(asked: Mapping[str, Rule], uses: Mapping[str, Sequence[Use]]) -> None:
    """Refuses rules none of which has a format for a weight that a product sums."""
    meant = [path for path, rule in asked.items() if rule.has_format]
    summed = [path for path, of in uses.items() if any(x.is_product and x.contracted for x in of)]
    if not set(meant) & set(summed):
        others = [f"{path} ({next(iter(uses[path]), 'unused')})" for path in meant]
        raise ValueError(
            "there is nothing to calibrate. The rules have a format for "
            f"{some_of(others or ['no weight'])}, and products use "
            f"{some_of(summed or ['no weight'])}. Add a rule for a weight that a product uses, or "
            "call vn.quant.quantize_tree, which quantizes embeddings too"
        )


def _quantized(
    path: str,
    leaf: Any,
    rule: Rule,
    axes: LowRankAxes | None,
    train: bool,
    statistics: Mapping[str, ActivationStatistics] | None,
) -> Any:
    try:
        of_leaf = None if statistics is None else statistics.get(path)
        if statistics is not None and of_leaf is None and rule.act_range != "dynamic":
            raise ValueError(
                f"{rule} needs statistics of this weight, and statistics= has "
                f"{some_of(list(statistics)) if statistics else 'none'}. Add a rule for it with "
                "act_range='dynamic', before this one"
            )

        def quantized(leaf: Any) -> Any:
            if train:
                return FakeQuantized.from_rule(leaf, rule) if rule.has_format else leaf
            return rule.with_activations(quantize_corrected(leaf, rule, axes), of_leaf)

        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(quantized, leaf)
        return quantized(leaf)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _along_the_program(
    asked: Mapping[str, Rule],
    weights: Mapping[str, Any],
    uses: Mapping[str, Sequence[Use]],
    fit: Callable[[Rule, Collection[int], Sequence[int]], Rule],
) -> dict[str, Rule]:
    """The rules with the axes that the program contracts; without those for what it does not."""
    located, unused = {}, {}
    for path, rule in asked.items():
        if rule.tile_axis is not None or not rule.has_format:
            located[path] = rule
            continue
        first = use_for_axes(path, uses[path])
        if first is None:
            unused[path] = weights[path]
            continue
        try:
            located[path] = fit(rule, first.contracted, weights[path].shape)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    tell_of_unused(unused, uses)
    tell_of_tiles(asked, located, weights)
    turned = [path for path, rule in located.items() if rule.rotate]
    fixed = [path for path in turned if not all(map(can_be_rotated, uses[path]))]
    tell_of_unrotated(fixed, uses)
    return located | {path: dataclasses.replace(located[path], rotate=False) for path in fixed}
