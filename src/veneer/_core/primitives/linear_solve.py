"""The rule for custom_linear_solve, which conjugate gradients and many solvers meet.

`A x = b` is bound again with the programs that apply and solve `A` staged anew for its implicit
parts: the rules run inside them, on the leaves. A right-hand side is made dense, visibly, unless it
is a label: then `x` and `b` are arrays of the same shape and dtype, each with metadata of its own
(a force is a stiffness times a length).
"""

from collections.abc import Sequence
from typing import Any

import jax

from ..._jax.primitives import find_primitive
from ..rules import structural
from ..tree import split_list
from ..value import Value
from .labels import dense_unless, is_label
from .staging import Staged, stage_to_labels


@structural("custom_linear_solve")
def _custom_linear_solve(*values: Any, const_lengths: Any, jaxprs: Any) -> list[Any]:
    *parts, b = split_list(values, *const_lengths)
    b = dense_unless(is_label, find_primitive("custom_linear_solve"), b)
    consts = type(jaxprs)(*parts)
    solve = _stage(jaxprs.solve, consts.solve, b)
    x = solve.examples()[: len(b)]
    matvec = _stage(jaxprs.matvec, consts.matvec, x)
    _check_gives_back(matvec, b)
    vecmat = transpose_solve = None
    if jaxprs.transpose_solve is not None:  # from the space of b to that of x, and back
        vecmat = _stage(jaxprs.vecmat, consts.vecmat, b)
        transpose_solve = _stage(jaxprs.transpose_solve, consts.transpose_solve, x)
    staged = type(jaxprs)(matvec, vecmat, solve, transpose_solve)
    leaves = [jax.tree.leaves(part) for part in parts]
    out = find_primitive("custom_linear_solve").bind(
        *(leaf for part in leaves for leaf in part),
        *jax.tree.leaves(b),
        const_lengths=type(const_lengths)(*map(len, leaves)),
        jaxprs=type(jaxprs)(*(program and program.jaxpr for program in staged)),
    )
    return solve.unflatten(out)


def _stage(jaxpr: Any, consts: Sequence[Any], vector: Sequence[Any]) -> Staged:
    # What a solver gives beside the solution may be of any type.
    return stage_to_labels("custom_linear_solve", jaxpr, [*consts, *vector], len(vector))


def _check_gives_back(matvec: Staged, b: Sequence[Any]) -> None:
    for x, back in zip(b, matvec.examples()[: len(b)], strict=True):
        tree: Any = jax.tree.structure(x)
        same_kind = isinstance(x, Value) and type(x) is type(back)
        if same_kind and x.metadata_is_meaning and tree != jax.tree.structure(back):
            raise TypeError(
                f"custom_linear_solve of b = {x}: matvec(solve(b)) is {back}, with other "
                "metadata than b. The solver must return metadata that matvec maps to the metadata "
                "of b. Or call vn.materialise to drop the metadata."
            )
