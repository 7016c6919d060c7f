"""Measure the perplexity of the demo's language model on a text, in veneer and in llama.cpp.

    python benchmarks/perplexity.py wikitext2-test.txt             # weights; five minutes
    python benchmarks/perplexity.py wikitext2-test.txt --caches    # quantized caches; five minutes
    python benchmarks/perplexity.py wikitext2-test.txt --scales    # rules for scales of caches

Prints the tables of docs/checkpoints.md and docs/cache.md. The text is read in windows of 512
tokens, and the result is `exp` of the mean loss. On the first 4,096 tokens of the test set of
WikiText-2 it is 27.61.

Without options, the table compares the file of the model, in Q4_1, with three files that veneer
writes from its values. llama.cpp rounds activations to 8 bits in blocks of 32 if weights are
quantized. So does veneer in the column *activations in int8*. The last column needs
llama-cpp-python, which takes ten minutes to compile.

`--scales` compares rules for the scales of integer caches: for values that are written once, and
for values that are read and written again until they have been written ten times.
"""

import argparse
import functools
import importlib.util
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import veneer as vn
from veneer.demo.fetch import LANGUAGE_MODEL, fetch
from veneer.demo.language_model import perplexity
from veneer.files.gguf import GgufFile, write_gguf
from veneer.models import LanguageModel, llama, load
from veneer.models.comparison import split_windows
from veneer.quant import Format
from veneer.quant import caches as cache_module
from veneer.quant.conversion import quantize
from veneer.quant.conversion.compute import QuantizeParams

WINDOW = 512
BLOCKS: dict[str, Any] = {
    "channelwise_axes": [0],
    "tiled_axes": {1: 32},
    "scale_dtype": "float16",
}

#: Round the activations of all products. The embedding is unchanged.
IN_INT8 = vn.quant.Rule(
    r".*(_proj|embed_tokens)\.weight", None, act_qtype="int8", act_tile_size=32, tile_axis=-1
)


def files(original: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of the model's file, and of files written from its values."""
    yield "as in the model's file", original
    with GgufFile(original, names="huggingface") as source:
        metadata, tensors = source.metadata, {name: source.read(name) for name in source}
    params = jax.tree.map(jax.numpy.asarray, tensors)
    dense = {name: vn.materialise(x) for name, x in params.items()}
    for format in ("int8", "uint4"):
        of = lambda name, format=format: "int8" if "embed" in name else format
        written = {
            name: x if x.ndim < 2 else vn.quant.quantize(x, of(name), **BLOCKS)
            for name, x in dense.items()
        }
        path = folder / f"{format}.gguf"
        write_gguf(path, written, metadata, names="huggingface")
        yield f"{format}, tile 32", path
    path = folder / "float32.gguf"
    write_gguf(path, dense, metadata, names="huggingface")
    yield "f32, the same values", path


def by_llama_cpp(file: Path, tokens: list[int]) -> str:
    """Return the perplexity in llama.cpp, or a dash if it is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return "-"
    import llama_cpp

    low = llama_cpp.llama_cpp
    params = low.llama_model_default_params()
    # 0.3.36: its AMX products crash in `ldtilecfg` on some machines, and `Llama` has no switch.
    params.use_extra_bufts = False
    with mock.patch.object(low, "llama_model_default_params", return_value=params):
        model = llama_cpp.Llama(
            str(file), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False
        )
    losses = []
    for window in np.reshape(tokens, (-1, WINDOW)):
        model.reset()
        model.eval(window.tolist())
        logits = model.scores[: WINDOW - 1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = np.take_along_axis(logits, window[1:, None], -1)[:, 0]
        losses.append(np.log(np.exp(logits).sum(-1)) - chosen)
    return f"{math.exp(np.mean(losses)):.2f}"


def _by_token(qtype: str, tile: int | None = None, method: str | None = None) -> dict[str, Any]:
    """Return the arguments of a cache with scales per token and head, or per tile of a head."""
    tiles = {} if tile is None else {"tiled_axes": {2: tile}, "scale_dtype": "float16"}
    return {"qtype": qtype, "channelwise_axes": (0, 1), "calibration_method": method, **tiles}


def _by_channel(qtype: str, block: int, method: str | None = None) -> dict[str, Any]:
    """Return the arguments of a cache with scales per channel and block of tokens."""
    how = {"channelwise_axes": (0, 2), "tiled_axes": {1: block}, "block_axis": 1}
    return {"qtype": qtype, "calibration_method": method, "scale_dtype": "float16", **how}


#: The arguments of `vn.quant.zeros` for keys and for values.
CACHES: dict[str, tuple[Any, Any]] = {
    "f32": (None, None),
    "int8": (_by_token("int8"), _by_token("int8")),
    "int8, tile 32": (_by_token("int8", 32), _by_token("int8", 32)),
    "fp8": (_by_token("fp8"), _by_token("fp8")),
    "int8 keys, uint4 values, tile 32": (
        _by_token("int8", 32),
        _by_token("uint4", 32, "minmax"),
    ),
    "uint4, tile 16": (_by_token("uint4", 16, "minmax"), _by_token("uint4", 16, "minmax")),
    "int4": (_by_token("int4"), _by_token("int4")),
    **{
        f"uint4, keys by channel in blocks of {block}, values in tiles of {tile}": (
            _by_channel("uint4", block, "minmax"),
            _by_token("uint4", tile, "minmax"),
        )
        for block, tile in ((32, 16), (16, 32), (32, 32), (64, 32))
    },
    "uint4 keys by channel in blocks of 32, nf4 values in tiles of 16": (
        _by_channel("uint4", 32, "minmax"),
        _by_token("nf4", 16),
    ),
    "int4, keys by channel in blocks of 32, values in tiles of 32": (
        _by_channel("int4", 32),
        _by_token("int4", 32),
    ),
}


def empty_cache(name: str, config: Any) -> Any:
    """Return an empty cache for `veneer.models.llama`."""
    dense = llama.empty_cache(config, 1, WINDOW)
    zeros = lambda x, how: x if how is None else vn.quant.zeros(x.shape, **how)
    keys, values = CACHES[name]
    return dense._replace(
        keys=tuple(zeros(x, keys) for x in dense.keys),
        values=tuple(zeros(x, values) for x in dense.values),
    )


def caches(text: Path, count: int) -> None:
    """Print a row for each format of the cache."""
    model = load(next(fetch(LANGUAGE_MODEL).glob("*.gguf")))
    tokens = split_windows(model.tokenizer, text.read_text("utf-8")[: 20_000 * count], count)
    print("| cache | bytes a token | perplexity | to that of f32 |")
    print("|---|---:|---:|---:|", flush=True)
    first = None
    losses = jax.jit(vn.implicit(llama.losses), static_argnums=1)
    for name in CACHES:
        cache = empty_cache(name, model.config)
        size = sum(x.nbytes for x in jax.tree.leaves(cache)) // WINDOW
        found = perplexity(functools.partial(losses, cache=cache), model, model.params, tokens)
        first = found if first is None else first
        print(f"| {name} | {size:,} | {found:.3f} | {found / first - 1:+.2%} |", flush=True)


def _written(array: Any, cache: Any, counts: Any, *, stable: bool, times: int) -> Any:
    """Quantize an array by the scales of caches or of weights. Write it back `times` times."""
    as_cache = quantize.quantize_as
    params = functools.partial(_params, stable=stable)
    with mock.patch.object(quantize, "QuantizeParams", params):
        q = as_cache(array, cache, counts)
        for _ in range(1, times):
            q = as_cache(q.dequantize(), cache, counts)
    return q


def _params(*args: Any, stable: bool) -> Any:
    return QuantizeParams(*args) if stable else QuantizeParams(*args[:-1])


def scales(text: Path, count: int) -> None:
    """Print a row for each rule for the scales of integer caches."""
    model = load(next(fetch(LANGUAGE_MODEL).glob("*.gguf")))
    tokens = split_windows(model.tokenizer, text.read_text("utf-8")[: 20_000 * count], count)
    names = [name for name in CACHES if name.startswith(("int8", "int4")) and "uint4" not in name]
    print(f"| scale | writes | {' | '.join(names)} |")
    print("|---|---:|" + "---:|" * len(names), flush=True)
    all_codes = property(lambda f: f.code_range)
    for rule, stable, ends in (
        ("absmax / (qmax + 1/2), as for weights", False, Format.ends),
        ("absmax / qmax, as for caches", True, Format.ends),
        ("the larger of max / qmax and -min / (qmax + 1)", True, all_codes),
    ):
        for times in (1, 10):
            written = functools.partial(_written, stable=stable, times=times)
            cells = []
            for name in names:
                losses = jax.jit(vn.implicit(llama.losses), static_argnums=1)
                cached = functools.partial(losses, cache=empty_cache(name, model.config))
                with (
                    mock.patch.object(cache_module, "quantize_as", written),
                    mock.patch.object(Format, "ends", ends),
                ):
                    found = perplexity(cached, model, model.params, tokens)
                jax.clear_caches()
                cells.append(f"{found:.3f}")
            print(f"| {rule} | {times} | {' | '.join(cells)} |", flush=True)


def main(text: Path, count: int) -> None:
    """Print a row for each file, from `count` windows of a text."""
    original = next(fetch(LANGUAGE_MODEL).glob("*.gguf"))
    losses = jax.jit(vn.implicit(llama.losses), static_argnums=1)
    read = text.read_text(encoding="utf-8")[: 20_000 * count]
    print(
        "| weights | types in the file | bytes | perplexity | activations in int8 | in llama.cpp |"
    )
    print("|---|---|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, file in files(original, Path(folder)):
            model: LanguageModel = load(file)
            tokens = split_windows(model.tokenizer, read, count)
            here = perplexity(losses, model, model.params, tokens)
            rounded = vn.quant.quantize_tree(model.params, [IN_INT8])
            by_integers = perplexity(losses, model, rounded, tokens)
            types = " and ".join(t for t in model.formats if len(model.formats) == 1 or t != "F32")
            there = by_llama_cpp(file, tokens)
            size = file.stat().st_size
            found = f"{here:.2f} | {by_integers:.2f} | {there}"
            print(f"| {name} | {types} | {size:,} | {found} |", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("text", type=Path)
    options.add_argument("--windows", type=int, default=8)
    options.add_argument("--caches", action="store_true", help="compare formats of the cache")
    options.add_argument("--scales", action="store_true", help="compare rules for its scales")
    given = options.parse_args()
    measure = scales if given.scales else caches if given.caches else main
    measure(given.text, given.windows)
