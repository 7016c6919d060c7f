"""`quantize_tree`: the parameters of a model, by rules on their paths.

Where the program is given, too, the axes along which a weight is quantised are those that its
products contract.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.typing import DTypeLike

from ..._jax.source_lines import warn_user
from ..observation.statistics import ActivationStatistics
from ..qarray import QArray
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
    """Quantises the parameters of a model, whichever library made them.

    **Arguments:**

    - `params`: any pytree of arrays, such as a module of Equinox or flax.nnx. Of an abstract tree,
      whose leaves are `jax.ShapeDtypeStruct`s, the result is abstract too.
    - `rules`: the first that matches the path of a leaf is the one that counts. Or the name of a
      format, for the usual choices for a language model (the table of `usual_rules`).
    - `model`, `args`, `kwargs`: the program, called as `model(params, *args, **kwargs)`; without a
      `model`, `params` is a module, and called itself. It is traced on shapes and dtypes, to see
      which axes of each weight its products contract: those share scales, where the rule does not
      say by `tile_axis` which do. Rows that are looked up have scales of their own. A weight that
      is in no product and not looked up stays dense.
    - `train`: whether weights are to be trained: then each is kept, as `vn.quant.FakeQuantized`,
      and quantised as it is used.
    - `statistics`: of activations by the path of their weight, as `vn.quant.observe` gives them;
      for rules with an `act_range` that is static.

    **Returns:** the tree with a `QArray` in place of each floating array of rank 2 and up that a
    rule with a format matches; in an `ActivationQuantized` where the rule has an `act_qtype`,
    which may do without a format for weights, in a `vn.types.Rotated` where it says `rotate`,
    and all of it in a `vn.types.LoraArray` where there is a `correction_rank`. Biases, norms and
    integers stay dense if they match, and so does what no rule matches; arrays that are implicit
    already stay as they are, but for a `QArray`, as a checkpoint has them, of a rule with an
    `act_qtype` and no format for weights.

    **Raises:** `TypeError` for rules that are no sequence of `Rule`, and what is no program;
    `ValueError`, naming the path, where a tile does not divide its axis, or where statistics
    are asked for and missing; for what is for training without `train`, and `op_names` with it;
    for the name of a format without a program. Warns with `UserWarning`, naming paths and the
    bits that a value takes, of a weight that stays dense as no product has it, or as an array
    of another type holds it; where no rule matches most of the values; of tiles that are others
    than asked for, as those do not fit; of what is hardly smaller; of what a convolution takes,
    which is not rotated; of a weight that two products contract along different axes; of a rule
    that matches no path, and of statistics that no rule asks for; and where all weights are too
    small for the usual rules.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> params = {"dense": {"kernel": jnp.ones((64, 8)), "bias": jnp.ones(8)}}
    >>> vn.quant.quantize_tree(params, [vn.quant.Rule("dense.*", "int8")])["dense"]["kernel"].nbytes
    544

    The kernel of an attention, whose axes are seen in the program:

    >>> params = {"query": jnp.ones((512, 8, 64))}
    >>> def model(params, x):
    ...     return jnp.einsum("td,dhk->thk", x, params["query"])
    >>> rules = [vn.quant.Rule(".*", "nf4", tile_size=64)]
    >>> small = vn.quant.quantize_tree(params, rules, model=model, args=(jnp.ones((3, 512)),))
    >>> small["query"].scale.shape, 8 * small["query"].nbytes / small["query"].size
    ((8, 8, 64), 4.5)

    A LoRA of a quantised model that begins close to the dense one, by LoftQ:

    >>> w = jax.random.normal(jax.random.key(0), (64, 64))
    >>> rules = [vn.quant.Rule(".*", "int2", correction_rank=8, correction_steps=5)]
    >>> vn.quant.quantize_tree({"w": w}, rules)["w"]
    LoraArray(w=QArray:f32[64,64], a=f32[64,8], b=f32[8,64], scale=1.0)
    """
    program = program_of(params, model, args, kwargs)
    rules = rules_or_format(rules)
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
                f"{path}: no correction of low rank of shape {list(shape)}: the axes "
                f"{sorted(contracted)} that products contract and {sorted(free)} that they leave "
                "are not side by side at its end. Give it a rule of its own, without "
                "correction_rank"
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
                "The program was called to trace it, as model(params, *args, **kwargs), or as "
                "params(*args, **kwargs) where there is no model."
            )
            raise
    if isinstance(rules, str):
        if uses is None:
            raise ValueError(
                f"rules of {rules!r} are chosen by what a program does with each weight: pass it, "
                f"as quantize_tree(params, {rules!r}, model=f, args=(x,)), or a list of Rules"
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
                    f"{path}: its scales {list(leaf.scale.shape)} do not tell which axes of "
                    f"{list(leaf.shape)} products contract: say it as tile_axis, or pass a model"
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
                f"method {rule.method!r} goes by activations: vn.quant.calibrate takes it: {rule}"
            )
        stated = [name for name in TRAINING if getattr(rule, name) is not None]
        if stated and not train:
            raise ValueError(
                f"{stated[0]} is for training, by quantize_tree(..., train=True): {rule}"
            )
        if rule.act_range != "dynamic" and train:
            raise ValueError(
                f"train=True quantises activations dynamically, and act_range is "
                f"{rule.act_range!r}: {rule}"
            )
        if rule.correction_rank is not None and train:
            raise ValueError(
                f"train=True rounds weights anew as they are used, and correction_rank corrects "
                f"what rounding lost: quantise without train, and train the correction: {rule}"
            )
        if rule.correction_steps > 1 and calibrated:
            raise ValueError(
                f"correction_steps are for weights that meet no activations, as by quantize_tree; "
                f"calibrate finds the best correction by activations in one: {rule}"
            )
        if rule.rotate and train:
            raise ValueError(f"train=True trains weights as they are, and rotate=True: {rule}")
        if rule.op_names and train:
            raise ValueError(f"train=True quantises activations in every product: {rule}")
    if statistics is not None and all(rule.act_range == "dynamic" for rule in rules):
        warn_user("no rule takes the statistics: its act_range says so, as 'mean'")


def _check_products(asked: Mapping[str, Rule], uses: Mapping[str, Sequence[Use]]) -> None:
    """Refuses rules none of which has a format for a weight that a product sums."""
    meant = [path for path, rule in asked.items() if rule.has_format]
    summed = [path for path, of in uses.items() if any(x.is_product and x.contracted for x in of)]
    if not set(meant) & set(summed):
        others = [f"{path} ({next(iter(uses[path]), 'it has no use')})" for path in meant]
        raise ValueError(
            f"there is nothing to calibrate: rules have a format for {some_of(others or ['none'])},"
            f" and what products have is {some_of(summed or ['no weight'])}. Have a rule match "
            "that; vn.quant.quantize_tree quantises what is looked up"
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
                f"there are no statistics of it, and {rule} asks for them; they are of "
                f"{some_of(list(statistics))}. Give it a rule of its own, before this one"
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
