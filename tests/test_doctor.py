"""The findings of `veneer doctor`, and the choice of vector instructions."""

import json
import os
import subprocess
import sys

import jax
import pytest

import veneer as vn
from veneer import cli, doctor, kernels
from veneer.cli.doctor import COMMAND
from veneer.kernels.gpu import cuda_program, hopper
from veneer.kernels.gpu import matmul as gpu_matmul
from veneer.native import cache, simd


def findings_by_name(size=256):
    return {finding.name: finding for finding in doctor.findings(size)}


def test_products_are_checked_and_timed():
    here = findings_by_name()
    timed = [finding for name, finding in here.items() if " x " in name]
    assert len(timed) == 3
    assert all("times as fast as XLA" in finding.text for finding in timed)
    assert all(finding.is_well for finding in here.values())


def test_a_wrong_product_is_reported(monkeypatch):
    monkeypatch.setattr(doctor, "materialise", lambda w: 1.1 * vn.materialise(w))
    wrong = findings_by_name()["int8 x f32, 256 x 256"]
    assert not wrong.is_well
    assert "WRONG by 9e-02: set VENEER_KERNELS=xla" in wrong.text


def test_missing_kernels_are_reported(monkeypatch):
    with kernels.use("xla"):
        here = findings_by_name()
    assert (here["kernels"].is_well, len(here)) == (False, len(findings_by_name()) - 3)
    monkeypatch.setattr(doctor.build, "unavailable_reason", lambda: "there is no Numba")
    assert "there is no Numba" in findings_by_name()["kernels"].text


def test_on_a_tpu_the_experimental_kernel_is_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert "VENEER_KERNELS=experimental tries" in doctor._kernels().text
    with kernels.use("experimental"):
        assert doctor._kernels().text.startswith("an experimental kernel")


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU, on which both kernels compile. Products run on the CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_matmul, "compute_capability", lambda: 90)
    monkeypatch.setattr(hopper, "has_jax", lambda: True)
    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    monkeypatch.setattr(gpu_matmul, "compile", lambda *args: None)
    monkeypatch.setattr(hopper, "compile", lambda *args: None)


def test_on_a_gpu_products_are_checked_and_timed(gpu):
    here = findings_by_name()
    assert here["GPU"].text.endswith(", compute capability unknown")
    assert here["kernel for few rows"].text == "rows_int8"
    assert here["kernel for many rows"].text == "hopper_rows_int8"
    timed = [finding for name, finding in here.items() if " x bf16, M = " in name]
    assert len(timed) == 4
    assert all("times as fast as XLA in bf16" in finding.text for finding in timed)
    assert all(finding.is_well for finding in here.values())


def test_on_a_gpu_a_wrong_product_is_reported(gpu, monkeypatch):
    monkeypatch.setattr(doctor, "materialise", lambda w: 1.1 * vn.materialise(w))
    wrong = findings_by_name()["int4 x bf16, M = 256, 256 x 256"]
    assert not wrong.is_well
    assert "WRONG by 9e-02: set VENEER_KERNELS=xla" in wrong.text


def test_on_a_gpu_missing_kernels_are_reported(gpu, monkeypatch):
    def fail(*args):
        raise cuda_program.CompileError("NVRTC is missing\nand more")

    monkeypatch.setattr(gpu_matmul, "compile", fail)
    monkeypatch.setattr(hopper, "is_hopper", lambda: False)
    few, many = doctor._gpu_kernel("few", 1), doctor._gpu_kernel("many", 256)
    assert (few.is_well, many.is_well) == (False, True)
    assert few.text.endswith("CompileError: NVRTC is missing")
    assert many.text.startswith("none for this GPU")
    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    monkeypatch.setattr(hopper, "has_jax", lambda: False)
    assert doctor._gpu_kernel("many", 256).text.startswith("none before JAX 0.11")
    with kernels.use("xla"):
        assert not findings_by_name()["kernels"].is_well


def test_an_unknown_isa_is_reported():
    code = "from veneer import doctor; print(doctor._kernels())"
    environment = {**os.environ, "VENEER_KERNELS_ISA": "sse1"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert b"'sse1' is unknown; this CPU has" in ran.stdout, ran.stderr
    assert b"is_well=False" in ran.stdout


def test_a_read_only_cache_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path / "none"))
    assert findings_by_name()["cache"].text == f"{tmp_path / 'none'}: 0 files, 0.0 MB"
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert "cannot be written" in findings_by_name()["cache"].text


def test_missing_extras_are_reported(monkeypatch):
    without = lambda name: None if name == "typer" else "1.0"
    monkeypatch.setattr(doctor, "_version", without)
    assert findings_by_name()["[cli]"].text == (
        "not installed: typer (pip install '.[cli]' in a clone of the repository)"
    )


@pytest.fixture
def slowed(monkeypatch, tmp_path):
    """Return a function that makes products slower by a factor for each instruction set."""
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path))
    monkeypatch.delenv("VENEER_KERNELS_ISA", raising=False)

    def slowed(factors):
        monkeypatch.setattr(simd, "available_isas", lambda: list(factors))
        monkeypatch.setattr(doctor, "_measuring", lambda name, size: subprocess.Popen("true"))
        monkeypatch.setattr(doctor, "_round", lambda name, _: [1e-3 * factors[name], factors[name]])

    return slowed


@pytest.mark.parametrize(("other", "chosen"), [(0.99, "avx512"), (0.5, "avx2")])
def test_the_best_isa_near_the_fastest_time_is_kept(slowed, other, chosen):
    slowed({"avx512": 1, "avx2": other})
    lines = {finding.name: finding.text for finding in doctor.choices()}
    assert [name for name in lines if "chosen" in lines[name]] == [chosen]
    assert lines["avx512"].startswith(f"{1 / other:.2f} times")
    assert cache.saved_isa() == (None if chosen == "avx512" else chosen)


def test_choose_raises_without_selectable_cpu_kernels(slowed, monkeypatch, tmp_path, capsys):
    slowed({"avx512": 1})
    with kernels.use("xla"), pytest.raises(ValueError, match="no CPU kernels to measure"):
        doctor.choices()
    with monkeypatch.context() as patch:
        patch.setenv("NUMBA_CPU_NAME", "generic")
        patch.setattr("sys.argv", ["veneer", "doctor", "--choose"])
        with pytest.raises(SystemExit, match="2"):
            cli.main()
    assert (
        "NUMBA_CPU_NAME selects the instructions of the kernels: unset it"
        in capsys.readouterr().err
    )
    (tmp_path / "file").touch()
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file"):
        doctor.choices()


def test_a_failed_measuring_process_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path))
    monkeypatch.delenv("VENEER_KERNELS_ISA", raising=False)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ended = lambda name, size: subprocess.Popen([sys.executable, "-c", "exit(3)"], **pipes)
    monkeypatch.setattr(doctor, "_measuring", ended)
    with pytest.raises(RuntimeError, match="ended with code 3"):
        doctor.choices()


@pytest.mark.slow  # it compiles some twenty kernels
def test_every_available_isa_is_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path))
    monkeypatch.delenv("VENEER_KERNELS_ISA", raising=False)
    monkeypatch.setattr(doctor, "_ROUNDS", 2)
    lines = {finding.name: finding.text for finding in doctor.choices(256)}
    assert list(lines) == simd.available_isas()
    assert sum("and chosen" in text for text in lines.values()) == 1


@pytest.mark.parametrize("is_well", [True, False])
def test_the_exit_code_reports_findings_that_are_not_well(monkeypatch, capsys, is_well):
    findings = [doctor.Finding("CPU", "a good one"), doctor.Finding("kernels", "some", is_well)]
    monkeypatch.setattr(doctor, "findings", lambda: iter(findings))
    monkeypatch.setattr("sys.argv", ["veneer", "doctor"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == int(not is_well)
    assert capsys.readouterr().out.splitlines()[0].split() == ["CPU", "a", "good", "one"]
    monkeypatch.setattr("sys.argv", ["veneer", "doctor", "--json"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == int(not is_well)
    entries = [finding._asdict() for finding in findings]
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"is_well": is_well, "findings": entries}
    assert printed.keys() == COMMAND.json_keys.keys()
