"""A program's source as machine code: Numba compiles its functions, LLVM writes an object file."""

from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.np.numpy_support import from_dtype

from ...native import functions
from ...native.functions import compile_module
from ..codegen.program import Function, Source
from .cache import register_symbols
from .entry import ENTRY, PROGRAM, write_entry, write_program
from .intrinsics import native

#: A product and a sum may be rounded once, as XLA does it; nothing else is rearranged.
_OPTIONS: dict[str, Any] = {"fastmath": {"contract"}, "boundscheck": False}


def compiled(source: Source) -> Any:
    """Numba's dispatcher of the function of a program, which takes pointers."""
    register_symbols(source.names.values())
    names: dict[str, Any] = {name: native(f) for name, f in source.names.items()} | {"np": np}
    exec(compile(source.text, "<vn.numba>", "exec"), names)
    for function in source.functions:
        names[function.name] = dispatcher = functions.native(names[function.name], **_OPTIONS)
        dispatcher.compile(signature_of(function))
    return names["program"]


def signature_of(function: Function) -> tuple[Any, ...]:
    """Numba's types of its arguments."""
    return tuple(types.CPointer(from_dtype(dtype)) for dtype in function.dtypes)


def object_code(source: Source) -> bytes:
    """The object file of a program, with a function for Python to call."""
    program = compiled(source)
    signature = signature_of(source.functions[-1])
    result = program.overloads[signature]
    module = ir.Module()

    def call(builder: ir.IRBuilder, pointers: Iterable[ir.Value]) -> None:
        context = cpu_target.target_context
        values = [
            builder.inttoptr(pointer, context.get_value_type(type))
            for pointer, type in zip(pointers, signature, strict=True)
        ]
        context.call_internal_no_propagate(builder, result.fndesc, result.signature, values)

    write_entry(module, source, call)
    write_program(module, source, call)
    linked = llvm.parse_assembly(str(module))
    for library_module in functions.modules_of([result.library]):
        linked.link_in(library_module, preserve=True)
    code = compile_module(linked, (ENTRY, PROGRAM), vectorize_loops=True)
    if any(".const.picklebuf" in variable.name for variable in linked.global_variables):
        raise NotImplementedError(
            "a compiled program must not raise an error, because nobody would see it. A rule "
            f"uses an operation in which Numba raises errors.\n{source.text}"
        )
    return code
