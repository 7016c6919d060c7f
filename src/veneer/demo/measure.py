"""What each variant costs and what it keeps: bytes, fidelity to f32, milliseconds."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

import veneer as vn

from .model import Batch, Model
from .programs import program
from .sentences import other_sentences

Params = Mapping[str, Any]
Encode = Callable[[Params, Batch], jax.Array]


@dataclass(frozen=True)
class Variant:
    """How the demo stores a model's weights.

    **Arguments:**

    - `qtype`: the format, or None for f32.
    - `tile_size`: how many values share a scale, or None for one scale a channel.
    - `act_qtype`: the format that activations are quantised to as they meet a weight, or None.
    - `least_error`: whether scales are those of the least error, which cut off what stands out.
    - `rotate`: whether weights are rotated before they are rounded.
    - `calibrated`: whether they are rounded by the activations that they meet.

    >>> from veneer.demo.measure import Variant
    >>> print(Variant("nf4", 64), Variant("int8"), Variant("int8", act_qtype="int8"), sep="; ")
    nf4, tile 64; int8, channelwise; int8 by int8
    """

    qtype: str | None = None
    tile_size: int | None = None
    act_qtype: str | None = None
    least_error: bool = False
    rotate: bool = False
    calibrated: bool = False

    def __str__(self) -> str:
        if self.qtype is None:
            return "f32"
        how = ", least error" if self.least_error else ", rotated" if self.rotate else ""
        how = ", calibrated" if self.calibrated else how
        if self.act_qtype is not None:
            return f"{self.qtype} by {self.act_qtype}{how}"
        tile = "channelwise" if self.tile_size is None else f"tile {self.tile_size}"
        return f"{self.qtype}, {tile}{how}"

    def fitted(self, model: Model) -> "Variant":
        """Returns it with the largest part of the tile that divides what the model contracts."""
        if self.tile_size is None:
            return self
        return replace(self, tile_size=math.gcd(self.tile_size, *model.contracted))


DENSE = Variant()
NF4 = Variant("nf4", 64)
VARIANTS = (
    DENSE,
    Variant("int8"),
    Variant("int8", act_qtype="int8"),
    Variant("int8", act_qtype="int8", rotate=True),
    NF4,
    Variant("int4", 32),
    Variant("int4", 128),
    Variant("int4", 128, least_error=True),
    Variant("int4", 128, rotate=True, calibrated=True),
)


@dataclass(frozen=True)
class Measurement:
    """One row of the demo's table.

    **Arguments:**

    - `variant`: how the weights are stored.
    - `nbytes`: of the parameters, as stored.
    - `cosine`: the mean to the embeddings of f32.
    - `kept`: the fraction of sentences whose nearest neighbour is that of f32.
    - `batch_ms`, `single_ms`: for a batch of 64 and a batch of 1.
    """

    variant: Variant
    nbytes: int
    cosine: float
    kept: float
    batch_ms: float
    single_ms: float


def quantise(model: Model, variant: Variant) -> Params:
    """Puts the parameters on the device, every weight of rank 2 quantised, embeddings included.

    By sentences that the table is not measured on, where the variant is calibrated.
    """
    params = jax.device_put(model.params)
    if variant.qtype is None:
        return params
    rule = partial(
        vn.quant.Rule,
        qtype=variant.qtype,
        tile_size=variant.tile_size,
        tile_axis=-1,
        calibration_method="mse,40,2.4" if variant.least_error else None,
    )
    rules = [  # of tables rows are looked up, which meet no activation; or slices are added
        rule(r"embeddings\.word_embeddings\.weight", rotate=variant.rotate),
        rule(r"embeddings\..*weight"),
        rule(".*weight", rotate=variant.rotate, act_qtype=variant.act_qtype),
    ]
    if not variant.calibrated:
        return vn.quant.quantize_tree(params, rules)
    encode = jax.jit(program("sentence_encoder").encode, static_argnums=1)
    run = lambda params, ids, mask: encode(params, model.config, ids, mask)
    calibration = vn.quant.calibrate(run, rules, params=params)
    return calibration([tuple(batch) for batch in model.unpadded(other_sentences())])


def compiled(model: Model) -> Encode:
    """Returns the encoder, a program for dense arrays, for parameters stored in any way.

    It is compiled once for each variant and shape of batch.
    """
    encode = jax.jit(vn.implicit(program("sentence_encoder").encode), static_argnums=1)
    return lambda params, batch: encode(params, model.config, *batch)


def embed(model: Model, encode: Encode, params: Params, sentences: Sequence[str]) -> np.ndarray:
    """Embeds the sentences: unit vectors, `[len(sentences), hidden]` in f32."""
    found = [
        (rows, np.asarray(encode(params, batch))[: len(rows)])
        for rows, batch in model.batches(sentences)
    ]
    rows, embeddings = (np.concatenate(part) for part in zip(*found, strict=True))
    return embeddings[np.argsort(rows)]


def measure(
    encode: Encode,
    params: Mapping[Variant, Params],
    embeddings: Mapping[Variant, np.ndarray],
    batch: Batch,
) -> list[Measurement]:
    """Measures each variant against `embeddings[DENSE]`; `batch` is what is timed."""
    single = Batch(batch.ids[:1], batch.mask[:1])
    batch_ms = _milliseconds(encode, list(params.values()), batch, repeats=5)
    single_ms = _milliseconds(encode, list(params.values()), single, repeats=20)
    return [
        Measurement(
            variant,
            nbytes(params[variant]),
            mean_cosine(embeddings[variant], embeddings[DENSE]),
            neighbours_kept(embeddings[variant], embeddings[DENSE]),
            *times,
        )
        for variant, *times in zip(params, batch_ms, single_ms, strict=True)
    ]


def nbytes(params: Params) -> int:
    """Counts the bytes of the leaves, which for a quantised weight are packed codes and scales."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def mean_cosine(embeddings: np.ndarray, reference: np.ndarray) -> float:
    """Returns the mean cosine of the rows of two sets of unit vectors `[sentences, hidden]`."""
    return float((embeddings * reference).sum(1).mean())


def neighbours_kept(embeddings: np.ndarray, reference: np.ndarray) -> float:
    """Returns the fraction of rows `[sentences, hidden]` whose nearest other is the reference's."""
    return float((_nearest(embeddings) == _nearest(reference)).mean())


def _nearest(embeddings: np.ndarray) -> np.ndarray:
    similarity = embeddings @ embeddings.T
    np.fill_diagonal(similarity, -np.inf)
    return similarity.argmax(1)


def _milliseconds(
    encode: Encode, variants: Sequence[Params], batch: Batch, repeats: int
) -> list[float]:
    """Returns the median milliseconds of a call with each of the parameters.

    They take turns, so that whatever else the machine does falls on all of them alike.
    """
    seconds: list[list[float]] = [[] for _ in variants]
    for turn in range(repeats + 1):
        for params, times in zip(variants, seconds, strict=True):
            start = time.perf_counter()
            encode(params, batch).block_until_ready()
            if turn > 0:  # the first turn may compile
                times.append(time.perf_counter() - start)
    return [1000 * statistics.median(times) for times in seconds]
