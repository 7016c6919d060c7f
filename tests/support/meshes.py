"""Meshes of 2 x 4 devices, values with a sharding, and a check of sharded programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import veneer as vn
from support import arrays
from support.array_types import MAKERS, Lora, assert_close
from support.policies import without_rule

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

AUTO = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
KEY = arrays.key(0)
X = arrays.normal(4, 8)

TOLERANCE = 1e-4  # each number of devices adds the terms of a sum in another order


class ColumnLora(Lora):
    """A low-rank update with shardings for its leaves."""

    def partition(self, spec, shape):
        *batch, m, n = spec
        return type(self)(P(*batch, m, n), P(*batch, m, None), P(*batch, None, n), self.scale)


def cut(lora):
    return ColumnLora(lora.w, lora.a, lora.b, lora.scale)


MAKE = {
    "lora": lambda shape=(8, 8): cut(MAKERS["lora"](KEY, shape)),
    "lora of int8": lambda shape=(8, 8): cut(MAKERS["lora of int8"](KEY, shape)),
    "int8": lambda shape=(8, 8): MAKERS["int8"](KEY, shape),
    "int4": lambda shape=(8, 8): vn.quant.quantize(
        jax.random.normal(KEY, shape), "int4", channelwise_axes=[-1], tiled_axes={-2: 2}
    ),
}
of_each_type = pytest.mark.parametrize("name", MAKE)
of_the_flat_types = pytest.mark.parametrize("name", ["lora", "int8", "int4"])

WAYS = {
    "eager": vn.implicit,
    "jit outside": lambda f: jax.jit(vn.implicit(f)),
    "jit inside": lambda f: vn.implicit(jax.jit(f)),
}


def check(f, *operands, ways=("jit outside",), events=()):
    """Check `f` against dense arrays, and that only the primitives in `events` have no rule."""
    expected = jax.jit(f)(*vn.materialise(operands))
    outs = [WAYS[way](f)(*operands) for way in ways]
    for out in outs:
        assert_close(out, expected, TOLERANCE)
    report = vn.explain(f)(*operands)
    assert tuple(event.primitive for event in without_rule(report)) == events
    return outs[0]


def matmul(x, w):
    return jnp.tanh(x @ w)


class Stated(vn.ImplicitArray):
    """A type whose `aval` has no sharding and no varying manual axes."""

    x: jax.Array  # [...]

    def aval(self):
        return jax.core.ShapedArray(self.x.shape, self.x.dtype)

    def materialise(self):
        return self.x


# Over the explicit mesh.


def put(x, *spec):
    """Shard an array, or the leaves of a value, over the explicit mesh."""
    return vn.implicit(lambda x: jax.device_put(x, NamedSharding(EXPLICIT, P(*spec))))(x)
