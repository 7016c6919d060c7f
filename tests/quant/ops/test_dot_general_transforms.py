"""Products of integer codes, with and without tiles, under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import veneer as vn
from veneer.quant import quantize


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# The format and tile size, along 64 terms, of lhs and rhs.
PAIRS = {
    "integers": (("int8", None), ("uint4", None)),
    "integers per tile": (("uint8", 32), ("int4", 16)),
    "float8": (("fp8_e4m3fn", None), ("fp8_e5m2", None)),
    "a codebook, scaled outside": (None, ("nf4", None)),
    "dequantized tiles": (None, ("int4", 16)),
}
of_each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def quantized(x, axis, kind):
    if kind is None:
        return x
    qtype, tile = kind
    free = [i for i in range(x.ndim) if i != axis % x.ndim]
    return quantize(x, qtype, channelwise_axes=free, tiled_axes={axis: tile} if tile else None)


def operands(pair, *batch):
    x, w = normal(*batch, 3, 64, seed=1), normal(*batch, 64, 8, seed=2)
    return quantized(x, -1, pair[0]), quantized(w, -2, pair[1])


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # Sums of 64 terms in another order. Derivatives by a scale are sums of codes, and large.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1, np.abs(b).max()))


def loop(x, w):
    return lax.fori_loop(0, 3, lambda _, c: c + jnp.tanh(x[0] @ w[0]), jnp.zeros((3, 8)))


def scan(x, w):
    return lax.scan(lambda c, xw: (c + jnp.sum(xw[0] @ xw[1]), None), 0.0, (x, w))[0]


PROGRAMS = {
    "vmap": jax.vmap(lambda x, w: x @ w),
    "vmap over the left": jax.vmap(lambda x, w: x @ w[0], in_axes=(0, None)),
    "vmap over the right": jax.vmap(lambda x, w: x[1] @ w, in_axes=(None, 0), out_axes=1),
    "vmap over rows": jax.vmap(lambda x, w: x @ w[0], in_axes=(1, None)),
    "vmap over columns": jax.vmap(lambda x, w: jnp.tanh(x[1] @ w[0]), in_axes=(None, 2)),
    "vmap of vmap": jax.vmap(jax.vmap(jnp.dot, in_axes=(0, None)), in_axes=(0, 0)),
    "scan": scan,
    "loop": loop,
    "cond": lambda x, w: lax.cond(True, lambda: x[0] @ w[1], lambda: x[1] @ w[0]),
    "checkpoint": jax.checkpoint(lambda x, w: jnp.sin(x @ w)),
    "jit": jax.jit(lambda x, w: x @ w),
}


@of_each_pair
def test_programs_agree_with_dense_arrays(pair):
    args = operands(pair, 2)

    @jax.jit
    def run(args):
        dense = vn.materialise(args)
        return [(vn.implicit(f)(*args), f(*dense)) for f in PROGRAMS.values()]

    for actual, expected in run(args):
        assert_close(vn.materialise(actual), expected)


def with_scales(args, scales):
    """Return the operands with other scales and dense values."""
    rest = iter(scales)
    return [
        q.replace(scale=next(rest)) if isinstance(q, vn.quant.QArray) else next(rest) for q in args
    ]


@of_each_pair
def test_derivatives_by_scales_and_dense_operands_agree(pair):
    args = operands(pair)
    scales = [q.scale if isinstance(q, vn.quant.QArray) else q for q in args]
    product = vn.implicit(lambda x, w: jnp.sum(jnp.sin(x @ w)))
    dense = lambda x, w: jnp.sum(jnp.sin(vn.materialise(x) @ vn.materialise(w)))

    @jax.jit
    def run(scales):
        of = lambda f: lambda scales: f(*with_scales(args, scales))
        tangents = [jnp.cos(s) for s in scales]
        return [
            (
                jax.grad(of(f))(scales),
                jax.jvp(of(f), (scales,), (tangents,)),
                jax.hessian(of(f))(scales)[0][0][..., :2],
            )
            for f in (product, dense)
        ]

    assert_close(*run(scales))


@of_each_pair
def test_derivatives_of_the_program_agree_with_dense_arrays(pair):
    args = operands(pair)
    grad = jax.grad(lambda args: jnp.sum(jnp.sin(args[0] @ args[1])))
    assert_close(vn.materialise(vn.implicit(grad)(args)), grad(vn.materialise(args)))


of_meshes = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")


@of_meshes
@of_each_pair
@pytest.mark.parametrize("specs", [(P(None, "x"), P("x")), (P(), P(None, "x")), (P("x"), P())])
def test_shard_map_with_scales_sharded_like_values_agrees(pair, specs):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    x, w = normal(4, 64, seed=1), normal(64, 6, seed=2)
    args = quantized(x, -1, pair[0]), quantized(w, -2, pair[1])
    summed = specs[1] == P("x")
    out = (
        P()
        if summed
        else P(specs[0][0] if specs[0] else None, specs[1][1] if len(specs[1]) > 1 else None)
    )

    def product(x, w):
        y = x @ w
        return lax.psum(y, "x") if summed else y

    run = jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=out)
    assert_close(jax.jit(vn.implicit(run))(*args), run(*vn.materialise(args)))


@of_meshes
@of_each_pair
def test_sharded_arrays_under_jit_agree(pair):
    args = operands(pair)
    for mode in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("x",), axis_types=(mode,))

        def put(leaf, mesh=mesh):
            spec = P(None, "x") if leaf.shape[1] > 1 else P()
            return jax.device_put(leaf, NamedSharding(mesh, spec))

        placed = args[0], jax.tree.map(put, args[1])
        with jax.set_mesh(mesh):
            actual = jax.jit(vn.implicit(jnp.matmul))(*placed)
        assert_close(actual, jnp.matmul(*vn.materialise(args)))
