"""Measure the error of MiniLM in few bits, for each calibration method.

    python benchmarks/ptq.py --write                 # into docs/ptq.md; over an hour on two cores
    python benchmarks/ptq.py --only int4 --write     # only these rows

Prints the mean cosine to f32 of 128 sentences, after calibration with 512 other sentences of the
demo. A second table has GPTQ and AWQ of Qwix, if Qwix is installed. Qwix receives single matrices
with the activation statistics of `vn.quant.observe`, because its own calibration only takes Flax
modules. Its scales are its default, "absmax". docs/site/gallery.py draws the plot of the first
table.
"""

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measure import markdown_table
from report import made_with, write_rows

import veneer as vn
from veneer.demo.encoder import BertEncoder
from veneer.demo.encoder_demo import compile_encoder, embed, load, mean_cosine
from veneer.demo.fetch import all_sentences, program
from veneer.quant import ActivationStatistics

try:
    from qwix._src.core import qarray
    from qwix.contrib import awq_core, gptq_core
except ImportError:  # the columns of Qwix are left out
    qarray = None

HELD_OUT, CALIBRATED_ON = 128, 512
LEAST_ERROR = "mse,40,2.4"  # the method for scales, as in `calibrate`


class Case(NamedTuple):
    """The format and tile of the weights, the format of activations, and the one of embeddings."""

    qtype: str
    tile: int | None = None
    act_qtype: str | None = None
    tables: str | None = None  # None: the format of the weights

    def __str__(self) -> str:
        tile = "channelwise" if self.tile is None else f"tile {self.tile}"
        by = "" if self.act_qtype is None else f", by {self.act_qtype}"
        return f"{self.qtype}, {tile}{by}" + (f"; embeddings {self.tables}" if self.tables else "")

    def rules(self, **fields: Any) -> list[vn.quant.Rule]:
        """Return rules for all weights, with additional fields."""
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
#: The fields of rules and the arguments of `calibrate` for each column. None: no calibration.
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
#: Cases that are also tuned: the epochs, in batches of 16, and the learning rate.
TUNED = {
    Case("int4", 128): (4, 0.001),
    Case("int3", 128): (4, 0.002),
    Case("int2", 32): (4, 0.004),
}
#: Cases with the same weight format as a tuned case.
SAME_WEIGHTS = [case for case in CASES if case[:2] in {tuned[:2] for tuned in TUNED}]
TUNING = "GPTQ, tuned"

Params = Mapping[str, Any]


class Measured:
    """The model, the sentences for calibration and the sentences for the measurement."""

    def __init__(self, bert: BertEncoder, sentences: Sequence[str]):
        self._bert, self._held_out = bert, sentences[:HELD_OUT]
        self.batches = [tuple(batch) for batch in bert.unpadded_batches(sentences[HELD_OUT:])]
        self.params = {name: jnp.asarray(x) for name, x in bert.params.items()}
        encode = program("sentence_encoder").encode
        encoder = jax.jit(encode, static_argnums=1)
        self.model = lambda params, ids, mask: encoder(params, bert.config, ids, mask)
        # A sequential calibration would compile the model again for each stage.
        self._op_by_op = lambda params, ids, mask: encode(params, bert.config, ids, mask)
        self._encode = compile_encoder(bert)
        self._reference = embed(bert, self._encode, self.params, self._held_out)

    def cosine(self, small: Params) -> float:
        """Return the mean cosine of the measured sentences to f32."""
        return mean_cosine(embed(self._bert, self._encode, small, self._held_out), self._reference)

    @functools.cached_property
    def statistics(self) -> Mapping[str, ActivationStatistics]:
        """The statistics of the activations, with second moments."""
        rules = Case("int8").rules()
        return vn.quant.observe(self.model, rules, params=self.params, gram=True)(self.batches)

    @functools.cache  # noqa: B019 - there is one
    def alone(self, qtype: str, tile: int | None, way: str) -> Params:
        """Return the parameters in a format, quantized by a method of veneer or Qwix."""
        if way in QWIX_WAYS:
            small = self.alone(qtype, tile, "to nearest")
            return dict(small) | dict(
                rounded_by_qwix(self.params, self.statistics, qtype, tile, way)
            )
        fields, how = (WAYS | OTHERS)[way]
        rules = Case(qtype, tile).rules(**fields)
        if how is None:
            return vn.quant.quantize_tree(self.params, rules)
        model = self._op_by_op if "sequential" in how else self.model
        calibration = vn.quant.calibrate(model, rules, params=self.params, **how)
        return calibration(self.batches)

    def rounded(self, case: Case, way: str) -> Params:
        """Return the parameters of a case. Cases with the same weight format share the matrices."""
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
        """Train the codes and scales of the parameters quantized by GPTQ."""
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


def _gptq(w: Any, statistics: ActivationStatistics, how: Any) -> Any:
    q, _ = gptq_core.quantize_weight(w, jnp.asarray(statistics.gram, jnp.float32), how)
    return qarray.dequantize(q)


def _awq(w: Any, statistics: ActivationStatistics, how: Any) -> Any:
    absmean = jnp.asarray(statistics.absmean, jnp.float32).ravel()
    q, factors = awq_core.quantize_weight(w, absmean, how)
    return qarray.dequantize(q) / factors


#: The function of each column of Qwix, by its heading.
QWIX_WAYS: dict[str, Callable[[Any, ActivationStatistics, Any], Any]] = (
    {} if qarray is None else {"Qwix's AWQ": _awq, "Qwix's GPTQ": _gptq}
)


def rounded_by_qwix(
    params: Mapping[str, Any],
    statistics: Mapping[str, ActivationStatistics],
    qtype: str,
    tile: int | None,
    way: str,
) -> Iterator[tuple[str, Any]]:
    """Yield the paths of torch weights `[N, K]` with activations, and the dequantized weights."""
    how = qarray.HowToQuantize(
        qtype=getattr(jnp, qtype),
        channelwise_axes=[0],
        tiled_axes={} if tile is None else {1: tile},
    )
    for path, of_weight in statistics.items():
        yield path, QWIX_WAYS[way](params[path], of_weight, how)


Row = dict[str, float]  # the cosine of each column, and the parameters in MB


def row_of(of: Measured, case: Case) -> Row:
    """Measure all columns of a row. Print each cell to stderr."""
    beside_qwix = [*BY_AWQ, *QWIX_WAYS] if case in BESIDE_QWIX else []
    row: Row = {}
    in_order = IN_ORDER if case in SAME_WEIGHTS else []
    tuned = [TUNING] if case in TUNED else []
    for way in [*WAYS, *beside_qwix, *in_order, *tuned]:
        start = time.perf_counter()
        small = of.tuned(case) if way == TUNING else of.rounded(case, way)
        row.setdefault("MB", vn.summary(small).nbytes / 1e6)
        row[way] = of.cosine(small)
        told = case, way, f"{row[way]:.4f}", f"{time.perf_counter() - start:.0f} s"
        print(*told, sep=" | ", file=sys.stderr, flush=True)
    return row


def table(rows: Mapping[Case, Row], names: Sequence[str]) -> str:
    """Return the cosines of some columns. The best one of each row is bold."""
    cells = []
    for case, row in rows.items():
        best = max(row.get(name, 0) for name in names)
        shown = [f"{row[name]:.4f}" if name in row else "" for name in names]
        bold = [row.get(name) == best for name in names]
        shown = [f"**{x}**" if b else x for x, b in zip(shown, bold, strict=True)]
        cells.append([str(case), f"{row['MB']:.1f}", *shown])
    return markdown_table(["", "MB", *names], cells)


def measured() -> Measured:
    """Return the model of the demo with its sentences in a random order."""
    every = all_sentences()
    order = np.random.default_rng(0).permutation(len(every))[: HELD_OUT + CALIBRATED_ON]
    return Measured(load(None), [every[i] for i in order])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="only cases whose names contain this")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/ptq.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    if not QWIX_WAYS:
        print("Qwix is not installed, so its table is left out", file=sys.stderr)
    of = measured()
    rows = {case: row_of(of, case) for case in CASES if options.only in str(case)}
    beside = {case: row for case, row in rows.items() if case in BESIDE_QWIX}
    of_qwix = ["to nearest", "AWQ", *list(QWIX_WAYS), "GPTQ", "AWQ and GPTQ"]
    tables = {"ptq.py": table(rows, [*WAYS, *IN_ORDER, TUNING])}
    if QWIX_WAYS:
        tables["ptq.py, Qwix"] = table(beside, of_qwix)
    for name, text in tables.items():
        print(text, made_with(), sep="\n\n", end="\n\n")
        if options.write:
            write_rows("ptq", name, text, made_with())


if __name__ == "__main__":
    main()
