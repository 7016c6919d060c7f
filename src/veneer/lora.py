"""LoRA by rules on paths: updates of low rank for the weights of a model.

`init_tree` gives the weights that a rule names a `vn.types.LoraArray` each. Which of their axes
come in and which go out is seen in the program. Beside it are the functions of trees of such.
Weights that are quantised, and in few bits, begin closer to the dense ones by LoftQ, which
`vn.quant.quantize_tree` has: `vn.quant.Rule(..., correction_rank=16, correction_steps=5)`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from ._core.surface.weights import path_matches
from ._core.value import Value
from ._jax.source_lines import warn_user
from .quant.models.correction import low_rank_axes
from .quant.models.rules import flatten_with_paths, some_of, warn_of_unmatched
from .quant.models.uses import Use, program_of, telling, uses_of
from .quant.qarray import QUANTIZABLE
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
    """Which weights are updated, and how.

    **Arguments:**

    - `path_regex`: matched in full against the keys of a leaf joined with dots, as in
      `layers.0.attention.query.kernel`. The `.value` at the end of a path of flax.nnx may be left
      out.
    - `rank`: of the update; None leaves the weight as it is.
    - `alpha`, `rs_lora`, `dora`, `dropout`, `dtype`: as for `vn.types.LoraArray.init`.

    **Raises:** `ValueError` for a regex that does not compile, or a rank below 1.

    >>> import veneer as vn
    >>> vn.lora.Rule(r".*attention.*", rank=8).alpha is None
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
        try:
            re.compile(self.path_regex)
        except re.error as error:
            raise ValueError(f"path_regex {self.path_regex!r} is not a regex: {error}") from None
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"a low-rank update has a rank of 1 or more, not {self.rank}")

    @property
    def options(self) -> dict[str, Any]:
        """What `vn.types.LoraArray.init` takes."""
        fields = dataclasses.asdict(self)
        del fields["path_regex"]
        return fields

    def matches(self, path: str) -> bool:
        """Return whether the whole of `path` matches, with or without a final `.value`."""
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
    """Gives weights of a model updates of low rank, which are zero to begin with.

    **Arguments:**

    - `params`: any pytree, whose weights may be dense, quantised, or implicit in another way.
    - `rules`: the first that matches the path of a leaf is the one that counts.
    - `key`: a PRNG key; each weight has one of its own of it.
    - `model`, `args`, `kwargs`: the program, as for `vn.quant.quantize_tree`: an update goes from
      the axes that its products contract to those that they leave, and a weight that stands for
      several, as of layers or of experts, has as many. Without it, each is a matrix
      `[..., in, out]`.

    **Returns:** the tree with a `LoraArray` in place of each floating array of rank 2 and up that a
    rule with a rank matches. `vn.trainable` says which leaves to train.

    **Raises:** `TypeError` for rules that are no sequence of `Rule`; `ValueError`, naming the path,
    where the axes do not lie as a `LoraArray` has them. Warns with `UserWarning` of a rule that
    matches no path, or nothing that can be updated; of a weight that the program has in no product,
    which stays as it is, unless it is a bias; and of an update that is as large as its weight.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> params = {"query": jnp.ones((512, 8, 64)), "norm": jnp.ones(512)}
    >>> def model(params, x):
    ...     return jnp.einsum("td,dhk->thk", x * params["norm"], params["query"])
    >>> rules = [vn.lora.Rule(".*", rank=4)]
    >>> x = jnp.ones((3, 512))
    >>> tuned = vn.lora.init_tree(params, rules, key=jax.random.key(0), model=model, args=(x,))
    >>> tuned["query"].a.shape, tuned["query"].b.shape
    ((512, 4), (4, 8, 64))
    """
    _check(rules)
    paths, leaves, treedef = flatten_with_paths(params)
    warn_of_unmatched(rules, paths)
    chosen = {}
    for path, leaf in zip(paths, leaves, strict=True):
        rule = next((rule for rule in rules if rule.matches(path)), None)
        if rule is not None and rule.rank is not None and _can_be_updated(leaf):
            chosen[path] = rule
    program = program_of(params, model, args, kwargs)
    uses = {}
    if program is not None:
        uses = uses_of(program, params, lambda path, _: path in chosen, args or (), kwargs)
        unused = [path for path in chosen if not telling(uses[path])]
        rule_of = chosen
        chosen = {path: rule for path, rule in rule_of.items() if path not in unused}
        at_work = list(chosen.values())
        told = [x for x in unused if rule_of[x] not in at_work or not _is_bias_or_norm(uses[x])]
        if told:
            warn_user(f"no product of the program has {some_of(told)}, so they have no update")
    keys = iter(jax.random.split(key, max(1, len(chosen))))
    new, large = [], []
    for path, leaf in zip(paths, leaves, strict=True):
        if path not in chosen:
            new.append(leaf)
            continue
        axes = _axes(path, leaf.shape, telling(uses[path])[0]) if uses else {}
        w = LoraArray.init(leaf, key=next(keys), **chosen[path].options, **axes)
        large += [f"{path} {list(w.shape)}"] if w.a.size + w.b.size >= w.size else []
        new.append(w)
    if large:
        remedy = "a lower rank" if program else "the program, as model= and args=, or a lower rank"
        warn_user(f"an update is as large as its weight: {some_of(large)}; pass {remedy}")
    return jax.tree.unflatten(treedef, new)


def _check(rules: Any) -> None:
    is_sequence = isinstance(rules, Sequence) and not isinstance(rules, str)
    for rule in rules if is_sequence else [rules]:
        if not is_sequence or not isinstance(rule, Rule):
            raise TypeError(
                f"rules must be a list of vn.lora.Rule, such as [vn.lora.Rule('.*', rank=8)], not "
                f"{rule!r}"
            )


def _is_bias_or_norm(uses: Sequence[Use]) -> bool:
    """Whether a program only adds a weight, or has it as a vector, of each layer of a stack say."""
    return bool(uses) and all(use.primitive == "add" or len(use.free) < 2 for use in uses)


def _can_be_updated(leaf: Any) -> bool:
    aval = leaf.aval() if isinstance(leaf, Value) else leaf
    floating = getattr(aval, "ndim", 0) >= 2 and aval.dtype in QUANTIZABLE
    return floating and not isinstance(leaf, LoraArray)


def _axes(path: str, shape: Sequence[int], use: Use) -> dict[str, Any]:
    """How many axes of a weight go in and out, and on which side a product contracts."""
    axes = low_rank_axes(len(shape), use.contracted, use.free)
    if axes is None:
        raise ValueError(
            f"no update of low rank of {path} {list(shape)}: the axes that products contract "
            f"and those that they leave are not side by side at its end: {use}"
        )
    return {"in_ndim": axes.in_ndim, "out_ndim": axes.out_ndim, "dropped": axes.contracted}
