"""The first part of the demo: its measurements, and a run with a small model."""

import importlib.util
import re

import jax
import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

import veneer as vn
from veneer import demo
from veneer.cli.demo import COMMAND
from veneer.demo import encoder, encoder_demo
from veneer.demo.encoder_demo import DENSE, NF4, VARIANTS, Variant
from veneer.demo.fetch import program, sentences


@pytest.fixture
def bert(bert_folder):
    return encoder.load(bert_folder)


def test_variants_print_their_names_in_the_table():
    assert [str(variant) for variant in VARIANTS] == [
        "f32",
        "int8, channelwise",
        "int8 by int8",
        "int8 by int8, rotated",
        "nf4, tile 64",
        "int4, tile 32",
        "int4, tile 128",
        "int4, tile 128, least error",
        "int4, tile 128, calibrated",
    ]


def test_tiles_shrink_to_divisors_of_the_widths(bert):
    assert [str(variant.fit_tile(bert)) for variant in (DENSE, Variant("int8"), NF4)] == [
        "f32",
        "int8, channelwise",
        "nf4, tile 32",
    ]


@pytest.mark.parametrize(
    ("variant", "code_bytes", "tile"),
    [
        (Variant("int8"), 1, None),
        (Variant("int8", act_qtype="int8"), 1, None),
        (Variant("nf4", 32), 0.5, 32),
        (Variant("int4", 16), 0.5, 16),
    ],
    ids=str,
)
def test_bytes_count_codes_scales_and_dense_parameters(bert, params, variant, code_bytes, tile):
    expected = 0
    for value in params.values():
        if value.ndim == 1:
            expected += value.nbytes
        else:
            expected += value.size * code_bytes + value.size // (tile or value.shape[-1]) * 4
    assert vn.summary(encoder_demo.quantize(bert, variant)).nbytes == expected


def test_f32_has_the_bytes_of_the_checkpoint(bert, params):
    nbytes = vn.summary(encoder_demo.quantize(bert, DENSE)).nbytes
    assert nbytes == sum(v.nbytes for v in params.values())


def test_mean_cosine_and_neighbors_kept_of_known_rows():
    reference = np.array([[1, 0], [0.8, 0.6], [0, 1]], np.float32)
    rotated = np.array([[1, 0], [0.6, 0.8], [0, 1]], np.float32)
    assert encoder_demo.mean_cosine(rotated, reference) == pytest.approx((1 + 0.96 + 1) / 3)
    # The nearest neighbor of the middle row changes from the first row to the last.
    assert encoder_demo.neighbors_kept(rotated, reference) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "variant", [Variant("int8"), Variant("nf4", 32), Variant("int4", 32)], ids=str
)
def test_only_the_embedding_rows_are_materialized(bert, variant):
    params = encoder_demo.quantize(bert, variant)
    _, batch = next(bert.batches(sentences(8)))
    encode, events = program("sentence_encoder").encode, []
    observed = jax.jit(vn.implicit(encode, on_materialise=events.append), static_argnums=1)
    found = observed(params, bert.config, *batch)
    expected = jax.jit(encode, static_argnums=1)(vn.materialise(params), bert.config, *batch)
    np.testing.assert_allclose(found, expected, atol=1e-5)  # f32, summed in another order
    looked_up = [event for event in events if event.rule is None]
    assert {event.primitive for event in looked_up} == {"add"}
    rows = batch.ids.size + batch.ids.shape[1] + 1  # rows of words, positions and the token type
    assert sum(event.nbytes for event in looked_up) == rows * bert.contracted[0] * 4


def test_embeddings_have_the_order_of_the_sentences(bert):
    corpus = ["the statement is in the the the", "a", "of and to", "in"]
    encode = encoder_demo.compile_encoder(bert)
    together = encoder_demo.embed(bert, encode, bert.params, corpus)
    for sentence, embedding in zip(corpus, together, strict=True):
        [alone] = encoder_demo.embed(bert, encode, bert.params, [sentence])
        np.testing.assert_allclose(embedding, alone, atol=1e-5)


def test_main_prints_a_table_and_writes_a_picture(write_bert, params, tmp_path, capsys):
    folder = write_bert(params, num_hidden_layers=1)  # one layer, because 15 programs are compiled
    found = encoder_demo.main(encoder_demo.load(folder), tmp_path / "new" / "output")
    assert set(re.findall(r"\w+", COMMAND.json_keys["encoder"])) >= {
        *found,
        *found["variants"][0],
        *found["nearest"][0],
    }
    bert = encoder.load(folder)
    fitted = [str(v.fit_tile(bert)) for v in VARIANTS]
    assert [row["name"] for row in found["variants"]] == list(dict.fromkeys(fitted))
    printed = capsys.readouterr().out
    for text in ("f32", "int8, channelwise", "nf4, tile 32", "int4, tile 32", encoder_demo.QUERY):
        assert text in printed
    steps = re.findall(r"^(\w+) .* \.\.\.$", printed, re.MULTILINE)
    assert steps == ["Reading", *["Encoding"] * len(VARIANTS), "Timing"]
    picture = imread(tmp_path / "new" / "output" / "size_against_fidelity.png")
    assert picture.shape[0] > 400
    assert picture[..., :3].std() > 0.01  # the picture is not empty


def test_the_table_fits_a_terminal_of_80_columns(capsys):
    widest = [
        encoder_demo.Measurement(v, 999_999_999, 0.9996, 1.0, 9999.0, 999.9) for v in VARIANTS
    ]
    Console(width=80).print(encoder_demo.make_table(widest))
    printed = capsys.readouterr().out
    for text in ("int8, channelwise", "int4, tile 128,", "calibrated"):
        assert text in printed
    assert "999,999,999" in printed
    assert "…" not in printed


def test_search_returns_the_best_first():
    embeddings = np.array([[0, 1], [1, 0], [0.6, 0.8]], np.float32)
    found = encoder_demo.search(
        np.array([1, 0], np.float32), embeddings, ["north", "east", "between"], 2
    )
    assert [sentence for _, sentence in found] == ["east", "between"]
    np.testing.assert_allclose([score for score, _ in found], [1, 0.6], rtol=1e-6)


def test_a_missing_library_raises_with_the_install_command(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tokenizers" else find_spec(name)
    )
    with pytest.raises(ImportError, match=r"needs tokenizers: pip install '\.\[demo\]'"):
        importlib.reload(demo)
