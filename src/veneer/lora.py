"""LoRA fine-tuning: low-rank adapters for the weights of a model, chosen by rules on paths.

`init_tree` replaces the weights that a rule selects by `vn.types.LoraArray`. It traces the program
to find the input and output axes of each weight. The other functions split, join and merge weights
and adapters, and turn dropout on and off.

For quantized weights, LoftQ initializes the adapters so that they correct the error of the
quantization (Li et al., arXiv 2310.08659): use
`vn.quant.Rule(..., correction_rank=16, correction_steps=5)` with `vn.quant.quantize_tree`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from ._core.surface import (
    check_key,
    check_parameters,
    check_regex,
    path_matches,
    some_of,
)
from ._core.value import Value
from ._jax.frames import warn_user
from .quant.arrays import QUANTIZABLE
from .quant.models.arguments import (
    describe_value,
    flatten_with_paths,
    program_for,
    warn_of_unmatched,
)
from .quant.models.correction import low_rank_axes
from .quant.models.uses import Use, find_uses, uses_with_axes
from .types.lora import LoraArray, join, merge, split, with_dropout, without_dropout

__all__ = [
    "LoraArray",
    "Rule",
    "init_tree",
    "join",
    "merge",
    "split",
    "with_dropout",
    "without_dropout",
]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule that selects weights by path and sets the options of their LoRA adapters.

    **Arguments:**

    - `path_regex`: a regex that must match the whole path of a weight: its keys joined with dots,
      such as `layers.0.attention.query.kernel`. A final `.value` of the path (flax.nnx) is
      optional.
    - `rank`: the rank of the adapter, at least 1. None means that the weights get no adapter.
    - `alpha`, `rs_lora`, `dora`, `dropout`, `dtype`: as in `vn.types.LoraArray.init`.

    **Raises:** `ValueError` if the regex is invalid or the rank is less than 1. `TypeError` if
    `path_regex` is not a string.

    >>> import veneer as vn
    >>> vn.lora.Rule(".*attention.*", rank=8).matches("layers.0.attention.query.kernel")
    True
    """

    path_regex: str
    rank: int | None
    _: dataclasses.KW_ONLY
    alpha: float | int | None = None
    rs_lora: bool = False
    dora: bool = False
    dropout: float = 0.0
    dtype: Any = None

    def __post_init__(self) -> None:
        check_regex(self.path_regex, "path_regex")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"the rank of an adapter must be at least 1, not {self.rank}")

    @property
    def options(self) -> dict[str, Any]:
        """The options of this rule, as keyword arguments for `vn.types.LoraArray.init`."""
        fields = dataclasses.asdict(self)
        del fields["path_regex"]
        return fields

    def matches(self, path: str) -> bool:
        """Return whether the regex matches the whole path, with or without a final `.value`."""
        return path_matches(self.path_regex, path)


def init_tree(
    params: T,
    rules: Sequence[Rule],
    *,
    key: jax.Array,
    model: Callable | None = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> T:
    """Add LoRA adapters to the weights of a model, for fine-tuning.

    The adapters are zero at first, so the results of the model do not change.

    **Arguments:**

    - `params`: any pytree. Its weights can be dense, quantized or of another implicit type.
    - `rules`: a list of `Rule`. The first rule that matches the path of a weight applies to it.
    - `key`: a PRNG key for the initial values of the adapters.
    - `model`, `args`, `kwargs`: the program, called as `model(params, *args, **kwargs)`. Without
      `model`, `params` itself is called. The program is traced to find the input axes of each
      weight: the axes that its products contract. Each layer or expert of a stack gets its own
      adapter. If all three are None, nothing is called or traced, and each weight is assumed to be
      `[..., in, out]`.

    **Returns:** `params`, with a `LoraArray` in place of each floating array with two or more axes
    to which a rule with a rank applies. To train only the adapters, use `vn.lora.split`, or
    `vn.trainable` as a mask.

    **Raises:**

    - `TypeError` if `rules` is not a list of `Rule`, `model` is not callable, or `key` is not a
      PRNG key.
    - `ValueError` if the input axes of a weight, or its output axes, are not adjacent. The message
      names the path.
    - `ValueError` if the `dropout` of a rule is outside [0, 1), or its `dtype` is not floating.

    **Warns** (`UserWarning`, with paths):

    - if a rule matches no path;
    - if a rule matches only arrays that cannot get an adapter: arrays that are not floating, have
      fewer than two axes, or already have an adapter;
    - if a matched weight gets no adapter because no product uses it (biases and norm scales are not
      reported if their rule adds adapters to other weights);
    - if an adapter has at least as many values as its weight.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> model = lambda params, x: jnp.einsum("td,dhk->thk", x * params["norm"], params["query"])
    >>> params = {"query": jnp.ones((512, 8, 64)), "norm": jnp.ones(512)}
    >>> rules = [vn.lora.Rule("query", rank=4)]
    >>> args = (jnp.ones((3, 512)),)
    >>> tuned = vn.lora.init_tree(params, rules, key=jax.random.key(0), model=model, args=args)
    >>> tuned["query"].a.shape, tuned["query"].b.shape
    ((512, 4), (4, 8, 64))
    """
    _check_rules(rules)
    check_parameters(params, "init_tree(params, rules, key=key, model=f, args=(x,))")
    check_key(key)
    paths, leaves, treedef = flatten_with_paths(params)
    warn_of_unmatched(rules, paths)
    chosen: dict[str, Rule] = {}
    matched: dict[Rule, list[str]] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        rule = next((rule for rule in rules if rule.matches(path)), None)
        if rule is None or rule.rank is None:
            continue
        matched.setdefault(rule, []).append(path)
        aval = leaf.aval() if isinstance(leaf, Value) else leaf
        is_weight = getattr(aval, "ndim", 0) >= 2 and aval.dtype in QUANTIZABLE
        if is_weight and not isinstance(leaf, LoraArray):
            chosen[path] = rule
    for rule, paths_of_rule in matched.items():
        if rule not in chosen.values():
            warn_user(
                f"the rule {rule.path_regex!r} gives nothing an adapter: {some_of(paths_of_rule)}. "
                "Adapters are for floating arrays of rank 2 or more that are not LoraArrays yet"
            )
    program = program_for(params, model, args, kwargs)
    uses = {}
    if program is not None:
        uses = find_uses(program, params, lambda path, _: path in chosen, args or (), kwargs)
        unused = {path: chosen.pop(path) for path in [*chosen] if not uses_with_axes(uses[path])}
        # Do not report biases and norm scales if their rule adds other adapters. They are only
        # added, or used as vectors.
        is_vector = lambda use: use.primitive == "add" or len(use.free_axes) < 2
        reported = [
            path
            for path, rule in unused.items()
            if rule not in chosen.values() or not uses[path] or not all(map(is_vector, uses[path]))
        ]
        if reported:
            warn_user(
                f"the program uses these weights in no product, so they get no adapter: "
                f"{some_of(reported)}"
            )
    keys = iter(jax.random.split(key, max(1, len(chosen))))
    new, large = [], []
    for path, leaf in zip(paths, leaves, strict=True):
        if path not in chosen:
            new.append(leaf)
            continue
        axes = _adapter_axes(path, leaf.shape, uses_with_axes(uses[path])[0]) if uses else {}
        w = LoraArray.init(leaf, key=next(keys), **chosen[path].options, **axes)
        large += [f"{path} {list(w.shape)}"] if w.a.size + w.b.size >= w.size else []
        new.append(w)
    if large:
        remedy = "a lower rank" if program else "the program, as model= and args=, or a lower rank"
        warn_user(f"an adapter is as large as its weight: {some_of(large)}. Pass {remedy}")
    return jax.tree.unflatten(treedef, new)


def _check_rules(rules: Any) -> None:
    is_sequence = isinstance(rules, Sequence) and not isinstance(rules, str)
    for rule in rules if is_sequence else [rules]:
        if not is_sequence or not isinstance(rule, Rule):
            raise TypeError(
                "rules must be a list of vn.lora.Rule, such as [vn.lora.Rule('.*', rank=8)], not "
                f"{describe_value(rule)}. The rules are the second argument, after the parameters"
            )


def _adapter_axes(path: str, shape: Sequence[int], use: Use) -> dict[str, Any]:
    """Return the keyword arguments of `LoraArray.init` for the input and output axes of a weight.

    `path` and `shape` describe the weight. `use` says which axes a product of the program
    contracts.

    **Raises:** `ValueError` if the input axes, or the output axes, are not adjacent.
    """
    axes = low_rank_axes(len(shape), use.contracted, use.free_axes)
    if axes is None:
        raise ValueError(
            f"no adapter fits {path} {list(shape)}: the axes that products contract must be "
            f"adjacent, and so must the other axes, at its end. It is used in {use}"
        )
    return {"in_ndim": axes.in_ndim, "out_ndim": axes.out_ndim, "dropped": axes.contracted}


def __dir__() -> list[str]:
    return __all__
