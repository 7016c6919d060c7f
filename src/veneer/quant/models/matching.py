"""Match rules with the leaves of a tree by their paths."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._core.value import is_value
from ..._jax.frames import warn_user
from ..arrays.qarray import QUANTIZABLE
from ..formats import get_format
from .rules import Rule


def as_rules_or_format(rules: Any) -> tuple[Rule, ...] | str:
    """Return a tuple of rules, or the name of a format if `rules` is a format or a dtype.

    **Raises:** `TypeError` if `rules` is neither an iterable of rules nor a format.
    """
    if isinstance(rules, str | type | np.dtype):
        return get_format(rules).name
    return as_rules(rules)


def as_rules(rules: Any) -> tuple[Rule, ...]:
    """Return an iterable of rules as a tuple.

    **Raises:** `TypeError` for any other argument. The message suggests a list of rules.
    """
    if isinstance(rules, Rule):
        raise TypeError(f"rules must be a list: [{rules}]")
    if not isinstance(rules, Iterable) or isinstance(rules, str | Mapping):
        # If the argument is a format, or a dict from paths to formats, suggest it as a list.
        formats: dict[str, str | None] = {".*": rules if isinstance(rules, str) else "int8"}
        if isinstance(rules, Mapping) and all(isinstance(path, str) for path in rules):
            formats = {path: x for path, x in rules.items() if isinstance(x, str | None)} or formats
        suggestion = ", ".join(f"vn.quant.Rule({path!r}, {x!r})" for path, x in formats.items())
        raise TypeError(
            f"rules must be a list of Rule, such as [{suggestion}], not {describe_value(rules)}. "
            "The rules are the second argument, after the parameters or the model"
        )
    rules = tuple(rules)
    for i, rule in enumerate(rules):
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rules[{i}] must be a Rule, such as Rule('.*', 'int8'), not {describe_value(rule)}"
            )
    return rules


def describe_value(x: Any) -> str:
    """Describe a value in an error message: by its repr, or by its type if it holds arrays."""
    holds_arrays = any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(x))
    return f"a {type(x).__name__}" if holds_arrays else repr(x)


def flatten_with_paths(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Return the paths, the leaves and the treedef of a tree. Rules match these paths.

    An implicit array is one leaf.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_value)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return paths, [leaf for _, leaf in leaves], treedef


def find_rule(path: str, rules: Sequence[Rule]) -> Rule | None:
    """Return the first rule that matches a path, or None."""
    return next((rule for rule in rules if rule.matches(path)), None)


def can_be_quantized(leaf: Any) -> bool:
    """Return whether a leaf is a floating array of rank 2 or more. It may be abstract."""
    return not is_value(leaf) and getattr(leaf, "ndim", 0) >= 2 and leaf.dtype in QUANTIZABLE


def warn_of_unmatched(rules: Sequence[Any], paths: Sequence[str]) -> None:
    """Warn of each rule that matches none of the paths."""
    for rule in rules:
        if not any(map(rule.matches, paths)):
            warn_user(
                f"the rule {rule.path_regex!r} matches no parameter. Change its path_regex, which "
                f"must match a whole path, such as {some_of(paths)}"
            )


def some_of(paths: Sequence[str]) -> str:
    """Join the first four paths for a message."""
    some = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
    return some or "(the tree is empty)"
