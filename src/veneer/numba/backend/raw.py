"""A compiled program as a function for other Numba code."""

import inspect
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.errors import TypingError

from ...native.functions import call
from ..codegen.program import Source
from .intrinsics import intrinsic, llvm_type
from .njit_functions import always_failing

_kept: list[Any] = []  # what compiled code refers to by its address


@intrinsic
def address_of(typing_context, x, like):
    """Where the entries of an array are, whose dtype is that of `like`, or of a number as one."""
    if isinstance(x, types.Array):
        if x.dtype != like.dtype or x.layout != "C" or x.ndim != like.ndim:
            wanted = f"C-contiguous arrays of {like.dtype} with {like.ndim} axes"
            raise TypingError(f"an argument is {x}, for {wanted}")
        return types.int64(x, like), _address_of_entries
    ranks = [_rank(type) for type in (x, like.dtype)]
    if ranks[0] > ranks[1]:  # which a cast would round, or take one part of
        raise TypingError(f"an argument is {x}, for a number of {like.dtype}")
    return types.int64(x, like), _address_of_number


def _rank(type: Any) -> int:
    """Of the kinds of numbers, each of which has those before it."""
    kinds = (types.Boolean, types.Integer, types.Float, types.Complex)
    return next((n for n, kind in enumerate(kinds) if isinstance(type, kind)), len(kinds))


def _address_of_entries(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.ptrtoint(array.data, ir.IntType(64))


def _address_of_number(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    number, array = signature.args
    value = context.cast(builder, args[0], number, array.dtype)
    stored = context.get_value_as_data(builder, array.dtype, value)
    with builder.goto_entry_block():
        slot = builder.alloca(stored.type)
    builder.store(stored, slot)
    return builder.ptrtoint(slot, ir.IntType(64))


@intrinsic
def fits(typing_context, x, like):
    """Whether a number of the dtype of `like` is equal to an integer; of all else, it is so."""

    def emit(context, builder, signature, args):
        number, kind = signature.args[0], signature.args[1].dtype
        if not (isinstance(number, types.Integer) and isinstance(kind, types.Integer)):
            return ir.IntType(1)(1)
        extended = _extended(builder, args[0], number)
        cut = builder.trunc(extended, llvm_type(kind))
        return builder.icmp_signed("==", extended, _extended(builder, cut, kind))

    return types.boolean(x, like), emit


def _extended(builder: Any, number: Any, type: Any) -> Any:
    """An integer with more bits than any has."""
    return (builder.sext if type.signed else builder.zext)(number, ir.IntType(128))


def raw_function(source: Source, address: int, entry: Any) -> Any:
    """Numba's dispatcher over the leaves of the arguments.

    **Arguments:**

    - `address`: of the program's function for compiled code.
    - `entry`: its function for Python, which has the table that it takes first.
    """
    halves = {x.dtype.name for x in (*source.inputs, *source.outputs)} & {"float16", "bfloat16"}
    if halves:
        raise NotImplementedError(
            f"A program with {' and '.join(sorted(halves))} arguments or results has no .raw: "
            "Numba has no such arrays. Convert them to float32 in the compiled function."
        )
    _kept.append(entry)
    table = _table_without_callbacks(source, entry.__self__)
    _kept.append(table)
    names: dict[str, Any] = {"np": np, "call": call, "address_of": address_of, "fits": fits}
    names |= {"ADDRESS": address, "TABLE": table.ctypes.data}
    for n, memory in enumerate(source.inputs):
        names[f"like{n}"] = np.zeros([0] * len(source.input_shapes[n]), memory.dtype)
    for n, memory in enumerate(source.outputs):
        names[f"dtype{n}"] = memory.dtype
    exec(_written(source), names)
    return njit(inspect.unwrap(names["raw"]), nogil=True)


def _table_without_callbacks(source: Source, table: np.ndarray) -> np.ndarray:
    """Return a table whose callbacks only fail: threads of Numba must not wait for Python's lock.

    The constants are at the end of the table.
    """
    if not source.callbacks:
        return table
    table = table.copy()
    address = np.array([always_failing().address], np.int64)
    _kept.append(address)
    table[[n - len(source.constants) for n in source.callbacks]] = address.ctypes.data
    return table


def _message_of_failure(source: Source) -> str:
    return (
        "a function of vn.numba.funcify raised an error, or gave an array of another shape: "
        f"{', '.join(dict.fromkeys(source.calls))}. Call the compiled function from Python to see "
        "the error."
    )


def _written(source: Source) -> str:
    inputs = [f"x{n}" for n in range(len(source.inputs))]
    outputs = [f"y{n}" for n in range(len(source.outputs))]
    lines = [f"def raw({', '.join(inputs)}):"]
    for n, (name, shape) in enumerate(zip(inputs, source.input_shapes, strict=True)):
        dtype = source.inputs[n].dtype
        if shape:
            lines += [
                f"    if {name}.shape != {shape}:",
                f"        raise ValueError('argument {n} is not of the shape {[*shape]}')",
            ]
        elif dtype.kind in "iu":
            lines += [
                f"    if not fits({name}, like{n}):",
                f"        raise OverflowError('argument {n} does not fit into {dtype}')",
            ]
    for n, shape in enumerate(source.output_shapes):
        lines.append(f"    y{n} = np.empty({shape or (1,)}, dtype{n})")
    addresses = [f"address_of({name}, like{n})" for n, name in enumerate(inputs)]
    addresses += [f"address_of({name}, {name})" for name in outputs]
    lines += [
        f"    if call(ADDRESS, ({', '.join(['TABLE', *addresses])},)):",
        "        raise MemoryError('there is too little memory')",
    ]
    if source.calls:
        lines += [
            f"    if not {outputs.pop()}[0]:",
            f"        raise RuntimeError({_message_of_failure(source)!r})",
        ]
    results = [
        name if shape else f"{name}[0]"
        for name, shape in zip(outputs, source.output_shapes, strict=False)
    ]
    lines.append(f"    return {', '.join(results) or '()'}")
    return "\n".join(lines)
