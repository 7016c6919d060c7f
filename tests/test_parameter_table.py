"""`vn.summary`: the rows, the totals and the tables of a tree of arrays."""

import html.parser
import io
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from support import arrays
from support.array_types import Diagonal, Lora

import veneer as vn


class Adapted(Lora):
    """A frozen weight with a trained low-rank update."""

    trainable = ("a", "b")

    @property
    def rank(self):
        return self.a.shape[-1]


NF4 = arrays.quantized("nf4", 64, 8, tile=32)
PARAMS = {
    "dense": {
        "kernel": Adapted(NF4, arrays.ones((64, 2)), arrays.ones((2, 8))),
        "bias": arrays.zeros(8),
    },
    "diagonal": Diagonal(arrays.arange(1000.0)),
    "embedding": vn.freeze(arrays.ones((10, 4), jnp.bfloat16)),
    "steps": arrays.arange(3),
    "activation": jnp.tanh,
    "rate": 0.1,
}
ROWS = {
    "dense.bias": ("dense", "float32", (8,), "float32", 32, 32, 8),
    "dense.kernel": (
        *("Adapted", "Adapted rank 2 over nf4, tile 32", (64, 8), "float32"),
        *(64 * 8 // 2 + 2 * 8 * 4 + (64 * 2 + 2 * 8) * 4, 64 * 8 * 4, 64 * 2 + 2 * 8),
    ),
    "diagonal": ("Diagonal", "Diagonal", (1000, 1000), "float32", 4000, 4_000_000, 1000),
    "embedding": ("Frozen", "Frozen", (10, 4), "bfloat16", 80, 80, 0),
    "steps": ("dense", "int32", (3,), "int32", 12, 12, 0),
}


@pytest.fixture
def table():
    return vn.summary(PARAMS)


def as_data(summary):
    return {
        row.path: (
            *(row.type, row.format, row.shape, row.dtype.name),
            *(row.nbytes, row.dense_nbytes, row.trainable),
        )
        for row in summary.rows
    }


def test_each_array_has_a_row(table):
    assert as_data(table) == ROWS


def test_totals_add_up_the_rows(table):
    assert table.nbytes == sum(row[4] for row in ROWS.values())
    assert table.dense_nbytes == sum(row[5] for row in ROWS.values())
    assert table.trainable == 8 + 144 + 1000


def test_an_abstract_model_has_the_same_rows(table):
    arrays = {k: v for k, v in PARAMS.items() if k not in ("activation", "rate")}
    assert as_data(vn.summary(jax.eval_shape(lambda: arrays))) == as_data(table)


def test_a_single_key_has_a_row():
    (row,) = vn.summary(jax.random.key(0)).rows
    assert (row.path, row.dtype.name, row.trainable) == ("", "key<fry>", 0)
    assert vn.summary({}).rows == ()


CELLS = [
    *("path format shape dtype bytes dense bytes trainable".split()),
    *("dense.kernel Adapted rank 2 over nf4, tile 32 [64, 8] float32 896 bytes".split()),
    *("diagonal Diagonal [1000, 1000] float32 4,000 bytes 4 MB 1,000".split()),
    *("total 5,020 bytes 4 MB 1,152".split()),
]


def test_the_table_prints_without_rich(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    text = str(table)
    assert set(CELLS) <= set(text.split())
    assert repr(table) == text


@pytest.mark.parametrize("columns", [70, 80, 140])
def test_the_table_fits_the_terminal(table, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, str(table).splitlines())) <= columns
    assert set(CELLS) <= set(str(table).split())


def test_the_table_has_80_columns_without_a_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "blocks.11.attention.out_projection.kernel"
    table = vn.summary({name: NF4, "b": jnp.ones(2)}, like={name: jnp.ones((64, 8))})
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= 80
    assert name in lines  # on a line above its row
    assert "error" in str(table)
    assert "bits" in str(table)


def test_no_cell_is_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    path = "ab" * 150
    assert path in "".join(str(vn.summary({path: jnp.ones(2)})).split())


def test_fake_quantized_weights_show_their_format():
    w = vn.quant.FakeQuantized(jnp.ones((64, 8)), qtype="nf4", tile_size=32)
    (row,) = vn.summary(w).rows
    assert row.format == "FakeQuantized as nf4, tile 32"
    lora = vn.types.LoraArray.init(NF4, 2, key=jax.random.key(0))
    assert vn.summary(lora).rows[0].format == "LoraArray rank 2 over nf4, tile 32"


def test_rich_prints_the_table(table):
    file = io.StringIO()
    Console(file=file, width=200, force_terminal=True).print(table)
    assert set(CELLS) <= set(re.sub(r"\x1b\[[0-9;]*m", " ", file.getvalue()).split())


class Cells(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.cells = []

    def handle_data(self, data):
        self.cells += data.split()


def test_a_notebook_shows_an_html_table(table):
    page = Cells()
    page.feed(table._repr_html_())
    assert set(CELLS) <= set(page.cells)


def test_html_is_escaped():
    assert "<b>" not in vn.summary({"<b>": jnp.ones(2)})._repr_html_()


def test_like_adds_bits_and_errors():
    dense = {"w": jnp.array([[0.5, 1.0], [2.0, 4.0]]), "zero": jnp.zeros((2, 2)), "b": jnp.ones(2)}
    small = dense | {name: vn.quant.quantize(dense[name], "int4") for name in ("w", "zero")}
    rows = {row.path: row for row in vn.summary(small, like=dense).rows}
    off = small["w"].dequantize() - dense["w"]
    assert rows["w"].error == pytest.approx(jnp.linalg.norm(off) / jnp.linalg.norm(dense["w"]))
    assert (rows["zero"].error, rows["b"].error) == (0, None)
    assert (rows["w"].bits, rows["b"].bits) == (8 * (2 + 4) / 4, 32)
    assert f"{rows['w'].error:.2%}" in str(vn.summary(small, like=dense))
    for like in ({}, {"w": jnp.ones(2), "zero": jnp.ones(2)}):
        with pytest.raises(ValueError, match=r"like has .* at 'w'.*QArray:f32\[2,2\]"):
            vn.summary(small, like=like)
