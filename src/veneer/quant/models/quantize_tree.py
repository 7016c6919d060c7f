"""`quantize_tree`: quantize the parameters of a model by rules on their paths.

`choose_rules` finds the rule of each weight and the axes that products contract. `calibrate` and
`allocate_bits` call `choose_rules`, too.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.typing import DTypeLike

from ..._core.surface import check_parameters, some_of
from ..._jax.frames import warn_user
from ..arrays import QArray
from ..statistics import ActivationStatistics
from ..training import FakeQuantized
from .arguments import (
    as_rules_or_format,
    can_be_quantized,
    find_rule,
    flatten_with_paths,
    program_for,
    warn_of_unmatched,
)
from .correction import LowRankAxes, low_rank_axes, quantize_with_correction
from .notices import (
    describe_changed_tiles,
    warn_of_conflicting_uses,
    warn_of_hardly_smaller,
    warn_of_mostly_dense,
    warn_of_not_rotated,
    warn_of_only_small,
    warn_of_unchanged,
    warn_of_unused,
)
from .rules import TRAINING_OPTIONS, Rule
from .uses import LOOK_UP, Use, default_rules, find_uses, fit_default_rule, uses_with_axes

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

    The program is traced without values, to find the axes of each weight that products contract.
    Values along these axes share a scale. If the rule or its format has a tile size (group size),
    only values in the same tile share a scale.

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
    - `ValueError` if `params` holds no arrays, or a format name is given without a program.
    - `ValueError` if an option of a rule cannot be combined with `train`, such as `rotate` with
      `train=True`, or `grad_qtype` with `train=False`.

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
    rules = as_rules_or_format(rules)
    check_parameters(params, "quantize_tree(params, 'int8', model=f, args=(x,))")
    program = program_for(params, model, args, kwargs)
    if not isinstance(rules, str):
        check_rules(rules, train=train, statistics=statistics)
    chosen = choose_rules(params, rules, program, args or (), kwargs, wrap_quantized=not train)

    def quantize(path: str, leaf: Any, rule: Rule) -> Any:
        axes = chosen.correction_axes(path)
        leaf_statistics = None if statistics is None else statistics.get(path)

        def convert(x: Any) -> Any:
            if train:
                return FakeQuantized.from_rule(x, rule) if rule.has_format else x
            return rule.with_activations(quantize_with_correction(x, rule, axes), leaf_statistics)

        try:
            if statistics is not None and leaf_statistics is None and rule.act_range != "dynamic":
                raise ValueError(
                    f"{rule} needs statistics of this weight, and statistics= has "
                    f"{some_of(list(statistics)) if statistics else 'none'}. Add a rule for it "
                    "with act_range='dynamic', before this one"
                )
            is_abstract = isinstance(leaf, jax.ShapeDtypeStruct)
            return jax.eval_shape(convert, leaf) if is_abstract else convert(leaf)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    return chosen.replace_leaves(quantize)


class ChosenRules(NamedTuple):
    """A flattened tree of parameters, and the rules for its leaves: the result of `choose_rules`.

    If `choose_rules` got a program, the `tile_axis` of each rule holds the axes of the weight that
    products contract. Otherwise `tile_axis` is unchanged.
    """

    paths: Sequence[str]
    leaves: Sequence[Any]
    treedef: Any
    rules: Mapping[str, Rule]  # by path; leaves without a rule stay unchanged
    uses: Mapping[str, Sequence[Use]] | None  # the uses of weights by path; None without a program

    def correction_axes(self, path: str) -> LowRankAxes | None:
        """Return the `LowRankAxes` of a weight, or None if its rule sets no `correction_rank`.

        **Raises:** `ValueError`, with the path, if a `LoraArray` does not support these axes.
        """
        rule = self.rules[path]
        if rule.correction_rank is None:
            return None
        shape = self.leaves[self.paths.index(path)].shape
        contracted = set(rule.contracting(len(shape)))
        uses = uses_with_axes(self.uses[path]) if self.uses is not None else []
        free = next((use.free_axes for use in uses if use.contracted == contracted), None)
        if free is None:
            # Without a program, assume that the axes after the contracted axes are free. If none
            # follows, as in torch's [out, in], the last axis that is not contracted is free.
            others = [axis for axis in range(-len(shape), 0) if axis not in contracted]
            free = frozenset(range(max(contracted) + 1, 0) or others[-1:])
        axes = low_rank_axes(len(shape), contracted, free)
        if axes is None:
            raise ValueError(
                f"{path}: correction_rank does not support shape {list(shape)}, because the "
                f"contracted axes {sorted(contracted)} and the other axes {sorted(free)} of its "
                "products are not contiguous. Add a rule for it without correction_rank"
            )
        return axes

    def product_axes(self, rules: Mapping[str, Rule]) -> dict[str, tuple[int, ...]]:
        """Return a dict from the path of each weight in `rules` to the axes its products contract.

        The axes are counted from the end. Weights whose rule has no format, and weights that no
        product uses, are left out.
        """
        ndims = {path: leaf.ndim for path, leaf in zip(self.paths, self.leaves, strict=True)}
        return {
            path: rule.contracting(ndims[path])
            for path, rule in rules.items()
            if rule.has_format and any(use.is_product for use in (self.uses or {})[path])
        }

    def replace_leaves(self, quantize: Callable[[str, Any, Rule], Any]) -> Any:
        """Return the tree with each leaf that has a rule replaced by `quantize(path, leaf, rule)`.

        Warn of results that take as many bytes as the dense leaves.
        """
        new = [
            quantize(path, leaf, self.rules[path]) if path in self.rules else leaf
            for path, leaf in zip(self.paths, self.leaves, strict=True)
        ]
        warn_of_hardly_smaller(self.paths, new, self.rules, has_program=self.uses is not None)
        return jax.tree.unflatten(self.treedef, new)


def choose_rules(
    params: Any,
    rules: Sequence[Rule] | str,
    program: Callable | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    needs_products: bool = False,
    wrap_quantized: bool = False,
) -> ChosenRules:
    """Choose a rule for each leaf that can be quantized, and fit the rule to the leaf.

    With a program, the `tile_axis` of a fitted rule is the list of axes that products contract, and
    its tiles divide these axes.

    **Arguments:**

    - `rules`: a list of rules, or the name of a format, which selects the default rules.
    - `program`, `args`, `kwargs`: the program `program(params, *args, **kwargs)`, or None.
    - `needs_products`: raise `ValueError` if no product contracts a weight whose rule has a format.
    - `wrap_quantized`: also choose rules for leaves that are a `QArray`, if a rule has an
      `act_qtype` and no `qtype`.

    **Raises:** `ValueError` if the name of a format is given without a program, and `ValueError`
    with the path if a tile does not divide its axis.

    **Warns** (`UserWarning`) of rules that match nothing and of weights that stay dense.
    """
    # Find the weights, and their uses in the program.
    paths, leaves, treedef = flatten_with_paths(params)
    wrapping: dict[str, Rule] = {}
    if wrap_quantized and not isinstance(rules, str):
        wrapping = _rules_of_quantized(paths, leaves, rules, has_program=program is not None)
    weights = {
        path: leaf
        for path, leaf in zip(paths, leaves, strict=True)
        if can_be_quantized(leaf) or path in wrapping
    }
    uses = None
    if program is not None:
        uses = find_uses(program, params, lambda path, leaf: path in weights, args, kwargs)
    # Select a rule for each weight, and warn of rules and weights without a match.
    if not isinstance(rules, str):
        selected = {path: rule for path in weights if (rule := find_rule(path, rules))} | wrapping
    elif uses is not None:
        selected = default_rules(rules, weights, uses)
    else:
        raise ValueError(
            f"the default rules for {rules!r} need the program: call quantize_tree(params, "
            f"{rules!r}, model=f, args=(x,)), or pass a list of Rule"
        )
    if needs_products:
        _check_products(selected, uses or {})
    if isinstance(rules, str):
        warn_of_only_small(weights, selected, rules)
    else:
        warn_of_unmatched(rules, paths)
        warn_of_mostly_dense(weights, selected)
    warn_of_unchanged(paths, leaves, rules)
    # Fit the rules to the axes that products contract.
    if uses is not None:
        fit = fit_default_rule if isinstance(rules, str) else Rule.along
        selected = _fit_to_uses(selected, weights, uses, fit)
    return ChosenRules(paths, leaves, treedef, selected, uses)


def _rules_of_quantized(
    paths: Sequence[str], leaves: Sequence[Any], rules: Sequence[Rule], *, has_program: bool
) -> dict[str, Rule]:
    """Return the rules for leaves that are already a `QArray`, as a dict from paths to rules.

    These rules have an `act_qtype` and no `qtype`, so they quantize only the activations. If such a
    rule has no `tile_axis` and `has_program` is False, its `tile_axis` becomes the axes along which
    values of the `QArray` share a scale.

    **Raises:** `ValueError`, with the path, if values share a scale along all axes or along none.
    """
    chosen = {}
    for path, leaf in zip(paths, leaves, strict=True):
        rule = find_rule(path, rules)
        if not isinstance(leaf, QArray) or rule is None or rule.qtype or not rule.act_qtype:
            continue
        if rule.tile_axis is None and not has_program:
            sizes = enumerate(zip(leaf.shape, leaf.scale.shape, strict=True))
            shared = [axis - leaf.ndim for axis, (size, num_scales) in sizes if size > num_scales]
            if not 0 < len(shared) < leaf.ndim:
                raise ValueError(
                    f"{path}: the contracted axes of shape {list(leaf.shape)} do not follow from "
                    f"its scales of shape {list(leaf.scale.shape)}. Set tile_axis, or pass model="
                )
            rule = dataclasses.replace(rule, tile_axis=shared)
        chosen[path] = rule
    return chosen


def _fit_to_uses(
    rules: Mapping[str, Rule],
    weights: Mapping[str, Any],
    uses: Mapping[str, Sequence[Use]],
    fit: Callable[..., Rule],
) -> dict[str, Rule]:
    """Fit the rules without a `tile_axis` to the axes that the first use of the weight contracts.

    **Arguments:**

    - `rules`, `weights`, `uses`: dicts from paths to rules, weights, and the uses of the weights.
    - `fit`: a function that is called as `fit(rule, contracted, shape)`, and returns a copy of the
      rule with `tile_axis` and `tile_size` for these axes.

    **Returns:** a dict from paths to rules. It leaves out weights that no product or look-up uses,
    with a warning. If a use of a weight would undo the rotation that its rule sets, the returned
    rule does not rotate, with a warning.

    **Raises:** `ValueError`, with the path, if `fit` rejects the shape.
    """
    fitted, unused = {}, {}
    for path, rule in rules.items():
        if rule.tile_axis is not None or not rule.has_format:
            fitted[path] = rule
        elif relevant_uses := uses_with_axes(uses[path]):
            warn_of_conflicting_uses(path, relevant_uses)
            try:
                fitted[path] = fit(rule, relevant_uses[0].contracted, weights[path].shape)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        else:
            unused[path] = weights[path]
    warn_of_unused(unused, uses)
    if changed := describe_changed_tiles(rules, fitted, weights):
        warn_user(
            f"the tile of the rule does not divide the contracted axes: {some_of(changed)}. To "
            "choose, add a rule for these weights with another tile_size or qtype"
        )
    unrotated = {
        path: dataclasses.replace(rule, rotate=False)
        for path, rule in fitted.items()
        if rule.rotate and not all(use.primitive in ("dot_general", LOOK_UP) for use in uses[path])
    }
    warn_of_not_rotated(list(unrotated), uses)
    return fitted | unrotated


def _check_products(rules: Mapping[str, Rule], uses: Mapping[str, Sequence[Use]]) -> None:
    """Raise `ValueError` if no product contracts a weight whose rule has a format.

    `rules` and `uses` are dicts by path. The message lists the weights of both groups.
    """
    with_format = [path for path, rule in rules.items() if rule.has_format]
    in_products = [
        path
        for path, weight_uses in uses.items()
        if any(use.is_product and use.has_axes for use in weight_uses)
    ]
    if set(with_format).isdisjoint(in_products):
        others = [f"{path} ({next(iter(uses[path]), 'unused')})" for path in with_format]
        raise ValueError(
            "there is nothing to calibrate. The rules have a format for "
            f"{some_of(others or ['no weight'])}, and products use "
            f"{some_of(in_products or ['no weight'])}. Add a rule for a weight that a product "
            "uses, or call vn.quant.quantize_tree, which quantizes embeddings too"
        )


def check_rules(
    rules: Sequence[Rule],
    *,
    train: bool = False,
    calibrated: bool = False,
    statistics: Mapping[str, ActivationStatistics] | None = None,
) -> None:
    """Raise `ValueError` if the calling function does not support an option of a rule.

    `train` and `statistics` are arguments of `quantize_tree`. `calibrated` is True if the calling
    function is `calibrate`, and not `quantize_tree`. Warn if `statistics` are given, but no rule
    has a static `act_range`, which needs them.
    """
    for rule in rules:
        training_option = next((x for x in TRAINING_OPTIONS if getattr(rule, x) is not None), None)
        errors = {
            f"method {rule.method!r} needs activations, so use vn.quant.calibrate": (
                rule.method is not None and not calibrated
            ),
            f"{training_option} is for training, so pass train=True to quantize_tree": (
                training_option is not None and not train
            ),
            f"train=True needs act_range='dynamic', not {rule.act_range!r}": (
                rule.act_range != "dynamic" and train
            ),
            "train=True does not support correction_rank, because weights change. Quantize without "
            "train, and train the correction as a LoRA": rule.correction_rank is not None and train,
            "correction_steps is for quantize_tree. calibrate computes the best correction in one "
            "step, so leave it out": rule.correction_steps > 1 and calibrated,
            "train=True does not support rotate=True, so leave it out": rule.rotate and train,
            "train=True does not support op_names, so leave it out": rule.op_names and train,
        }
        for message, is_error in errors.items():
            if is_error:
                raise ValueError(f"{message}: {rule}")
    if statistics is not None and all(rule.act_range == "dynamic" for rule in rules):
        warn_user(
            "statistics= has no effect, because every rule has act_range='dynamic'. Set "
            "act_range='mean' in a rule, or leave out statistics="
        )
