"""Measure the bits per value and the error of each quantization format.

    python benchmarks/format_errors.py                 # write into docs/formats.md; five minutes
    python benchmarks/format_errors.py --print-only    # print the tables

The weights are Gaussian, or the weights of MiniLM, the model of the demo. The error is the root
mean square of the change, relative to the root mean square of the weights. The second table
compares methods that choose the range of a tile.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from measure import markdown_table
from report import fill

from veneer.demo.encoder import load
from veneer.demo.fetch import ENCODER, fetch
from veneer.quant import FORMATS, Format, QArray, quantize

PAGE = Path(__file__).parent.parent / "docs" / "formats.md"
Weights = list[np.ndarray]  # [out, in] each

# The dtype of scales, unless the format has its own.
SCALE_DTYPE = "bfloat16"

# The methods that choose the range of a tile, and the formats to compare them with.
METHODS = ["absmax", "mse", "rms,3", "percentile,99"]
METHOD_CASES = [
    ("int8", None),
    ("int4", 128),
    ("int4", 32),
    ("int3", 32),
    ("int2", 32),
    ("nf4", 64),
]


def tiles(format: Format) -> list[int | None]:
    """Return the tile sizes of a format in the table. None is one scale per channel."""
    if format.tile_size is not None:
        return [format.tile_size]
    if format.name.startswith("nf4"):
        return [64]
    if format.bits == 8:
        return [None]
    if format.bits > 8:
        return [None, 128]
    if format.bits > 4:
        return [None, 128, 64]
    return [128, 64, 32] if format.bits == 4 else [128, 32]


def quantized(w: np.ndarray, name: str, tile: int | None, method: str | None = None) -> QArray:
    """Quantize a weight, with tiles along the contracted axis."""
    own_scale = FORMATS[name].scale_dtype is not None
    return quantize(
        jnp.asarray(w),
        name,
        channelwise_axes=[0],
        tiled_axes={} if tile is None else {1: tile},
        calibration_method=method,
        scale_dtype=None if own_scale else SCALE_DTYPE,
    )


def relative_error(
    weights: Weights, name: str, tile: int | None, method: str | None = None
) -> float:
    """Return the relative error over all weights together."""
    lost = kept = 0.0
    for w in weights:
        difference = np.asarray(quantized(w, name, tile, method).dequantize(), np.float64) - w
        lost += float(np.square(difference).sum())
        kept += float(np.square(w, dtype=np.float64).sum())
    return (lost / kept) ** 0.5


def bits_a_value(weights: Weights, name: str, tile: int | None) -> float:
    """Return the stored bits per value: codes, scales and zero points."""
    stored = sum(quantized(w, name, tile).nbytes for w in weights)
    return 8 * stored / sum(w.size for w in weights)


def gaussian() -> Weights:
    return [np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)]


def minilm() -> Weights:
    """Return the weights of the linear layers, without embeddings."""
    params = load(fetch(ENCODER)).params
    return [w for name, w in params.items() if w.ndim == 2 and name.startswith("encoder.")]


def format_rows(samples: Iterable[Weights]) -> Iterator[list[str]]:
    samples = list(samples)
    for name, format in FORMATS.items():
        for tile in tiles(format):
            errors = [f"{relative_error(weights, name, tile):.2%}" for weights in samples]
            bits = f"{bits_a_value(samples[-1], name, tile):.2f}"
            yield [f"`{name}`", "channel" if tile is None else str(tile), bits, *errors]


def method_rows(weights: Weights) -> Iterator[list[str]]:
    for name, tile in METHOD_CASES:
        errors = [f"{relative_error(weights, name, tile, method):.2%}" for method in METHODS]
        yield [f"`{name}`", "channel" if tile is None else str(tile), *errors]


def main(*, write: bool) -> None:
    page = PAGE.read_text("utf-8") if write else ""
    normal, model = gaussian(), minilm()
    tables = {
        "format_errors.py formats": markdown_table(
            ["format", "tile", "bits a value", "error, Gaussian", "error, MiniLM"],
            format_rows([normal, model]),
        ),
        "format_errors.py methods": markdown_table(
            ["MiniLM", "tile", *(f"`{method}`" for method in METHODS)], method_rows(model)
        ),
    }
    for name, table in tables.items():
        print(table, end="\n\n")
        if write:
            page = fill(page, name, table)
    if write:
        PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--print-only", action="store_true", help="do not write docs/formats.md")
    main(write=not parser.parse_args().print_only)
