"""Measure the likelihood of Whisper's transcripts in few bits, for each calibration method.

    python benchmarks/ptq_speech.py --write    # 15 minutes on two cores; needs espeak-ng

espeak-ng speaks sentences of the demo, in recordings of 30 seconds. Whisper tiny.en transcribes
them with the f16 values of its file. The table shows how much less likely each token of these
transcripts is after quantization, as a mean in nats. Calibration uses other sentences. `--write`
writes the table into docs/ptq.md.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import markdown_table
from report import made_with, write

import veneer as vn
from veneer.demo.fetch import all_sentences, fetch

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import dictation
import whisper

LONGEST = 128  # the most tokens in 30 seconds
#: The fields of the rule, and the calibration method. None rounds to nearest.
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "to nearest": ({}, None),
    "GPTQ": ({}, "gptq"),
    "rotated": ({"rotate": True}, "nearest"),
    "rotated, GPTQ": ({"rotate": True}, "gptq"),
}


def recordings(sentences: Iterator[str], count: int) -> list[np.ndarray]:
    """Return recordings of up to 30 seconds of whole sentences, with pauses between them."""
    size, pause = whisper.RATE * whisper.SECONDS, np.zeros(whisper.RATE // 2, np.float32)
    found: list[np.ndarray] = []
    sound = np.zeros(0, np.float32)
    for sentence in sentences:
        new = np.concatenate([dictation.speak(sentence), pause])
        if len(sound) + len(new) > size:
            found.append(sound)
            if len(found) == count:
                return found
            sound = new[:0]
        sound = np.concatenate([sound, new])
    raise ValueError(f"the sentences fill {len(found)} recordings of 30 seconds, not {count}")


def likelihoods(p: Any, config: whisper.Config, sound: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log likelihood of each token, given the sound and the tokens before it."""
    cache = whisper.begin(p, config, whisper.encode(p, config, sound), len(tokens) + 1)
    prompt = jnp.array([whisper.START, whisper.SILENT_TIMES])
    logits, _ = whisper.decode(p, config, jnp.concatenate([prompt, tokens[:-1]]), cache, 0)
    logs = jax.nn.log_softmax(logits[1:])
    return jnp.take_along_axis(logs, tokens[:, None], 1)[:, 0]


class Heard:
    """The Whisper model with its f32 parameters."""

    def __init__(self) -> None:
        stored, self.config = whisper.load(fetch(dictation.MODEL))
        self.params = {
            k: jnp.asarray(v, jnp.float32) for k, v in stored.items() if v.dtype.kind == "f"
        }
        self._transcribe = jax.jit(whisper.transcribe, static_argnums=1, static_argnames="count")

    def written(self, sounds: Sequence[np.ndarray]) -> list[tuple[jax.Array, np.ndarray]]:
        """Transcribe recordings. Return a spectrogram and tokens for each."""
        batches = []
        for sound in map(whisper.spectrogram, sounds):
            found = self._transcribe(self.params, self.config, sound, count=LONGEST)
            tokens = np.asarray(found)
            end = int((tokens == whisper.END).argmax()) + 1 if whisper.END in tokens else LONGEST
            batches.append((sound, tokens[: end // 8 * 8]))  # each length compiles
        return batches


def rows(each: int, qtype: str, tile: int) -> Iterator[list[str]]:
    """Measure and yield a row for each method."""
    heard = Heard()
    sentences = all_sentences()
    order = np.random.default_rng(0).permutation(len(sentences))
    spoken = recordings((sentences[i] for i in order), 2 * each)
    batches = heard.written(spoken)
    held_out, others = batches[:each], batches[each:]
    config, log = heard.config, jax.jit(vn.implicit(likelihoods), static_argnums=1)
    mean = lambda p: float(np.mean(np.concatenate([log(p, config, *batch) for batch in held_out])))
    dense = mean(heard.params)
    yield ["as in the file, f16", f"{dense:.4f}", "", ""]
    model: Callable = lambda p, *batch: likelihoods(p, config, *batch)
    to_nearest = math.nan
    for name, (fields, method) in CASES.items():
        rule = vn.quant.Rule(
            r".*/(linear_\d|embeddings)/weight", qtype, tile_size=tile, tile_axis=-1, **fields
        )
        if method is None:
            small = vn.quant.quantize_tree(heard.params, [rule])
        else:
            small = vn.quant.calibrate(model, [rule], params=heard.params, method=method)(others)
        found = mean(small)
        if method is None:
            to_nearest = dense - found
        share = (dense - found) / to_nearest
        cells = [name, f"{found:.4f}", f"{dense - found:.4f}", f"{share:.2f}"]
        print(*cells, sep=" | ", file=sys.stderr, flush=True)
        yield cells


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--each", type=int, default=12, help="recordings for each purpose")
    parser.add_argument("--qtype", default="int4", help="the format of the matrices")
    parser.add_argument("--tile", type=int, default=64, help="how many values share a scale")
    parser.add_argument("--write", action="store_true", help="put the table into docs/ptq.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    found = list(rows(options.each, options.qtype, options.tile))
    heading = ["matrices", "mean log-likelihood", "loses", "of what nearest loses"]
    text = f"{markdown_table(heading, found)}\n\n{made_with()}"
    print(text)
    if options.write:
        write("ptq", "ptq_speech.py", text)
