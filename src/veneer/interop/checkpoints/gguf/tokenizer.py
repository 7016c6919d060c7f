"""The tokenizer of a GGUF file's metadata, by the library `tokenizers`."""

from collections.abc import Mapping
from typing import Any

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

_CONTROL, _USER_DEFINED = 3, 4  # `tokenizer.ggml.token_type`


def tokenizer(metadata: Mapping[str, Any]) -> Any:
    """Returns the `tokenizers.Tokenizer` that a file's metadata describes.

    Byte-level pair encoding, `gpt2` in GGUF: that of SmolLM, Llama 3, Qwen2 and 3 and GPT-2. It
    adds no token of its own at the beginning or the end of a text.

    **Arguments:**

    - `metadata`: `GgufFile.metadata`.

    **Raises:** `ValueError` for a tokenizer of another kind. `ImportError` where `tokenizers` is
    not installed.

    >>> from veneer.interop.checkpoints.gguf import tokenizer
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
        from tokenizers import decoders, models, pre_tokenizers
    except ImportError as error:
        raise ImportError(
            "the tokenizer of a GGUF file needs: pip install 'veneer[demo]'"
        ) from error

    kind, pre = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind != "gpt2" or pre not in _PATTERNS:
        raise ValueError(
            f"the file has a tokenizer {kind!r} that cuts texts as {pre!r}, and what is made here "
            f"is 'gpt2', as {', '.join(map(repr, _PATTERNS))}"
        )
    tokens, merges = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    model = models.BPE(
        vocab={token: number for number, token in enumerate(tokens)},
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
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    of_kind = lambda wanted: [t for t, k in zip(tokens, kinds, strict=False) if k == wanted]
    words.add_special_tokens(of_kind(_CONTROL))
    words.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in of_kind(_USER_DEFINED)])
    return words
