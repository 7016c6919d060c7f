"""Measure models for `gpu_all.py`: decoding, a LoRA training step, attention to a cache."""

import functools
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gpu_tables import Format, quantized
from gpu_worker import INT4, INT8, NF4, Job, Program, Sizes, Worker, stored_bytes
from jax import lax

import veneer as vn
from veneer import kernels

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from veneer.models import llama

# Parts 5 and 6: decoding, and a LoRA training step.


@functools.cache
def model(sizes: Sizes, stored: Format | None, embedding: bool = False) -> dict[str, Any]:
    """Return random bf16 parameters of the Llama.

    Quantize its matrices if `stored` is a format. The embedding is quantized only if `embedding`.
    """
    config = llama.LlamaConfig(*sizes.llama)
    shapes = jax.eval_shape(lambda: llama.init(jax.random.key(0), config))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def make(key: Any, shape: Any, is_quantized: bool) -> Any:
        if len(shape) == 1:
            return jnp.ones(shape, jnp.bfloat16)
        if is_quantized:
            return quantized(key, shape, stored, "columns")
        return jax.random.normal(key, shape, jnp.bfloat16) / shape[1] ** 0.5

    matrices = "_proj|lm_head|embed_tokens" if embedding else "_proj|lm_head"
    is_matrix = lambda name: re.search(rf"({matrices})\.weight$", name) and stored
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: make(key, aval.shape, bool(is_matrix(name)))
        for key, (name, aval) in zip(keys, shapes.items(), strict=True)
    }


def measure_decoding(worker: Worker) -> None:
    """Measure the tokens per second of `veneer.models.llama`, and the bytes of its weights."""
    sizes, config = worker.sizes, llama.LlamaConfig(*worker.sizes.llama)

    def decode(leaves: Any, token: jax.Array, *, treedef: Any) -> jax.Array:
        params = jax.tree.unflatten(treedef, leaves)
        cache = llama.empty_cache(config, len(token), sizes.tokens, jnp.bfloat16)

        def step(at: Any, state: Any) -> Any:
            token, cache = state
            x, cache = llama.hidden(params, config, token, cache, at)
            return llama.most_likely(llama.logits(params, x[:, -1]))[:, None], cache

        return lax.fori_loop(0, sizes.tokens, step, (token, cache))[0]

    jobs, arguments, sizes_stored = [], {}, {}
    plan: list[tuple[Format | None, str]] = [(None, "xla")]
    plan += [(format, how) for how in ("auto", "xla") for format in (INT4, INT8)]
    for stored, choice in plan:
        leaves, treedef = jax.tree.flatten(model(sizes, stored))
        for batch in sizes.batches:
            key = f"5/{stored or 'bf16'}, {choice}/batch {batch}"
            if key in worker.done and stored is not None:
                continue
            run = vn.implicit(functools.partial(decode, treedef=treedef))
            arguments[key] = leaves, jnp.zeros((batch, 1), jnp.int32)
            jobs.append(Job(key, run, arguments[key], functools.partial(kernels.use, choice)))
            sizes_stored[key] = stored_bytes(leaves)
    jobs.sort(key=lambda job: int(job.key.rpartition(" ")[2]))  # begin with batch 1
    _time_programs(
        worker,
        worker.compile(jobs),
        arguments,
        lambda key, seconds: {
            "tokens_per_s": int(key.rpartition(" ")[2]) * sizes.tokens / seconds,
            "bytes": sizes_stored[key],
        },
        lambda key: f"5/bf16, xla/{key.rpartition('/')[2]}",
    )


def stacked(params: dict[str, Any], layers: int, head_parts: int) -> dict[str, Any]:
    """Stack the parameters of all layers for `lax.scan`, and split the vocabulary into equal parts.

    A scan compiles one layer instead of all of them. It also materializes one matrix at a time.
    """
    by_layer = []
    for i in range(layers):
        prefix = f"model.layers.{i}."
        by_layer.append(
            {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
        )
    split = lambda leaf: leaf.reshape(head_parts, -1, *leaf.shape[1:])
    return {
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *by_layer),
        "head": jax.tree.map(split, params["lm_head.weight"]),
        **{name: params[name] for name in ("model.embed_tokens.weight", "model.norm.weight")},
    }


def mean_loss(head: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean of `-log p` of each target token.

    It computes the logits of one part of the vocabulary at a time, also for derivatives.

    **Arguments:**

    - `head`: the matrix of the logits, `[parts, vocabulary / parts, width]`.
    - `x`: `[batch, length, width]`.
    - `targets`: tokens, `[batch, length]`.
    """
    size = head.shape[1]

    @jax.checkpoint
    def add_part(state: Any, part: Any) -> tuple[Any, None]:
        (total, of_target), (first, matrix) = state, part
        logits = (x @ matrix.T).astype(jnp.float32)
        total = jnp.logaddexp(total, jax.nn.logsumexp(logits, axis=-1))
        is_target = targets[..., None] == first + jnp.arange(size)
        of_target = of_target + jnp.where(is_target, logits, 0).sum(-1)
        return (total, of_target), None

    state = jnp.full(targets.shape, -jnp.inf), jnp.zeros(targets.shape)
    firsts = size * jnp.arange(len(head))
    (total, of_target), _ = lax.scan(add_part, state, (firsts, head))
    return (total - of_target).mean()


class TrainingStep(NamedTuple):
    """A LoRA training step, and the bytes of its frozen weights."""

    job: "Job"
    frozen_bytes: int


@functools.cache
def training_steps(worker: Worker) -> list[TrainingStep]:
    """Return a LoRA training step for each format of the frozen weights: bf16, int4 and nf4.

    There are two steps for int4: with the embedding in bf16, and with all matrices in int4.
    """
    import optax

    sizes, config = worker.sizes, llama.LlamaConfig(*worker.sizes.llama)
    tx = optax.adam(1e-4)

    @jax.checkpoint
    def layer_step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        cache = llama.empty_cache(config, *x.shape[:2], x.dtype)
        kept = cache.keys[0], cache.values[0]
        y = llama.norm(layer["input_layernorm.weight"], x, config)
        x = x + llama.attention(layer, config, y, kept, 0, 0)[0]
        y = llama.norm(layer["post_attention_layernorm.weight"], x, config)
        return x + llama.swiglu(layer, y), None

    def losses(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["model.embed_tokens.weight"][tokens]
        x, _ = lax.scan(layer_step, x, params["layers"])
        x = llama.norm(params["model.norm.weight"], x, config)
        return mean_loss(params["head"], x[:, :-1], tokens[:, 1:])

    def step(trained: Any, state: Any, frozen: Any, tokens: jax.Array) -> Any:
        def of_trained(trained: Any) -> jax.Array:
            return vn.implicit(losses)(vn.tree.combine(trained, frozen), tokens)

        value, gradient = jax.value_and_grad(of_trained)(trained)
        updates, state = tx.update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state, value

    steps = []
    for stored, embedding in ((None, False), (INT4, False), (INT4, True), (NF4, False)):
        key = f"6/{stored or 'bf16'}{', and the embedding' if embedding else ''}"
        with worker.attempt(key, "make"):
            rules = [vn.lora.Rule(r".*_proj\.weight", rank=8, alpha=16)]
            params = model(sizes, stored, embedding)
            params = stacked(params, config.num_hidden_layers, sizes.head_parts)
            tuned = vn.lora.init_tree(params, rules, key=jax.random.key(2))
            is_adapted = lambda path, x: isinstance(x, vn.types.LoraArray)
            trained, frozen = vn.tree.partition(tuned, vn.trainable(tuned, where=is_adapted))
            tokens = jax.random.randint(jax.random.key(3), sizes.trained, 0, config.vocab_size)
            arguments = trained, tx.init(trained), frozen, tokens
            steps.append(TrainingStep(Job(key, step, arguments), stored_bytes(frozen)))
    return steps


def measure_qlora(worker: Worker) -> None:
    """Measure the time and memory of LoRA training steps."""
    steps = {step.job.key: step for step in training_steps(worker)}
    programs = worker.compile([step.job for step in steps.values()])

    def facts(key: str, seconds: float) -> dict[str, Any]:
        sizes = programs[key].run.memory_analysis()
        parts = sizes.argument_size_in_bytes, sizes.temp_size_in_bytes, sizes.output_size_in_bytes
        peak = {"peak_bytes": sum(parts), "argument_bytes": parts[0]}
        loss = float(programs[key].run(*arguments[key])[2])
        return {"loss": loss, "frozen_bytes": steps[key].frozen_bytes, **peak}

    arguments = {key: step.job.args for key, step in steps.items()}
    _time_programs(worker, programs, arguments, facts, lambda key: "6/bf16")
    training_steps.cache_clear()


def _time_programs(
    worker: Worker, programs: dict[str, Program], arguments: Any, facts: Any, base_key: Any
) -> None:
    """Time programs alternately. Record the times, and their ratios to the baselines."""
    if time.time() > worker.until:
        return
    runs = {k: functools.partial(program.run, *arguments[k]) for k, program in programs.items()}
    medians = {key: statistics.median(took) for key, took in worker.time(runs).items()}
    for key, seconds in medians.items():
        base = medians.get(base_key(key))
        ratio = None if base is None else base / seconds
        worker.record(
            key, ms=seconds * 1e3, ratio=ratio, **facts(key, seconds), **programs[key].facts
        )


# Part 7: attention to a quantized cache.


def measure_attention(worker: Worker) -> None:
    """Measure the attention of one new token to a cache, in bf16 and in quantized formats."""
    batch, heads, queries, width = worker.sizes.attention

    def step(caches: Any, query: jax.Array, new: jax.Array) -> Any:
        written = []
        for keys, values in caches:
            at = keys.shape[1] - 1
            keys = lax.dynamic_update_slice(keys, new, (0, at, 0))
            values = lax.dynamic_update_slice(values, new, (0, at, 0))
            scores = jnp.einsum("hqd,hsd->hqs", query, keys).astype(jnp.float32) * width**-0.5
            query = jax.nn.softmax(scores).astype(query.dtype) @ values
            written.append((keys, values))
        return written, query

    for room, layers in worker.sizes.contexts:
        shape, jobs, states, size = (batch * heads, room, width), [], {}, {}
        query = jax.random.normal(jax.random.key(0), (batch * heads, queries, width), jnp.bfloat16)
        for name, qtype, choice in (
            ("bf16", None, "xla"),
            *((f"{q}, {how}", q, how) for how in ("auto", "xla") for q in ("int8", "int4", "fp8")),
        ):
            key = f"7/{room} tokens/{name}"
            if qtype is None:
                zeros = functools.partial(jnp.zeros, shape, jnp.bfloat16)
            else:
                zeros = functools.partial(vn.quant.zeros, shape, qtype, dtype=jnp.bfloat16,
                                          channelwise_axes=(0, 1))  # fmt: skip
            with worker.attempt(key, "make"):
                states[key] = [[(zeros(), zeros()) for _ in range(layers)]]
                size[key] = stored_bytes(states[key])
                args = states[key][0], query, query[:, :1]
                context = functools.partial(kernels.use, choice)
                jobs.append(Job(key, vn.implicit(step), args, context, donated=(0,)))
        programs = worker.compile(jobs)

        def once(
            key: str, states: Any = states, programs: Any = programs, query: Any = query
        ) -> Any:
            states[key][0], out = programs[key].run(states[key][0], query, query[:, :1])
            return out

        if time.time() > worker.until:
            return
        took = worker.time({key: functools.partial(once, key) for key in programs})
        medians = {key: statistics.median(rounds) / layers for key, rounds in took.items()}
        base = medians.get(f"7/{room} tokens/bf16")
        for key, seconds in medians.items():
            ratio = None if base is None else base / seconds
            rate = size[key] / layers / seconds / 1e9
            worker.record(
                key,
                us=seconds * 1e6,
                ratio=ratio,
                gbs=rate,
                cache_bytes=size[key] // layers,
                **programs[key].facts,
            )
