"""Lower calls of kernels. Products of the same x become one call.

A call takes as long as a small product. On a CPU, XLA and the kernel start, and threads meet. On a
GPU, a launch takes microseconds. So if few rows of x are multiplied by several matrices, such as
queries, keys and values, the second product joins the call of the first, which computes both. This
happens while JAX lowers a program, after all transformations, so derivatives, batches and the
jaxprs that users see are the same as before.

JAX lowers some parts of a program separately, such as the body of a function with custom
derivatives. Products in such a part join only each other. Therefore activations are rounded
outside of it, except in loops, which `stacks.py` rewrites.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from ..._jax.primitives import Primitive

kernel_p = Primitive("stored_matmul_kernel")


@runtime_checkable
class CallableKernel(Protocol):
    """A kernel that computes products of the same activations in one call. It is hashable."""

    @property
    def most_products(self) -> int:
        """The most products in one call."""
        ...

    def is_called_by(self, operation: Any) -> bool:
        """Return whether a custom call in the program is a call of this kernel."""
        ...

    def emit(self, ctx: Any, operands: Sequence[Any], shapes: Sequence[Any]) -> Sequence[Any]:
        """Write a call into the program, and return a result of each shape.

        The operands are the activations, then the arrays of each matrix. The avals of operands in
        `ctx` have the right shapes, but not the right dtypes.
        """
        ...


class CpuKernel(NamedTuple):
    """A kernel of the CPU.

    **Arguments:**

    - `target`: the name of its FFI target, which is built.
    - `most_products`: the most products in one call.
    """

    target: str
    most_products: int

    def is_called_by(self, operation: Any) -> bool:
        """Return whether a custom call has the target of this kernel."""
        return attribute(operation, "call_target_name") == self.target

    def emit(self, ctx: Any, operands: Sequence[Any], shapes: Sequence[Any]) -> Sequence[Any]:
        """Write a call of the target."""
        return jax.ffi.ffi_lowering(self.target)(ctx, *operands)


def call(
    kernel: CallableKernel,
    activations: Sequence[Any],
    matrix: Sequence[Any],
    shape: Sequence[int],
    dtype: str = "float32",
) -> jax.Array:
    """Call a kernel, in a program that is lowered for one device.

    **Arguments:**

    - `activations`: the operands that products of the same x share: x, and its scales if it has
      some.
    - `matrix`: all other operands.
    - `shape`, `dtype`: the shape and dtype of the product.
    """
    return kernel_p.bind(
        *activations,
        *matrix,
        kernel=kernel,
        shape=tuple(shape),
        dtype=dtype,
        lead=len(activations),
    )


@kernel_p.def_abstract_eval
def _typed(
    *avals: Any, kernel: CallableKernel, shape: tuple[int, ...], dtype: str, lead: int
) -> Any:
    del avals, kernel, lead
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


def _lowered(
    ctx: Any,
    *operands: Any,
    kernel: CallableKernel,
    shape: tuple[int, ...],
    dtype: str,
    lead: int,
) -> Sequence[Any]:
    emit = functools.partial(_emitted, ctx, kernel, jnp.dtype(dtype))
    joins = kernel.most_products > 1
    out = _joined(ctx, operands, kernel, emit, shape, lead) if joins else None
    if out is None:
        (out,) = emit(operands, [shape])
    # JAX keeps what it is given. This stays, where what it is made from is replaced.
    return [hlo.reshape(out.type, out)]


def _joined(
    ctx: Any,
    operands: Sequence[Any],
    kernel: CallableKernel,
    emit: Callable[..., Sequence[Any]],
    shape: tuple[int, ...],
    lead: int,
) -> Any:
    """Return the product as a result of an earlier call, which may have to be extended, or None."""
    activations, matrix, program = operands[:lead], operands[lead:], _Program(ctx)
    earlier = [*_earlier(program, kernel, activations, len(matrix))]
    for other in earlier:
        if (out := _found(program, other, lead, matrix, shape)) is not None:
            return out
    for other in earlier:
        is_full = len(other.results) == kernel.most_products
        if is_full or (moved := program.moved_before(other, matrix)) is None:
            continue
        for operation in moved:
            operation.move_before(other)
        shapes = [tuple(before.type.shape) for before in other.results]
        with ir.InsertionPoint(other), other.location:
            results = emit([*other.operands, *matrix], [*shapes, shape])
        for before, now in zip(other.results, results, strict=False):
            before.replace_all_uses_with(now)
        other.erase()
        return results[-1]
    return None


mlir.register_lowering(kernel_p, _lowered, cacheable=False)


def _emitted(
    ctx: Any, kernel: CallableKernel, dtype: Any, operands: Sequence[Any], shapes: Sequence[Any]
) -> Sequence[Any]:
    """Write a call where the program is written. Its results have a dtype."""
    avals_in = [jax.core.ShapedArray(tuple(operand.type.shape), dtype) for operand in operands]
    avals_out = [jax.core.ShapedArray(tuple(shape), dtype) for shape in shapes]
    ctx = ctx.replace(avals_in=avals_in, avals_out=avals_out)
    return kernel.emit(ctx, operands, shapes)


def _earlier(
    program: "_Program", kernel: CallableKernel, activations: Sequence[Any], count: int
) -> Iterator[Any]:
    """Calls of a kernel with the same activations, and as many operands for each matrix."""
    lead = len(activations)
    for x in program.twins(activations[0]):
        for use in x.uses:
            call = use.owner.operation
            is_call = call.name == "stablehlo.custom_call" and call.block == program.block
            if use.operand_number == 0 and is_call and kernel.is_called_by(call):
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


def attribute(operation: Any, name: str) -> str:
    """Return an attribute of an operation, which must be a string."""
    return ir.StringAttr(operation.attributes[name]).value


#: Operations that give the same wherever they are, as those do that operands are made by.
_PURE = {
    f"stablehlo.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "minimum", "maximum", "clamp", "abs", "negate"),
        *("bitcast_convert", "broadcast_in_dim", "compare", "concatenate", "constant", "convert"),
        "dynamic_slice",
        *("iota", "reshape", "round_nearest_even", "select", "slice", "transpose"),
    )
}
_IN_FUNCTIONS = {*_PURE, "stablehlo.reduce", "stablehlo.return", "func.func", "func.return"}

#: How many operations in a row two values are compared by, and how many are moved.
_DEPTH, _MOST_MOVED = 6, 32


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
            return attribute(operation, "call_target_name").startswith("veneer_quantise_")
        return operation.name in _IN_FUNCTIONS


def _noted(operation: Any, found: list[Any]) -> Any:
    found.append(operation)
    return ir.WalkResult.ADVANCE


def _attributes(operation: Any) -> dict[str, Any]:
    return {name: operation.attributes[name] for name in operation.attributes}
