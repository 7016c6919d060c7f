"""Calls of the CPU's kernels, in the program that is lowered: products of the same x are one call.

A call costs what a small product does: XLA and the kernel have to begin, and threads to come
together. So where few rows of x are multiplied by several matrices, as by those of queries, keys
and values, the second joins the first, at its place. That is when JAX has done all else: no
derivative, batch or program that users see knows of it. What JAX lowers apart, as it does the body
of a function with derivatives of its own, sees no others: so activations are rounded, outside of
loops, which `stacks.py` has written out.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from .._jax.primitives import Primitive
from .select import are_few

kernel_p = Primitive("stored_matmul_kernel")


def call(
    target: str, activations: Sequence[Any], matrix: Sequence[Any], shape: Sequence[int]
) -> jax.Array:
    """Calls a kernel, in what is lowered for one CPU.

    **Arguments:**

    - `target`: a product's, which is built.
    - `activations`: what products of the same x share: x, and its scales if it has some.
    - `matrix`: all other operands.
    - `shape`: of the product, which is f32.
    """
    return kernel_p.bind(
        *activations, *matrix, target=target, shape=tuple(shape), lead=len(activations)
    )


@kernel_p.def_abstract_eval
def _typed(*avals: Any, target: str, shape: tuple[int, ...], lead: int) -> Any:
    del avals, target, lead
    return jax.core.ShapedArray(shape, np.dtype("float32"))


def _lowered(
    ctx: Any, *operands: Any, target: str, shape: tuple[int, ...], lead: int
) -> Sequence[Any]:
    out = _joined(ctx, operands, target, shape, lead) if are_few(target) else None
    if out is None:
        (out,) = _emitted(ctx, target, operands, [shape])
    # JAX keeps what it is given. This stays, where what it is made from is replaced.
    return [hlo.reshape(out.type, out)]


def _joined(
    ctx: Any, operands: Sequence[Any], target: str, shape: tuple[int, ...], lead: int
) -> Any:
    """The product as a result of an earlier call, that is there or is made to be; or None."""
    activations, matrix, program = operands[:lead], operands[lead:], _Program(ctx)
    earlier = [*_earlier(program, target, activations, len(matrix))]
    for other in earlier:
        if (out := _found(program, other, lead, matrix, shape)) is not None:
            return out
    for other in earlier:
        if len(other.results) == _MOST or (moved := program.moved_before(other, matrix)) is None:
            continue
        for operation in moved:
            operation.move_before(other)
        shapes = [tuple(before.type.shape) for before in other.results]
        with ir.InsertionPoint(other), other.location:
            results = _emitted(ctx, target, [*other.operands, *matrix], [*shapes, shape])
        for before, now in zip(other.results, results, strict=False):
            before.replace_all_uses_with(now)
        other.erase()
        return results[-1]
    return None


mlir.register_lowering(kernel_p, _lowered, cacheable=False)


def _emitted(ctx: Any, target: str, operands: Sequence[Any], shapes: Sequence[Any]) -> Any:
    """Writes a call where the program is written."""
    entry = np.dtype("float32")  # which says nothing of operands: they are there
    avals_in = [jax.core.ShapedArray(tuple(operand.type.shape), entry) for operand in operands]
    avals_out = [jax.core.ShapedArray(tuple(shape), entry) for shape in shapes]
    ctx = ctx.replace(avals_in=avals_in, avals_out=avals_out)
    return jax.ffi.ffi_lowering(target)(ctx, *operands)


def _earlier(
    program: "_Program", target: str, activations: Sequence[Any], count: int
) -> Iterator[Any]:
    """Calls of a kernel with the same activations, and as many operands for each matrix."""
    lead = len(activations)
    for x in program.twins(activations[0]):
        for use in x.uses:
            call = use.owner.operation
            if use.operand_number == 0 and _calls(call, target) and call.block == program.block:
                pairs = zip(call.operands[1:lead], activations[1:], strict=True)
                fits = len(call.operands) == lead + count * len(call.results)
                if fits and all(itertools.starmap(program.is_same, pairs)):
                    yield call


def _found(
    program: "_Program", call: Any, lead: int, matrix: Sequence[Any], shape: tuple[int, ...]
) -> Any:
    """The result of a call that is the product with this matrix; or None."""
    for i, out in enumerate(call.results):
        first = lead + i * len(matrix)
        pairs = zip(call.operands[first : first + len(matrix)], matrix, strict=True)
        if tuple(out.type.shape) == shape and all(itertools.starmap(program.is_same, pairs)):
            return out
    return None


def _calls(operation: Any, target: str) -> bool:
    is_call = operation.name == "stablehlo.custom_call"
    return is_call and ir.StringAttr(operation.attributes["call_target_name"]).value == target


#: Operations that give the same wherever they are, as those do that operands are made by.
_PURE = {
    f"stablehlo.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "minimum", "maximum", "clamp", "abs", "negate"),
        *("broadcast_in_dim", "compare", "concatenate", "constant", "convert", "dynamic_slice"),
        *("iota", "reshape", "round_nearest_even", "select", "slice", "transpose"),
    )
}
_IN_FUNCTIONS = {*_PURE, "stablehlo.reduce", "stablehlo.return", "func.func", "func.return"}

#: How many operations in a row two values are compared by, and how many are moved.
_DEPTH, _MOST_MOVED = 6, 32
#: Products of a call, at most.
_MOST = 16


class _Program:
    """What is known of operations of the block that is being written."""

    def __init__(self, ctx: Any) -> None:
        self.block = ir.InsertionPoint.current.block
        self._functions = ctx.module_context.symbol_table
        self._are_pure: dict[str, bool] = {}

    def twins(self, value: Any, depth: int = _DEPTH) -> Iterator[Any]:
        """Values that are this one, made by the same operations of the same: this comes first."""
        yield value
        made = self._made(value)
        if made is None or depth == 0 or not len(made.operands):
            return
        number = ir.OpResult(value).result_number
        for operand in self.twins(made.operands[0], depth - 1):
            for use in operand.uses:
                other = use.owner.operation
                if other != made and self._is_twin(made, other, depth):
                    yield other.results[number]

    def is_same(self, one: Any, other: Any, depth: int = _DEPTH) -> bool:
        """Whether two values are the same, as far as is seen."""
        if one == other:
            return True
        if depth == 0 or (made := self._made(one)) is None or self._made(other) is None:
            return False
        are_results = ir.OpResult(one).result_number == ir.OpResult(other).result_number
        return are_results and self._is_twin(made, other.owner.operation, depth)

    def _is_twin(self, one: Any, other: Any, depth: int) -> bool:
        return (
            one.name == other.name
            and _attributes(one) == _attributes(other)
            and [value.type for value in one.results] == [value.type for value in other.results]
            and len(one.operands) == len(other.operands)
            and len(one.regions) == 0
            and all(
                self.is_same(*pair, depth - 1)
                for pair in zip(one.operands, other.operands, strict=True)
            )
        )

    def moved_before(self, operation: Any, values: Sequence[Any]) -> list[Any] | None:
        """What has to be moved for values to be there before an operation, in this order.

        It is None where they cannot be.
        """
        moved: list[Any] = []
        can_be = all(self._can_precede(operation, value, moved) for value in values)
        return moved if can_be else None

    def _can_precede(
        self, operation: Any, value: Any, moved: list[Any], depth: int = _MOST_MOVED
    ) -> bool:
        if isinstance(value.owner, ir.Block):
            return True  # of this block, or of one around it
        made = value.owner.operation
        if made.block != operation.block or made.is_before_in_block(operation) or made in moved:
            return True
        if self._made(value) is None or depth == 0:
            return False
        others = (self._can_precede(operation, x, moved, depth - 1) for x in made.operands)
        if not all(others) or len(moved) == _MOST_MOVED:
            return False
        moved.append(made)
        return True

    def _made(self, value: Any) -> Any:
        """The operation that makes a value, if it gives the same wherever it is; or None."""
        if isinstance(value.owner, ir.Block):
            return None
        made = value.owner.operation
        if made.name == "func.call":
            return made if self._is_pure(ir.FlatSymbolRefAttr(made.attributes["callee"])) else None
        return made if made.name in _PURE else None

    def _is_pure(self, callee: Any) -> bool:
        name = callee.value
        if name not in self._are_pure:
            self._are_pure[name] = False
            inside: list[Any] = []
            self._functions[name].operation.walk(lambda found: _noted(found, inside))
            self._are_pure[name] = all(map(self._is_pure_inside, inside))
        return self._are_pure[name]

    def _is_pure_inside(self, operation: Any) -> bool:
        if operation.name == "func.call":
            return self._is_pure(ir.FlatSymbolRefAttr(operation.attributes["callee"]))
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            return target.startswith("veneer_quantise_")
        return operation.name in _IN_FUNCTIONS


def _noted(operation: Any, found: list[Any]) -> Any:
    found.append(operation)
    return ir.WalkResult.ADVANCE


def _attributes(operation: Any) -> dict[str, Any]:
    return {name: operation.attributes[name] for name in operation.attributes}
