"""Products with slices of stacked weights in loops, which move no codes."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer import kernels
from veneer.quant import FORMATS, QArray, quantize
from veneer.quant.ops.by_kernel import codes_of

# Matrices begin at odd addresses, and their rows end within a byte and within a vector.
L, M, K, N, D = 3, 3, 192, 131, 256


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def stack(qtype, *shape, tile=None, **options):
    tile = FORMATS[qtype].tile_size or tile
    tiled = {} if tile is None else {1: tile}
    w = normal(*shape, seed=2) / math.sqrt(shape[1])
    return quantize(w, qtype, channelwise_axes=[0, 2], tiled_axes=tiled, **options)


def assert_close(actual, exact, tolerance=1e-5):
    """Compare two arrays by the norm of the error."""
    exact = np.asarray(exact, np.float64)
    assert actual.shape == exact.shape
    error = np.linalg.norm(np.asarray(actual, np.float64) - exact) / np.linalg.norm(exact)
    assert error <= tolerance, error


_MOVED = re.compile(r"= (?:u8|s8|f8\w+)\[([\d,]+)\]\S* (?:dynamic-slice|slice|copy|transpose)\(")


def moved(f, *args, least=K * N // 8):
    """Return the sizes, of at least `least`, of the arrays of codes that a program writes."""
    program = jax.jit(vn.implicit(f)).lower(*args).compile().as_text()
    assert 'custom_call_target="veneer_' in program
    sizes = [math.prod(map(int, found.split(","))) for found in _MOVED.findall(program)]
    return [size for size in sizes if size >= least]


def layer_by_layer(xs, ws):
    return lax.scan(lambda c, xw: (c, xw[0] @ xw[1]), None, (xs, ws))[1]


def with_zero_points(dtype):
    rng, shape = np.random.default_rng(0), (L, 1, N)
    low = 0 if dtype.startswith("u") else -8
    codes = jnp.asarray(rng.integers(low, low + 16, (L, K, N)), dtype)
    scale = jnp.asarray(rng.uniform(0.5, 1, shape), jnp.float32)
    return QArray(codes, scale, jnp.asarray(rng.integers(low, low + 16, shape), jnp.int8))


def with_minima(dtype):
    q = with_zero_points("uint4")
    scale, minimum = (x.astype(dtype) for x in (q.scale, q.scale - 2))
    return QArray(q.qvalue, scale, qtype="uint4", minimum=minimum).replace(dense_dtype="float32")


def test_every_format_is_read_from_its_stack():
    served = [name for name in FORMATS if codes_of(name, has_zero_point=False) is not None]
    ws = {qtype: stack(qtype, L, K, N) for qtype in served}
    ws |= {"tiles": stack("int4", L, K, N, tile=64)}
    ws |= {"scales of 16 bits": stack("int8", L, K, N, tile=32, scale_dtype="bfloat16")}
    ws |= {f"zero points of {dtype}": with_zero_points(dtype) for dtype in ("int4", "uint4")}
    ws |= {f"minima of {dtype}": with_minima(dtype) for dtype in ("float32", "float16")}
    ws |= {"one layer": stack("int8", 1, K, N)}
    xs = normal(L, M, K, seed=1)

    def run(xs, ws):
        return {name: layer_by_layer(xs[: len(w)], w) for name, w in ws.items()}

    assert moved(run, xs, ws) == []
    for name, actual in jax.jit(vn.implicit(run))(xs, ws).items():
        assert_close(actual, xs[: len(ws[name])] @ ws[name].dequantize())


@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
def test_integer_activations_agree(scale_dtype):
    w = stack("int4", L, K, N, scale_dtype=scale_dtype)
    xs = normal(L, M, K, seed=1)

    def run(xs, ws):
        def step(c, xw):
            x = quantize(xw[0], "int8", channelwise_axes=[0])
            return c, vn.quant.dot_general(x, xw[1], (((1,), (0,)), ((), ())))

        return lax.scan(step, None, (xs, ws))[1]

    assert moved(run, xs, w) == []
    with kernels.use("xla"):
        expected = jax.jit(vn.implicit(run))(xs, w)
    assert_close(jax.jit(vn.implicit(run))(xs, w), expected, 1e-3)


def layer(x, w):
    return jnp.tanh(x @ w)


def scan(f, **options):
    return lambda x, ws: lax.scan(lambda x, w: (f(x, w), x.sum()), x, ws, **options)[0]


def gradient(f):
    return jax.grad(lambda x, ws: jnp.sum(f(x, ws) ** 2))


def choice(x, w):
    return lax.cond(x[0, 0] > 9, lambda x, w: x, layer, x, w)


def experts(x, ws):
    return lax.map(lambda expert: layer(x, ws[expert]), jnp.array([2, 0, 2]))


PROGRAMS = {
    "reverse": scan(layer, reverse=True),
    "unroll": scan(layer, unroll=2),
    "jit": scan(jax.jit(layer)),
    "einsum": scan(lambda x, w: jnp.tanh(jnp.einsum("mk,nk->mn", x, w))),
    "transposed": scan(lambda x, w: jnp.tanh(x @ w.T)),
    "remat": scan(jax.checkpoint(layer)),
    "cond": scan(choice),
    "vmap": lambda x, ws: jax.vmap(scan(layer), (0, None))(jnp.stack([x, 2 * x]), ws),
    "grad": gradient(scan(layer)),
    "grad of remat": gradient(scan(jax.checkpoint(layer))),
    "fori_loop": lambda x, ws: lax.fori_loop(0, len(ws), lambda i, x: layer(x, ws[-i]), x),
    "dynamic_index_in_dim": lambda x, ws: lax.fori_loop(
        -1, len(ws) + 1, lambda i, x: layer(x, lax.dynamic_index_in_dim(ws, i, 0, False)), x
    ),
    "slices of slices": lambda x, ws: lax.scan(
        lambda x, pair: (layer(layer(x, pair[1]), pair[0]), None), x, ws.reshape(2, 2, D, D)
    )[0],
    "experts": experts,
}


@pytest.mark.parametrize("qtype", ["int4", "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_and_branches_read_the_stack(name, qtype):
    x, w, program = normal(M, D, seed=1), stack(qtype, 4, D, D), PROGRAMS[name]
    assert moved(program, x, w) == []
    assert_close(jax.jit(vn.implicit(program))(x, w), program(x, w.dequantize()))


def test_other_uses_of_a_layer_are_correct():
    x, w = normal(M, D, seed=1), stack("int8", L, D, D)
    both = scan(lambda x, w: jnp.tanh(x @ w + w[0]))
    assert_close(jax.jit(vn.implicit(both))(x, w), both(x, w.dequantize()))


def test_a_stack_in_a_loop_carry_can_be_written():
    x, w = normal(M, D, seed=1), stack("int8", L, D, D)

    def run(x, q):
        def step(carry, i):
            x, codes = carry
            layer_codes = lax.dynamic_index_in_dim(codes, i, 0, False)
            codes = codes.at[i].set(jnp.int8(1))
            return (layer(x, vn.quant.QArray(layer_codes, q.scale[0])), codes), None

        return lax.scan(step, (x, q.qvalue), jnp.arange(L))[0][0]

    actual = jax.jit(vn.implicit(lambda x, codes, scale: run(x, QArray(codes, scale))))
    scale = jnp.broadcast_to(w.scale[:1], w.scale.shape)
    dense = QArray(w.qvalue, scale).dequantize()
    assert_close(actual(x, w.qvalue, scale), scan(layer)(x, dense))


def test_experts_of_a_batch_are_gathered():
    x, w = normal(M, D, seed=1), stack("int4", L, D, D)
    of_each = jax.vmap(lambda x, e, w: layer(x, w[e]), (None, 0, None))
    which = jnp.array([1, 0, 1])
    run = lambda x, w: lax.scan(lambda x, _: (of_each(x, which, w)[0], None), x, None, 2)[0]
    assert_close(jax.jit(vn.implicit(run))(x, w), run(x, w.dequantize()))


def test_the_jaxpr_is_the_same_as_without_stacks():
    x, w = normal(M, D, seed=1), stack("int8", L, D, D)
    jaxpr = jax.make_jaxpr(vn.implicit(scan(layer)))(x, w)
    (loop,) = jaxpr.eqns
    names = [equation.primitive.name for equation in loop.params["jaxpr"].eqns]
    assert loop.primitive.name == "scan"
    assert names.count("stored_matmul") == 1
    assert "dynamic_slice" not in names


def test_high_types_read_the_stack():
    x, w, run = normal(M, D, seed=1), stack("int4", L, D, D), scan(layer)
    with vn.hijax.enabled():
        program = jax.jit(run).lower(x, w).compile().as_text()
        assert 'custom_call_target="veneer_' in program
        assert _MOVED.findall(program) == []
        assert_close(jax.jit(run)(x, w), run(x, w.dequantize()))
