"""Object files of native functions, which only LLVM optimizes, and only once."""

import ctypes

import pytest
from numba import njit, types
from numba.core.codegen import CPUCodeLibrary

from veneer.native import functions, machine_code
from veneer.native.functions import ObjectFile, native
from veneer.native.memory import store_f32


def load(file, **argument_counts):
    """Load functions of a file, each with its number of arguments, as callables."""
    addresses = machine_code.load(file.code(), *argument_counts)
    integers = [[ctypes.c_int64] * (1 + count) for count in argument_counts.values()]
    return [ctypes.CFUNCTYPE(*types)(at) for types, at in zip(integers, addresses, strict=True)]


def test_numba_neither_optimizes_nor_emits_native_functions(monkeypatch):
    njit(lambda: 0)()  # compiles Numba's runtime

    def fail(*_):
        raise AssertionError("optimized")

    for name in ("_optimize_functions", "_optimize_final_module", "_finalize_final_module"):
        monkeypatch.setattr(CPUCodeLibrary, name, fail)

    @native
    def double(number):
        return 2 * number

    file = ObjectFile()
    file.export("test_sum", native(lambda a, b: double(a) + double(b)))
    file.export("test_double", double)
    sum_of_doubles, doubled = load(file, test_sum=2, test_double=1)
    assert sum_of_doubles(3, 4) == 14
    assert doubled(5) == 10


def test_numba_functions_in_object_files_stay_callable():
    @njit
    def increment(number):
        return number + 1

    @njit
    def increment_twice(number):
        return increment(increment(number))

    file = ObjectFile()
    file.export("test_twice", native(lambda number: increment_twice(number)))
    (twice,) = load(file, test_twice=1)
    assert twice(3) == increment_twice(3) == 5


def test_numba_calls_native_functions_with_their_callees():
    add = native(lambda a, b: a + b)
    double = native(lambda number: add(number, number))
    quadruple = njit(lambda number: double(double(number)))
    assert quadruple(3) == 12


def test_a_compiled_function_keeps_no_numba_ir():
    double = native(lambda number: 2 * number)
    ObjectFile().export("test_double", double)
    (result,) = double.overloads.values()
    assert result.type_annotation is None


def test_a_call_of_an_unknown_function_raises():
    missing = types.ExternalFunction("no_such_function", types.int64(types.int64))
    file = ObjectFile()
    file.export("test_call", native(lambda number: missing(number)))
    with pytest.raises(ValueError, match="test_call call no_such_function"):
        file.code()


@native
def fill(to, count):
    for i in range(count):
        store_f32(to + 4 * i, 1)


def test_loops_of_scalars_compile_to_no_scatters(monkeypatch):
    """A scatter takes several dozen cycles, even if its addresses are contiguous."""
    texts, compile_module = [], functions.compile_module

    def keep_text(module, *args, **options):
        code = compile_module(module, *args, **options)
        texts.append(str(module))
        return code

    monkeypatch.setattr(functions, "compile_module", keep_text)
    file = ObjectFile()
    file.export("fill", fill)
    file.code()
    assert "store float" in texts[0]
    assert "scatter" not in texts[0]
