"""The tokenizer of a GGUF file's metadata, by the library `tokenizers`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .._core.errors import install_command

# How a text is cut before pairs are merged, by `tokenizer.ggml.pre`. Numbers differ: all digits of
# one together, three at most, or each alone.
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
_MERGES_LAST = {"llama-bpe"}  # a word that is a token is one, whatever merges would make of it

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6  # `tokenizer.ggml.token_type`

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # in SentencePiece's tokens


def tokenizer(metadata: Mapping[str, Any]) -> Any:
    """Returns the `tokenizers.Tokenizer` that a file's metadata describes.

    Byte-level pair encoding, `gpt2` in GGUF, that of SmolLM, Llama 3, Qwen2 and 3 and GPT-2; and
    SentencePiece's, `llama`, of Llama 2, Mistral and Gemma. It adds no token of its own at the
    beginning or the end of a text.

    **Arguments:**

    - `metadata`: `GgufFile.metadata`.

    **Raises:** `ValueError` for a tokenizer of another kind, and where a part of it is missing.
    `ImportError` where `tokenizers` is not installed.

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
        words = _sentencepiece(metadata)
    elif kind == "gpt2" and pre in _PATTERNS:
        words = _byte_pairs(metadata, pre)
    else:
        raise ValueError(
            f"the file has a tokenizer {kind!r} with pre-tokenizer {pre!r}; supported are 'llama', "
            f"and 'gpt2' with {', '.join(map(repr, _PATTERNS))}"
        )
    special = [tokenizers.AddedToken(t, normalized=False) for t in _of_kind(metadata, _CONTROL)]
    words.add_special_tokens(special)
    others = _of_kind(metadata, _USER_DEFINED)
    words.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in others])
    return words


def _byte_pairs(metadata: Mapping[str, Any], pre: str) -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    merges = _part(metadata, "merges")
    model = models.BPE(
        vocab={token: number for number, token in enumerate(_part(metadata, "tokens"))},
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


def _sentencepiece(metadata: Mapping[str, Any]) -> Any:
    """SentencePiece's pairs: of all neighbours that make a token, those of the highest score are
    merged first. Spaces are letters, and letters that are no token are bytes."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    tokens = _part(metadata, "tokens")
    kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    number_of = {token: number for number, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=number_of,
        merges=_merges(tokens, _part(metadata, "scores"), kinds),
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


def _merges(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Each way to make a token of two, the token of the highest score first."""
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
    """Returns what `tokenizer.json` and `tokenizer_config.json` of a folder of Hugging Face have.

    Unlike `tokenizer`, the former adds the tokens that the model wants at the beginning and the
    end.

    **Arguments:**

    - `metadata`: `GgufFile.metadata`.

    **Returns:** the contents of the files, by their names.

    **Raises:** as `tokenizer`.
    """
    words = tokenizer(metadata)
    from tokenizers import processors

    tokens = _part(metadata, "tokens")
    named = {}
    for name, key in _NAMED.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and 0 <= number < len(tokens):
            named[name] = (tokens[number], int(number))
    # What llama.cpp does where the file does not say.
    kind, pre = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    usual = kind == "llama" or pre == "llama-bpe"
    begins = metadata.get("tokenizer.ggml.add_bos_token", usual)
    begin = [named["bos_token"]] if begins and "bos_token" in named else []
    ends = metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in named
    end = [named["eos_token"]] if ends else []
    if begin or end:
        around = lambda text: [*(t for t, _ in begin), text, *(t for t, _ in end)]
        words.post_processor = processors.TemplateProcessing(
            single=around("$A"),
            pair=[*around("$A"), *(f"{piece}:1" for piece in around("$B"))],
            special_tokens=begin + [one for one in end if one not in begin],
        )
    architecture = metadata.get("general.architecture")
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: token for name, (token, _) in named.items()},
        "chat_template": metadata.get("tokenizer.chat_template"),
        "model_max_length": metadata.get(f"{architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    said = {key: value for key, value in said.items() if value is not None}
    return {
        "tokenizer.json": words.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(said, indent=2, ensure_ascii=False) + "\n",
    }


_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def _part(metadata: Mapping[str, Any], name: str) -> Any:
    part = metadata.get(f"tokenizer.ggml.{name}")
    if part is None:
        raise ValueError(
            f"the tokenizer of the file is incomplete: tokenizer.ggml.{name} is missing"
        )
    return part


def _of_kind(metadata: Mapping[str, Any], wanted: int) -> list[str]:
    tokens, kinds = _part(metadata, "tokens"), metadata.get("tokenizer.ggml.token_type", [])
    return [token for token, kind in zip(tokens, kinds, strict=False) if kind == wanted]
