"""Time calibration: observing a model, GPTQ compared with LAPACK, and calibrating one weight.

python benchmarks/ptq_costs.py    # the figures of docs/ptq.md, in two minutes on two cores
"""

import time
import warnings
from collections.abc import Iterator

import jax
import numpy as np
from measure import Claim, Side, markdown_table, measure
from ptq import Case, measured
from report import made_with
from scipy.linalg.lapack import dpotrf, dpotri

import veneer as vn
from veneer.quant.ptq.gptq import DAMPING, Moments, damp, gptq

ROUNDS = 5


def observing() -> Iterator[list[str]]:
    """Yield the time to observe one more batch of MiniLM, once the program is compiled."""
    of = measured()
    chosen = Case("int4", 128).rules()
    batch = max(of.batches, key=lambda batch: batch[0].size)
    run = jax.jit(of.model)

    def each(count: int, gram: bool) -> float:
        batches = [batch] * count
        start = time.perf_counter()
        vn.quant.observe(of.model, chosen, params=of.params, gram=gram)(batches)
        return time.perf_counter() - start

    def forward() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(of.params, *batch))
        return time.perf_counter() - start

    forward()
    for gram in (False, True):
        turns = [((each(9, gram) - each(1, gram)) / 8, forward()) for _ in range(ROUNDS)]
        more, plain = np.median(turns, axis=0)
        what = "with" if gram else "without"
        yield [f"observing MiniLM, {what} moments", "its forward pass", *_cells(more, plain)]


def rounding() -> Iterator[list[str]]:
    """Yield the time of GPTQ for square matrices."""
    for n in (384, 1536, 4096):
        x = np.random.default_rng(0).normal(size=(2 * n, n)) * np.linspace(0.1, 3, n)
        gram = x.T @ x / len(x)
        w = np.random.default_rng(1).normal(size=(n, n)).astype(np.float32)
        scale = np.repeat(np.abs(w.reshape(n // 128, 128, n)).max(1) / 7, 128, axis=0)

        def lapack(gram: np.ndarray = gram) -> None:
            lower, _ = dpotrf(damp(gram, DAMPING), lower=1)
            dpotri(lower, lower=1)

        ours = lambda w=w, gram=gram, scale=scale: gptq(w, Moments(gram), scale, None, "int4")
        (result,) = measure([Claim(Side("ours", ours), Side("LAPACK", lapack))], rounds=ROUNDS)
        yield [
            f"GPTQ of {n} x {n}",
            "Cholesky and inverse by LAPACK",
            *_cells(*result.seconds),
        ]


def one_weight() -> Iterator[list[str]]:
    """Yield the time to calibrate a weight of 4096 x 4096."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], (4096, 4096))}
    batches = list(jax.random.normal(keys[1], (4, 2048, 4096)))
    model = lambda params, x: x @ params["w"]
    calibration = vn.quant.calibrate(
        model, [vn.quant.Rule("w", "int4", tile_size=128)], params=params
    )
    start = time.perf_counter()
    jax.block_until_ready(jax.tree.leaves(calibration(batches)))
    yield [
        "calibrating 4096 x 4096, int4, by 8,192 rows",
        "",
        f"{time.perf_counter() - start:.1f} s",
        "",
        "",
    ]


def _cells(ours: float, other: float) -> list[str]:
    return [f"{1000 * ours:.1f} ms", f"{1000 * other:.1f} ms", f"{ours / other:.2f}"]


def main() -> None:
    found = [*observing(), *rounding(), *one_weight()]
    print(made_with(), markdown_table(["", "beside", "takes", "that", "ratio"], found), sep="\n\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)  # embeddings have no activations
    main()
