"""The figures of the table."""

import jax
import numpy as np
import pytest

import veneer as vn
from veneer.demo import measure, model
from veneer.demo.measure import DENSE, NF4, VARIANTS, Variant
from veneer.demo.programs import program
from veneer.demo.sentences import sentences


@pytest.fixture
def bert(bert_folder):
    return model.load(bert_folder)


def test_variants_print_as_the_table_names_them():
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


def test_tiles_shrink_to_what_divides_the_model(bert):
    assert [str(variant.fitted(bert)) for variant in (DENSE, Variant("int8"), NF4)] == [
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
def test_bytes_are_packed_codes_scales_and_what_stays_dense(
    bert, params, variant, code_bytes, tile
):
    expected = 0
    for value in params.values():
        if value.ndim == 1:
            expected += value.nbytes
        else:
            expected += value.size * code_bytes + value.size // (tile or value.shape[-1]) * 4
    assert measure.nbytes(measure.quantise(bert, variant)) == expected


def test_f32_is_the_checkpoint(bert, params):
    assert measure.nbytes(measure.quantise(bert, DENSE)) == sum(v.nbytes for v in params.values())


def test_cosine_and_neighbours_of_rows_known_by_hand():
    reference = np.array([[1, 0], [0.8, 0.6], [0, 1]], np.float32)
    turned = np.array([[1, 0], [0.6, 0.8], [0, 1]], np.float32)
    assert measure.mean_cosine(turned, reference) == pytest.approx((1 + 0.96 + 1) / 3)
    # The middle one's neighbour was the first, and is the last.
    assert measure.neighbours_kept(turned, reference) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "variant", [Variant("int8"), Variant("nf4", 32), Variant("int4", 32)], ids=str
)
def test_of_the_weights_only_the_rows_looked_up_are_made_dense(bert, variant):
    params = measure.quantise(bert, variant)
    _, batch = next(bert.batches(sentences(8)))
    encode, made_dense = program("sentence_encoder").encode, []
    observed = jax.jit(vn.implicit(encode, on_materialise=made_dense.append), static_argnums=1)
    found = observed(params, bert.config, *batch)
    expected = jax.jit(encode, static_argnums=1)(vn.materialise(params), bert.config, *batch)
    np.testing.assert_allclose(found, expected, atol=1e-5)  # f32, sums in another order
    looked_up = [event for event in made_dense if event.rule is None]
    assert {event.primitive for event in looked_up} == {"add"}
    rows = batch.ids.size + batch.ids.shape[1] + 1  # of words, positions and the token type
    assert sum(event.nbytes for event in looked_up) == rows * bert.contracted[0] * 4


def test_embeddings_come_in_the_order_of_the_sentences(bert):
    corpus = ["the statement is in the the the", "a", "of and to", "in"]
    encode = measure.compiled(bert)
    together = measure.embed(bert, encode, bert.params, corpus)
    for sentence, embedding in zip(corpus, together, strict=True):
        [alone] = measure.embed(bert, encode, bert.params, [sentence])
        np.testing.assert_allclose(embedding, alone, atol=1e-5)
