"""How kernels come to be: compiled once, kept on disk, refused where they cannot run."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from kernels.cpu import plain_kernel as plain
from kernels.cpu.test_runtime import run

from veneer.kernels.cpu import build


def test_a_kernel_that_is_compiled_needs_no_numba():
    plain.target()
    assert run("import sys; plain.check(); print('numba' in sys.modules)") == "False\n"


def test_processes_may_compile_at_the_same_time(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, "plain.check()", VENEER_CACHE=str(tmp_path)) for _ in range(2)]
        assert [done.result() for done in runs] == ["", ""]
    assert len([*(tmp_path / "kernels").iterdir()]) == 2  # the kernel, and what all share


def test_an_unknown_target_or_isa_is_an_error(tmp_path):
    with pytest.raises(KeyError, match="no kernel veneer_rows_int5_few"):
        build.target("veneer_rows_int5_few")
    code = """
from veneer.kernels.cpu import build
try:
    build.target("veneer_rows_int8_few")
except ValueError as error:
    print(error)
"""
    assert "'sse1' is unknown" in run(code, VENEER_KERNELS_ISA="sse1")


def test_numba_that_is_missing_is_said_once_and_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    assert build.available.__wrapped__() == "kernels need Numba: pip install 'veneer[numba]'"


@pytest.mark.parametrize(
    "settings", [{}, {"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_FEATURES": ""}], ids=str
)
def test_whether_bf16_is_multiplied_is_known_without_numba_and_as_numba_is_told(settings):
    code = """
import sys
from veneer.kernels.cpu import build
found = build.has_bf16()
print("numba" in sys.modules)
import numba
from veneer.native import cpu, isa
print(found == isa.HAS_BF16 == ("avx512bf16" in cpu.features()))
"""
    assert run(code, **settings) == "False\nTrue\n"
