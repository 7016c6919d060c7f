"""Run the GPU benchmark with tiny sizes, and check the tables that it makes for docs/gpu.md."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import gpu_all
import gpu_tables
import pytest
from gpu_tables import Format

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "gpu.md").read_text("utf-8")


def test_without_optax_nothing_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_all.py", "--out", str(tmp_path / "results")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        gpu_all.main()
    assert "pip install '.[examples]'" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_small_parts_run_and_have_no_errors(tmp_path):
    options = ["--small", "--seconds", "60", "--parts", "1", "3", "8", "--only", "int4.*columns"]
    command = [sys.executable, ROOT / "benchmarks" / "gpu_all.py", *options, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    results = gpu_tables.read(tmp_path)
    assert not [line for line in results.values() if "error" in line]
    for name in (gpu_tables.DENSE, gpu_tables.VENEER, gpu_tables.BY_XLA, "bitcast to int4"):
        assert "us" in results[f"3/256x128/int4, tile 128/columns/1/{name}"]
    assert [place for place, _ in gpu_tables.tables(results)] == [
        *("device", "products", "bandwidth", "dequantization")
    ]
    with pytest.raises(ValueError, match="from a GPU, not from cpu"):
        gpu_all.write_page(tmp_path)


def test_the_page_has_a_place_for_each_table():
    places = re.findall(r"<!-- gpu_all\.py, (\w+) -->", PAGE)
    assert sorted(places) == sorted(gpu_tables.PLACES)


@pytest.mark.parametrize(
    ("qtype", "tile", "m", "kernel"),
    [
        ("int4", 128, 1, "few rows, "),
        ("int4", 128, 256, "many rows, "),
        ("int8", None, 64, "many rows, "),
        ("nf4", 64, 64, "few rows, "),
        ("nf4", 64, 128, gpu_tables.BY_XLA),
    ],
)
def test_a_cell_is_the_time_of_the_selected_kernel(qtype, tile, m, kernel):
    name = gpu_tables.selected(Format(qtype, tile), "columns", m, 4096, 11008)
    assert name.startswith(kernel)
    by_name = {name: {"us": 2.0}, gpu_tables.VENEER: {"us": 3.0}}
    assert gpu_tables.line_of(by_name, name) == {"us": 2.0}


def test_an_unmeasured_kernel_has_the_time_of_veneer_if_it_ran():
    ran = {"us": 3.0, "kernels": "1 triton, 1 mosaic_gpu_v2"}
    assert gpu_tables.line_of({gpu_tables.VENEER: ran}, "many rows, 64x128x128") == ran
    assert gpu_tables.line_of({gpu_tables.VENEER: ran}, "few rows, 2 tiles") is None
    assert gpu_tables.line_of({gpu_tables.VENEER: ran}, "veneer, int8 x int8") is None


def test_a_result_replaces_an_error_and_an_earlier_result(tmp_path):
    lines = [{"key": "a", "us": 1}, {"key": "b", "same_as": "a"}, {"key": "a", "error": "late"}]
    (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert gpu_tables.read(tmp_path) == {"a": lines[0], "b": lines[0]}
    (tmp_path / "2.jsonl").write_text(json.dumps({"key": "a", "us": 2}))
    assert gpu_tables.read(tmp_path)["a"]["us"] == 2
