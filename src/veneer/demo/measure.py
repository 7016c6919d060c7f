"""What each format costs and what it keeps: bytes, fidelity to f32, milliseconds."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import veneer as vn

from .model import Batch, Model, sentence_encoder

Params = Mapping[str, Any]
Encode = Callable[[Params, Batch], jax.Array]


@dataclass(frozen=True)
class Format:
    """How the demo stores a model's weights; `qtype=None` is f32, `tile_size=None` channelwise.

    >>> print(Format("nf4", 64), Format("int8"), Format(), sep="; ")
    nf4, tile 64; int8, channelwise; f32
    """

    qtype: str | None = None
    tile_size: int | None = None

    def __str__(self) -> str:
        if self.qtype is None:
            return "f32"
        tile = "channelwise" if self.tile_size is None else f"tile {self.tile_size}"
        return f"{self.qtype}, {tile}"

    def fitted(self, model: Model) -> "Format":
        """With the largest part of the tile that divides the axes which the model contracts."""
        if self.tile_size is None:
            return self
        return Format(self.qtype, math.gcd(self.tile_size, *model.contracted))


DENSE = Format()
NF4 = Format("nf4", 64)
FORMATS = (DENSE, Format("int8"), NF4, Format("int4", 32), Format("int4", 128))


@dataclass(frozen=True)
class Measurement:
    """One row of the demo's table.

    `nbytes` are the parameters' as stored; `cosine` is the mean to the embeddings of f32, `kept`
    the fraction of sentences whose nearest neighbour is that of f32; the times are for a batch of
    64 and a batch of 1.
    """

    format: Format
    nbytes: int
    cosine: float
    kept: float
    batch_ms: float
    single_ms: float


def quantise(model: Model, format: Format) -> Params:
    """The parameters on the device, every weight of rank 2 in `format`, embeddings included."""
    params = jax.device_put(model.params)
    if format.qtype is None:
        return params
    weights = vn.quant.Rule(r".*weight", format.qtype, tile_size=format.tile_size, tile_axis=-1)
    return vn.quant.quantize_tree(params, [weights])


def compiled(model: Model) -> Encode:
    """The encoder, a program for dense arrays, as a function of parameters in any format.

    It is compiled once for each format and shape of batch.
    """
    encode = jax.jit(vn.implicit(sentence_encoder().encode), static_argnums=1)
    return lambda params, batch: encode(params, model.config, *batch)


def embed(model: Model, encode: Encode, params: Params, sentences: Sequence[str]) -> np.ndarray:
    """The embeddings of the sentences: unit vectors, `[len(sentences), hidden]` in f32."""
    found = [
        (rows, np.asarray(encode(params, batch))[: len(rows)])
        for rows, batch in model.batches(sentences)
    ]
    rows, embeddings = (np.concatenate(part) for part in zip(*found, strict=True))
    return embeddings[np.argsort(rows)]


def measure(
    encode: Encode,
    params: Mapping[Format, Params],
    embeddings: Mapping[Format, np.ndarray],
    batch: Batch,
) -> list[Measurement]:
    """One measurement a format, against `embeddings[DENSE]`; `batch` is what is timed."""
    single = Batch(batch.ids[:1], batch.mask[:1])
    variants = list(params.values())
    batch_ms = _milliseconds(encode, variants, batch, repeats=5)
    single_ms = _milliseconds(encode, variants, single, repeats=20)
    return [
        Measurement(
            format,
            nbytes(params[format]),
            mean_cosine(embeddings[format], embeddings[DENSE]),
            neighbours_kept(embeddings[format], embeddings[DENSE]),
            *times,
        )
        for format, *times in zip(params, batch_ms, single_ms, strict=True)
    ]


def nbytes(params: Params) -> int:
    """Bytes that the leaves hold, which for a quantised weight are packed codes and scales."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def mean_cosine(embeddings: np.ndarray, reference: np.ndarray) -> float:
    """Mean over the rows of the cosine between two sets of unit vectors `[sentences, hidden]`."""
    return float((embeddings * reference).sum(1).mean())


def neighbours_kept(embeddings: np.ndarray, reference: np.ndarray) -> float:
    """Fraction of the rows `[sentences, hidden]` whose nearest other row is the reference's."""
    return float((_nearest(embeddings) == _nearest(reference)).mean())


def _nearest(embeddings: np.ndarray) -> np.ndarray:
    similarity = embeddings @ embeddings.T
    np.fill_diagonal(similarity, -np.inf)
    return similarity.argmax(1)


def _milliseconds(
    encode: Encode, variants: Sequence[Params], batch: Batch, repeats: int
) -> list[float]:
    """Median milliseconds of a call with each of the variants.

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
