"""Round to nearest on all-MiniLM-L6-v2 keeps what it is known to keep."""

from dataclasses import replace

import numpy as np
import pytest

from veneer.demo import measure, model
from veneer.demo.fetch import ENCODER, fetch
from veneer.demo.measure import DENSE, VARIANTS, Variant
from veneer.demo.sentences import sentences

pytestmark = [pytest.mark.divided, pytest.mark.slow]

# Mean cosine of the embeddings of 512 English sentences to those of f32.
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
    return model.load(folder)


@pytest.fixture(scope="module")
def embed(bert):
    encode = measure.compiled(bert)
    return lambda variant: measure.embed(bert, encode, measure.quantise(bert, variant), sentences())


@pytest.fixture(scope="module")
def dense(embed):
    return embed(DENSE)


def test_the_expected_figures_are_of_the_variants_shown():
    assert set(EXPECTED) == {v for v in VARIANTS if v.act_qtype is None} - {DENSE}


@pytest.mark.parametrize("variant", EXPECTED, ids=str)
def test_quantised_embeddings_are_as_near_to_f32_as_expected(embed, dense, variant):
    # Sums go in another order from one machine to the next, and codes by what they come to.
    near = pytest.approx(EXPECTED[variant], abs=0.003 if variant.calibrated else 0.001)
    assert measure.mean_cosine(embed(variant), dense) == near


def test_rounding_activations_to_8_bits_costs_less_than_rounding_weights_to_4(embed, dense):
    by_int8 = Variant("int8", act_qtype="int8")
    variants = replace(by_int8, rotate=True), Variant("int8"), by_int8, Variant("nf4", 64)
    cosines = [measure.mean_cosine(embed(variant), dense) for variant in variants]
    assert sorted(cosines, reverse=True) == cosines


def test_similar_sentences_have_similar_embeddings(bert):
    encode = measure.compiled(bert)
    said = ["A man is eating food.", "A man eats a meal.", "The weather is cold today."]
    embeddings = measure.embed(bert, encode, bert.params, said)
    cosines = embeddings @ embeddings.T
    assert cosines[0, 1] > 0.9
    assert np.abs(cosines[2, :2]).max() < 0.1
