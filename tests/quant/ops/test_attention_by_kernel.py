"""Attention to caches `[batch, tokens, heads, width]`, in which heads are interleaved."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import veneer as vn

B, S, K, D = 2, 320, 4, 64  # batch, tokens, heads of keys, width
FORMATS = {
    "int8": {},
    "int4": {},
    "int3": {},
    "fp8": {},
    "uint4": {"calibration_method": "minmax"},
    "int8, scales of 16 bits": {"scale_dtype": "bfloat16"},
    "int8 in tiles": {"tiled_axes": {3: 32}},
}


def draw(*shape, seed, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def cache(name, seed, shape=(B, S, K, D), dtype=jnp.float32):
    qtype, how = name.split(",")[0].split(" ")[0], FORMATS[name]
    axes = [*range(len(shape) - 1)]
    how = how if "tiled_axes" not in how else {"tiled_axes": {len(shape) - 1: 32}}
    empty = vn.quant.zeros(shape, qtype, dtype=dtype, channelwise_axes=axes, **how)
    write = vn.implicit(lambda c, x: c.at[...].set(x), on_materialise="error")
    return write(empty, draw(*shape, seed=seed, dtype=dtype))


def attend(q, k, v, at=S, **how):
    mask = (jnp.arange(S) < at)[None, None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, **how)


def written_out(q, k, v, at=S):
    """Compute attention by einsum, with an axis for the queries that share a head."""
    b, t, n, d = q.shape
    grouped = q.reshape(b, t, K, n // K, d)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k) * d**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(S) < at, scores, -jnp.inf))
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(q.shape)


PROGRAMS = {
    "jax.nn": attend,
    "causal": lambda q, k, v, at: attend(q, k, v, at, is_causal=True),
    "einsum": written_out,
}


def check(program, q, k, v, *rest, tolerance=1e-5):
    actual = jax.jit(vn.implicit(program))(q, k, v, *rest)
    expected = program(q, *vn.materialise((k, v)), *rest)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    pair = (np.asarray(y, np.float32) for y in (actual, expected))
    np.testing.assert_allclose(*pair, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("queries", [1, 3, 30])
def test_attention_agrees_with_dense_caches(name, queries):
    q = draw(B, queries, 2 * K, D, seed=1)
    for program in PROGRAMS.values():
        check(program, q, cache(name, 2), cache(name, 3), 100)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("heads", [K, 4 * K])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_no_dense_cache_is_materialized(name, heads, program):
    args = draw(B, 1, heads, D, seed=1), cache(name, 2), cache(name, 3), 100
    assert vn.explain(PROGRAMS[program])(*args).materialised == ()
    compiled = jax.jit(vn.implicit(PROGRAMS[program])).lower(*args).compile()
    text = compiled.as_text()
    shapes = re.findall(r"(?:f32|f16|bf16)\[([\d,]+)\]", text)
    assert max(np.prod([*map(int, shape.split(","))]) for shape in shapes) < B * S * K * D
    # Codes are not copied either.
    assert not re.search(r"= (?:[su]8|f8\w+)\[[\d,]+\]\S* (?:copy|transpose|fusion)\(", text)


def test_attention_in_16_bits_agrees():
    k, v = (cache("int8", seed, dtype=jnp.bfloat16) for seed in (2, 3))
    q = draw(B, 1, K, D, seed=1, dtype=jnp.bfloat16)
    check(attend, q, k, v, tolerance=0.03)  # scores and weights are rounded


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_decoding_step_writes_in_place_and_reads_the_cache(name):
    def step(caches, q, new, at):
        k, v = (jax.lax.dynamic_update_slice(c, new, (0, at, 0, 0)) for c in caches)
        return (k, v), attend(q, k, v, at + 1)

    caches = cache(name, 2), cache(name, 3)
    args = draw(B, 1, K, D, seed=1), draw(B, 1, K, D, seed=4), 100
    run = jax.jit(vn.implicit(step), donate_argnums=0).lower(caches, *args).compile()
    bytes_ = ",".join(map(str, caches[0].packed.shape))
    assert not re.search(rf"= [su]8\[{bytes_}\]\S* copy\(", run.as_text())
    dense = vn.materialise(caches)
    (k, _), out = run(caches, *args)
    np.testing.assert_array_equal(k.dequantize()[:, :100], dense[0][:, :100])
    expected = attend(
        args[0], *(c.at[:, 100:101].set(k.dequantize()[:, 100:101]) for c in dense), 101
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_a_single_text_needs_no_batch_axis():
    k, v = cache("int8", 2, (S, K, D)), cache("int8", 3, (S, K, D))
    assert vn.explain(attend)(draw(1, K, D, seed=1), k, v).materialised == ()
    check(attend, draw(1, K, D, seed=1), k, v)


def test_attention_under_vmap_agrees():
    k, v = cache("int4", 2), cache("int4", 3)
    lengths = jnp.array([5, S])

    def each(q, k, v):
        one = lambda q, k, v, at: attend(q, k, v, at)
        return jax.vmap(one)(q, k, v, lengths)

    check(each, draw(B, 1, K, D, seed=1), k, v)


def test_a_scan_over_layers_reads_the_stacked_cache():
    shape = 3, B, S, K, D
    k, v = cache("int8", 2, shape), cache("int8", 3, shape)

    def layers(q, k, v):
        return jax.lax.scan(lambda q, kv: (attend(q, *kv), None), q, (k, v))[0]

    q = draw(B, 1, K, D, seed=1)
    check(layers, q, k, v)
    compiled = jax.jit(vn.implicit(layers)).lower(q, k, v).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < k.packed.nbytes // 3


def test_gradients_by_queries_and_scales_agree():
    q, k, v = draw(B, 2, K, D, seed=1), cache("int4", 2), cache("int4", 3)

    def loss(q, scales, dense):
        k_, v_ = k.replace(scale=scales[0]), v.replace(scale=scales[1])
        out = attend(q, *vn.materialise((k_, v_))) if dense else vn.implicit(attend)(q, k_, v_)
        return jnp.sum(jnp.sin(out))

    grad = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    grads = [jax.tree.leaves(grad(q, (k.scale, v.scale), dense)) for dense in (False, True)]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_attention_sharded_over_two_devices_agrees(spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    k, v = (vn.device_put(cache("int8", seed), NamedSharding(mesh, spec)) for seed in (2, 3))
    q = jax.device_put(draw(B, 1, K, D, seed=1), NamedSharding(mesh, spec))
    check(attend, q, k, v)


def test_quantized_queries_are_multiplied_as_integers():
    q = vn.quant.quantize(draw(B, 1, K, D, seed=1), "int8", channelwise_axes=[0, 1, 2])
    k, v = cache("int8", 2), cache("int8", 3)
    expected = attend(*vn.materialise((q, k, v)))
    np.testing.assert_allclose(vn.implicit(attend)(q, k, v), expected, rtol=1e-5, atol=1e-5)
