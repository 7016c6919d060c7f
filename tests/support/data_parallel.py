"""Train a small decoder with data parallelism on 8 devices, and count the bytes that are sent.

`benchmarks/scale.py` prints the results, and tests compare shorter runs.
"""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import veneer as vn

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import fsdp

AXIS = "devices"

#: The bytes that each of 8 devices receives, relative to the bytes of its result.
_TIMES = {"all-gather": 1, "all-to-all": 1, "collective-permute": 1}
_TIMES |= {"reduce-scatter": 8, "all-reduce": 2}
_COLLECTIVE = rf"= (.*?) ({'|'.join(_TIMES)})(?:-start)?\("
_BYTES = {"f32": 4, "u8": 1, "s8": 1}


def bytes_received(run: Any, *args: Any) -> int:
    """Return the bytes that collectives of the compiled program send to one device."""
    total = 0
    for results, name in re.findall(_COLLECTIVE, run.lower(*args).compile().as_text()):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
            sizes = [int(size) for size in shape.split(",") if size]
            total += _TIMES[name] * _BYTES[dtype] * int(np.prod(sizes))
    return total


SMALL = fsdp.Config(vocabulary=64, width=64, wide=128, num_layers=2, num_heads=4, batch=64)
OPTIMIZER = optax.adam(optax.cosine_decay_schedule(3e-3, 500))

#: How gradients are sent: the format, stochastic rounding, and error feedback.
GRADIENTS: dict[str, tuple[str | None, bool, bool]] = {
    "f32": (None, False, False),
    "int8": ("int8", False, False),
    "int8, at random": ("int8", True, False),
    "float8_e4m3fn": ("float8_e4m3fn", False, False),
    "mxfp8": ("mxfp8", False, False),
    "int4": ("int4", False, False),
    "int4, with what was lost": ("int4", False, True),
}


def chain(key: jax.Array, config: fsdp.Config) -> jax.Array:
    """Return sequences `[batch, length + 1]` of a Markov chain."""
    likely = 2 * jax.random.normal(jax.random.key(7), (config.vocabulary, config.vocabulary))
    start, *keys = jax.random.split(key, config.length + 1)
    first = jax.random.randint(start, (config.batch,), 0, config.vocabulary)

    def step(token: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jax.random.categorical(key, likely[token])
        return new, new

    return jnp.concatenate([first[:, None], lax.scan(step, first, jnp.stack(keys))[1].T], 1)


def surprise(weights: Any, tokens: jax.Array, config: fsdp.Config) -> jax.Array:
    """Return the mean cross entropy of the next token, for a decoder with dense weights."""
    layer = lambda x, p: (fsdp.layer(p, x, config.num_heads), None)
    x, _ = lax.scan(layer, weights["embedding"][tokens[:, :-1]], weights["layers"])
    logits = fsdp.norm(x) @ weights["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def data_parallel(how: str, steps: int, config: fsdp.Config = SMALL) -> tuple[float, int]:
    """Train with one way to send gradients. Return the loss and the bytes per step.

    **Arguments:**

    - `how`: a key of `GRADIENTS`.
    """
    qtype, at_random, with_error = GRADIENTS[how]
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,))

    def sums(grads: Any, errors: Any, key: jax.Array) -> tuple[Any, Any]:
        if qtype is None:
            return lax.psum(grads, AXIS), errors
        send = partial(vn.distributed.psum, axis_name=AXIS, qtype=qtype)
        key = key if at_random else None
        if not with_error:
            return send(grads, key=key), errors
        return send(grads, key=key, error=errors)

    def step(weights: Any, state: Any, errors: Any, key: jax.Array, tokens: jax.Array) -> Any:
        own = lax.pcast(weights, AXIS, to="varying")  # otherwise JAX sums the gradients in f32
        grads = jax.grad(surprise)(own, tokens, config)
        grads, errors = sums(grads, jax.tree.map(lambda e: e[0], errors), key)
        changes, state = OPTIMIZER.update(jax.tree.map(lambda g: g / 8, grads), state)
        return optax.apply_updates(weights, changes), state, jax.tree.map(lambda e: e[None], errors)

    specs = P(), P(), P(AXIS)
    run = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P(), P(AXIS)), out_specs=specs)
    weights, _ = fsdp.init(jax.random.key(0), config)
    errors = jax.tree.map(lambda w: jnp.zeros((8, *w.shape)), weights)
    args = weights, OPTIMIZER.init(weights), errors

    @jax.jit
    def train(args: Any, keys: jax.Array) -> Any:
        return lax.scan(lambda args, key: (run(*args, key, chain(key, config)), None), args, keys)[
            0
        ]

    keys = jax.random.split(jax.random.key(1), steps)
    received = bytes_received(jax.jit(run), *args, keys[0], chain(keys[0], config))
    trained = train(args, keys)[0]
    unseen = chain(jax.random.key(2), replace(config, batch=1024))
    return float(jax.jit(surprise, static_argnums=2)(trained, unseen, config)), received
