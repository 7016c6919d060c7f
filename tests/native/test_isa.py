"""Which vector instructions are used: what the CPU has, what is asked for, what was measured."""

import os
import subprocess
import sys

import pytest

from veneer.native import isa


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def used(**environment):
    code = "from veneer.native.isa import ISA; print(ISA)"
    command = [sys.executable, "-c", code]
    without = {k: v for k, v in os.environ.items() if k != "VENEER_KERNELS_ISA"}
    return subprocess.check_output(command, env=without | environment, text=True).strip()


def test_what_is_remembered_is_used_where_nothing_else_is_asked_for():
    assert used() == isa.available()[0]
    isa.remember("portable")
    assert isa.remembered() == used() == "portable"
    best = isa.available()[0]
    assert used(VENEER_KERNELS_ISA=best) == best


def test_it_is_remembered_of_a_cpu(monkeypatch):
    isa.remember("portable")
    monkeypatch.setattr(isa, "host", lambda: "another")
    assert isa.remembered() is None
    isa.remember(isa.available()[0])
    monkeypatch.undo()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"HOST": "sse1"}', '{"HOST": 3}'])
def test_a_file_that_makes_no_sense_is_none(folder, text):
    folder.mkdir()
    (folder / "isa.json").write_text(text.replace("HOST", isa.host()))
    assert isa.remembered() is None
    isa.remember("portable")
    assert isa.remembered() == "portable"


def test_a_cache_that_cannot_be_written_is_told(folder):
    folder.write_text("no folder")
    with pytest.raises(OSError, match="cache"):
        isa.remember("portable")
