"""The perplexity of the demo's language model on a text, packed as in its file and dense.

    python benchmarks/perplexity.py wikitext2-test.txt    # a text of your own; two minutes

Windows of 512 tokens are read each by itself, and `exp` of the mean loss is told. On the first
4,096 tokens of the test set of WikiText-2 it is 27.61.
"""

import argparse
from pathlib import Path

import jax

import veneer as vn
from veneer.demo.fetch import LANGUAGE_MODEL, fetch
from veneer.demo.language_model import load, perplexity, windows
from veneer.demo.programs import program


def main(text: Path, count: int) -> None:
    """Prints the perplexity of `count` windows of a text, of the packed and the dense weights."""
    model = load(fetch(LANGUAGE_MODEL))
    tokens = windows(model, [text.read_text(encoding="utf-8")[: 20_000 * count]], count)
    losses = jax.jit(vn.implicit(program("llama").losses), static_argnums=1)
    for name, params in {"packed": model.params, "dense": vn.materialise(model.params)}.items():
        print(f"{name}: {perplexity(losses, model, params, tokens):.4f}", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("text", type=Path)
    options.add_argument("--windows", type=int, default=8)
    given = options.parse_args()
    main(given.text, given.windows)
