"""Measure the perplexity of SmolLM2-135M in few bits, for each calibration method.

    python benchmarks/ptq_language_model.py wikitext2-test.txt --write    # 20 minutes on two cores

The model is the one of the demo, from the f32 values of its file, with embeddings in int8. The
perplexity is measured on the first 8 windows of 512 tokens of the text. Calibration uses windows
from later parts of the text. `--write` writes the table into docs/ptq.md.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import markdown_table
from report import made_with, write_rows

import veneer as vn
from veneer.demo.fetch import LANGUAGE_MODEL, fetch
from veneer.demo.language_model import perplexity
from veneer.models import llama, load
from veneer.models.comparison import split_windows

WINDOW, MEASURED_ON, BEHIND = 512, 8, 400_000
#: The fields of the rule, and the calibration method. None rounds to nearest.
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "int8": ({"qtype": "int8"}, None),
    "int8, GPTQ": ({"qtype": "int8"}, "gptq"),
    "int8, rotated, GPTQ": ({"qtype": "int8", "rotate": True}, "gptq"),
    "int8 by int8": ({"qtype": "int8", "act_qtype": "int8"}, None),
    "int8 by int8, rotated": ({"qtype": "int8", "act_qtype": "int8", "rotate": True}, None),
    "uint3, tile 64": ({"qtype": "uint3", "tile_size": 64}, None),
    "uint3, tile 64, GPTQ": ({"qtype": "uint3", "tile_size": 64}, "gptq"),
    "uint3, tile 64, rotated, GPTQ": ({"qtype": "uint3", "tile_size": 64, "rotate": True}, "gptq"),
}


def rows(text: str, count: int, only: str) -> Iterator[list[str]]:
    """Measure and yield a row for each case whose name contains `only`."""
    model = load(next(fetch(LANGUAGE_MODEL).glob("*.gguf")))
    losses = jax.jit(vn.implicit(llama.losses), static_argnums=1)
    params = {name: jnp.asarray(vn.materialise(x)) for name, x in model.params.items()}
    held_out = split_windows(model.tokenizer, text[: 20_000 * MEASURED_ON], MEASURED_ON)
    behind = np.reshape(
        split_windows(model.tokenizer, text[BEHIND:], count), (-1, 2, WINDOW)
    ).astype(np.int32)
    run = lambda params, tokens: llama.losses(params, model.config, tokens)
    yield ["f32", f"{perplexity(losses, model, params, held_out):.2f}"]
    for name, (fields, method) in CASES.items():
        if only not in name:
            continue
        chosen = [
            vn.quant.Rule(".*embed.*", "int8", tile_axis=-1),
            vn.quant.Rule(r".*\.weight", tile_axis=-1, **fields),
        ]
        start = time.perf_counter()
        if method is None:
            small = vn.quant.quantize_tree(params, chosen)
        else:
            calibration = vn.quant.calibrate(run, chosen, params=params, method=method)
            small = calibration(list(behind))
        seconds = time.perf_counter() - start
        cells = [name, f"{perplexity(losses, model, small, held_out):.2f}"]
        print(*cells, f"{seconds:.0f} s", sep=" | ", file=sys.stderr, flush=True)
        yield cells


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The perplexity of SmolLM2-135M in few bits.")
    parser.add_argument("text", type=Path, help="the test set of WikiText-2")
    parser.add_argument("--calibrate", type=int, default=16, help="windows to calibrate with")
    parser.add_argument("--only", default="", help="only cases whose names contain this")
    parser.add_argument("--write", action="store_true", help="put the table into docs/ptq.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    found = list(rows(options.text.read_text(encoding="utf-8"), options.calibrate, options.only))
    table = markdown_table(["matrices", "perplexity"], found)
    print(table, made_with(), sep="\n\n")
    if options.write:
        write_rows("ptq", "ptq_language_model.py", table, made_with())
