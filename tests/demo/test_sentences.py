"""The corpus: the same everywhere, distinct, English."""

import hashlib

import pytest

from veneer.demo.fetch import PROSE, fetch
from veneer.demo.sentences import all_sentences, sentences


@pytest.fixture(autouse=True)
def _fetched():
    try:
        fetch(PROSE)
    except FileNotFoundError as error:  # neither a cache nor a network
        pytest.skip(str(error))


def test_there_are_512_and_no_two_are_the_same():
    assert len(sentences()) == len(set(sentences())) == 512


def test_they_are_the_same_on_every_python():
    digest = hashlib.sha256("\n".join(all_sentences()).encode()).hexdigest()
    assert (len(all_sentences()), digest[:16]) == (2623, "ab006f0b9df15c36")


def test_they_are_sentences():
    for sentence in sentences():
        assert 6 <= len(sentence.split()) <= 32
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert not set("=<>[]{}*|`\n") & set(sentence)


def test_more_than_there_are_is_an_error_that_says_how_many_there_are():
    with pytest.raises(ValueError, match=r"holds \d+ sentences, fewer than 100000"):
        sentences(100_000)
