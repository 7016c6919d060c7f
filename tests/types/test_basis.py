"""Tests of `Permuted`, `Rotated` and `Scaled` against the dense program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays

import veneer as vn
from veneer.types import Permuted, Rotated, Scaled
from veneer.types.rotated import factor_sizes, rotate, rotate_back

X = np.random.RandomState(1).standard_normal((5, 12)).astype(np.float32)


def array(*shape, quantized=False, seed=0):
    w = np.random.RandomState(seed).standard_normal(shape).astype(np.float32)
    if not quantized:
        return w
    return vn.quant.quantize(w, "int4", channelwise_axes=[0], tiled_axes={1: 4})


def order(n, *others, seed=0):
    return np.stack(
        [np.random.RandomState([seed, i]).permutation(n) for i in range(max(1, *others, 0))]
        if others
        else [np.random.RandomState(seed).permutation(n)]
    ).astype(np.int32)


FACTORS = np.linspace(0.5, 2, 12, dtype=np.float32)

VALUES = {
    "permuted": Permuted(array(8, 12), order(12)),
    "permuted rows": Permuted(array(12, 8), order(12).T, -2),
    "rotated": Rotated(array(8, 12), (-1,)),
    "rotated rows": Rotated(array(12, 8)),
    "scaled": Scaled(array(8, 12), FACTORS[None]),
    "scaled rows": Scaled(array(12, 8), FACTORS[:, None]),
}
QUANTIZED = arrays.OnDemand(
    {
        "permuted": lambda: Permuted(array(8, 12, quantized=True), order(12)),
        "rotated": lambda: Rotated(array(8, 12, quantized=True), (-1,)),
        "scaled": lambda: Scaled(array(8, 12, quantized=True), FACTORS[None]),
    }
)


@pytest.mark.parametrize("name", VALUES)
def test_rules_match_the_dense_program(name):
    value = VALUES[name]
    heads = (2, 4, 12) if value.shape == (8, 12) else (12, 2, 4)
    vn.testing.check_rules(type(value), value, programs={"heads": lambda w, _: w.reshape(heads)})


PROGRAMS = {
    "x @ w.T": lambda w, x: x @ w.T,
    "w @ x.T": lambda w, x: w @ x.T,
    "w.T is contracted": lambda w, x: x[:, :8] @ w,
    "from the left": lambda w, x: w.T @ x[:, :8].T,
    "heads": lambda w, x: jnp.einsum("bi,hdi->bhd", x, w.reshape(2, 4, 12)),
    "half of the rows": lambda w, x: x @ w[:4].T,
    "rows looked up": lambda w, x: w[jnp.array([3, 0, 3])] + x[:3],
    "gradient": jax.grad(lambda w, x: jnp.sum((x @ w.T) ** 2), argnums=1),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_products_do_not_materialize(program, name):
    w, f = QUANTIZED[name], PROGRAMS[program]
    report = vn.explain(f)(w, X)
    assert not [row for row in report.materialised if type(w).__name__ in str(row)]
    y, dense = jax.jit(vn.implicit(f))(w, X), f(vn.materialise(w), X)
    assert (y.shape, y.dtype) == (dense.shape, dense.dtype)
    np.testing.assert_allclose(vn.materialise(y), dense, 1e-4, 1e-4)


STACKS = {
    "permuted": Permuted(array(3, 8, 12), order(12, 3)[:, None]),
    "rotated": Rotated(array(3, 8, 12), (-1,)),
    "scaled": Scaled(array(3, 8, 12), FACTORS * np.arange(1, 4, dtype=np.float32)[:, None, None]),
    "scaled, a factor each": Scaled(array(3, 8, 12), np.ones((3, 1, 1), np.float32)),
}


@pytest.mark.parametrize("w", STACKS.values(), ids=STACKS)
def test_stacked_matrices_have_their_own_bases(w):
    x = array(3, 5, 12, seed=1)
    program = lambda w, x: jnp.einsum("lbi,loi->lbo", x, w)
    dense = program(w.materialise(), x)
    report = vn.explain(program)(w, x)
    assert not report.materialised
    np.testing.assert_allclose(vn.implicit(program)(w, x), dense, 1e-5, 1e-5)

    def scanned(w, x):
        return jax.lax.scan(lambda c, wx: (c, wx[1] @ wx[0].T), 0, (w, x))[1]

    np.testing.assert_allclose(vn.implicit(scanned)(w, x), dense, 1e-5, 1e-5)


def test_a_product_can_contract_several_axes():
    w, x = array(4, 6, 8), array(5, 4, 6, seed=1)
    program = lambda w, x: jnp.einsum("thk,hkd->td", x, w)
    for value in (
        Rotated.from_dense(w, (-3, -2)),
        Scaled(w / FACTORS[:6, None], np.broadcast_to(FACTORS[:6, None], (4, 6, 1))),
    ):
        np.testing.assert_allclose(vn.materialise(value), w, 1e-5, 1e-6)
        assert not vn.explain(program)(value, x).materialised
        np.testing.assert_allclose(vn.implicit(program)(value, x), program(w, x), 1e-5, 1e-5)
    # Factors along a contracted axis and a free axis: correct, but with a dense operand.
    both = Scaled(w[0], np.outer(FACTORS[:6], FACTORS[:8]))
    np.testing.assert_allclose(
        vn.implicit(jnp.matmul)(x[0], both), x[0] @ vn.materialise(both), 1e-5, 1e-5
    )


@pytest.mark.parametrize("n", [1, 2, 3, 12, 67, 384, 1000])
def test_a_rotation_is_orthogonal_and_can_be_undone(n):
    assert np.prod(factor_sizes(n)) == n
    identity = jnp.eye(n)
    matrix = np.asarray(rotate(identity, 0))
    np.testing.assert_allclose(matrix @ matrix.T, identity, atol=1e-5)
    np.testing.assert_allclose(rotate_back(jnp.asarray(matrix), 0), identity, atol=1e-5)
    np.testing.assert_array_equal(rotate(identity, 1), matrix.T)
    # All entries of a Hadamard matrix are equally large. Each odd prime adds a factor of sqrt(2).
    odd = {1: 0, 2: 0, 3: 1, 12: 1, 67: 1, 384: 1, 1000: 3}[n]
    assert abs(matrix).max() <= (2**odd / n) ** 0.5 + 1e-6


CONTRACTED = {  # the contracted axis of w, and the product
    "x @ w": (-2, lambda w, x: x @ w),
    "w.T @ x.T": (-2, lambda w, x: w.T @ x.T),
    "x @ w.T": (-1, lambda w, x: x @ w.T),
    "w @ x.T": (-1, lambda w, x: w @ x.T),
}
UNDER = {
    "jit": jax.jit,
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[:, None]),
    "grad of x": lambda f: jax.grad(lambda w, x: (f(w, x) ** 2).sum() / 2, argnums=1),
    "grad of w": lambda f: jax.grad(lambda w, x: (f(w, x) ** 2).sum() / 2),
}


@pytest.mark.parametrize("n", [1, 3, 64, 67, 105, 134, 384, 1000])  # one prime, several, Kronecker
@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("product", CONTRACTED)
def test_a_rotated_product_is_exact_up_to_rounding(product, under, n):
    axis, f = CONTRACTED[product]
    w, x = array(*((n, 4) if axis == -2 else (4, n))), array(3, n, seed=1)
    turned = Rotated.from_dense(w, (axis,))
    assert n == 1 or abs(turned.array - w).max() > 0.1
    dense = UNDER[under](f)(w, x)
    found = vn.implicit(UNDER[under](f))(turned, x)
    # The rounding errors of a sum grow like a random walk.
    each = np.linalg.norm(x, axis=1).max() * np.linalg.norm(w, axis=axis).max()
    by = {"grad of x": np.linalg.norm(w), "grad of w": np.linalg.norm(x)}.get(under, 1)
    np.testing.assert_allclose(found, dense, rtol=0, atol=4 * np.finfo(np.float32).eps * each * by)


def test_a_rotation_of_bf16_is_computed_in_f32():
    x = jnp.asarray(array(64, 6), jnp.bfloat16)
    wide = rotate(x.astype(jnp.float32), 0)
    np.testing.assert_array_equal(rotate(x, 0), wide.astype(jnp.bfloat16))


def test_a_rotation_reduces_the_error_of_int4():
    w = np.array(array(256, 64))
    w[::50] *= 30  # outliers
    x = array(100, 256, seed=1)
    quantize = lambda w: vn.quant.quantize(w, "int4", channelwise_axes=[1])
    lost = lambda q: np.linalg.norm(x @ (vn.materialise(q) - w))
    turned = Rotated.from_dense(w)
    assert lost(turned.with_array(quantize(turned.array))) < 0.6 * lost(quantize(w))


ORDER = np.arange(12, dtype=np.int32)
REFUSED = {
    "floats": (lambda: Permuted(array(8, 12), FACTORS[None]), TypeError, "integers, not float"),
    "short": (lambda: Permuted(array(8, 12), ORDER[None, :9]), ValueError, r"has shape \(1, 9\)"),
    "rank": (lambda: Permuted(array(8, 12), ORDER), ValueError, r"order has shape \(12,\)"),
    "axis": (lambda: Permuted(array(8, 12), ORDER[None], 1), ValueError, "axis must be negative"),
    "codes": (lambda: Rotated(ORDER[None]), TypeError, "takes a floating array, not int32"),
    "no axis": (lambda: Rotated(array(8, 12), (1,)), ValueError, "axes must be negative"),
    "twice": (lambda: Rotated(array(8, 12), (-1, -1)), ValueError, "distinct"),
    "factors": (lambda: Scaled(array(8, 12), FACTORS), ValueError, r"factor has shape \(12,\)"),
    "integers": (lambda: Scaled(array(8, 12), ORDER[None]), TypeError, "factor must be floating"),
}


@pytest.mark.parametrize(("make", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


SIZE_1 = {  # along an axis of size 1
    "permuted": vn.types.Permuted(array(3, 1), order(1)),
    "rotated": vn.types.Rotated(array(3, 1), (-1,)),
}


@pytest.mark.parametrize("w", SIZE_1.values(), ids=SIZE_1)
@pytest.mark.parametrize(
    "program",
    [jnp.diagonal, lambda w: jax.lax.squeeze(w, (1,)), lambda w: w.reshape(3), jnp.mean],
    ids=["diagonal", "squeeze", "reshape", "mean"],
)
def test_an_axis_of_size_1_can_be_removed(program, w):
    found = vn.materialise(vn.implicit(program)(w))
    np.testing.assert_allclose(found, program(w.materialise()), rtol=1e-6)


FILLED = {
    "scaled": vn.types.Scaled(array(3, 4), arrays.full((1, 1), 3.0)),
    "rotated": vn.types.Rotated(array(3, 4), (-1,)),
    "permuted": vn.types.Permuted(array(3, 4), order(4)),
}


@pytest.mark.parametrize("fill_value", [0.5, 0, None])
@pytest.mark.parametrize("w", FILLED.values(), ids=FILLED)
def test_lookups_out_of_bounds_return_the_fill_value(w, fill_value):
    take = lambda w: jnp.take(w, jnp.array([7, 0]), 0, mode="fill", fill_value=fill_value)
    found = vn.materialise(vn.implicit(take)(w))
    np.testing.assert_allclose(found, take(w.materialise()), rtol=1e-5, atol=1e-6)
