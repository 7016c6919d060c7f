"""Compiled code is cached on disk until a source, the CPU or a setting changes."""

import ast
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import veneer
import veneer.kernels.cpu
from veneer.native.cache import Cache, hash_sources, save_isa


def new_cache():
    """Return a cache of kernels, as a new process creates it."""
    return Cache("veneer.kernels")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path / "not" / "there"))
    return tmp_path / "not" / "there" / "kernels"


def counted_maker(content=b"code"):
    """Return a list that gets an entry per call, and a function that returns `content`."""
    calls = []

    def make():
        calls.append(1)
        return content

    return calls, make


def test_compiled_code_is_cached(directory):
    calls, make = counted_maker()
    assert [new_cache().cached("f", make), new_cache().cached("f", make)] == [b"code"] * 2
    assert len(calls) == 1
    assert len([*directory.iterdir()]) == 1


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:-1] + b"?"])
def test_a_damaged_file_is_compiled_again(directory, damage):
    new_cache().cached("f", counted_maker()[1])
    [file] = directory.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    calls, make = counted_maker()
    assert [new_cache().cached("f", make), new_cache().cached("f", make)] == [b"code"] * 2
    assert len(calls) == 1


def test_a_new_file_removes_old_files_of_the_same_function(directory):
    directory.mkdir(parents=True)
    names = ["f-old.o", "f-new.o", "f_of_another-old.o"]
    for name in names:
        (directory / name).touch()
    for name in (names[0], names[2]):
        os.utime(directory / name, (0, 0))
    new_cache().cached("f", counted_maker()[1])
    kept = {file.name for file in directory.iterdir()}
    assert kept & {*names} == {*names[1:]}


def test_a_cache_that_cannot_be_written_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path / "file"))
    calls, make = counted_maker()
    assert [new_cache().cached("f", make), new_cache().cached("f", make)] == [b"code"] * 2
    assert len(calls) == 2


def test_concurrent_calls_can_fill_the_cache(directory):
    content = bytes(1 << 20)
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda _: new_cache().cached("f", counted_maker(content)[1]), range(32))
        assert all(result == content for result in results)
    assert len([*directory.iterdir()]) == 1


def test_the_default_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("VENEER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_cache().directory == tmp_path / ".cache" / "veneer" / "kernels"


# The fingerprint in the name of a file.


def test_the_fingerprint_covers_all_sources(tmp_path):
    (tmp_path / "simd").mkdir()
    files = [tmp_path / "memory.py", tmp_path / "simd" / "floats.py"]
    for file in files:
        file.write_text("before")
    digests = {hash_sources({tmp_path})}
    for file in files:
        file.write_text("after")
        digests.add(hash_sources({tmp_path}))
    assert len(digests) == 3


def test_code_of_edited_sources_is_not_cached(directory, tmp_path, monkeypatch):
    package = type(sys)("package_for_a_test")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    kept = Cache(package.__name__)
    (tmp_path / "new.py").touch()
    assert kept.cached("f", counted_maker()[1]) == b"code"
    assert not kept.directory.exists()
    assert Cache(package.__name__).fingerprint != kept.fingerprint


@pytest.mark.parametrize("variable", ["VENEER_KERNELS_ISA", "NUMBA_CPU_NAME"])
def test_the_fingerprint_covers_the_cpu(monkeypatch, variable):
    before = new_cache().fingerprint
    monkeypatch.setenv(variable, "portable")
    assert new_cache().fingerprint != before


def test_the_fingerprint_covers_the_saved_isa(directory, monkeypatch):
    before = new_cache().fingerprint
    save_isa("portable")
    after = new_cache().fingerprint
    monkeypatch.setenv("VENEER_KERNELS_ISA", "portable")
    assert before != after == new_cache().fingerprint


SOURCE = Path(veneer.__file__).parent


def imported_modules(file):
    """Yield the modules of this package that a file imports anywhere."""
    package = file.relative_to(SOURCE.parent).parent.parts
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            origin = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            yield from (".".join(filter(None, [*origin, alias.name])) for alias in node.names)


@pytest.mark.parametrize("folder", ["kernels/cpu", "native"])
def test_the_fingerprint_covers_the_sources_of_kernels(folder):
    files = [*(SOURCE / folder).rglob("*.py")]
    assert len(files) > 10
    allowed = ("veneer.kernels", "veneer.native")
    for file in files:
        for name in imported_modules(file):
            assert name.startswith(allowed), (file, name)
