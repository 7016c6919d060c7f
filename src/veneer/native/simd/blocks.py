"""Blocks of vectors in registers, instructions on blocks, and emitters of LLVM IR for these.

A `Block` has rows x columns of vectors of `LANES` numbers. It is a local variable of a Numba
function, which LLVM keeps in registers. Instructions are compiled without loops, one LLVM
instruction or more per vector. Kernels are Python loops over such instructions.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from ..memory import F32, I8, I16, I32, I64, intrinsic, pointer
from . import IS_NEON, ISA, LANES

#: The types of a vector, in LLVM: as f32, int32, int16 and int8.
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
SHORTS, BYTES = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, 4 * LANES)

_VECTORS = {"f32": FLOATS, "i32": INTS}
#: Allows a * b + c to be rounded once, by a fused multiply-add.
_FUSED = ("contract",)


class Block(types.Type):
    """The Numba type of rows x columns of vectors of f32 or i32."""

    def __init__(self, entry: str, rows: int, columns: int):
        self.entry, self.rows, self.columns = entry, rows, columns
        super().__init__(name=f"Block({entry}, {rows}, {columns})")

    @property
    def count(self) -> int:
        """The number of vectors."""
        return self.rows * self.columns

    @property
    def llvm(self) -> ir.Type:
        """The type in LLVM: an array of vectors in row-major order."""
        return ir.ArrayType(_VECTORS[self.entry], self.count)


@register_model(Block)
class _BlockModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type: Block):
        super().__init__(manager, type, type.llvm)


Emit = Callable[..., Any]


def instruction(define: Callable[..., tuple[types.Type, Emit]]) -> Any:
    """Decorate a function to make an instruction, which is a Numba intrinsic.

    The function takes the types of the arguments of the instruction. It returns the type of its
    result and an emitter. The emitter takes an LLVM IR builder
    and the values of the arguments, and returns the value of the result, or None for `types.void`.
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


def get_vectors(builder: Any, block: Any) -> list[Any]:
    """Return the vectors of a block in row-major order."""
    return [builder.extract_value(block, i) for i in range(block.type.count)]


def make_block(builder: Any, values: Sequence[Any]) -> Any:
    """Return a block of vectors, which are in row-major order."""
    block = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        block = builder.insert_value(block, value, i)
    return block


def map_blocks(builder: Any, function: Callable[..., Any], *blocks: Any) -> Any:
    """Apply `function` to the corresponding vectors of blocks of one shape. Return a block."""
    groups = zip(*(get_vectors(builder, block) for block in blocks), strict=True)
    return make_block(builder, [function(*group) for group in groups])


def advance(builder: Any, address: Any, vector: int = 0, row: int = 0, stride: Any = None) -> Any:
    """Return `address + row * stride`, in bytes, plus the size of `vector` vectors."""
    if row:
        address = builder.add(address, builder.mul(stride, I64(row)))
    return builder.add(address, I64(4 * LANES * vector)) if vector else address


def load_vector(builder: Any, address: Any, type: ir.Type = FLOATS) -> Any:
    """Return the vector at an address, which need not be aligned."""
    value = builder.load(pointer(builder, address, type))
    value.align = 1
    return value


def store_vector(builder: Any, value: Any, address: Any) -> None:
    """Write a vector to an address, which need not be aligned."""
    builder.store(value, pointer(builder, address, value.type)).align = 1


def broadcast(builder: Any, number: Any, count: int = LANES) -> Any:
    """Return a vector of `count` lanes that all hold a number."""
    undefined = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    first = builder.insert_element(undefined, number, I32(0))
    return shuffle(builder, first, undefined, [0] * count)


def load_broadcast(builder: Any, address: Any, type: ir.Type = F32) -> Any:
    """Return a vector whose lanes all hold the number at an address."""
    number = builder.load(pointer(builder, address, type))
    number.align = 1
    return broadcast(builder, number)


def constant(type: ir.VectorType, value: int | float) -> Any:
    """Return a vector of type `type` whose lanes all hold the constant `value`."""
    return ir.Constant(type, [value] * type.count)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return `a * b + c`, rounded once if the CPU has fused multiply-adds."""
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def call_llvm(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """Emit a call of the LLVM intrinsic `name`, and return its value, of type `result`."""
    type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, type, name), args)


def shuffle(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    """Return the lanes with these indices in the concatenation of `a` and `b`."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), [*lanes]))


def permute(builder: Any, values: Any, indices: Any) -> Any:
    """Return `values[indices]`: the lanes of a vector of f32 at the int32 in another vector."""
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
    """Return the entries of a table of f32 at int32 indices, by Arm's lookup of bytes.

    The vectors of `table`, at most four, are concatenated.
    """
    first = builder.mul(indices, constant(INTS, 0x04040404))
    places = builder.add(first, constant(INTS, 0x03020100))
    parts = [builder.bitcast(part, BYTES) for part in (*table, places)]
    entries = call_llvm(builder, f"llvm.aarch64.neon.tbl{len(table)}.v16i8", BYTES, *parts)
    return builder.bitcast(entries, FLOATS)


def accumulate(builder: Any, total: Block, totals: Any, ws: Any, row: Emit, add: Emit) -> Any:
    """Return the block whose vector [r][c] is `add(builder, totals[r][c], row(r), ws[c])`.

    `total` is the type of the block `totals`. `row` and `add` write LLVM IR, and return its value.
    """
    totals, ws = get_vectors(builder, totals), get_vectors(builder, ws)
    for r in range(total.rows):
        value = row(r)
        for c, w in enumerate(ws):
            i = r * total.columns + c
            totals[i] = add(builder, totals[i], value, w)
    return make_block(builder, totals)


def split_lanes(builder: Any, values: Sequence[Any], unit: int = 1) -> list[Any]:
    """Deinterleave n vectors: vector i of the result has the lanes i, i + n, i + 2 * n, ...

    Lanes are counted over all n vectors in order. n is a power of two. If `unit` is more than 1,
    groups of `unit` neighboring lanes are moved together.
    """
    if len(values) == 1:
        return [*values]
    pairs = [*zip(values[::2], values[1::2], strict=True)]
    lanes = [i for start in range(0, 2 * LANES, 2 * unit) for i in range(start, start + unit)]
    even = [shuffle(builder, a, b, lanes) for a, b in pairs]
    odd = [shuffle(builder, a, b, [i + unit for i in lanes]) for a, b in pairs]
    columns = zip(*(split_lanes(builder, half, unit) for half in (even, odd)), strict=True)
    return [value for pair in columns for value in pair]


def merge_lanes(builder: Any, values: Sequence[Any], unit: int = 1) -> list[Any]:
    """Interleave the lanes of n vectors. This is the inverse of `split_lanes`."""
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
