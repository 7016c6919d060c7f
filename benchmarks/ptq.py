"""What MiniLM loses in few bits: rounded to nearest, and by the activations that its weights meet.

    python benchmarks/ptq.py                 # half an hour on two cores
    python benchmarks/ptq.py --only int4

Prints tables of the mean cosine of 128 sentences to f32, and of the seconds that calibrating took,
with 512 other sentences. The model and the sentences are the demo's.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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
#: The format of weights, its tile, and the format of activations.
CASES = [
    ("int4", 128, None),
    ("int4", 32, None),
    ("nf4", 64, None),
    ("int3", 128, None),
    ("int2", 32, None),
    ("int8", None, "int8"),
    ("int4", 128, "int8"),
    ("int4", 128, "int4"),
]
#: By what each column is called: fields of rules, and arguments of `calibrate`.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scales of the least error": ({}, {"method": "nearest"}),
    "GPTQ": ({}, {"method": "gptq"}),
    "AWQ and GPTQ": ({}, {"method": "awq+gptq"}),
    "rotated": ({"rotate": True}, {"method": "nearest"}),
    "rotated, GPTQ": ({"rotate": True}, {"method": "gptq"}),
}
#: What is trained, of formats of few bits: epochs, in batches of 16, and the learning rate.
TUNED = {"int3": (4, 0.002), "int2": (4, 0.004)}


def rules(case: tuple[str, int | None, str | None], tables: str | None, **fields: Any) -> list[Any]:
    """Rules for all weights, and embedding tables in a format of their own, or the same."""
    qtype, tile, act_qtype = case
    of_tables = (qtype, tile) if tables is None else (tables, None)
    return [
        vn.quant.Rule(
            r"embeddings\..*weight", of_tables[0], tile_size=of_tables[1], tile_axis=-1, **fields
        ),
        vn.quant.Rule(
            ".*weight", qtype, tile_size=tile, tile_axis=-1, act_qtype=act_qtype, **fields
        ),
    ]


class Measured:
    """The model, what it is calibrated with and what it is measured on."""

    def __init__(self, bert: Model, sentences: Sequence[str]):
        self._bert, self._held_out = bert, sentences[:HELD_OUT]
        self.batches = [tuple(batch) for batch in bert.unpadded(sentences[HELD_OUT:])]
        self.params = {name: jnp.asarray(x) for name, x in bert.params.items()}
        encoder = jax.jit(program("sentence_encoder").encode, static_argnums=1)
        self.model = lambda params, ids, mask: encoder(params, bert.config, ids, mask)
        self._encode = compiled(bert)
        self._reference = embed(bert, self._encode, self.params, self._held_out)

    def cosine(self, small: Any) -> float:
        """The mean cosine of what is held out to f32."""
        return mean_cosine(embed(self._bert, self._encode, small, self._held_out), self._reference)

    def timed(self, make: Callable[[], Any]) -> tuple[Any, str]:
        """What is made, and the cell of a table for it."""
        start = time.perf_counter()
        small = make()
        return small, f"{self.cosine(small):.4f} ({time.perf_counter() - start:.0f} s)"


def rows(of: Measured, only: str) -> Iterator[list[str]]:
    """A row of the table for each format, with embeddings in it and in int8."""
    for case in CASES:
        if only not in case[0]:
            continue
        for tables in (None, "int8")[: 1 if case[0] == "int8" else 2]:
            qtype, tile, act_qtype = case
            cells = [f"{qtype}, {'channelwise' if tile is None else f'tile {tile}'}"]
            cells += [act_qtype or "", tables or ""]
            cells.append(f"{of.cosine(vn.quant.quantize_tree(of.params, rules(case, tables))):.4f}")
            for fields, how in WAYS.values():
                chosen = rules(case, tables, **fields)
                calibration = vn.quant.calibrate(of.model, chosen, params=of.params, **how)
                small, cell = of.timed(lambda calibration=calibration: calibration(of.batches))
                cells.append(cell)
                if how["method"] == "gptq" and not fields:
                    by_gptq = small
            cells.append("" if act_qtype else _tuned(of, qtype, by_gptq))
            print(*cells, sep=" | ", file=sys.stderr, flush=True)
            yield cells


def _tuned(of: Measured, qtype: str, small: Any) -> str:
    if qtype not in TUNED:
        return ""
    epochs, rate = TUNED[qtype]
    few = [
        tuple(x[i : i + 16] for x in batch)
        for batch in of.batches
        for i in range(0, len(batch[0]) - 15, 16)
    ]
    tuning = vn.quant.tune(
        of.model,
        small,
        params=of.params,
        train=("codes", "scales", "dense"),
        epochs=epochs,
        learning_rate=rate,
    )
    return of.timed(lambda: tuning(few))[1]


def measured() -> Measured:
    """The demo's model, and its sentences in the order of a seed."""
    every = all_sentences()
    order = np.random.default_rng(0).permutation(len(every))[: HELD_OUT + CALIBRATED_ON]
    return Measured(load(None), [every[i] for i in order])


def main(only: str) -> None:
    """Prints the table."""
    of = measured()
    heading = ["weights", "activations", "embeddings", "to nearest", *WAYS, "GPTQ, tuned"]
    print(made_with(), markdown_table(heading, list(rows(of, only))), sep="\n\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What MiniLM loses in few bits.")
    parser.add_argument("--only", default="", help="formats of weights with this in their names")
    warnings.simplefilter("ignore", UserWarning)
    main(parser.parse_args().only)
