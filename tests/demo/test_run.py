"""The demo from beginning to end, on a model small enough for a test."""

import importlib.util
import re

import numpy as np
import pytest
from matplotlib.image import imread

from veneer import demo
from veneer.cli.demo import COMMAND
from veneer.demo import run
from veneer.demo.measure import VARIANTS


def test_prints_a_table_and_an_answer_and_writes_a_picture(write_bert, params, tmp_path, capsys):
    folder = write_bert(params, num_hidden_layers=1)  # fifteen programs are compiled
    found = run.main(run.load(folder), tmp_path / "new" / "output")
    assert set(re.findall(r"\w+", COMMAND.json_keys["encoder"])) >= {
        *found,
        *found["variants"][0],
        *found["nearest"][0],
    }
    fitted = [str(v.fitted(run.load(folder))) for v in VARIANTS]
    assert [row["name"] for row in found["variants"]] == list(dict.fromkeys(fitted))
    printed = capsys.readouterr().out
    for said in ("f32", "int8, channelwise", "nf4, tile 32", "int4, tile 32", run.QUERY):
        assert said in printed
    steps = re.findall(r"^(\w+) .* \.\.\.$", printed, re.MULTILINE)  # as it is no terminal
    assert steps == ["Reading", *["Encoding"] * len(VARIANTS), "Timing"]
    picture = imread(tmp_path / "new" / "output" / "size_against_fidelity.png")
    assert picture.shape[0] > 400
    assert picture[..., :3].std() > 0.01  # something is drawn


def test_the_table_fits_a_terminal_of_80_columns(capsys):
    widest = [run.Measurement(v, 999_999_999, 0.9996, 1.0, 9999.0, 999.9) for v in VARIANTS]
    run.Console(width=80).print(run.table(widest))
    printed = capsys.readouterr().out
    for said in ("int8, channelwise", "int4, tile 128,", "calibrated"):
        assert said in printed
    assert "999,999,999" in printed
    assert "…" not in printed


def test_search_gives_the_best_first():
    embeddings = np.array([[0, 1], [1, 0], [0.6, 0.8]], np.float32)
    found = run.nearest(np.array([1, 0], np.float32), embeddings, ["north", "east", "between"], 2)
    assert [sentence for _, sentence in found] == ["east", "between"]
    np.testing.assert_allclose([score for score, _ in found], [1, 0.6], rtol=1e-6)


def test_without_its_extra_it_names_what_is_missing_and_how_to_get_it(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tokenizers" else find_spec(name)
    )
    with pytest.raises(ImportError, match=r"needs tokenizers: pip install '\.\[demo\]'"):
        importlib.reload(demo)
