"""Run the GPU benchmark with tiny sizes, and check the tables that it makes for docs/gpu.md."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import gpu_all
import gpu_models
import gpu_tables
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_tables import Format
from gpu_worker import INT4, SMALL

import veneer as vn

ROOT = Path(__file__).parents[2]
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


def test_the_loss_by_parts_of_the_vocabulary_is_the_loss():
    params = gpu_models.model(SMALL, INT4)
    head = gpu_models.stacked(params, 1, head_parts=2)["head"]
    key = jax.random.key(0)
    x = jax.random.normal(key, (2, 7, SMALL.llama[1]), jnp.bfloat16)
    targets = jax.random.randint(key, x.shape[:2], 0, SMALL.llama[0])

    def expected(x):
        logits = x @ params["lm_head.weight"].dequantize().T
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(log_p, targets[..., None], -1).mean()

    by_parts = jax.value_and_grad(lambda x: vn.implicit(gpu_models.mean_loss)(head, x, targets))
    (loss, gradient), (other, exact) = by_parts(x), jax.value_and_grad(expected)(x)
    np.testing.assert_allclose(loss, other, rtol=1e-3)
    error = jnp.linalg.norm((gradient - exact).astype(jnp.float32))
    assert error < 0.01 * jnp.linalg.norm(exact.astype(jnp.float32))


def test_stacked_layers_agree_with_the_model():
    sizes = dataclasses.replace(SMALL, llama=(64, 128, 256, 2, 2, 1, 64))
    params = gpu_models.model(sizes, INT4)
    name = "mlp.up_proj.weight"
    layers = gpu_models.stacked(params, 2, head_parts=2)["layers"][name]
    for i in range(2):
        np.testing.assert_array_equal(
            layers.dequantize()[i], params[f"model.layers.{i}.{name}"].dequantize()
        )
