"""NMSparse: its algebra against the dense program, what pruning keeps, and its size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.claims import Claim, claims

import veneer as vn
from veneer.kernels.common.problem import pack_bits, planes_size, unpack_bits
from veneer.types.elementwise import NONLINEAR
from veneer.types.nm_sparse import NMSparse


def pruned(n, m, axis):
    """A maker of matrices: along the axis, as many groups as the draw says; 3 entries across."""

    def make(draw):
        shape = (draw.n * m, 3) if axis == -2 else (3, draw.n * m)
        return NMSparse.prune(draw.positive(*shape) / 2, n, m, axis)

    return make


KERNEL, WEIGHT = pruned(2, 4, -2), pruned(1, 3, -1)
SMALL = {"sizes": (0, 1), "dtypes": ("bfloat16", "float64")}

FUNCTIONS = {name: getattr(jax.lax, name) for name in ("neg", *NONLINEAR)}
FUNCTIONS["integer_pow"] = lambda x: x**3
SMOOTH = "neg square integer_pow sin tanh expm1 log1p erf".split()

CLAIMS = {
    "matmul": Claim(
        lambda w, x: [x @ w, w.T @ x.T, x[0] @ w, w.T @ w],
        [KERNEL, lambda draw: draw(2, 4 * draw.n)],
    ),
    "matmul along the other axis": Claim(
        lambda w, x: [x @ w, w.T @ x.T], [WEIGHT, lambda draw: draw(2, 3)], **SMALL
    ),
    "transpose": Claim(lambda w, v: [w.T, v.T], [KERNEL, WEIGHT], NMSparse, **SMALL),
    "elementwise functions": Claim(
        lambda w: [FUNCTIONS[name](w) for name in SMOOTH], [KERNEL], NMSparse, **SMALL
    ),
    "conversions": Claim(
        lambda w: [w.astype(jnp.bfloat16), w.astype(jnp.float32)], [KERNEL], NMSparse, **SMALL
    ),
    "times and over a number": Claim(
        lambda w, y: [2 * w, w * y[0, 0], w / y[0, 0]],
        [WEIGHT, lambda draw: draw.positive(1, 1)],
        NMSparse,
        **SMALL,
    ),
    "times and over dense": Claim(
        lambda w, y, z: [w * y, y * w, w / y, w * z],
        [KERNEL, lambda draw: draw.positive(4 * draw.n, 3), lambda draw: draw.positive(3)],
        NMSparse,
        **SMALL,
    ),
    "sum": Claim(lambda w: w.sum(0), [KERNEL], made_dense=True, **SMALL),
}

test_under, test_over_sizes_and_dtypes = claims(CLAIMS)

NORMAL = arrays.normal(16, 3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_map_0_to_0_keep_the_pattern(name):
    w = NMSparse.prune(NORMAL / 8)
    out = vn.implicit(FUNCTIONS[name], on_materialise="error")(w)
    assert isinstance(out, NMSparse)
    np.testing.assert_allclose(
        vn.materialise(out), FUNCTIONS[name](vn.materialise(w)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("function", [jnp.cos, lambda w: w + 1, lambda w: w**0])
def test_other_functions_materialize(function):
    assert vn.explain(function)(NMSparse.prune(NORMAL)).materialised


def kept_by_sorting(x, n, m):
    """Return the mask of the n largest of each m entries along the last axis, by a stable sort."""
    groups = np.abs(x).reshape(*x.shape[:-1], -1, m)
    order = np.argsort(-np.where(np.isnan(groups), np.inf, groups), axis=-1, kind="stable")
    mask = np.zeros(groups.shape, bool)
    np.put_along_axis(mask, order[..., :n], True, axis=-1)
    return mask.reshape(x.shape)


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (3, 5), (4, 4), (7, 256)])
def test_prune_keeps_the_largest_entries(n, m, axis):
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, (2, 3, 2 * m)).astype(np.float32)  # with ties
    x[0, 0, :2] = np.nan, np.inf
    mask = kept_by_sorting(x, n, m)
    put = lambda x: np.moveaxis(x, -1, axis)
    w = NMSparse.prune(put(x), n, m, axis)
    np.testing.assert_array_equal(w.mask(), put(mask))
    np.testing.assert_array_equal(vn.materialise(w), put(np.where(mask, x, 0)))
    np.testing.assert_array_equal(w.gather(put(x)), w.values)


def test_elementwise_operations_ignore_nan_at_pruned_entries():
    w = NMSparse.prune(jnp.array([[2.0, 1.0]]), 1, 2, axis=-1)
    bad = jnp.array([[1.0, jnp.nan]])
    assert vn.materialise(w * bad).tolist() == [[2.0, 0.0]]
    assert vn.materialise(w / jnp.array([[1.0, 0.0]])).tolist() == [[2.0, 0.0]]


def test_a_matmul_multiplies_pruned_entries_by_zero():
    w = NMSparse.prune(jnp.array([[2.0, 1.0]]), 1, 2, axis=-1)
    np.testing.assert_array_equal(w @ jnp.array([1.0, jnp.inf]), [jnp.nan])


@pytest.mark.parametrize(("n", "m", "bits"), [(2, 4, 2), (1, 2, 1), (1, 8, 3), (4, 16, 4)])
def test_nbytes_counts_values_and_packed_positions(n, m, bits):
    w = NMSparse.prune(jax.random.normal(jax.random.key(0), (256, 8)), n, m)
    kept = 256 * 8 * n // m
    assert w.nbytes == kept * 4 + kept * bits // 8


def test_repr_shows_leaves_and_pattern():
    assert repr(NMSparse.prune(NORMAL)) == (
        "NMSparse(values=f32[8,3], indices=u8[2,3], n=2, m=4, axis=-2)"
    )


def test_gradients_of_values_match_the_dense_gradient():
    w, x = NMSparse.prune(NORMAL), jnp.ones((2, 16))
    loss = lambda w: (jnp.tanh(x @ w) ** 2).sum()
    of_values = lambda values: vn.implicit(loss)(dataclasses.replace(w, values=values))
    dense = vn.implicit(jax.grad(loss))(w)
    np.testing.assert_allclose(jax.grad(of_values)(w.values), w.gather(dense), rtol=1e-5)


def test_prune_is_differentiable():
    by_w = jax.grad(lambda w: vn.materialise(NMSparse.prune(w)).sum())(NORMAL)
    np.testing.assert_array_equal(by_w, NMSparse.prune(NORMAL).mask())


def test_values_may_be_quantized():
    w = NMSparse.prune(NORMAL)
    quantized = vn.quant.quantize(w.values, "int8", channelwise_axes=[1])
    q = NMSparse(quantized, w.indices, w.n, w.m)
    assert q.nbytes == 8 * 3 + 3 * 4 + 2 * 3
    program = lambda x, q: (x @ q) @ q.T
    x = jnp.ones((2, 16))
    strict = vn.implicit(program, on_materialise="error")
    np.testing.assert_allclose(strict(x, q), program(x, vn.materialise(q)), rtol=1e-5, atol=1e-5)
    by_x = jax.grad(lambda x: strict(x, q).sum())(x)
    expected = jax.grad(lambda x: program(x, vn.materialise(q)).sum())(x)
    np.testing.assert_allclose(by_x, expected, rtol=1e-5, atol=1e-5)


def test_prune_takes_an_implicit_array():
    q = vn.quant.quantize(NORMAL, "int8")
    pruned = NMSparse.prune(vn.materialise(q))
    assert (vn.materialise(NMSparse.prune(q)) == vn.materialise(pruned)).all()


def test_a_scan_goes_over_stacked_layers():
    layers = NMSparse.prune(jax.random.normal(jax.random.key(0), (5, 4, 4)))
    run = lambda w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.ones(4), w)[0]
    strict = vn.implicit(run, on_materialise="error")
    np.testing.assert_allclose(strict(layers), run(vn.materialise(layers)), rtol=1e-5)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("size", [0, 1, 8, 19])
@pytest.mark.parametrize("axis", [-2, -1])
def test_bits_are_packed_and_unpacked(bits, size, axis):
    shape = (2, size, 3) if axis == -2 else (2, 3, size)
    codes = np.random.default_rng(0).integers(0, 2**bits, shape).astype(np.uint8)
    packed = pack_bits(jnp.asarray(codes), bits, axis)
    assert packed.shape[axis] == planes_size(size, bits) == -(-size // 8) * bits
    np.testing.assert_array_equal(unpack_bits(packed, bits, axis, size), codes)


@arrays.once
def pruned():
    return NMSparse.prune(NORMAL)


REFUSED = {
    "values that are no array": (lambda: NMSparse(1.0, pruned().indices, 2, 4), TypeError),
    "indices of another dtype": (
        lambda: NMSparse(pruned().values, pruned().indices.astype("int8"), 2, 4),
        TypeError,
    ),
    "indices of other values": (
        lambda: NMSparse(pruned().values, pruned().indices[:1], 2, 4),
        ValueError,
    ),
    "indices of more bits": (lambda: NMSparse(pruned().values, pruned().indices, 2, 8), ValueError),
    "a group cut short": (lambda: NMSparse(pruned().values, pruned().indices, 3, 4), ValueError),
    "more kept than there are": (lambda: NMSparse.prune(NORMAL, 5, 4), ValueError),
    "groups of one": (lambda: NMSparse.prune(NORMAL, 1, 1), ValueError),
    "groups of too many": (lambda: NMSparse.prune(NORMAL, 1, 257), ValueError),
    "an axis from the front": (lambda: NMSparse.prune(NORMAL, axis=0), ValueError),
    "an axis that is no multiple": (lambda: NMSparse.prune(NORMAL, axis=-1), ValueError),
    "a vector": (lambda: NMSparse.prune(NORMAL[:, 0], axis=-1), ValueError),
    "integers": (lambda: NMSparse.prune(NORMAL.astype(int)), TypeError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_raise(name):
    make, error = REFUSED[name]
    with pytest.raises(error, match=r"NMSparse|n:m|axis|prune|indices"):
        make()
