"""The corpus: deterministic, distinct, English."""

import pytest

from veneer.demo.sentences import sentences


def test_there_are_512_and_no_two_are_the_same():
    assert len(sentences()) == len(set(sentences())) == 512


def test_the_same_python_gives_the_same_list():
    assert sentences(100) == sentences(100)


def test_they_are_sentences():
    for sentence in sentences():
        assert 6 <= len(sentence.split()) <= 32
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert not set("=<>[]{}*|`\n") & set(sentence)


def test_more_than_there_are_is_an_error_that_says_how_many_there_are():
    with pytest.raises(ValueError, match=r"holds \d+ sentences, fewer than 100000"):
        sentences(100_000)
