"""Object files of Numba's functions, which LLVM optimises once."""

import ctypes

from numba.core.codegen import CPUCodeLibrary

from veneer.native import machine_code, object_file
from veneer.native.functions import native
from veneer.native.memory import store_f32
from veneer.native.object_file import ObjectFile


def test_numba_neither_optimises_nor_emits_what_is_exported(monkeypatch):
    def refuse(*_):
        raise AssertionError("optimised")

    for name in ("_optimize_functions", "_optimize_final_module", "_finalize_final_module"):
        monkeypatch.setattr(CPUCodeLibrary, name, refuse)

    @native
    def doubled(number):
        return 2 * number

    file = ObjectFile()
    file.export("test_sum", native(lambda a, b: doubled(a) + doubled(b)))
    file.export("test_double", doubled)
    addresses = machine_code.load(file.code(), "test_sum", "test_double")
    integer = ctypes.c_int64
    assert ctypes.CFUNCTYPE(integer, integer, integer)(addresses[0])(3, 4) == 14
    assert ctypes.CFUNCTYPE(integer, integer)(addresses[1])(5) == 10


def test_a_compiled_function_keeps_no_numba_ir():
    double = native(lambda number: 2 * number)
    ObjectFile().export("test_double", double)
    (result,) = double.overloads.values()
    assert result.type_annotation is None


@native
def fill(to, count):
    for i in range(count):
        store_f32(to + 4 * i, 1)


def test_loops_of_scalars_are_not_made_scatters(monkeypatch):
    """Which take several dozen cycles each, where numbers follow each other."""
    seen, compile_module = [], object_file.compile_module

    def kept(module, *args, **options):
        code = compile_module(module, *args, **options)
        seen.append(str(module))
        return code

    monkeypatch.setattr(object_file, "compile_module", kept)
    file = ObjectFile()
    file.export("fill", fill)
    file.code()
    assert "store float" in seen[0]
    assert "scatter" not in seen[0]
