"""Build the tokenizer that the metadata of a GGUF file describe, with the library `tokenizers`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .._core.errors import install_command

# The patterns that split a text into words before pairs are merged, by `tokenizer.ggml.pre`. They
# differ in how many digits of a number stay together. None is the pattern of GPT-2.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _WORDS % "{1,3}",
    "qwen2": _WORDS % "",
}
_DIGITS_ALONE = {"smollm"}
_MERGES_LAST = {"llama-bpe"}  # a word that is in the vocabulary is never split

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6  # `tokenizer.ggml.token_type`

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # in SentencePiece's tokens


def tokenizer(metadata: Mapping[str, Any]) -> Any:
    """Return the `tokenizers.Tokenizer` that the metadata of a GGUF file describe.

    Two kinds are supported: byte-level pair encoding ("gpt2" in GGUF) of SmolLM, Llama 3, Qwen2,
    Qwen3 and GPT-2, and SentencePiece ("llama") of Llama 2, Mistral and Gemma. The tokenizer adds
    no tokens at the beginning or the end of a text.

    **Arguments:**

    - `metadata`: `GgufFile.metadata`.

    **Raises:** `ValueError` for another kind of tokenizer, or if an entry is missing. `ImportError`
    if `tokenizers` is not installed.

    >>> from veneer.files.gguf import tokenizer
    >>> tokens = ["a", "b", "ab", "Ġ", "<end>"]
    >>> words = tokenizer({
    ...     "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
    ...     "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"],
    ...     "tokenizer.ggml.token_type": [1, 1, 1, 1, 3],
    ... })
    >>> words.encode("ab a<end>").ids, words.decode([2, 3, 0])
    ([2, 3, 0, 4], 'ab a')
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"reading the tokenizer of a GGUF file needs tokenizers: {install_command('demo')}"
        ) from error

    kind, pre = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind == "llama":
        words = _build_sentencepiece(metadata)
    elif kind == "gpt2" and pre in _PATTERNS:
        words = _build_byte_pairs(metadata, pre)
    else:
        raise ValueError(
            f"the file has a tokenizer {kind!r} with pre-tokenizer {pre!r}; supported are 'llama', "
            f"and 'gpt2' with {', '.join(map(repr, _PATTERNS))}"
        )
    special = [tokenizers.AddedToken(t, normalized=False) for t in _find_tokens(metadata, _CONTROL)]
    words.add_special_tokens(special)
    others = _find_tokens(metadata, _USER_DEFINED)
    words.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in others])
    return words


def _build_byte_pairs(metadata: Mapping[str, Any], pre: str) -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    merges = _require_entry(metadata, "merges")
    model = models.BPE(
        vocab={token: number for number, token in enumerate(_require_entry(metadata, "tokens"))},
        merges=[tuple(merge.split(" ")) for merge in merges],
        ignore_merges=pre in _MERGES_LAST,
    )
    words = tokenizers.Tokenizer(model)
    pattern = _PATTERNS[pre]
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)]
    if pattern:
        steps.insert(0, pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    if pre in _DIGITS_ALONE:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    words.pre_tokenizer = pre_tokenizers.Sequence(steps)
    words.decoder = decoders.ByteLevel()
    return words


def _build_sentencepiece(metadata: Mapping[str, Any]) -> Any:
    """Return a SentencePiece tokenizer, which merges the pair with the best score first.

    Spaces are letters. Letters that are not in the vocabulary are encoded as bytes.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    tokens = _require_entry(metadata, "tokens")
    kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    number_of = {token: number for number, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=number_of,
        merges=_list_merges(tokens, _require_entry(metadata, "scores"), kinds),
        unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=any(kind == _BYTE for kind in kinds),
    )
    words = tokenizers.Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decode = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        decode.append(decoders.Strip(" ", 1, 0))
    words.normalizer = normalizers.Sequence(steps)
    words.decoder = decoders.Sequence(decode)
    return words


def _list_merges(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, the best score first.

    **Arguments:**

    - `tokens`, `scores`: the tokens and their scores.
    - `kinds`: the number of the GGUF type of each token. Special tokens are in no pair.
    """
    normal = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _NORMAL
    }
    ranked = [
        (-scores[number], number, normal[token[:at]], token[:at], token[at:])
        for token, number in normal.items()
        for at in range(1, len(token))
        if token[:at] in normal and token[at:] in normal
    ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the contents of `tokenizer.json` and `tokenizer_config.json`, as a dict.

    Unlike the result of `tokenizer`, it adds the tokens that the model expects at the beginning and
    the end of a text.

    **Arguments:**

    - `metadata`: `GgufFile.metadata`.

    **Raises:** the errors of `tokenizer`.
    """
    words = tokenizer(metadata)
    from tokenizers import processors

    tokens = _require_entry(metadata, "tokens")
    named = {}
    for name, key in _NAMED.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and 0 <= number < len(tokens):
            named[name] = (tokens[number], int(number))
    begin = [named["bos_token"]] if begins_with_bos(metadata) and "bos_token" in named else []
    ends = metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in named
    end = [named["eos_token"]] if ends else []
    if begin or end:
        around = lambda text: [*(t for t, _ in begin), text, *(t for t, _ in end)]
        words.post_processor = processors.TemplateProcessing(
            single=around("$A"),
            pair=[*around("$A"), *(f"{piece}:1" for piece in around("$B"))],
            special_tokens=begin + [token for token in end if token not in begin],
        )
    architecture = metadata.get("general.architecture")
    entries = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: token for name, (token, _) in named.items()},
        "chat_template": metadata.get("tokenizer.chat_template"),
        "model_max_length": metadata.get(f"{architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    entries = {key: value for key, value in entries.items() if value is not None}
    return {
        "tokenizer.json": words.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(entries, indent=2, ensure_ascii=False) + "\n",
    }


# Hugging Face's names of special tokens, and GGUF's.
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def begins_with_bos(metadata: Mapping[str, Any]) -> bool:
    """Return whether texts begin with the token BOS: by the metadata, or as llama.cpp does."""
    kind, pre = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    return bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre == "llama-bpe"))


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens in the metadata of a GGUF file, such as "bos_token"."""
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    ids = {name: metadata.get(f"tokenizer.ggml.{x}_token_id") for name, x in _NAMED.items()}
    return {
        name: str(tokens[int(i)])
        for name, i in ids.items()
        if i is not None and 0 <= int(i) < len(tokens)
    }


def _require_entry(metadata: Mapping[str, Any], name: str) -> Any:
    entry = metadata.get(f"tokenizer.ggml.{name}")
    if entry is None:
        raise ValueError(
            f"the tokenizer of the file is incomplete: tokenizer.ggml.{name} is missing"
        )
    return entry


def _find_tokens(metadata: Mapping[str, Any], wanted: int) -> list[str]:
    tokens, kinds = (
        _require_entry(metadata, "tokens"),
        metadata.get("tokenizer.ggml.token_type", []),
    )
    return [token for token, kind in zip(tokens, kinds, strict=False) if kind == wanted]
