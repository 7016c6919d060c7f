"""`quantize_tree`: the parameters of a model, by rules on their paths.

Where the program is given, too, the axes along which a weight is quantised are those that its
products contract.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from ..._core.value import is_part, is_value
from ..activations import ActivationQuantized
from ..formats import get_format
from ..observation.statistics import ActivationStatistics
from ..qarray import QArray
from ..training import FakeQuantized
from .rules import (
    TRAINING,
    Rule,
    can_be_quantized,
    flatten_with_paths,
    rule_for,
    rules_in,
    some_of,
    warn_of_unmatched,
)
from .uses import Use, program_of, use_for_axes, uses_of
from .usual_rules import SMALL, usual_rules

T = TypeVar("T")


def quantize_tree(
    params: T,
    rules: Sequence[Rule] | str,
    *,
    model: Callable | None = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    train: bool = False,
    statistics: Mapping[str, ActivationStatistics] | None = None,
) -> T:
    """Quantises the parameters of a model, whichever library made them.

    **Arguments:**

    - `params`: any pytree of arrays, such as a module of Equinox or flax.nnx.
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
    rule with a format matches; in an `ActivationQuantized` where the rule has an `act_qtype`, which
    may do without a format for weights. Biases, norms and integers stay dense if they match, and so
    does what no rule matches; arrays that are implicit already stay as they are.

    **Raises:** `TypeError` for rules that are no sequence of `Rule`, and what is no program;
    `ValueError`, naming the path, where a tile does not divide its axis, or where statistics are
    asked for and missing; for what is for training without `train`, and `op_names` with it; for the
    name of a format without a program. Warns with `UserWarning` of a rule that matches no path, and
    of statistics that no rule asks for; of a weight that two products contract along different
    axes, of one that stays dense as the program adds to it or the like, or as an array of another
    type holds it, and of one that quantising makes hardly smaller.

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
    """
    paths, leaves, treedef = flatten_with_paths(params)
    program = program_of(params, model, args, kwargs)
    uses = None
    if program is not None:
        is_weight = lambda path, leaf: can_be_quantized(leaf)
        uses = uses_of(program, params, is_weight, args or (), kwargs)
    if isinstance(rules, str):
        if uses is None:
            raise ValueError(
                f"rules of {rules!r} are chosen by what a program does with each weight: pass it, "
                f"as quantize_tree(params, {rules!r}, model=f, args=(x,)), or a list of Rules"
            )
        chosen = usual_rules(rules, dict(zip(paths, leaves, strict=True)), uses)
    else:
        rules = rules_in(rules)
        _check(rules, train, statistics)
        warn_of_unmatched(rules, paths, stacklevel=3)
        pairs = zip(paths, leaves, strict=True)
        chosen = {path: rule for path, leaf in pairs if (rule := rule_for(path, leaf, rules))}
        if uses is not None:
            chosen = _along_the_program(chosen, dict(zip(paths, leaves, strict=True)), uses)
    _warn_of_held(paths, leaves, rules)
    _warn_of_quantised(paths, leaves, rules)
    quantized = []
    for path, leaf in zip(paths, leaves, strict=True):
        rule = chosen.get(path)
        quantized.append(leaf if rule is None else _quantized(path, leaf, rule, train, statistics))
    _warn_of_large(paths, quantized, chosen, located=uses is not None)
    return jax.tree.unflatten(treedef, quantized)


def _check(
    rules: Sequence[Rule], train: bool, statistics: Mapping[str, ActivationStatistics] | None
) -> None:
    for rule in rules:
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
        if rule.op_names and train:
            raise ValueError(f"train=True quantises activations in every product: {rule}")
    if statistics is not None and all(rule.act_range == "dynamic" for rule in rules):
        message = "no rule takes the statistics: its act_range says so, as 'mean'"
        warnings.warn(message, UserWarning, stacklevel=3)


def _quantized(
    path: str,
    leaf: Any,
    rule: Rule,
    train: bool,
    statistics: Mapping[str, ActivationStatistics] | None,
) -> Any:
    try:
        if train:
            return FakeQuantized.from_rule(leaf, rule) if _has_format(rule) else leaf
        of_leaf = None if statistics is None else statistics.get(path)
        if statistics is not None and of_leaf is None and rule.act_range != "dynamic":
            raise ValueError(
                f"there are no statistics of it, and {rule} asks for them; they are of "
                f"{some_of(list(statistics))}. Give it a rule of its own, before this one"
            )
        return rule.with_activations(rule.quantize(leaf), of_leaf)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# Axes from the program.


def _along_the_program(
    chosen: Mapping[str, Rule], leaves: Mapping[str, Any], uses: Mapping[str, Sequence[Use]]
) -> dict[str, Rule]:
    """The rules with the axes that the program contracts; without those for what it does not."""
    located, left = {}, []
    for path, rule in chosen.items():
        if rule.tile_axis is not None or not _has_format(rule):
            located[path] = rule
            continue
        first = use_for_axes(path, uses[path], stacklevel=4)
        if first is None:
            # A vector of a stack is a norm, and what is small a bias: those are expected to.
            is_small = math.prod(leaves[path].shape) < SMALL
            if not uses[path] or not (is_small or any(len(use.free) < 2 for use in uses[path])):
                left.append(f"{path} ({next(iter(uses[path]), 'it has no use')})")
            continue
        try:
            located[path] = rule.along(first.contracted, leaves[path].shape)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if left:
        message = (
            f"left dense, as the program has them in no product: {some_of(left)}. A rule with a "
            "tile_axis quantises them all the same"
        )
        warnings.warn(message, UserWarning, stacklevel=3)
    return located


def _has_format(rule: Rule) -> bool:
    return any(getattr(rule, name) is not None for name in ("qtype", "act_qtype", *TRAINING))


def _warn_of_held(paths: Sequence[str], leaves: Sequence[Any], rules: Sequence[Rule] | str) -> None:
    """Warns of weights that are meant, and within arrays of other types, as that of a LoRA is."""
    held = []
    for path, leaf in zip(paths, leaves, strict=True):
        if not is_value(leaf) or isinstance(leaf, QArray | FakeQuantized | ActivationQuantized):
            continue
        within = jax.tree.leaves(leaf, is_leaf=is_part(leaf))
        if any(can_be_quantized(x) and x.shape == leaf.shape for x in within):
            of_leaf = [] if isinstance(rules, str) else [r for r in rules if r.matches(path)][:1]
            if isinstance(rules, str) or any(map(_has_format, of_leaf)):
                held.append(f"{path} ({type(leaf).__name__})")
    if held:
        message = (
            f"not quantised, as an array of another type holds the weight: {some_of(held)}. "
            "Quantise first, and make such arrays of the quantised weights"
        )
        warnings.warn(message, UserWarning, stacklevel=3)


def _warn_of_quantised(
    paths: Sequence[str], leaves: Sequence[Any], rules: Sequence[Rule] | str
) -> None:
    """Warns of weights in another format than is asked for, which stay as they are."""
    kept = []
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, QArray):
            asked: list[Any] = [rules, "int8"]  # as tables and heads are
            if not isinstance(rules, str):
                asked = [rule.qtype for rule in rules if rule.matches(path)][:1]
            if asked and None not in asked and leaf.qtype not in map(_name_of, asked):
                kept.append(f"{path} ({leaf.qtype})")
    if kept:
        message = (
            f"quantised already, and left as they are: {some_of(kept)}. Quantise the dense "
            "weights, or what vn.materialise gives, which is rounded twice"
        )
        warnings.warn(message, UserWarning, stacklevel=3)


def _name_of(qtype: Any) -> str:
    return get_format(qtype).name


def _warn_of_large(
    paths: Sequence[str], quantized: Sequence[Any], chosen: Mapping[str, Rule], *, located: bool
) -> None:
    """Warns of what is not smaller, or of which few values share a scale that nobody asked for."""
    large = []
    for path, x in zip(paths, quantized, strict=True):
        q = x.array if isinstance(x, ActivationQuantized) else x
        if path not in chosen or not isinstance(q, QArray) or q.size < _MATTERS:
            continue
        scales = sum(leaf.size for leaf in jax.tree.leaves(q.scale))
        asked = located or chosen[path].tile_size is not None or q.format.tile_size is not None
        if q.nbytes >= q.size * q.dtype.itemsize or (not asked and q.size <= _FEW * scales):
            large.append(f"{path} {list(q.shape)} takes {8 * q.nbytes / q.size:.3g} bits a value")
    if large:
        remedy = (
            "leave it dense, by a rule with qtype=None"
            if located
            else "say by tile_axis which axes the products contract, or pass the program, as "
            "model= and args="
        )
        message = f"hardly smaller, for few values share a scale: {some_of(large)}; {remedy}"
        warnings.warn(message, UserWarning, stacklevel=3)


#: So few values that share a scale are a mistake.
_FEW = 8
#: What is smaller than this may be as large as it likes.
_MATTERS = 1024
