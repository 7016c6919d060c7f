"""Compare a quantized language model with its reference, token by token."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.surface.implicit import implicit
from . import llama

if TYPE_CHECKING:
    from . import LanguageModel

#: The models read windows of this many tokens. The second half of each window is scored, so that
#: each scored token follows at least this half. llama.cpp's perplexity tool does the same. No BOS
#: token is added.
WINDOW = 512


@dataclass(frozen=True)
class Comparison:
    """How much the predictions of a model differ from a reference, on the same text.

    - `perplexity`, `reference_perplexity`: `exp` of the mean loss, in nats per token.
    - `kl_mean`, `kl_99_9`: the mean and the 99.9th percentile of the KL divergence from the
      reference to the model over the vocabulary, in nats per token.
    - `same_top`: the share of tokens for which both models have the same most likely token.
    - `nbytes`, `reference_nbytes`: the bytes of the parameters, as stored.
    - `tokens`: the number of tokens that were scored.
    """

    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_99_9: float
    same_top: float
    nbytes: int
    reference_nbytes: int
    tokens: int


def compare(
    reference: "LanguageModel", model: "LanguageModel", text: str, *, windows: int | None = None
) -> Comparison:
    """Compare a model with a reference by their predictions on a text.

    The text is read in windows of 512 tokens, and the second half of each window is scored.

    **Arguments:**

    - `reference`: the reference, such as the dense model.
    - `model`: the model to compare, with the same vocabulary.
    - `text`: the text. Both models read it by the tokenizer of the reference.
    - `windows`: the number of windows. None reads the whole text.

    **Returns:** a `Comparison`.

    **Raises:** `ValueError` if the text is too short, or if the vocabularies differ.
    """
    same_size = reference.config.vocab_size == model.config.vocab_size
    if not same_size or reference.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise ValueError("the models have different vocabularies, so they cannot be compared")
    tokens = split_windows(reference.tokenizer, text, windows)
    rows = min(len(m.params["model.embed_tokens.weight"]) for m in (reference, model))
    if tokens.max() >= rows:
        raise ValueError(f"the text has token {tokens.max()}, but a model has only {rows} tokens")
    sums = np.zeros(3)
    divergences = []
    for window in tokens:
        loss, reference_loss, divergence, is_same = map(
            np.asarray,
            _compare_window()(
                reference.params, model.params, reference.config, model.config, window[None]
            ),
        )
        sums += loss.sum(), reference_loss.sum(), is_same.sum()
        divergences.append(divergence)
    all_divergences = np.concatenate(divergences)
    count = len(all_divergences)
    return Comparison(
        perplexity=float(np.exp(sums[0] / count)),
        reference_perplexity=float(np.exp(sums[1] / count)),
        kl_mean=float(all_divergences.mean()),
        kl_99_9=float(np.quantile(all_divergences, 0.999)),
        same_top=float(sums[2] / count),
        nbytes=model.nbytes,
        reference_nbytes=reference.nbytes,
        tokens=count,
    )


def split_windows(tokenizer: Any, text: str, count: int | None = None) -> np.ndarray:
    """Return the tokens of a text in windows of 512, as `int32[windows, 512]`.

    **Arguments:**

    - `tokenizer`: a `tokenizers.Tokenizer`.
    - `text`: the text.
    - `count`: the number of windows. None is as many as the text has.

    **Raises:** `ValueError` if the text has fewer tokens than the windows need.
    """
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    count = max(len(tokens) // WINDOW, 1) if count is None else count
    if count < 1:
        raise ValueError(f"the number of windows must be 1 or more, not {count}")
    if len(tokens) < count * WINDOW:
        raise ValueError(f"the text has {len(tokens)} tokens, but {count * WINDOW} are needed")
    return np.asarray(tokens[: count * WINDOW], np.int32).reshape(-1, WINDOW)


@cache
def _compare_window() -> Any:
    return jax.jit(implicit(_score_window), static_argnums=(2, 3))


def _score_window(
    reference: Any,
    params: Any,
    reference_config: llama.LlamaConfig,
    config: llama.LlamaConfig,
    tokens: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return four arrays with an element for each scored token of a window `int32[1, 512]`.

    They are the loss of the model, the loss of the reference, the KL divergence from the reference
    to the model, and whether both have the same most likely token. `reference` has the parameters
    of the reference, and `params` the parameters of the model.
    """
    # Position i predicts token i + 1.
    scored, targets = slice(WINDOW // 2, WINDOW - 1), tokens[0, WINDOW // 2 + 1 :]

    def log_probabilities(params: Any, config: llama.LlamaConfig) -> jax.Array:
        cache = llama.empty_cache(config, 1, WINDOW, params["model.norm.weight"].dtype)
        x, _ = llama.hidden(params, config, tokens, cache)
        logits = llama.logits(params, x[0, scored])
        return jax.nn.log_softmax(logits.astype(jnp.float32))

    p, q = log_probabilities(reference, reference_config), log_probabilities(params, config)
    loss = lambda log_probability: -jnp.take_along_axis(log_probability, targets[:, None], 1)[:, 0]
    divergence = jnp.maximum((jnp.exp(p) * (p - q)).sum(-1), 0)
    return loss(q), loss(p), divergence, p.argmax(-1) == q.argmax(-1)
