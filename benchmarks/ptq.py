"""What MiniLM loses in few bits: rounded to nearest, and by the activations that its weights meet.

    python benchmarks/ptq.py

Prints a table: the mean cosine of 128 sentences to f32, and the seconds that calibration took, with
512 other sentences. The model and the sentences are the demo's. An hour on two cores.
"""

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import markdown_table
from report import made_with

import veneer as vn
from veneer.demo.measure import compiled, embed, mean_cosine
from veneer.demo.model import Model
from veneer.demo.programs import program
from veneer.demo.run import load
from veneer.demo.sentences import all_sentences

HELD_OUT, CALIBRATED_ON = 128, 512
CASES = [("int4", 128), ("int4", 32), ("int4", None), ("int3", 128), ("int2", 32), ("nf4", 64)]
WAYS: dict[str, dict[str, Any]] = {
    "scales of the least error": {"method": "nearest"},
    "GPTQ": {"method": "gptq"},
    "GPTQ, `sequential`": {"method": "gptq", "sequential": True},
}


def rules(qtype: str, tile: int | None, tables: str | None) -> list[vn.quant.Rule]:
    """Rules for all weights, and embedding tables in a format of their own, or the same."""
    of_tables = (qtype, tile) if tables is None else (tables, None)
    return [
        vn.quant.Rule(r"embeddings\..*weight", of_tables[0], tile_size=of_tables[1], tile_axis=-1),
        vn.quant.Rule(".*weight", qtype, tile_size=tile, tile_axis=-1),
    ]


def rows(bert: Model, held_out: Sequence[str], batches: Sequence[Any]) -> Iterator[list[str]]:
    """A row of the table for each format, with embeddings in it and in int8."""
    params = {name: jnp.asarray(x) for name, x in bert.params.items()}
    encode = compiled(bert)
    encoder = jax.jit(program("sentence_encoder").encode, static_argnums=1)
    model = lambda params, ids, mask: encoder(params, bert.config, ids, mask)
    reference = embed(bert, encode, params, held_out)
    cosine = lambda small: f"{mean_cosine(embed(bert, encode, small, held_out), reference):.3f}"
    for qtype, tile in CASES:
        for tables in (None, "int8"):
            chosen = rules(qtype, tile, tables)
            cells = [f"{qtype}, {'channelwise' if tile is None else f'tile {tile}'}", tables or ""]
            cells.append(cosine(vn.quant.quantize_tree(params, chosen)))
            for options in WAYS.values():
                start = time.perf_counter()
                small = vn.quant.calibrate(model, chosen, params=params, **options)(batches)
                seconds = time.perf_counter() - start
                cells.append(f"{cosine(small)} ({seconds:.0f} s)")
            print(*cells, sep=" | ", file=sys.stderr, flush=True)
            yield cells


def unpadded(bert: Model, sentences: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of sentences of as many tokens, cut to multiples of 8: padding would be counted."""
    by_length: dict[int, list[list[int]]] = {}
    for encoding in bert.tokenizer.encode_batch(list(sentences)):
        length = len(encoding.ids) // 8 * 8
        by_length.setdefault(length, []).append(encoding.ids[:length])
    lengths = sorted(length for length in by_length if length)
    ids = [np.array(by_length[length], np.int32) for length in lengths]
    return [(x, np.ones(x.shape, bool)) for x in ids]


def main() -> None:
    """Prints the table."""
    bert = load(None)
    every = all_sentences()
    order = np.random.default_rng(0).permutation(len(every))[: HELD_OUT + CALIBRATED_ON]
    sentences = [every[i] for i in order]
    batches = unpadded(bert, sentences[HELD_OUT:])
    heading = ["weights", "embeddings", "to nearest", *WAYS]
    table = markdown_table(heading, list(rows(bert, sentences[:HELD_OUT], batches)))
    print(made_with(), table, sep="\n\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    main()
