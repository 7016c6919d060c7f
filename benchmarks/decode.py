"""Tokens a second of a Llama here and in llama.cpp: of the same shapes, bits and files, by turns.

    python benchmarks/decode.py --write                # into docs/performance.md; half an hour
    python benchmarks/decode.py --only Q4_0 w4a8 --batches 1
    python benchmarks/decode.py --quick                # small sizes, to see that it runs

One Llama has random weights, 2048 wide, of 8 layers and a vocabulary of 32 thousand: `vn.save`
writes them as GGUF files, which both read. The other is SmolLM2-135M-Instruct as it is shipped.
What is timed here is `examples/llama.py`, a compiled program that writes 4 tokens of each text of a
batch after a context, and one that reads a prompt of 512. There is 8 bits a value in the caches of
both where weights are quantized, and else f32, or 16 bits. A format of ours that GGUF has not is
beside the file of as many bits. Activations meet quantized weights in f32 here, but for w8a8 and
w4a8; llama.cpp rounds all to 8 bits. The time of a side is that of its fastest round: other
programs can only slow it. llama.cpp's figures are left out without llama-cpp-python.
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
from decode_tables import FORMATS, SHIPPED, Cell, Format, Kept, tables
from jax import lax
from measure import parser
from report import made_with, write

import veneer as vn
from veneer.demo.fetch import LANGUAGE_MODEL, fetch

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import llama

TOKENS = 4  # that each text of a batch is continued by in a round
THREADS = 2
LONGEST = 10  # seconds, for the rounds of a cell


@dataclass(frozen=True)
class Sizes:
    """What is timed."""

    contexts: Sequence[int] = (0, 512, 4096)
    batches: Sequence[int] = (1, 4, 16)
    prompt: int = 512
    rounds: int = 9
    # Of the Llama of random weights, as its config.json says.
    shape: Sequence[int] = (32000, 2048, 8192, 8, 32, 8, 64)

    @property
    def llama(self) -> Any:
        """The Llama's `Config`."""
        return llama.Config(*self.shape)


# Ours.


def empty_cache(config: Any, cell: Cell, dtype: Any, is_quantized: bool) -> Any:
    dense = llama.empty_cache(config, cell.batch, cell.context + TOKENS, dtype)
    if not is_quantized:
        return dense
    zeros = lambda x: vn.quant.zeros(x.shape, "int8", dtype=dtype, channelwise_axes=(0, 1))
    return jax.tree.map(zeros, dense)


def write_on(params: Any, config: Any, tokens: Any, cache: Any, start: int) -> Any:
    """Writes tokens after a context, the likeliest: those of the last step, and the cache."""

    def body(i: Any, state: Any) -> Any:
        tokens, cache = state
        x, cache = llama.hidden(params, config, tokens[:, None], cache, start + i)
        return llama.likeliest(llama.logits(params, x[:, 0])), cache

    return lax.fori_loop(0, TOKENS, body, (tokens, cache))


def read_prompt(params: Any, config: Any, tokens: Any, cache: Any, start: int) -> Any:
    """Reads a prompt: which token is likeliest to come next, and the cache."""
    x, cache = llama.hidden(params, config, tokens, cache, start)
    return llama.likeliest(llama.logits(params, x[:, -1])), cache


def ours(params: Any, config: Any, format: Format, cell: Cell) -> Callable[[], Any]:
    """What a round runs: a compiled program, which keeps its cache from call to call."""
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


# Theirs.


class Theirs:
    """llama.cpp's model of a file, and what its caches hold.

    **Arguments:**

    - `contents`: what caches hold, by their type and what is timed; shared by all models of these
      shapes, for the time of a token does not depend on it.
    """

    def __init__(self, path: Path, contents: dict[tuple[int, Cell], Any]):
        self.model, self.contents = peer.Model(path), contents

    def run(self, format: Format, cell: Cell) -> tuple[Callable[[], Any], Callable[[], None]]:
        """What a round runs, and what frees it."""
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


# What is measured.


def seconds(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The fastest of some rounds of each, by turns; of fewer, but three, where they take long."""
    for run in runs.values():  # which compiles
        jax.block_until_ready(run())
    fastest = dict.fromkeys(runs, float("inf"))
    limit = time.perf_counter() + LONGEST
    for turn in range(rounds):
        for name, run in runs.items():
            time.sleep(0.005)  # threads of the other look for work a while
            begin = time.perf_counter()
            jax.block_until_ready(run())
            fastest[name] = min(fastest[name], time.perf_counter() - begin)
        if turn > 1 and time.perf_counter() > limit:
            break
    return fastest


def rates(
    params: Any, config: Any, format: Format, theirs: Theirs | None, cell: Cell, rounds: int
) -> tuple[float, float | None]:
    """Tokens a second, here and in llama.cpp."""
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
    """Bytes a second that two threads read: the most of some times."""
    size = 1 << 28
    side = reading(size)
    return size / min(seconds({side.name: side.run}, 15).values())


def measure(
    formats: Sequence[Format],
    params_of: Callable[[Format], tuple[Any, Path | None]],
    config: Any,
    sizes: Sizes,
    kept: Kept,
) -> None:
    """Measures what is not kept of a model.

    **Arguments:**

    - `params_of`: the parameters in a format, and the file that llama.cpp reads beside it.
    """
    contents: dict[tuple[int, Cell], Any] = {}
    for format in formats:
        wanted = [cell for cell in cells(sizes) if kept[format, cell] is None]
        if not wanted and kept[format, "bytes"]:
            continue
        params, file = params_of(format)
        theirs = None if file is None else Theirs(file, contents)
        # All but the embedding, of which a row is read; the head is that where it has none.
        skipped = params["model.embed_tokens.weight"] if "lm_head.weight" in params else ()
        kept[format, "bytes"] = nbytes(params) - nbytes(skipped)
        for cell in wanted:
            kept[format, cell] = rates(params, config, format, theirs, cell, sizes.rounds)
        if theirs is not None:
            theirs.model.close()


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def random_llama(sizes: Sizes, only: Sequence[str], folder: Path, kept: Kept) -> None:
    """Measures a Llama of random weights, in files that `vn.save` writes."""
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
    if peer.missing():  # which makes the files of some
        chosen = [x for x in chosen if by_name[x.beside or x.name].file_type is None]
    measure(chosen, params_of, config, sizes, kept)


def shipped(sizes: Sizes, only: Sequence[str], kept: Kept) -> None:
    """Measures SmolLM2."""
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
        return llama.Config.of(file.config)


def gguf_metadata(config: Any) -> dict[str, Any]:
    """What a GGUF file says of a Llama that has no tokenizer."""
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
    """The tables of all that is kept, and of what is measured now."""
    kept = json.loads(file.read_text("utf-8")) if file is not None and file.exists() else {}
    ours, theirs = Kept(kept, "Llama"), Kept(kept, "SmolLM2")
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
    options.add_argument("--only", nargs="+", default=(), help="of the formats, those so called")
    options.add_argument("--contexts", nargs="+", type=int, default=Sizes.contexts)
    options.add_argument("--batches", nargs="+", type=int, default=Sizes.batches)
    options.add_argument("--kept", type=Path, help="of a run that was stopped, to go on from")
    options.add_argument("--write", action="store_true", help="into docs/performance.md")
    options.add_argument("--quick", action="store_true", help="a small Llama, and short texts")
    given = options.parse_args()
    sizes = Sizes(given.contexts, given.batches, rounds=given.rounds)
    if given.quick:
        small = (256, 128, 256, 2, 4, 2, 32)
        sizes = replace(sizes, contexts=(0, 8), batches=(1, 2), prompt=8, rounds=2, shape=small)
    text = main(sizes, given.only, given.kept, quick=given.quick)
    print(text)
    if given.write:
        write("performance", "decode.py", text)
