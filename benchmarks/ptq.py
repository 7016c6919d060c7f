"""What MiniLM loses in few bits: rounded to nearest, and by the activations that its weights meet.

    python benchmarks/ptq.py --write         # an hour and more on two cores
    python benchmarks/ptq.py --only int4 --write  # these rows alone

Prints tables of the mean cosine of 128 sentences to f32, calibrated with 512 others; one of them
has GPTQ and AWQ of Qwix's too, where that is installed. The model and the sentences are the demo's.
With `--write` puts them into docs/ptq.md; docs/site/gallery.py draws the plot of it.
"""

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import ptq_qwix
from measure import markdown_table
from report import made_with, write_rows

import veneer as vn
from veneer.demo.measure import compiled, embed, mean_cosine, nbytes
from veneer.demo.model import Model
from veneer.demo.programs import program
from veneer.demo.run import load
from veneer.demo.sentences import all_sentences

HELD_OUT, CALIBRATED_ON = 128, 512
LEAST_ERROR = "mse,40,2.4"  # of scales, as `calibrate` has them


class Case(NamedTuple):
    """Formats: of weights, with the tile that shares a scale; of activations; of embeddings."""

    qtype: str
    tile: int | None = None
    act_qtype: str | None = None
    tables: str | None = None  # in that of the weights

    def __str__(self) -> str:
        tile = "channelwise" if self.tile is None else f"tile {self.tile}"
        by = "" if self.act_qtype is None else f", by {self.act_qtype}"
        return f"{self.qtype}, {tile}{by}" + (f"; embeddings {self.tables}" if self.tables else "")

    def rules(self, **fields: Any) -> list[vn.quant.Rule]:
        """Rules for all weights, with further fields."""
        tables = (self.qtype, self.tile) if self.tables is None else (self.tables, None)
        return [
            vn.quant.Rule(
                r"embeddings\..*weight", tables[0], tile_size=tables[1], tile_axis=-1, **fields
            ),
            vn.quant.Rule(
                ".*weight",
                self.qtype,
                tile_size=self.tile,
                tile_axis=-1,
                act_qtype=self.act_qtype,
                **fields,
            ),
        ]


CASES = [
    Case("int8"),
    Case("int4", 32),
    Case("nf4", 64),
    Case("int4", 128),
    Case("int4", 128, tables="int8"),
    Case("int4"),
    Case("int4", tables="int8"),
    Case("int3", 128),
    Case("int2", 32),
    Case("int8", act_qtype="int8"),
    Case("int4", 128, "int8"),
    Case("int4", 128, "int8", "int8"),
    Case("int4", 128, "int4"),
]
#: By what each column is called: fields of rules, and arguments of `calibrate`; None needs no data.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "to nearest": ({}, None),
    "least error": ({"calibration_method": LEAST_ERROR}, None),
    "rotated": ({"calibration_method": LEAST_ERROR, "rotate": True}, None),
    "GPTQ": ({}, {}),
    "rotated, GPTQ": ({"rotate": True}, {}),
}
BESIDE_QWIX = [
    Case("int4", tile, tables=tables) for tile in (128, None) for tables in (None, "int8")
]
BY_AWQ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AWQ": ({}, {"method": "awq"}),
    "AWQ and GPTQ": ({}, {"method": "awq+gptq"}),
}
IN_ORDER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rotated, GPTQ, propagated": ({"rotate": True}, {"sequential": True, "propagation": 0.5}),
}
OTHERS = BY_AWQ | IN_ORDER
#: What is rounded in order, too, and trained, from GPTQ's: epochs, in batches of 16, and the rate.
TUNED = {
    Case("int4", 128): (4, 0.001),
    Case("int3", 128): (4, 0.002),
    Case("int2", 32): (4, 0.004),
}
#: Cases whose matrices are those of one of these, whatever else they have.
SAME_WEIGHTS = [case for case in CASES if case[:2] in {tuned[:2] for tuned in TUNED}]
TUNING = "GPTQ, tuned"

Params = Mapping[str, Any]


class Measured:
    """The model, what it is calibrated with and what it is measured on."""

    def __init__(self, bert: Model, sentences: Sequence[str]):
        self._bert, self._held_out = bert, sentences[:HELD_OUT]
        self.batches = [tuple(batch) for batch in bert.unpadded(sentences[HELD_OUT:])]
        self.params = {name: jnp.asarray(x) for name, x in bert.params.items()}
        encode = program("sentence_encoder").encode
        encoder = jax.jit(encode, static_argnums=1)
        self.model = lambda params, ids, mask: encoder(params, bert.config, ids, mask)
        # In order, each stage observes other weights: compiled, it would be so again each time.
        self._op_by_op = lambda params, ids, mask: encode(params, bert.config, ids, mask)
        self._encode = compiled(bert)
        self._reference = embed(bert, self._encode, self.params, self._held_out)

    def cosine(self, small: Params) -> float:
        """The mean cosine of what is held out to f32."""
        return mean_cosine(embed(self._bert, self._encode, small, self._held_out), self._reference)

    @functools.cached_property
    def statistics(self) -> Mapping[str, vn.quant.ActivationStatistics]:
        """Of the activations, with second moments."""
        rules = Case("int8").rules()
        return vn.quant.observe(self.model, rules, params=self.params, gram=True)(self.batches)

    @functools.cache  # noqa: B019 - there is one
    def alone(self, qtype: str, tile: int | None, way: str) -> Params:
        """The parameters in a format, rounded in a way of ours or of Qwix's."""
        if way in ptq_qwix.WAYS:
            small = self.alone(qtype, tile, "to nearest")
            return dict(small) | dict(
                ptq_qwix.rounded(self.params, self.statistics, qtype, tile, way)
            )
        fields, how = (WAYS | OTHERS)[way]
        rules = Case(qtype, tile).rules(**fields)
        if how is None:
            return vn.quant.quantize_tree(self.params, rules)
        model = self._op_by_op if "sequential" in how else self.model
        calibration = vn.quant.calibrate(model, rules, params=self.params, **how)
        return calibration(self.batches)

    def rounded(self, case: Case, way: str) -> Params:
        """The parameters as a case has them: the same matrices, whatever activations are in."""
        fields, _ = (WAYS | OTHERS).get(way, ({}, None))
        of_tables, of_matrices = case.rules(**fields)
        small = dict(self.alone(case.qtype, case.tile, way))
        tables = {path: x for path, x in self.params.items() if of_tables.matches(path)}
        if case.tables is not None:
            small |= vn.quant.quantize_tree(tables, [of_tables])
        return {
            path: x if path in tables or x.ndim < 2 else of_matrices.with_activations(x)
            for path, x in small.items()
        }

    def tuned(self, case: Case) -> Params:
        """Those that GPTQ rounded, trained further."""
        few = [
            tuple(x[i : i + 16] for x in batch)
            for batch in self.batches
            for i in range(0, len(batch[0]) - 15, 16)
        ]
        epochs, rate = TUNED[case]
        tuning = vn.quant.tune(
            self.model,
            self.rounded(case, "GPTQ"),
            params=self.params,
            train=("codes", "scales", "dense"),
            epochs=epochs,
            learning_rate=rate,
        )
        return tuning(few)


Row = dict[str, float]  # cosines by the column; "MB" is what the parameters take


def row_of(of: Measured, case: Case) -> Row:
    """The row of a case; each cell is told of as it is found."""
    beside_qwix = [*BY_AWQ, *ptq_qwix.WAYS] if case in BESIDE_QWIX else []
    row: Row = {}
    in_order = IN_ORDER if case in SAME_WEIGHTS else []
    tuned = [TUNING] if case in TUNED else []
    for way in [*WAYS, *beside_qwix, *in_order, *tuned]:
        start = time.perf_counter()
        small = of.tuned(case) if way == TUNING else of.rounded(case, way)
        row.setdefault("MB", nbytes(small) / 1e6)
        row[way] = of.cosine(small)
        told = case, way, f"{row[way]:.4f}", f"{time.perf_counter() - start:.0f} s"
        print(*told, sep=" | ", file=sys.stderr, flush=True)
    return row


def table(rows: Mapping[Case, Row], names: Sequence[str]) -> str:
    """The cosines of some columns; the best of each row stands out."""
    cells = []
    for case, row in rows.items():
        best = max(row.get(name, 0) for name in names)
        shown = [f"{row[name]:.4f}" if name in row else "" for name in names]
        bold = [row.get(name) == best for name in names]
        shown = [f"**{x}**" if b else x for x, b in zip(shown, bold, strict=True)]
        cells.append([str(case), f"{row['MB']:.1f}", *shown])
    return markdown_table(["", "MB", *names], cells)


def measured() -> Measured:
    """The demo's model, and its sentences in the order of a seed."""
    every = all_sentences()
    order = np.random.default_rng(0).permutation(len(every))[: HELD_OUT + CALIBRATED_ON]
    return Measured(load(None), [every[i] for i in order])


def main() -> None:
    """Prints the tables, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/ptq.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    if not ptq_qwix.WAYS:
        print("Qwix is not installed: the table of it is left out", file=sys.stderr)
    of = measured()
    rows = {case: row_of(of, case) for case in CASES if options.only in str(case)}
    beside = {case: row for case, row in rows.items() if case in BESIDE_QWIX}
    of_qwix = ["to nearest", "AWQ", *list(ptq_qwix.WAYS), "GPTQ", "AWQ and GPTQ"]
    tables = {"ptq.py": table(rows, [*WAYS, *IN_ORDER, TUNING])}
    if ptq_qwix.WAYS:
        tables["ptq.py, Qwix"] = table(beside, of_qwix)
    for name, text in tables.items():
        print(text, made_with(), sep="\n\n", end="\n\n")
        if options.write:
            write_rows("ptq", name, text, made_with())


if __name__ == "__main__":
    main()
