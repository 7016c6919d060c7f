"""Kernels are compiled once, cached on disk, and rejected on machines that cannot run them."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable
from kernels.cpu import plain_kernel as plain
from kernels.cpu.test_runtime import run

import veneer as vn
from veneer import kernels
from veneer.kernels.cpu import build


def test_a_cached_kernel_runs_without_numba():
    plain.target()
    assert run("import sys; plain.check(); print('numba' in sys.modules)") == "False\n"


def test_processes_can_compile_at_the_same_time(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, "plain.check()", VENEER_CACHE=str(tmp_path)) for _ in range(2)]
        assert [done.result() for done in runs] == ["", ""]
    assert len([*(tmp_path / "kernels").iterdir()]) == 2  # the kernel, and what all share


def test_an_unknown_target_or_isa_raises(tmp_path):
    with pytest.raises(KeyError, match="no kernel is named veneer_rows_int5_few"):
        build.register_target("veneer_rows_int5_few")
    code = """
from veneer.kernels.cpu import build
try:
    build.register_target("veneer_rows_int8_few")
except ValueError as error:
    print(error)
"""
    assert "'sse1' is unknown" in run(code, VENEER_KERNELS_ISA="sse1")


def test_without_numba_the_reason_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    assert build.unavailable_reason.__wrapped__() == (
        "kernels need Numba: pip install 'numba>=0.61'"
    )


@pytest.mark.parametrize(
    "settings", [{}, {"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_FEATURES": ""}], ids=str
)
def test_has_bf16_agrees_with_numba_without_importing_it(settings):
    code = """
import sys
from veneer.kernels.cpu import build
found = build.has_bf16()
print("numba" in sys.modules)
import numba
from veneer.native import machine_code, simd
print(found == simd.HAS_BF16 == ("avx512bf16" in machine_code.cpu_features()))
"""
    assert run(code, **settings) == "False\nTrue\n"


def serialized():
    """Return a program that calls a kernel, and the bytes of its executable."""
    w = vn.quant.quantize(jnp.eye(256), "int4", channelwise_axes=[1])
    f = jax.jit(lambda x: vn.implicit(jnp.matmul)(x, w))
    executable = f.lower(jnp.ones((1, 256))).compile()
    return executable, serialize_executable.serialize(executable)[0]


def test_register_handlers_finds_kernels_in_an_executable():
    compiled, executable = serialized()
    names = kernels.register_handlers(executable)
    assert names
    assert all(f'custom_call_target="{name}"' in compiled.as_text() for name in names)
    assert kernels.register_handlers(b"no kernel, veneer_ rows_") == []
    assert set(names) <= set(kernels.register_handlers())  # all that the cache has


def test_a_kernel_of_another_version_raises_with_its_name():
    with pytest.raises(ValueError, match=r"veneer_rows_int99_few.* compile the program again"):
        kernels.register_handlers(b"\0veneer_rows_int99_few\0")


def test_an_executable_with_unavailable_kernels_raises(monkeypatch):
    monkeypatch.setattr(build, "unavailable_reason", lambda: "kernels need Numba")
    with pytest.raises(
        RuntimeError, match="calls veneer_rows_int8_few, which cannot run: kernels need Numba"
    ):
        kernels.register_handlers(b"\0veneer_rows_int8_few\0")
    assert kernels.register_handlers() == []


def test_no_name_of_a_kernel_is_found_in_another_name():
    for name in build.target_names():
        assert build.called_targets(f"a{name}z".encode()) == [name]


WRITES = """
import pathlib
import jax, jax.numpy as jnp
from jax.experimental.serialize_executable import serialize
import veneer as vn
w = vn.quant.quantize(jnp.eye(256), "int4", channelwise_axes=[1])
executable = jax.jit(lambda x: vn.implicit(jnp.matmul)(x, w)).lower(jnp.ones((1, 256))).compile()
pathlib.Path("{file}").write_bytes(serialize(executable)[0])
"""

LOADS = """
import pathlib, sys
import jax, jax.numpy as jnp
from jax.experimental.serialize_executable import deserialize_and_load
from veneer import kernels
executable = pathlib.Path("{file}").read_bytes()
kernels.register_handlers(executable if {named} else None)
x = jnp.arange(256.0)[None]
trees = [jax.tree.structure(tree) for tree in (((x,), {{}}), x)]
print(deserialize_and_load(executable, *trees)(x).argmax(), "numba" in sys.modules)
"""


@pytest.mark.parametrize("named", [True, False])
def test_another_process_loads_an_executable(tmp_path, named):
    file = tmp_path / "executable"
    # XLA does not write an executable again that it has read itself.
    run(WRITES.format(file=file), JAX_ENABLE_COMPILATION_CACHE="false")
    assert run(LOADS.format(file=file, named=named)) == "255 False\n"
