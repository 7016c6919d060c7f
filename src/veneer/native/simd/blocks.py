"""Blocks of vectors that live in registers, as values of Numba's, and what emits code of them.

A `Block` is rows x columns of vectors of `LANES` numbers. It is a value like any other: a local
variable of a Numba function, which LLVM keeps in registers. All loops over its vectors are unrolled
as it is compiled. So kernels are loops in plain Python over a few such instructions.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from ..isa import IS_NEON, ISA, LANES
from ..memory import F32, I8, I16, I32, I64, intrinsic, pointer

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


# For what emits code.


def get_vectors(builder: Any, block: Any) -> list[Any]:
    """The vectors of a block, row by row."""
    return [builder.extract_value(block, i) for i in range(block.type.count)]


def make_block(builder: Any, values: Sequence[Any]) -> Any:
    """The block that has these vectors."""
    block = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        block = builder.insert_value(block, value, i)
    return block


def advance(builder: Any, address: Any, vector: int = 0, row: int = 0, stride: Any = None) -> Any:
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


def broadcast(builder: Any, number: Any, count: int = LANES) -> Any:
    """A vector of one number."""
    undefined = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    first = builder.insert_element(undefined, number, I32(0))
    return shuffle(builder, first, undefined, [0] * count)


def load_broadcast(builder: Any, place: Any) -> Any:
    """A vector of the f32 at an address."""
    number = builder.load(pointer(builder, place, F32))
    number.align = 1
    return broadcast(builder, number)


def constant(type: ir.VectorType, value: int | float) -> Any:
    """A vector of one constant."""
    return ir.Constant(type, [value] * type.count)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, rounded once where the CPU can."""
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def call_llvm(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """Calls a function of LLVM's by name."""
    type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, type, name), args)


def shuffle(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    """The lanes of two vectors of one length, those of `b` numbered after those of `a`."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), [*lanes]))


def permute(builder: Any, values: Any, indices: Any) -> Any:
    """The lanes of a vector of f32 at indices."""
    if ISA.startswith("avx512"):
        return call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, values, indices)
    if ISA == "avx2":
        return call_llvm(builder, "llvm.x86.avx2.permps", FLOATS, values, indices)
    if IS_NEON:
        return look_up_floats(builder, [values], indices)
    result = ir.Constant(FLOATS, ir.Undefined)
    for lane in range(LANES):
        index = builder.extract_element(indices, I32(lane))
        number = builder.extract_element(values, index)
        result = builder.insert_element(result, number, I32(lane))
    return result


def look_up_floats(builder: Any, table: Sequence[Any], indices: Any) -> Any:
    """The numbers of a table of vectors of f32 at indices, found byte by byte, as Arm does."""
    first = builder.mul(indices, constant(INTS, 0x04040404))
    places = builder.add(first, constant(INTS, 0x03020100))
    parts = [builder.bitcast(part, BYTES) for part in (*table, places)]
    found = call_llvm(builder, f"llvm.aarch64.neon.tbl{len(table)}.v16i8", BYTES, *parts)
    return builder.bitcast(found, FLOATS)


def accumulate(builder: Any, total: Block, totals: Any, ws: Any, row: Emit, add: Emit) -> Any:
    """A block whose entry [r][c] is `add(builder, totals[r][c], row(r), ws[c])`."""
    totals, ws = get_vectors(builder, totals), get_vectors(builder, ws)
    for r in range(total.rows):
        value = row(r)
        for c, w in enumerate(ws):
            i = r * total.columns + c
            totals[i] = add(builder, totals[i], value, w)
    return make_block(builder, totals)


def split_lanes(builder: Any, values: Sequence[Any], unit: int = 1) -> list[Any]:
    """Split n vectors, n a power of two, into n vectors of every n-th group of `unit` lanes."""
    if len(values) == 1:
        return [*values]
    pairs = [*zip(values[::2], values[1::2], strict=True)]
    lanes = [i for start in range(0, 2 * LANES, 2 * unit) for i in range(start, start + unit)]
    even = [shuffle(builder, a, b, lanes) for a, b in pairs]
    odd = [shuffle(builder, a, b, [i + unit for i in lanes]) for a, b in pairs]
    columns = zip(*(split_lanes(builder, half, unit) for half in (even, odd)), strict=True)
    return [value for pair in columns for value in pair]


def merge_lanes(builder: Any, values: Sequence[Any], unit: int = 1) -> list[Any]:
    """Invert `split_lanes`."""
    if len(values) == 1:
        return [*values]
    evens, odds = (merge_lanes(builder, values[i::2], unit) for i in (0, 1))
    lanes = [
        i
        for start in range(0, LANES, unit)
        for vector in (0, LANES)
        for i in range(vector + start, vector + start + unit)
    ]
    return [
        shuffle(builder, a, b, half)
        for a, b in zip(evens, odds, strict=True)
        for half in (lanes[:LANES], lanes[LANES:])
    ]
