"""The tokenizer of a GGUF file, and its Hugging Face files."""

import json

import pytest
import tokenizers

from veneer.files.gguf import tokenizer, tokenizer_files

# The kinds of SentencePiece tokens: 1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte.
_TOKENS = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    ("<user>", 0.0, 4),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    # The scores of pairs decrease in order of discovery. Letters come after all pairs.
    ("ab", -1.0, 1),
    ("▁a", -2.0, 1),
    ("abab", -3.0, 1),
    *((letter, -10.0 - i, 1) for i, letter in enumerate("▁abc")),
]
NUMBER_OF = {token: number for number, (token, *_) in enumerate(_TOKENS)}
SENTENCEPIECE = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [token for token, *_ in _TOKENS],
    "tokenizer.ggml.scores": [score for _, score, _ in _TOKENS],
    "tokenizer.ggml.token_type": [kind for *_, kind in _TOKENS],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ab", ["▁", "ab"]),  # the pair with the higher score, although "▁a" comes first
        ("ac", ["▁a", "c"]),
        ("cabab a", ["▁", "c", "abab", "▁a"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("c<user></s>", ["▁", "c", "<user>", "</s>"]),
        ("", []),
    ],
)
def test_sentencepiece_merges_the_pair_of_the_highest_score(text, tokens):
    words = tokenizer(SENTENCEPIECE)
    assert words.encode(text).ids == [NUMBER_OF[token] for token in tokens]
    assert words.decode(words.encode(text).ids, skip_special_tokens=False) == text


def test_a_space_comes_first_only_where_the_file_wants_it():
    words = tokenizer(SENTENCEPIECE | {"tokenizer.ggml.add_space_prefix": False})
    assert words.encode("ab a").tokens == ["ab", "▁a"]
    assert words.decode(words.encode(" ab").ids) == " ab"


@pytest.mark.parametrize("missing", ["tokens", "scores"])
def test_a_part_that_is_missing_is_named(missing):
    part = f"tokenizer.ggml.{missing}"
    with pytest.raises(ValueError, match=f"{part} is missing"):
        tokenizer({k: v for k, v in SENTENCEPIECE.items() if k != part})


@pytest.mark.parametrize(
    ("said", "around"),
    [
        ({}, (["<s>"], [])),
        ({"tokenizer.ggml.add_eos_token": True}, (["<s>"], ["</s>"])),
        ({"tokenizer.ggml.add_bos_token": False}, ([], [])),
    ],
)
def test_the_files_add_the_tokens_that_the_model_wants(said, around):
    files = tokenizer_files(SENTENCEPIECE | said | {"tokenizer.chat_template": "{{ x }}"})
    begin, end = around
    words = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    assert words.encode("ab").tokens == [*begin, "▁", "ab", *end]
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert (config["chat_template"], config["model_max_length"]) == ("{{ x }}", 64)
