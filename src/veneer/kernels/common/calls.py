"""Lower calls of kernels. Products of the same x become one call.

A call takes as long as a small product. On a CPU, XLA and the kernel start, and threads meet. On a
GPU, a launch takes microseconds. So if few rows of x are multiplied by several matrices, such as
queries, keys and values, the second product joins the call of the first, which computes both. This
happens while JAX lowers a program, after all transformations, so derivatives, batches and the
jaxprs that users see are the same as before.

JAX lowers some parts of a program separately, such as the body of a function with custom
derivatives. Products in such a part join only each other.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from ..._jax.primitives import Primitive

kernel_p = Primitive("stored_matmul_kernel")


@runtime_checkable
class CallableKernel(Protocol):
    """The interface of a kernel that `call` can use. Implementations are hashable.

    One call of the kernel can multiply the same activations by several stored matrices.
    """

    @property
    def most_products(self) -> int:
        """The largest number of products that one call can compute."""
        ...

    def is_called_by(self, operation: Any) -> bool:
        """Return whether an MLIR custom call is a call of this kernel."""
        ...

    def emit(self, ctx: Any, operands: Sequence[Any], shapes: Sequence[Any]) -> Sequence[Any]:
        """Write a call of the kernel into the program, and return its results.

        **Arguments:**

        - `ctx`: JAX's lowering context. `ctx.avals_out` has the shapes and the dtype of the
          results. `ctx.avals_in` has the shapes of the operands, but with the dtype of the results.
          Take the dtypes of operands from `operands`.
        - `operands`: MLIR values: the activations, then the arrays of each matrix.
        - `shapes`: the shape of each result.
        """
        ...


def call(
    kernel: CallableKernel,
    activations: Sequence[Any],
    matrix: Sequence[Any],
    shape: Sequence[int],
    dtype: str = "float32",
) -> jax.Array:
    """Compute a product by a kernel, in a program that is lowered for one device.

    If the program already calls the kernel with the same activations, the product may become a
    further result of that call.

    **Arguments:**

    - `activations`: the operands that products of the same x share: x, and its scales if it has
      some.
    - `matrix`: all other operands: the codes of the stored matrix, its scales and so on.
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


def _lower(
    ctx: Any,
    *operands: Any,
    kernel: CallableKernel,
    shape: tuple[int, ...],
    dtype: str,
    lead: int,
) -> Sequence[Any]:
    emit = functools.partial(_emit, ctx, kernel, jnp.dtype(dtype))
    out = None
    if kernel.most_products > 1:
        out = _join_earlier_call(_Program(ctx), operands, kernel, emit, shape, lead)
    if out is None:
        (out,) = emit(operands, [shape])
    # JAX keeps the value that it gets here. If a later product extends the call, the call is
    # replaced, but this operation stays.
    return [hlo.reshape(out.type, out)]


mlir.register_lowering(kernel_p, _lower, cacheable=False)


def _emit(
    ctx: Any, kernel: CallableKernel, dtype: Any, operands: Sequence[Any], shapes: Sequence[Any]
) -> Sequence[Any]:
    """Write a call of `kernel` at the current place of the program, and return its results.

    `shapes` are the shapes of the results, and `dtype` is the dtype of all of them.
    """
    avals_in = [jax.core.ShapedArray(tuple(operand.type.shape), dtype) for operand in operands]
    avals_out = [jax.core.ShapedArray(tuple(shape), dtype) for shape in shapes]
    ctx = ctx.replace(avals_in=avals_in, avals_out=avals_out)
    return kernel.emit(ctx, operands, shapes)


def _join_earlier_call(
    program: "_Program",
    operands: Sequence[Any],
    kernel: CallableKernel,
    emit: Callable[..., Sequence[Any]],
    shape: tuple[int, ...],
    lead: int,
) -> Any:
    """Return the product as a result of an earlier call of `kernel`, or None if that is impossible.

    If an earlier call already computes this product, return its result. Otherwise, replace an
    earlier call by one that also has the operands of this product.

    **Arguments:**

    - `operands`: the operands of the product. The first `lead` of them are activations.
    - `emit(operands, shapes)`: writes a call and returns its results, which have these shapes.
    - `shape`: the shape of the product.
    """
    activations, matrix = operands[:lead], operands[lead:]
    calls = [*_earlier_calls(program, kernel, activations, len(matrix))]
    for call in calls:
        for i, out in enumerate(call.results):
            first = lead + i * len(matrix)
            pairs = zip(call.operands[first : first + len(matrix)], matrix, strict=True)
            if tuple(out.type.shape) == shape and all(itertools.starmap(program.is_same, pairs)):
                return out
    for call in calls:
        if len(call.results) == kernel.most_products:
            continue
        moved = program.operations_to_move(call, matrix)
        if moved is None:
            continue
        for operation in moved:
            operation.move_before(call)
        shapes = [tuple(result.type.shape) for result in call.results]
        with ir.InsertionPoint(call), call.location:
            results = emit([*call.operands, *matrix], [*shapes, shape])
        for old, new in zip(call.results, results, strict=False):
            old.replace_all_uses_with(new)
        call.erase()
        return results[-1]
    return None


def _earlier_calls(
    program: "_Program", kernel: CallableKernel, activations: Sequence[Any], count: int
) -> Iterator[Any]:
    """Yield the calls of `kernel` that the program already has, if they have these activations.

    `count` is the number of operands per stored matrix. Calls with another number are skipped.
    """
    lead = len(activations)
    for x in program.equal_values(activations[0]):
        for use in x.uses:
            call = use.owner.operation
            is_call = call.name == "stablehlo.custom_call" and call.block == program.block
            if use.operand_number == 0 and is_call and kernel.is_called_by(call):
                pairs = zip(call.operands[1:lead], activations[1:], strict=True)
                fits = len(call.operands) == lead + count * len(call.results)
                if fits and all(itertools.starmap(program.is_same, pairs)):
                    yield call


def attribute(operation: Any, name: str) -> str:
    """Return the text of an attribute of an MLIR operation."""
    return ir.StringAttr(operation.attributes[name]).value


#: Operations without side effects, whose results do not depend on their place in the program.
_PURE = {
    f"stablehlo.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "minimum", "maximum", "clamp", "abs", "negate"),
        *("bitcast_convert", "broadcast_in_dim", "compare", "concatenate", "constant", "convert"),
        "dynamic_slice",
        *("iota", "reshape", "round_nearest_even", "select", "slice", "transpose"),
    )
}
_PURE_IN_FUNCTIONS = {*_PURE, "stablehlo.reduce", "stablehlo.return", "func.func", "func.return"}

#: The longest chain of operations by which two values are compared, and the most moved operations.
_DEPTH, _MOST_MOVED = 6, 32


class _Program:
    """The MLIR block that a lowering is writing to.

    Its methods compare values of the block, and find operations that can move to an earlier place.
    """

    def __init__(self, ctx: Any) -> None:
        self.block = ir.InsertionPoint.current.block
        self._functions = ctx.module_context.symbol_table
        self._is_pure_function: dict[str, bool] = {}

    def equal_values(self, value: Any, depth: int = _DEPTH) -> Iterator[Any]:
        """Yield `value`, and then other values of the program that are known to be equal to it.

        Two values are equal if equal operations compute them from equal operands. `depth` is the
        longest chain of operations that is compared.
        """
        yield value
        operation = self._pure_operation(value)
        if operation is None or depth == 0 or not len(operation.operands):
            return
        number = ir.OpResult(value).result_number
        for operand in self.equal_values(operation.operands[0], depth - 1):
            for use in operand.uses:
                other = use.owner.operation
                if other != operation and self._are_equal(operation, other, depth):
                    yield other.results[number]

    def is_same(self, one: Any, other: Any, depth: int = _DEPTH) -> bool:
        """Return whether two MLIR values are known to be equal.

        `depth` is the longest chain of operations that is compared.
        """
        if one == other:
            return True
        operation = self._pure_operation(one)
        if depth == 0 or operation is None or self._pure_operation(other) is None:
            return False
        has_same_number = ir.OpResult(one).result_number == ir.OpResult(other).result_number
        return has_same_number and self._are_equal(operation, other.owner.operation, depth)

    def _are_equal(self, one: Any, other: Any, depth: int) -> bool:
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

    def operations_to_move(self, operation: Any, values: Sequence[Any]) -> list[Any] | None:
        """Return the operations that must be moved before `operation`, so that it can use `values`.

        They are in the order in which they must be moved. Return None if one of them is not pure,
        or if they are too many.
        """
        moved: list[Any] = []
        can_move = all(self._can_precede(operation, value, moved) for value in values)
        return moved if can_move else None

    def _can_precede(
        self, operation: Any, value: Any, moved: list[Any], depth: int = _MOST_MOVED
    ) -> bool:
        """Return whether `operation` can use `value`, possibly after other operations are moved.

        Append the operations that must be moved before `operation` to `moved`. `depth` is the
        longest chain of them.
        """
        if isinstance(value.owner, ir.Block):
            return True  # an argument of this block, or of one around it
        source = value.owner.operation
        if source.block != operation.block or source.is_before_in_block(operation):
            return True
        if source in moved:
            return True
        if self._pure_operation(value) is None or depth == 0:
            return False
        others = (self._can_precede(operation, x, moved, depth - 1) for x in source.operands)
        if not all(others) or len(moved) == _MOST_MOVED:
            return False
        moved.append(source)
        return True

    def _pure_operation(self, value: Any) -> Any:
        """Return the operation that computes `value`, or None if the operation is not pure."""
        if isinstance(value.owner, ir.Block):
            return None
        operation = value.owner.operation
        if operation.name == "func.call":
            return operation if self._is_pure_call(operation) else None
        return operation if operation.name in _PURE else None

    def _is_pure_call(self, call: Any) -> bool:
        name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
        if name not in self._is_pure_function:
            self._is_pure_function[name] = False
            inside: list[Any] = []

            def visit(operation: Any) -> Any:
                inside.append(operation)
                return ir.WalkResult.ADVANCE

            self._functions[name].operation.walk(visit)
            self._is_pure_function[name] = all(map(self._is_pure_in_function, inside))
        return self._is_pure_function[name]

    def _is_pure_in_function(self, operation: Any) -> bool:
        if operation.name == "func.call":
            return self._is_pure_call(operation)
        if operation.name == "stablehlo.custom_call":
            return attribute(operation, "call_target_name").startswith("veneer_quantize_")
        return operation.name in _PURE_IN_FUNCTIONS


def _attributes(operation: Any) -> dict[str, Any]:
    return {name: operation.attributes[name] for name in operation.attributes}
