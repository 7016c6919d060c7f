"""Callbacks, shardings, shard_map and export: one cell for each.

See also test_callbacks.py, test_shard_map.py, test_sharding.py and test_export.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.matrix import N, cells, matrix
from support.probes import bare

MESH = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
ROWS, BATCH = NamedSharding(MESH, P("d")), P("d")


def on_host(call):
    """Return a function that computes a sum on the host."""
    add = lambda c, w: np.asarray(bare(c)) + np.asarray(bare(w))
    return lambda c, w: call(add, jax.ShapeDtypeStruct((N, N), jnp.float32), c, w)


def printed(m):
    def function(c, w):
        jax.debug.print("{c} {w}", c=c, w=w)
        return m.step(c, w)

    return function


def constrained(m):
    place = lambda x: jax.lax.with_sharding_constraint(x, ROWS)
    return lambda c, w: place(m.step(place(c), place(w)))


def put(m):
    return lambda c, w: m.step(jax.device_put(c, ROWS), jax.device_put(w, ROWS))


def mapped(m):
    """Run the step on two devices, each with one element of a batch."""
    return jax.shard_map(jax.vmap(m.step), mesh=MESH, in_specs=(BATCH, BATCH), out_specs=BATCH)


def rebuilt(function, *args):
    """Export a function for these arguments, serialize it, read it back and call it."""
    return export.deserialize(export.export(jax.jit(function))(*args).serialize()).call(*args)


CELLS = {
    **cells(
        "host",
        {
            "pure_callback": lambda m: m.implicit(on_host(jax.pure_callback))(m.c, m.w),
            "io_callback": lambda m: m.implicit(on_host(io_callback))(m.c, m.w),
            "jit of pure_callback": lambda m: m.implicit(jax.jit(on_host(jax.pure_callback)))(
                m.c, m.w
            ),
        },
    ),
    **cells(
        "c",
        {
            "debug.print": lambda m: m.implicit(printed(m))(m.c, m.w),
            "with_sharding_constraint": lambda m: jax.jit(m.implicit(constrained(m)))(m.c, m.w),
            "device_put": lambda m: m.implicit(put(m))(m.c, m.w),
            "device_put of a batch": lambda m: m.implicit(jax.vmap(m.step))(
                *jax.device_put((m.cs[:2], m.ws), ROWS)
            ),
            "shard_map": lambda m: m.implicit(mapped(m))(m.cs[:2], m.ws),
            "jit of implicit of shard_map": lambda m: jax.jit(m.implicit(mapped(m)))(
                m.cs[:2], m.ws
            ),
            "export": lambda m: rebuilt(m.implicit(m.step), m.c, m.w),
        },
    ),
    **cells(
        "dloss",
        {
            "implicit of grad of shard_map": lambda m: m.implicit(
                jax.grad(lambda c, w: m.loss_of(mapped(m)(c, w), c), 1)
            )(m.cs[:2], m.ws),
        },
    ),
    **cells(
        None,
        {
            "grad of implicit of shard_map": lambda m: jax.grad(
                m.scalar(lambda c, w: m.loss_of(mapped(m)(c, w), c)), 1, allow_int=True
            )(m.cs[:2], m.ws),
        },
    ),
}

test_cell = matrix(CELLS)
