"""SIMD values in Numba: blocks of vectors that live in registers, and what is done with them.

A `Block` is rows x columns of vectors of `LANES` numbers. It is a value like any other: a local
variable of a Numba function, which LLVM keeps in registers. All loops over its vectors are unrolled
as it is compiled. So kernels are loops in plain Python over a few such instructions, and only these
(here and in the other files called `simd_...`) and `isa.py` know one CPU from another.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import models, register_model

from .isa import ISA, LANES
from .memory import F32, I8, I16, I32, I64, intrinsic, pointer

#: A vector of LANES numbers, and what else its bytes may be taken for.
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
SHORTS, BYTES = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, 4 * LANES)

_VECTORS = {"f32": FLOATS, "i32": INTS}
#: a * b + c may be rounded once, as fused multiplication and addition do.
_FUSED = ("contract",)


class Block(types.Type):
    """Rows x columns of vectors of f32 or i32."""

    def __init__(self, entry: str, rows: int, columns: int):
        self.entry, self.rows, self.columns = entry, rows, columns
        super().__init__(name=f"Block({entry}, {rows}, {columns})")

    @property
    def count(self) -> int:
        """How many vectors it has."""
        return self.rows * self.columns

    @property
    def llvm(self) -> ir.Type:
        """What it is to LLVM: an array of vectors, row by row."""
        return ir.ArrayType(_VECTORS[self.entry], self.count)


@register_model(Block)
class _BlockModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type: Block):
        super().__init__(manager, type, type.llvm)


Emit = Callable[..., Any]


def instruction(define: Callable[..., tuple[types.Type, Emit]]) -> Any:
    """Makes an intrinsic of a function of the types of its arguments.

    That returns the type of the result, and a function of LLVM's builder and the values that emits
    the code: its value, or None where the result is `types.void`.
    """

    def typed(typing_context: Any, *args: types.Type) -> Any:
        result, emit = define(*args)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        return result(*args), generate

    typed.__name__, typed.__doc__ = define.__name__, define.__doc__
    context = inspect.Parameter("typing_context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = inspect.signature(define).parameters.values()
    typed.__signature__ = inspect.Signature([context, *arguments])  # type: ignore[attr-defined]
    return intrinsic(prefer_literal=True)(typed)


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles a function of numbers and blocks as it is first called.

    It holds no lock of Python's, and raises nothing.
    """
    # Tests wrap all functions, to check their annotations: that, Numba could not read.
    return njit(inspect.unwrap(function), nogil=True, error_model="numpy")


@intrinsic
def not_inlined(typing_context):
    """Keeps what LLVM makes of a function apart from its callers, where one copy will do.

    Numba optimises a function again with each that calls it.
    """

    def emit(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), emit


# For what emits code.


def vectors(builder: Any, block: Any) -> list[Any]:
    """The vectors of a block, row by row."""
    return [builder.extract_value(block, i) for i in range(block.type.count)]


def block_of(builder: Any, values: Sequence[Any]) -> Any:
    """The block that has these vectors."""
    block = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        block = builder.insert_value(block, value, i)
    return block


def at(builder: Any, address: Any, vector: int = 0, row: int = 0, stride: Any = None) -> Any:
    """An address so many vectors on, and so many rows of `stride` bytes."""
    if row:
        address = builder.add(address, builder.mul(stride, I64(row)))
    return builder.add(address, I64(4 * LANES * vector)) if vector else address


def load_vector(builder: Any, address: Any, type: ir.Type = FLOATS) -> Any:
    """A vector at any address, aligned or not."""
    value = builder.load(pointer(builder, address, type))
    value.align = 1
    return value


def store_vector(builder: Any, value: Any, address: Any) -> None:
    """Writes a vector to any address."""
    builder.store(value, pointer(builder, address, value.type)).align = 1


def repeated(builder: Any, number: Any, count: int = LANES) -> Any:
    """A vector of one number."""
    undefined = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    first = builder.insert_element(undefined, number, I32(0))
    return shuffled(builder, first, undefined, [0] * count)


def constant(type: ir.VectorType, value: int | float) -> Any:
    """A vector of one constant."""
    return ir.Constant(type, [value] * type.count)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, rounded once where the CPU can."""
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def call(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """Calls a function of LLVM's by name."""
    type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, type, name), args)


def shuffled(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    """The lanes of two vectors of one length, those of `b` numbered after those of `a`."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), [*lanes]))


def permuted(builder: Any, values: Any, indices: Any) -> Any:
    """The lanes of a vector of f32 at indices."""
    if ISA.startswith("avx512"):
        return call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, values, indices)
    if ISA == "avx2":
        return call(builder, "llvm.x86.avx2.permps", FLOATS, values, indices)
    result = ir.Constant(FLOATS, ir.Undefined)
    for lane in range(LANES):
        index = builder.extract_element(indices, I32(lane))
        number = builder.extract_element(values, index)
        result = builder.insert_element(result, number, I32(lane))
    return result


# Making blocks.


@instruction
def zeros(rows, columns):
    """A block of 0.0."""
    block = Block("f32", rows.literal_value, columns.literal_value)
    return block, lambda builder, *_: ir.Constant(block.llvm, [constant(FLOATS, 0.0)] * block.count)


@instruction
def load(address, columns):
    """Reads a row of vectors of f32."""
    block = Block("f32", 1, columns.literal_value)

    def emit(builder, address, _):
        reads = [load_vector(builder, at(builder, address, c)) for c in range(block.columns)]
        return block_of(builder, reads)

    return block, emit


@instruction
def splat(number):
    """One vector of an f32."""
    return Block("f32", 1, 1), lambda builder, number: block_of(
        builder, [repeated(builder, number)]
    )


@instruction
def store(address, block):
    """Writes a row of vectors."""

    def emit(builder, address, values):
        for c, value in enumerate(vectors(builder, values)):
            store_vector(builder, value, at(builder, address, c))

    return types.void, emit


@instruction
def store_block(address, stride, block):
    """Writes rows of vectors, `stride` bytes apart."""

    def emit(builder, address, stride, values):
        for i, value in enumerate(vectors(builder, values)):
            row, column = divmod(i, block.columns)
            store_vector(builder, value, at(builder, address, column, row, stride))

    return types.void, emit


# Arithmetic.


@instruction
def scaled(block, scale):
    """`block * scale`, of which each row is multiplied by the row, or the one vector, `scale`."""

    def emit(builder, values, scales):
        by = vectors(builder, scales)
        products = [
            builder.fmul(value, by[i % len(by)]) for i, value in enumerate(vectors(builder, values))
        ]
        return block_of(builder, products)

    return block, emit


@instruction
def outer(total, x, stride, w):
    """`total[r][c] + x[r] * w[c]`: a number at `x`, `stride` bytes apart, times vectors."""

    def emit(builder, totals, x, stride, ws):
        totals, ws = vectors(builder, totals), vectors(builder, ws)
        for r in range(total.rows):
            number = builder.load(pointer(builder, at(builder, x, 0, r, stride), F32))
            number.align = 1
            number = repeated(builder, number)
            for c, value in enumerate(ws):
                i = r * total.columns + c
                totals[i] = multiply_add(builder, number, value, totals[i])
        return block_of(builder, totals)

    return total, emit


@instruction
def inner(total, x, stride, w):
    """`total[r][c] + x[r] * w[c]`: a vector at `x`, `stride` bytes apart, times vectors.

    The sums of its lanes are what is looked for in the end.
    """

    def emit(builder, totals, x, stride, ws):
        totals, ws = vectors(builder, totals), vectors(builder, ws)
        for r in range(total.rows):
            row = load_vector(builder, at(builder, x, 0, r, stride))
            for c, value in enumerate(ws):
                i = r * total.columns + c
                totals[i] = multiply_add(builder, row, value, totals[i])
        return block_of(builder, totals)

    return total, emit


@instruction
def add_scaled(address, stride, block, scale):
    """Adds `block * scale` to rows of f32, `stride` bytes apart; `scale` is as for `scaled`."""

    def emit(builder, address, stride, values, scales):
        by = vectors(builder, scales)
        for i, value in enumerate(vectors(builder, values)):
            row, column = divmod(i, block.columns)
            place = at(builder, address, column, row, stride)
            old = load_vector(builder, place)
            store_vector(builder, multiply_add(builder, value, by[column % len(by)], old), place)

    return types.void, emit


@instruction
def store_sums(address, stride, block):
    """Writes the sum of the lanes of each vector: f32 at `address + r * stride + 4 * c`."""

    def emit(builder, address, stride, values):
        for i, value in enumerate(vectors(builder, values)):
            row, column = divmod(i, block.columns)
            place = builder.add(at(builder, address, 0, row, stride), I64(4 * column))
            builder.store(_sum(builder, value), pointer(builder, place, F32)).align = 1

    return types.void, emit


def _sum(builder: Any, value: Any) -> Any:
    """The sum of the lanes of a vector: halves are added up until one is left."""
    count = LANES
    while count > 1:
        count //= 2
        low = shuffled(builder, value, value, range(count))
        high = shuffled(builder, value, value, range(count, 2 * count))
        value = builder.fadd(low, high)
    return builder.extract_element(value, I32(0))


# The order of lanes.


@instruction
def deinterleave(block):
    """A row of n vectors of neighbours, as n vectors of every n-th."""
    return block, lambda builder, values: block_of(
        builder, apart(builder, vectors(builder, values))
    )


def apart(builder: Any, values: Sequence[Any], unit: int = 1) -> list[Any]:
    """n vectors of neighbours, as n of every n-th `unit` lanes; n is a power of two."""
    if len(values) == 1:
        return [*values]
    pairs = [*zip(values[::2], values[1::2], strict=True)]
    lanes = [i for start in range(0, 2 * LANES, 2 * unit) for i in range(start, start + unit)]
    even = [shuffled(builder, a, b, lanes) for a, b in pairs]
    odd = [shuffled(builder, a, b, [i + unit for i in lanes]) for a, b in pairs]
    columns = zip(apart(builder, even, unit), apart(builder, odd, unit), strict=True)
    return [value for pair in columns for value in pair]


def together(builder: Any, values: Sequence[Any], unit: int = 1) -> list[Any]:
    """Undoes `apart`."""
    if len(values) == 1:
        return [*values]
    evens, odds = (together(builder, values[i::2], unit) for i in (0, 1))
    lanes = [
        i
        for start in range(0, LANES, unit)
        for vector in (0, LANES)
        for i in range(vector + start, vector + start + unit)
    ]
    return [
        shuffled(builder, a, b, half)
        for a, b in zip(evens, odds, strict=True)
        for half in (lanes[:LANES], lanes[LANES:])
    ]
