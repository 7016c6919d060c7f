"""Compare the tokens per second of a Llama in veneer and in llama.cpp, on a CPU.

    python benchmarks/decode.py --write                # into docs/performance.md; half an hour
    python benchmarks/decode.py --only Q4_0 w4a8 --batches 1
    python benchmarks/decode.py --quick                # small sizes, to see that it runs

The first model is a Llama with random weights, 8 layers of width 2048 and a vocabulary of 32,000.
`vn.save` writes it as GGUF files, which both libraries read. The second model is
SmolLM2-135M-Instruct from its published file.

Veneer runs `veneer.models.llama`: a program that decodes 4 tokens per text of a batch, and a
program that reads a prompt of 512 tokens. The caches of both libraries have 8 bits per value if
weights are quantized. A format that GGUF does not have is compared with a file of as many bits.
Activations are in f32 in veneer, except in rows that name int8 activations, such as w4a8. llama.cpp
always rounds them to 8 bits.

The two sides alternate, and the fastest round counts, because other programs can only slow a round
down. Without llama-cpp-python, the columns of llama.cpp are left out.
"""

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import llama_cpp_texts as peer
from cpu_matmul import READING, reading
from decode_tables import FORMATS, SHIPPED, Cell, Format, Results, tables
from jax import lax
from measure import parser
from report import made_with, write

import veneer as vn
from veneer.demo.fetch import LANGUAGE_MODEL, fetch

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from veneer.models import llama

TOKENS = 4  # tokens to decode per text and round
THREADS = 2
LONGEST = 10  # seconds for the rounds of a cell


@dataclass(frozen=True)
class Sizes:
    """The contexts and batches to measure, and the shape of the Llama with random weights."""

    contexts: Sequence[int] = (0, 512, 4096)
    batches: Sequence[int] = (1, 4, 16)
    prompt: int = 512
    rounds: int = 9
    # The `Config` of the Llama with random weights.
    shape: Sequence[int] = (32000, 2048, 8192, 8, 32, 8, 64)

    @property
    def llama(self) -> Any:
        """The configuration of the Llama with random weights."""
        return llama.LlamaConfig(*self.shape)


# Programs of veneer.


def empty_cache(config: Any, cell: Cell, dtype: Any, is_quantized: bool) -> Any:
    dense = llama.empty_cache(config, cell.batch, cell.context + TOKENS, dtype)
    if not is_quantized:
        return dense
    zeros = lambda x: vn.quant.zeros(x.shape, "int8", dtype=dtype, channelwise_axes=(0, 1))
    return jax.tree.map(zeros, dense)


def write_on(params: Any, config: Any, tokens: Any, cache: Any, start: int) -> Any:
    """Decode `TOKENS` tokens greedily after a context. Return the last tokens and the cache."""

    def body(i: Any, state: Any) -> Any:
        tokens, cache = state
        x, cache = llama.hidden(params, config, tokens[:, None], cache, start + i)
        return llama.most_likely(llama.logits(params, x[:, 0])), cache

    return lax.fori_loop(0, TOKENS, body, (tokens, cache))


def read_prompt(params: Any, config: Any, tokens: Any, cache: Any, start: int) -> Any:
    """Read a prompt. Return the most likely next token and the cache."""
    x, cache = llama.hidden(params, config, tokens, cache, start)
    return llama.most_likely(llama.logits(params, x[:, -1])), cache


def ours(params: Any, config: Any, format: Format, cell: Cell) -> Callable[[], Any]:
    """Return a compiled program, which keeps its cache from call to call."""
    is_quantized = any(isinstance(w, vn.ImplicitArray) for w in params.values())
    state = [empty_cache(config, cell, format.dtype, is_quantized)]
    shape = (cell.batch, cell.context) if cell.is_prompt else (cell.batch,)
    tokens, start = jnp.ones(shape, jnp.int32), 0 if cell.is_prompt else cell.context
    program = vn.implicit(read_prompt if cell.is_prompt else write_on)
    run = jax.jit(program, static_argnums=1, donate_argnums=3)

    def once() -> Any:
        token, state[0] = run(params, config, tokens, state[0], start)
        return token

    return once


# Programs of llama.cpp.


class Theirs:
    """A model of llama.cpp, and the contents of its caches.

    **Arguments:**

    - `contents`: the contents of filled caches, by cache type and cell. All models of the same
      shape share them, because the time of a token does not depend on the contents.
    """

    def __init__(self, path: Path, contents: dict[tuple[int, Cell], Any]):
        self.model, self.contents = peer.Model(path), contents

    def run(self, format: Format, cell: Cell) -> tuple[Callable[[], Any], Callable[[], None]]:
        """Return a function that runs a round, and one that frees its memory."""
        is_quantized = format.name not in ("f32", "bf16")
        cache = peer.Q8_0 if is_quantized else peer.F32 if format.name == "f32" else peer.F16
        room = max(256, cell.context + TOKENS)
        texts = peer.Texts(self.model, cell.batch, room, cache=cache, threads=THREADS)
        if cell.is_prompt:

            def read() -> int:
                texts.forget(0)
                return texts.read(cell.context)

            return read, texts.close
        if cell.context:
            if (cache, cell) not in self.contents:
                texts.read(cell.context)
                self.contents[cache, cell] = texts.contents()
            texts.fill(self.contents[cache, cell])
        return functools.partial(texts.write, TOKENS, cell.context), texts.close


# Measurements.


def seconds(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Time the fastest of several rounds of each function, alternately.

    If rounds take more than `LONGEST` seconds, there are fewer rounds, but at least three.
    """
    for run in runs.values():  # compiles
        jax.block_until_ready(run())
    fastest = dict.fromkeys(runs, float("inf"))
    limit = time.perf_counter() + LONGEST
    for turn in range(rounds):
        for name, run in runs.items():
            time.sleep(0.005)  # threads of the other side still spin
            begin = time.perf_counter()
            jax.block_until_ready(run())
            fastest[name] = min(fastest[name], time.perf_counter() - begin)
        if turn > 1 and time.perf_counter() > limit:
            break
    return fastest


def rates(
    params: Any, config: Any, format: Format, theirs: Theirs | None, cell: Cell, rounds: int
) -> tuple[float, float | None]:
    """Return the tokens per second of veneer, and of llama.cpp or None."""
    runs, free = {"ours": ours(params, config, format, cell)}, lambda: None
    if theirs is not None:
        runs["theirs"], free = theirs.run(format, cell)
    found = seconds(runs, rounds)
    free()
    count = cell.batch * (cell.context if cell.is_prompt else TOKENS)
    return count / found["ours"], count / found["theirs"] if "theirs" in found else None


def cells(sizes: Sizes) -> Iterator[Cell]:
    yield Cell(sizes.prompt, 1, is_prompt=True)
    for batch in sizes.batches:
        for context in sizes.contexts:
            yield Cell(context, batch)


def bandwidth() -> float:
    """Return the bytes per second that two threads read from memory, at their fastest."""
    size = 1 << 28
    side = reading(size)
    return size / min(seconds({side.name: side.run}, 15).values())


def measure(
    formats: Sequence[Format],
    params_of: Callable[[Format], tuple[Any, Path | None]],
    config: Any,
    sizes: Sizes,
    kept: Results,
) -> None:
    """Measure the cells of a model that `kept` does not have.

    **Arguments:**

    - `params_of`: returns the parameters in a format, and the file for llama.cpp or None.
    """
    contents: dict[tuple[int, Cell], Any] = {}
    for format in formats:
        wanted = [cell for cell in cells(sizes) if kept[format, cell] is None]
        if not wanted and kept[format, "bytes"]:
            continue
        params, file = params_of(format)
        theirs = None if file is None else Theirs(file, contents)
        # A step reads only one row of the embedding, unless the embedding is also the head.
        skipped = params["model.embed_tokens.weight"] if "lm_head.weight" in params else ()
        kept[format, "bytes"] = nbytes(params) - nbytes(skipped)
        for cell in wanted:
            kept[format, cell] = rates(params, config, format, theirs, cell, sizes.rounds)
        if theirs is not None:
            theirs.model.close()


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def random_llama(sizes: Sizes, only: Sequence[str], folder: Path, kept: Results) -> None:
    """Measure the Llama with random weights, from files that `vn.save` writes."""
    config = sizes.llama
    by_name = {format.name: format for format in FORMATS}
    dense = functools.cache(lambda: llama.init(jax.random.key(0), config))

    def file(format: Format) -> Path | None:
        if peer.missing():
            return None
        path = folder / f"{format.name}.gguf"
        if not path.exists() and format.file_type is not None:
            peer.quantize(file(by_name["f32"]), path, format.file_type)
        elif not path.exists():
            metadata, stored = gguf_metadata(config), format.stored(dense())
            vn.save(path, stored, format="gguf", config=metadata, names="huggingface")
        return path

    def params_of(format: Format) -> tuple[Any, Path | None]:
        peers = by_name[format.beside or format.name]
        path = file(peers)
        if peers.file_type is None:
            return format.stored(dense()), path
        params = vn.load(path, names="huggingface")
        return params if format.rule is None else format.stored(params), path

    chosen = _chosen(FORMATS, only)
    if peer.missing():  # llama.cpp writes the files of some formats
        chosen = [x for x in chosen if by_name[x.beside or x.name].file_type is None]
    measure(chosen, params_of, config, sizes, kept)


def shipped(sizes: Sizes, only: Sequence[str], kept: Results) -> None:
    """Measure SmolLM2 from its published file."""
    path = next(fetch(LANGUAGE_MODEL).glob("*.gguf"))
    params = vn.load(path, names="huggingface")
    dense = {name: vn.materialise(x) for name, x in params.items()}

    def params_of(format: Format) -> tuple[Any, Path | None]:
        if format.rule is None:
            stored = params
        else:
            stored = format.stored(params if format.rule["qtype"] is None else dense)
        return stored, None if peer.missing() else path

    measure(_chosen(SHIPPED, only), params_of, _config_of(path), sizes, kept)


def _chosen(formats: Sequence[Format], only: Sequence[str]) -> list[Format]:
    return [format for format in formats if not only or format.name in only]


def _config_of(path: Path) -> Any:
    from veneer.files.gguf import GgufFile

    with GgufFile(path, names="huggingface") as file:
        return llama.LlamaConfig.from_dict(file.config)


def gguf_metadata(config: Any) -> dict[str, Any]:
    """Return the metadata of a GGUF file of a Llama without a tokenizer."""
    said = {
        "block_count": config.num_hidden_layers,
        "context_length": 8192,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "vocab_size": config.vocab_size,
    }
    named = {f"llama.{name}": value for name, value in said.items()}
    return {"general.architecture": "llama", "tokenizer.ggml.model": "none", **named}


def main(sizes: Sizes, only: Sequence[str], file: Path | None, *, quick: bool) -> str:
    """Measure, and return the tables of these and of all earlier results in `file`."""
    kept = json.loads(file.read_text("utf-8")) if file is not None and file.exists() else {}
    ours, theirs = Results(kept, "Llama"), Results(kept, "SmolLM2")
    try:
        with tempfile.TemporaryDirectory() as folder:
            random_llama(sizes, only, Path(folder), ours)
            if not quick:
                shipped(sizes, only, theirs)
            kept[READING] = max(kept.get(READING, 0), bandwidth())
    finally:
        if file is not None:
            file.write_text(json.dumps(kept, indent=1), "utf-8")
    in_order = lambda cell: (cell.batch, not cell.is_prompt, cell.context)
    every = sorted({*cells(sizes), *cells(Sizes())}, key=in_order)
    parts = [made_with(), tables(FORMATS, every, ours)]
    if not quick:
        parts.append(tables(SHIPPED, every, theirs))
    if peer.missing():
        parts.append("llama.cpp is left out: llama-cpp-python is not installed.")
    return "\n\n".join(parts)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", default=(), help="only these formats")
    options.add_argument("--contexts", nargs="+", type=int, default=Sizes.contexts)
    options.add_argument("--batches", nargs="+", type=int, default=Sizes.batches)
    options.add_argument("--kept", type=Path, help="JSON of results: continue an earlier run")
    options.add_argument("--write", action="store_true", help="write into docs/performance.md")
    options.add_argument("--quick", action="store_true", help="a small Llama and short texts")
    given = options.parse_args()
    sizes = Sizes(given.contexts, given.batches, rounds=given.rounds)
    if given.quick:
        small = (256, 128, 256, 2, 4, 2, 32)
        sizes = replace(sizes, contexts=(0, 8), batches=(1, 2), prompt=8, rounds=2, shape=small)
    text = main(sizes, given.only, given.kept, quick=given.quick)
    print(text)
    if given.write:
        write("performance", "decode.py", text)
