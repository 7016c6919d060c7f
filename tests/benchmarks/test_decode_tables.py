"""The tables of `decode.py`: the contents of cells, and the cells that are empty."""

import decode_tables as of
import jax
import jax.numpy as jnp
import pytest
from cpu_matmul import READING

import veneer as vn

DENSE, FILE = of.Format("f32"), of.Format("Q4_0", {"qtype": "int4"}, target=1.1, prompt_target=2)
CELLS = [of.Cell(512, 1, is_prompt=True), of.Cell(0, 1), of.Cell(4096, 1), of.Cell(0, 4)]


@pytest.fixture
def kept():
    found = of.Results({READING: 1e9}, "A model")
    found[DENSE, CELLS[1]] = [5, None]
    found[DENSE, "bytes"] = 1e8
    found[FILE, CELLS[0]], found[FILE, CELLS[1]] = [300, 200], [30, 60]
    found[FILE, "bytes"] = 2e7
    return found


def test_cells_show_kept_results_and_targets(kept):
    kept[FILE, CELLS[3]] = [40, 20]
    one, four, bounds = of.tables([DENSE, FILE], CELLS, kept).split("\n\n")
    assert one.splitlines() == [
        "| A model, 1 text | prompt of 512 | after 0 |",
        "| --- | ---: | ---: |",
        "| f32 |  | 5.0 |",
        "| Q4_0 | 300.0, **1.50** (≥ 2) | 30.0, **0.50** (≥ 1.1) |",
    ]
    assert four.splitlines()[2:] == ["| Q4_0 | 40.0, **2.00** |"]
    assert bounds.splitlines()[2:] == [
        "| reading memory | 1,000 | 1 |  |  |  |",
        "| f32 | 100.0 | 5.0 | **50%** |  |  |",
        "| Q4_0 | 20.0 | 30.0 | **60%** | 60.0 | **120%** |",
    ]


def test_results_of_another_model_are_not_shown(kept):
    other = of.Results(kept.kept, "Another")
    assert other[FILE, CELLS[0]] is None
    other[FILE, CELLS[1]], other[FILE, "bytes"] = [1, 1], 1
    assert "f32" not in of.tables([DENSE, FILE], CELLS, other)


@pytest.mark.parametrize("format", of.FORMATS, ids=lambda format: format.name)
def test_a_format_stores_matrices_by_its_rule(format):
    names = ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight")
    matrix = jax.random.normal(jax.random.key(0), (4, 128))
    if format.rule is not None and format.rule["qtype"] is None:  # as in its file
        matrix = vn.quant.quantize(matrix, "int4", channelwise_axes=(0,), tiled_axes={1: 32})
    stored = format.stored(dict.fromkeys(names, matrix) | {"model.norm.weight": jnp.ones(128)})
    assert stored["model.norm.weight"].dtype == jnp.float32
    for name in names:
        if format.rule is None:
            assert stored[name].dtype == format.dtype
        else:
            assert vn.materialise(stored[name]).shape == (4, 128)
            assert sum(x.nbytes for x in jax.tree.leaves(stored[name])) < 4 * 128 * 1.2
            rounds = isinstance(stored[name], vn.quant.ActivationQuantized)
            assert rounds == ("act_qtype" in format.rule)
    assert format.beside is None or format.beside in [f.name for f in of.FORMATS]
