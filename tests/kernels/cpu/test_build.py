"""How kernels come to be: compiled once, kept on disk, refused where they cannot run."""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from kernels.cpu import plain_kernel as plain
from kernels.cpu.test_runtime import run

from veneer.kernels.cpu import build, cache, ffi_header


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path / "not" / "there"))
    return tmp_path / "not" / "there" / "kernels"


def made(content=b"code"):
    """How often something is made, and what makes it."""
    calls = []

    def make():
        calls.append(1)
        return content

    return calls, make


def test_what_is_compiled_is_kept(directory):
    calls, make = made()
    assert [cache.cached("f", make), cache.cached("f", make)] == [b"code"] * 2
    assert len(calls) == 1
    assert len([*directory.iterdir()]) == 1


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:-1] + b"?"])
def test_a_damaged_file_is_made_again(directory, damage):
    cache.cached("f", made()[1])
    [file] = directory.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    calls, make = made()
    assert [cache.cached("f", make), cache.cached("f", make)] == [b"code"] * 2
    assert len(calls) == 1


def test_what_was_made_long_ago_is_removed_when_it_is_made_anew(directory):
    directory.mkdir(parents=True)
    names = ["f-old.o", "f-new.o", "f_of_another-old.o"]
    for name in names:
        (directory / name).touch()
    for name in (names[0], names[2]):
        os.utime(directory / name, (0, 0))
    cache.cached("f", made()[1])
    kept = {file.name for file in directory.iterdir()}
    assert kept & {*names} == {*names[1:]}


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path / "file"))
    calls, make = made()
    assert [cache.cached("f", make), cache.cached("f", make)] == [b"code"] * 2
    assert len(calls) == 2


def test_many_may_fill_the_cache_at_once(directory):
    content = bytes(1 << 20)
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda _: cache.cached("f", made(content)[1]), range(32))
        assert all(result == content for result in results)
    assert len([*directory.iterdir()]) == 1


def test_without_a_chosen_directory_it_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("VENEER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.directory() == tmp_path / ".cache" / "veneer" / "kernels"


def test_a_kernel_that_is_compiled_needs_no_numba():
    plain.target()
    assert run("import sys; plain.check(); print('numba' in sys.modules)") == "False\n"


def test_processes_may_compile_at_the_same_time(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, "plain.check()", VENEER_CACHE=str(tmp_path)) for _ in range(2)]
        assert [done.result() for done in runs] == ["", ""]
    assert len([*(tmp_path / "kernels").iterdir()]) == 2  # the kernel, and what all share


def test_an_unknown_target_or_isa_is_an_error(tmp_path):
    with pytest.raises(KeyError, match="no kernel veneer_rows_int5"):
        build.target("veneer_rows_int5")
    code = """
from veneer.kernels.cpu import build
try:
    build.target("veneer_rows_int8")
except ValueError as error:
    print(error)
"""
    assert "'sse1' is unknown" in run(code, VENEER_KERNELS_ISA="sse1")


def test_numba_that_is_missing_is_said_once_and_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    assert build.available.__wrapped__() == "kernels need Numba: pip install 'veneer[numba]'"


HEADER = ffi_header.header_text()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace("API_MAJOR 0", "API_MAJOR 1"), "version is 1."),
        (lambda text: text.replace("int64_t* dims;", ""), "it has no XLA_FFI_Buffer with dims"),
        (lambda text: text.replace("DataType_F32 =", "DataType_F33 ="), "no XLA_FFI_DataType_F32"),
        (lambda text: text.replace("XLA_FFI_Args args;", "Tuple args;"), "the type Tuple"),
        (lambda text: "", "version is "),
    ],
)
def test_a_header_that_kernels_do_not_know_is_refused(change, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        ffi_header.Header(change(HEADER))


def test_members_are_where_a_c_compiler_has_them(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    header = ffi_header.header()
    places = [(s, m) for s, members in ffi_header.MEMBERS.items() for m in members.split()]
    asserted = [
        f"_Static_assert(offsetof({s}, {m}) == {header.offset(s, m)}, {f'{s}.{m}'!r});".replace(
            "'", '"'
        )
        for s, m in places
    ]
    asserted += [
        f'_Static_assert({s}_STRUCT_SIZE == {header.size(s)}, "{s}");'
        for s in ffi_header.MEMBERS
        if s.endswith("_Args")
    ]
    asserted += [
        f'_Static_assert({e} == {header.value(e)}, "{e}");' for e in ffi_header.ENUMERATORS
    ]
    source = tmp_path / "layout.c"
    source.write_text("\n".join([HEADER, *asserted]))
    subprocess.run([compiler, "-fsyntax-only", "-x", "c", source], check=True)
