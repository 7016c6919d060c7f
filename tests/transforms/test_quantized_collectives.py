"""Collectives that quantize dense arrays to send them, compared with those in JAX."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax  # noqa: F401  # a missing optax skips this module
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import arrays
from support.data_parallel import bytes_received, data_parallel
from support.stored_values import stored_in_cache

import veneer as vn
from veneer._jax.tracing import varying_axes
from veneer.distributed import all_gather, psum, psum_scatter

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

LINE = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
KEY = arrays.key(0)
X = arrays.normal(8, 40, 112)  # a part has no whole number of tiles
LARGE = arrays.normal(8, 320, 448)

#: The most that a value is off, of the largest in its tile.
ERRORS = {"int8": 0.5 / 127, "float8_e4m3fn": 2**-4, "mxfp8": 2**-3, "int4": 0.5 / 7}
#: Ours and JAX's, of a block with an axis in front that is one device's.
EACH = {
    "all_gather": (
        lambda x, *how, **k: all_gather(x[0], "i", *how, **k)[None],
        lambda x: lax.all_gather(x[0], "i")[None],
    ),
    "all_gather, tiled": (
        lambda x, *how, **k: all_gather(x[0], "i", *how, axis=-1, tiled=True, **k)[None],
        lambda x: lax.all_gather(x[0], "i", axis=1, tiled=True)[None],
    ),
    "psum_scatter": (
        lambda x, *how, **k: psum_scatter(x, "i", *how, scatter_dimension=2, tiled=True, **k),
        lambda x: lax.psum_scatter(x, "i", scatter_dimension=2, tiled=True),
    ),
    "psum_scatter, an axis less": (
        lambda x, *how, **k: psum_scatter(
            x.reshape(4, 8, -1), "i", *how, scatter_dimension=-2, **k
        ),
        lambda x: lax.psum_scatter(x.reshape(4, 8, -1), "i", scatter_dimension=1),
    ),
    "psum": (
        lambda x, *how, **k: psum(x, "i", *how, **k),
        lambda x: lax.psum(x, "i"),
    ),
}
of_each = pytest.mark.parametrize("name", EACH)


def over_blocks(f, check_vma=True, mesh=LINE, specs=None):
    """Each device's own result, side by side; what all have is made its own."""
    names = mesh.axis_names

    def own(y):
        same = tuple(set(names) - varying_axes(y))
        return lax.pcast(y, same, to="varying") if check_vma and same else y

    body = lambda *xs: jax.tree.map(own, f(*xs))
    specs = P(names) if specs is None else specs
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(names), check_vma=check_vma)
    )


@of_each
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("qtype", ERRORS)
def test_results_are_within_the_error_of_the_format(name, check_vma, qtype):
    ours, exact = EACH[name]
    found = over_blocks(lambda x: ours(x, qtype), check_vma)(X)
    expected = over_blocks(exact, check_vma)(X)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    sent = abs(X).max() if "gather" in name else abs(X).max((1, 2)).sum()
    again = abs(expected).max() + ERRORS[qtype] * sent if name == "psum" else 0
    error = abs(found - expected).max()
    assert 0 < error <= ERRORS[qtype] * (sent + again)


def test_a_sum_is_quantized_before_and_after_adding():
    """Compute the same sum by hand on one device."""
    x = X[:, :, :64]  # 2,560 values: 20 tiles, padded to 24
    rounded = lambda x: stored_in_cache(x, "int8", (0, 1), {2: 128}).dequantize()
    tiles = jnp.pad(x.reshape(8, 20, 128), [(0, 0), (0, 4), (0, 0)])
    expected = rounded(rounded(tiles).sum(0)[None])[0, :20].reshape(x.shape[1:])
    found = over_blocks(lambda x: psum(x, "i"))(x)
    wrong = abs(found - expected) > 1e-5  # a value between two codes may be rounded to either
    assert wrong.mean() < 2e-3
    assert abs(found - expected).max() < 1.01 * abs(expected).max() / 127


@pytest.mark.parametrize("key", [None, KEY], ids=["to nearest", "at random"])
@pytest.mark.parametrize("name", ["psum", "all_gather", "all_gather, tiled"])
def test_all_devices_get_the_same_result(name, key):
    found = over_blocks(lambda x: EACH[name][0](x, "int4", key=key), check_vma=False)(X)
    for i in range(1, 8):
        np.testing.assert_array_equal(found[i], found[0])


def test_a_sum_does_not_vary_over_devices():
    f = lambda x, e: psum(x[0], "i", error=e[0])[0]
    jax.shard_map(f, mesh=LINE, in_specs=(P("i"), P("i")), out_specs=P())(X, X)


@of_each
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn", "mxfp8"])
def test_8_bit_collectives_send_a_quarter_of_the_bytes(name, qtype):
    ours, exact = EACH[name]
    packed = bytes_received(over_blocks(lambda x: ours(x, qtype)), LARGE)
    dense = bytes_received(over_blocks(exact), LARGE)
    assert 0.25 * dense < packed <= 0.27 * dense


def test_int4_collectives_send_an_eighth_of_the_bytes():
    packed = bytes_received(over_blocks(lambda x: psum(x, "i", "int4")), LARGE)
    assert packed <= 0.14 * bytes_received(over_blocks(lambda x: lax.psum(x, "i")), LARGE)


# Derivatives.


@of_each
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_agree_with_exact_collectives(name, check_vma):
    ours, exact = EACH[name]
    weights = jax.random.normal(jax.random.key(1), (8, 32, 112))
    x = X[:, :32]

    def grad_of(f):
        of_block = lambda w, x: jnp.sum(jnp.sin(f(x)) * jnp.resize(w, jax.eval_shape(f, x).shape))
        return over_blocks(jax.grad(of_block, 1), check_vma)

    found, expected = grad_of(ours)(weights, x), grad_of(exact)(weights, x)
    assert np.linalg.norm(found - expected) < 0.08 * np.linalg.norm(expected)
    if check_vma and name == "psum":
        return  # replicated cotangents are not sent
    text = grad_of(ours).lower(weights, x).compile().as_text()
    assert bytes_received(grad_of(ours), weights, x) < 0.3 * bytes_received(
        grad_of(exact), weights, x
    )
    assert not re.search(r"f32\[[\d,]*\d{4,}\S* (all-reduce|reduce-scatter)\(", text)


def test_zero_plus_plus_gathers_again_and_scatters_gradients():
    """ZeRO++: both in int8, within a scan and a checkpoint."""
    w = jax.random.normal(KEY, (3, 64, 64)) / 8
    x = jax.random.normal(KEY, (16, 64))

    def loss(gather, w, x):
        step = jax.checkpoint(lambda x, w: (jnp.tanh(x @ gather(w)), None))
        return lax.psum(jnp.sum(lax.scan(step, x, w)[0] ** 2), "i")

    def grad_of(gather):
        f = jax.grad(lambda w, x: loss(gather, w, x))
        return jax.jit(
            jax.shard_map(f, mesh=LINE, in_specs=(P(None, "i"), P("i")), out_specs=P(None, "i"))
        )

    ours = grad_of(lambda w: all_gather(w, "i", tiled=True))
    expected = grad_of(lambda w: lax.all_gather(w, "i", tiled=True))(w, x)
    assert np.linalg.norm(ours(w, x) - expected) < 0.03 * np.linalg.norm(expected)
    program = str(jax.make_jaxpr(ours)(w, x))
    sent = re.findall(r":(\w+)\[[\d,]*\]\S* = (all_gather|all_to_all)\[", program)
    both = [("f32", "all_gather"), ("u8", "all_gather")] * 2
    assert sorted(sent) == sorted([*both, ("f32", "all_to_all"), ("u8", "all_to_all")])


def test_second_derivatives_are_close_to_exact_ones():
    of_sum = lambda x: jnp.sum(jnp.sin(psum_scatter(x[0], "i", tiled=True)))
    slope = jax.grad(lambda x: jnp.sum(jax.grad(of_sum)(x) ** 2))
    exact = lambda x: jnp.sum(jnp.sin(lax.psum_scatter(x[0], "i", tiled=True)))
    slope_of_exact = jax.grad(lambda x: jnp.sum(jax.grad(exact)(x) ** 2))
    found, expected = over_blocks(slope)(X), over_blocks(slope_of_exact)(X)
    assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


# Stochastic rounding, and error feedback.


@pytest.mark.parametrize("name", EACH)
def test_stochastic_rounding_is_unbiased_and_independent(name):
    ours, exact = EACH[name]
    same = jnp.broadcast_to(X[:1], X.shape)
    by_keys = lambda x, keys: lax.map(lambda key: ours(x, "int4", key=key), keys)
    keys = jax.random.split(KEY, 64)
    specs = {"in_specs": (P("i"), P()), "out_specs": P(None, "i")}
    found = jax.jit(jax.shard_map(by_keys, mesh=LINE, check_vma=False, **specs))(same, keys)
    expected = over_blocks(exact)(same)
    nearest = over_blocks(lambda x: ours(x, "int4"))(same) - expected
    assert abs((found - expected).mean(0)).mean() < 0.3 * abs(nearest).mean()
    if "scatter" in name:  # rounding to nearest makes the same error on all eight devices
        assert (found - expected).std() < 0.6 * nearest.std()


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "psum_scatter, an axis less"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_error_feedback_keeps_the_sum(name, check_vma):
    """The sum of all results and the remaining errors equals the sum of all inputs."""
    ours, exact = EACH[name]
    shaped = lambda e: e.reshape(4, 8, -1) if "less" in name else e
    run = over_blocks(lambda x, e: ours(x, "int4", error=shaped(e)), check_vma)
    error, came = jnp.zeros_like(X), 0
    for _ in range(5):
        out, error = run(X, error)
        error, came = error.reshape(X.shape), came + out
    expected = over_blocks(exact, check_vma)(5 * X)
    left = over_blocks(exact, check_vma)(error)
    np.testing.assert_allclose(came + left, expected, rtol=1e-4, atol=1e-3)
    without = 5 * over_blocks(lambda x: ours(x, "int4"), check_vma)(X)
    assert 0 < abs(came - expected).mean() < 0.5 * abs(without - expected).mean()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["int8", "int4, with what was lost"])
def test_a_decoder_learns_as_by_exact_sums(how):
    """Run fewer steps than benchmarks/scale.py, while the loss still falls."""
    exact, dense = data_parallel("f32", 40)
    loss, received = data_parallel(how, 40)
    assert exact < 3.6  # of log(64) = 4.16
    assert abs(loss / exact - 1) < 0.005
    assert received < 0.27 * dense


# Trees, implicit operands and large arrays.


def test_small_arrays_of_a_tree_are_sent_exactly():
    tree = {"w": X, "bias": X[:, 0, :4], "one": X[:, 0, 0]}
    exact = over_blocks(lambda x: lax.psum(x, "i"))(tree)
    zeros = jax.tree.map(jnp.zeros_like, tree)
    for out in (
        over_blocks(lambda x: psum(x, "i"))(tree),
        over_blocks(lambda x, e: psum(x, "i", error=e)[0])(tree, zeros),
    ):
        assert jax.tree.structure(out) == jax.tree.structure(tree)
        np.testing.assert_array_equal(out["bias"], exact["bias"])
        np.testing.assert_array_equal(out["one"], exact["one"])
        assert 0 < abs(out["w"] - exact["w"]).max() < 0.2
    gathered = over_blocks(lambda x: all_gather(x["bias"][0], "i")[None])(tree)
    np.testing.assert_array_equal(gathered[3], tree["bias"])


def test_collectives_run_over_one_or_two_mesh_axes():
    both = over_blocks(lambda x: psum(x, ("x", "y")), mesh=GRID)(X)
    np.testing.assert_array_equal(both, over_blocks(lambda x: psum(x, "i"))(X))
    one = over_blocks(lambda x: psum_scatter(x[0], "y", tiled=True)[None], mesh=GRID)(X)
    exact = X.reshape(2, 4, 40, 112).sum(1).reshape(one.shape)
    assert 0 < abs(one - exact).max() < 0.06


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_of_halves_are_in_f32(dtype):
    x = X.astype(dtype)
    found = over_blocks(lambda x: psum(x, "i"))(x)
    assert found.dtype == dtype
    wide = over_blocks(lambda x: psum(x, "i"))(x.astype(jnp.float32))
    np.testing.assert_array_equal(found, wide.astype(dtype))
    grad = over_blocks(jax.grad(lambda x: psum(x, "i").astype(jnp.float32).sum()))(x)
    assert grad.dtype == dtype


def test_collectives_work_inside_and_over_a_vmap():
    stack = jnp.stack([X, 2 * X], 1)
    per_row = over_blocks(jax.vmap(lambda x: psum(x, "i"), in_axes=1, out_axes=1))(stack)
    for i in range(2):
        expected = over_blocks(lambda x: psum(x, "i"))(stack[:, i])
        np.testing.assert_allclose(per_row[:, i], expected, rtol=1e-6, atol=1e-6)
    by_vmap = jax.jit(jax.vmap(lambda x: psum(x, "i"), axis_name="i"))(X)
    np.testing.assert_allclose(by_vmap, over_blocks(lambda x: psum(x, "i"))(X), rtol=1e-6)


def test_a_nan_reaches_all_devices_but_not_the_error():
    run = over_blocks(lambda x, e: psum(x, "i", error=e))
    found, error = run(X.at[3, 7, 5].set(jnp.nan), jnp.zeros_like(X))
    assert jnp.isfinite(error).all()  # which the next step is given, too
    assert jnp.isnan(found[:, 7, 5]).all()
    assert jnp.isnan(found[0]).sum() == 128  # its tile


def test_implicit_operands_are_materialized():
    q = vn.quant.quantize(X, "nf4", channelwise_axes=(0, 2), tiled_axes={1: 40})
    program = over_blocks(lambda x: psum(x, "i"))
    np.testing.assert_allclose(
        jax.jit(vn.implicit(program))(q), program(q.dequantize()), rtol=1e-6, atol=1e-6
    )
    gather = over_blocks(lambda x: all_gather(vn.freeze(x[0]), "i")[None])
    np.testing.assert_array_equal(gather(X), over_blocks(lambda x: EACH["all_gather"][0](x))(X))


# Errors.

REFUSED = {
    "a value": (
        lambda x: psum({"w": vn.types.LoraArray(x[0], x[0, :, :2], x[0, :2])}, "i"),
        TypeError,
        r"psum cannot tell whether LoraArray.* vn\.materialise.* jax\.tree\.leaves",
    ),
    "integers": (
        lambda x: psum(jnp.ones((8, 128), jnp.int32), "i"),
        TypeError,
        "psum takes floating arrays, not int32",
    ),
    "what does not divide": (
        lambda x: psum_scatter(x[0, :, :110], "i", scatter_dimension=1, tiled=True),
        ValueError,
        r"axis 1 of shape \(40, 110\) cannot be split over 8 devices along \('i',\)\. Its size "
        r"must be a multiple of 8, not 110",
    ),
    "what is no part": (
        lambda x: psum_scatter(x[0], "i"),
        ValueError,
        r"axis 0 of shape \(40, 112\) cannot be split .* 8 \(with tiled=True, a multiple\), not 40",
    ),
    "an axis": (
        lambda x: all_gather(x[0], "i", axis=2, tiled=True),
        ValueError,
        "all_gather: axis 2 is out of range for 2 axes",
    ),
    "a format": (lambda x: psum(x, "i", "int9"), ValueError, "int9"),
    "scales of several devices": (
        lambda x: psum(x, "i", "nvfp4"),
        ValueError,
        "psum does not support the format nvfp4, whose scales are quantized",
    ),
    "a tile": (lambda x: psum(x, "i", "mxfp8", tile_size=64), ValueError, "tiles of 32"),
    "no tile": (
        lambda x: psum(x, "i", tile_size=0),
        ValueError,
        "tile_size must be positive, not 0",
    ),
    "other errors": (
        lambda x: psum([x], "i", error=x),
        ValueError,
        r"error must have the structure of x, PyTreeDef\(\[\*\]\), not PyTreeDef\(\*\)",
    ),
    "an error": (
        lambda x: psum(x, "i", error=x[0]),
        ValueError,
        r"an error has shape \(40, 112\), its array \(1, 40, 112\)",
    ),
}


@pytest.mark.parametrize(("program", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_rejected(program, error, message):
    with pytest.raises(error, match=message):
        over_blocks(program)(X)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("qtype", ["int8", "uint8"])
def test_large_arrays_are_sent_from_within_a_shard_map(qtype, dtype):
    """Outside a shard_map, this many values are quantized in chunks on CPU."""
    x = jnp.broadcast_to(jnp.arange(2**21, dtype=dtype) / 2**21, (8, 2**21))
    total = over_blocks(lambda x: psum(x, "i", qtype))(x)
    np.testing.assert_allclose(total[0, ::4096], 8 * x[0, ::4096], atol=0.1)
