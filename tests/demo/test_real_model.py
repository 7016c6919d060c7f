"""all-MiniLM-L6-v2 keeps the published cosines in each format."""

from dataclasses import replace

import numpy as np
import pytest

from veneer.demo import encoder, encoder_demo
from veneer.demo.encoder_demo import DENSE, VARIANTS, Variant
from veneer.demo.fetch import ENCODER, fetch, sentences

pytestmark = [pytest.mark.divided, pytest.mark.slow]

# The mean cosine between embeddings and f32 embeddings of 512 English sentences.
EXPECTED = {
    Variant("int8"): 0.9996,
    Variant("nf4", 64): 0.9716,
    Variant("int4", 32): 0.9597,
    Variant("int4", 128): 0.9422,
    Variant("int4", 128, least_error=True): 0.9512,
    Variant("int4", 128, rotate=True, calibrated=True): 0.9846,
}


@pytest.fixture(scope="module")
def bert():
    try:
        folder = fetch(ENCODER)
    except FileNotFoundError as error:  # neither a cache nor a network
        pytest.skip(str(error))
    return encoder.load(folder)


@pytest.fixture(scope="module")
def embed(bert):
    encode = encoder_demo.compile_encoder(bert)
    return lambda variant: encoder_demo.embed(
        bert, encode, encoder_demo.quantize(bert, variant), sentences()
    )


@pytest.fixture(scope="module")
def dense(embed):
    return embed(DENSE)


def test_each_variant_has_an_expected_cosine():
    assert set(EXPECTED) == {v for v in VARIANTS if v.act_qtype is None} - {DENSE}


@pytest.mark.parametrize("variant", EXPECTED, ids=str)
def test_embeddings_have_the_expected_cosine(embed, dense, variant):
    # Machines sum in different orders, so some codes differ.
    near = pytest.approx(EXPECTED[variant], abs=0.003 if variant.calibrated else 0.001)
    assert encoder_demo.mean_cosine(embed(variant), dense) == near


def test_int8_activations_lose_less_than_nf4_weights(embed, dense):
    by_int8 = Variant("int8", act_qtype="int8")
    variants = replace(by_int8, rotate=True), Variant("int8"), by_int8, Variant("nf4", 64)
    cosines = [encoder_demo.mean_cosine(embed(variant), dense) for variant in variants]
    assert sorted(cosines, reverse=True) == cosines


def test_similar_sentences_have_similar_embeddings(bert):
    encode = encoder_demo.compile_encoder(bert)
    texts = ["A man is eating food.", "A man eats a meal.", "The weather is cold today."]
    embeddings = encoder_demo.embed(bert, encode, bert.params, texts)
    cosines = embeddings @ embeddings.T
    assert cosines[0, 1] > 0.9
    assert np.abs(cosines[2, :2]).max() < 0.1
