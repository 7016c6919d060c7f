"""The choice of vector instructions: by CPU, environment variable or saved measurement."""

import os
import subprocess
import sys

import pytest

from veneer.kernels.cpu import build
from veneer.native import cache, simd


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def isa_of_new_process(**environment):
    code = "from veneer.native.simd import ISA; print(ISA)"
    command = [sys.executable, "-c", code]
    inherited = {k: v for k, v in os.environ.items() if k != "VENEER_KERNELS_ISA"}
    return subprocess.check_output(command, env=inherited | environment, text=True).strip()


def test_the_saved_isa_is_the_default():
    best = simd.available_isas()[0]
    assert isa_of_new_process() == best
    cache.save_isa("portable")
    assert cache.saved_isa() == isa_of_new_process() == "portable"
    assert isa_of_new_process(VENEER_KERNELS_ISA=best) == best
    cache.save_isa(None)
    assert (cache.saved_isa(), isa_of_new_process()) == (None, best)


def test_an_isa_is_saved_for_one_cpu(monkeypatch):
    cache.save_isa("portable")
    with monkeypatch.context() as patch:
        patch.setattr(cache, "host_cpu", lambda: "another")
        assert cache.saved_isa() is None
        cache.save_isa("avx2")
    assert cache.saved_isa() == "portable"


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[1]", b'{"HOST": 3}', b'{"HOST": "sse1"}'])
def test_an_invalid_file_is_ignored(folder, text):
    folder.mkdir()
    (folder / "isa.json").write_bytes(text.replace(b"HOST", cache.host_cpu().encode()))
    assert isa_of_new_process() == simd.available_isas()[0]
    assert build.CACHE.fingerprint
    cache.save_isa("portable")
    assert isa_of_new_process() == "portable"


def test_saving_to_a_read_only_cache_raises(folder):
    folder.write_text("no folder")
    with pytest.raises(OSError, match="cache"):
        cache.save_isa("portable")
