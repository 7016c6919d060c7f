"""Tests of `Masked` against numpy.ma, whose mask is True where entries are invalid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer.types.masked import Masked

ma = np.ma

# Functions of x, y and d, in jax.numpy and in numpy.ma. Some entries and a row of x [4, 3] are
# invalid, and other entries of y. d is dense.
SHAPE = (4, 3)

OPERATIONS = {
    "a function": (lambda x, y, d: jnp.log(x), lambda x, y, d: ma.log(x)),
    "two functions": (
        lambda x, y, d: jnp.sqrt(x) / jnp.tan(x),
        lambda x, y, d: ma.sqrt(x) / ma.tan(x),
    ),
    "a sum of two": (lambda x, y, d: x + y, lambda x, y, d: x + y),
    "with an array": (lambda x, y, d: x * d - d / x, lambda x, y, d: x * d - d / x),
    "with a row": (lambda x, y, d: x * d[0] + y[1], lambda x, y, d: x * d[0] + y[1]),
    "with numbers": (lambda x, y, d: (2 * x + 1) ** 2, lambda x, y, d: (2 * x + 1) ** 2),
    "a comparison": (lambda x, y, d: x > y, lambda x, y, d: x > y),
    "a choice": (
        lambda x, y, d: jnp.where(d > 0.7, x, y),
        lambda x, y, d: ma.where(d > 0.7, x, y),
    ),
    "a choice by what is invalid": (
        lambda x, y, d: jnp.where(x > 0.7, y, d),
        lambda x, y, d: ma.where(x > 0.7, y, d),
    ),
    "clip": (lambda x, y, d: jnp.clip(x, 0.6, 0.9), lambda x, y, d: ma.clip(x, 0.6, 0.9)),
    "astype": (lambda x, y, d: (9 * x).astype("int32"), lambda x, y, d: (9 * x).astype("int32")),
    "sum": (lambda x, y, d: x.sum(-1), lambda x, y, d: x.sum(-1)),
    "sum of all": (lambda x, y, d: x.sum(), lambda x, y, d: ma.asarray(x.sum())),
    "prod": (lambda x, y, d: x.prod(-1), lambda x, y, d: x.prod(-1)),
    "max": (lambda x, y, d: x.max(-1), lambda x, y, d: x.max(-1)),
    "min": (lambda x, y, d: x.min(0), lambda x, y, d: x.min(0)),
    "max of integers": (
        lambda x, y, d: (-9 * x).astype("int32").max(-1),
        lambda x, y, d: (-9 * x).astype("int32").max(-1),
    ),
    "all": (lambda x, y, d: (x > 0.7).all(-1), lambda x, y, d: (x > 0.7).all(-1)),
    "any": (lambda x, y, d: (x > 0.9).any(-1), lambda x, y, d: (x > 0.9).any(-1)),
    "argmax": (
        lambda x, y, d: x.argmax(-1),
        lambda x, y, d: ma.array(x.filled(-1).argmax(-1), mask=x.mask.all(-1)),
    ),
    "argmin": (
        lambda x, y, d: x.argmin(0),
        lambda x, y, d: ma.array(x.filled(9).argmin(0), mask=x.mask.all(0)),
    ),
    "cumsum": (lambda x, y, d: jnp.cumsum(x, 0), lambda x, y, d: x.cumsum(0)),
    "cumprod": (lambda x, y, d: jnp.cumprod(x, 1), lambda x, y, d: x.cumprod(1)),
    "cummax": (
        lambda x, y, d: lax.cummax(x, 0),
        lambda x, y, d: ma.array(np.maximum.accumulate(x.filled(-1)), mask=x.mask),
    ),
    "sort": (lambda x, y, d: jnp.sort(x, -1), lambda x, y, d: ma.sort(x, -1)),
    "a product": (lambda x, y, d: x @ y.T, lambda x, y, d: ma.dot(x, y.T)),
    "a product with an array": (lambda x, y, d: x.T @ d, lambda x, y, d: ma.dot(x.T, d)),
    "layout": (
        lambda x, y, d: x.T.reshape(2, 6)[::-1, None, 1:],
        lambda x, y, d: x.T.reshape(2, 6)[::-1, None, 1:],
    ),
    "concatenate": (
        lambda x, y, d: jnp.concatenate([x, d, y]),
        lambda x, y, d: ma.concatenate([x, d, y]),
    ),
    "stack": (lambda x, y, d: jnp.stack([x, d], 1), lambda x, y, d: ma.stack([x, d], 1)),
    "tile": (lambda x, y, d: jnp.tile(x, (2, 1)), lambda x, y, d: ma.concatenate([x, x])),
    "unstack": (lambda x, y, d: jnp.unstack(x)[1], lambda x, y, d: x[1]),
    "split": (lambda x, y, d: jnp.split(x, 2)[1], lambda x, y, d: x[2:]),
    "a slice by a number": (
        lambda x, y, d: lax.dynamic_slice(x, (jnp.int32(d[0, 0] * 0), 1), (2, 2)),
        lambda x, y, d: x[:2, 1:],
    ),
    "a slice written": (
        lambda x, y, d: lax.dynamic_update_slice(x, d[:2], (1, 0)),
        lambda x, y, d: ma.concatenate([x[:1], d[:2], x[3:]]),
    ),
    "rows": (lambda x, y, d: x[jnp.array([2, 0])], lambda x, y, d: x[[2, 0]]),
    "a write": (lambda x, y, d: x.at[1].set(d[1]), lambda x, y, d: written(x, d)),
    "pad": (
        lambda x, y, d: jnp.pad(x, ((0, 1), (1, 0))),
        lambda x, y, d: ma.array(
            np.pad(x.data, ((0, 1), (1, 0))), mask=np.pad(x.mask, ((0, 1), (1, 0)))
        ),
    ),
    "mean": (lambda x, y, d: x.mean(-1), lambda x, y, d: x.mean(-1)),
    "var": (lambda x, y, d: x.var(0), lambda x, y, d: x.var(0)),
    "std": (lambda x, y, d: x.std(0, keepdims=True), lambda x, y, d: x.std(0, keepdims=True)),
}


def written(x, d):
    out = x.copy()
    out[1] = d[1]
    return out


METHODS = ("mean", "var", "std")  # methods, which cannot run under implicit


def drawn(seed: int, invalid: float = np.nan):
    """Return numbers in [0.5, 1). Some, and all of row 2, are invalid and hold `invalid`."""
    random = np.random.default_rng(seed)
    mask = random.random(SHAPE) < 0.6
    mask[2] = False
    mask[0] = True
    values = (random.random(SHAPE) / 2 + 0.5).astype("float32")
    return np.where(mask, values, np.float32(invalid)), mask


def operands(seed: int = 0, invalid: float = np.nan):
    x, y = (Masked(*drawn(seed + i, invalid)) for i in (1, 2))
    return x, y, drawn(seed + 3, 0.75)[0]


def in_numpy(x):
    return ma.array(np.nan_to_num(x.value), mask=~x.mask) if isinstance(x, Masked) else x


def assert_agrees(out, expected):
    expected = ma.asarray(expected)
    assert isinstance(out, Masked)
    assert out.shape == expected.shape
    assert np.array_equal(out.mask, ~ma.getmaskarray(expected))
    assert np.allclose(out.filled(0), expected.filled(0), rtol=1e-5)


def stacked(values):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *values)


def rows(out):
    leaves, tree = jax.tree.flatten(out)
    return [tree.unflatten(row) for row in zip(*leaves, strict=True)]


# Functions of a function and two lists of operands.
TRANSFORMATIONS = {
    "implicit": lambda f, lots: [vn.implicit(f)(*x) for x in lots],
    "jit of implicit": lambda f, lots: [jax.jit(vn.implicit(f))(*x) for x in lots[:1]],
    "implicit of jit": lambda f, lots: [vn.implicit(jax.jit(f))(*x) for x in lots[:1]],
    "vmap of implicit": lambda f, lots: rows(jax.vmap(vn.implicit(f))(*stacked(lots))),
    "implicit of vmap": lambda f, lots: rows(vn.implicit(jax.vmap(f))(*stacked(lots))),
    "implicit of scan": lambda f, lots: rows(
        vn.implicit(lambda *xs: lax.scan(lambda c, x: (c, f(*x)), 0, xs)[1])(*stacked(lots))
    ),
}


@pytest.mark.parametrize("how", TRANSFORMATIONS)
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in METHODS])
def test_operations_match_numpy_ma(name, how):
    ours, theirs = OPERATIONS[name]
    lots = [operands(0), operands(10)]
    for out, x in zip(TRANSFORMATIONS[how](ours, lots), lots, strict=False):
        assert_agrees(out, theirs(*map(in_numpy, x)))


@pytest.mark.parametrize("name", METHODS)
def test_statistics_match_numpy_ma(name):
    ours, theirs = OPERATIONS[name]
    x = operands()
    assert_agrees(ours(*x), theirs(*map(in_numpy, x)))
    assert_agrees(jax.jit(ours)(*x), theirs(*map(in_numpy, x)))


def test_count_matches_numpy_ma():
    x = operands()[0]
    assert np.array_equal(x.count(-1), in_numpy(x).count(-1))
    assert x.count() == in_numpy(x).count()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32"])
def test_a_mean_of_70000_narrow_entries_is_exact(dtype):
    x = Masked(jnp.ones(70_000, dtype), jnp.arange(70_000) < 69_999)
    assert x.mean().filled() == 1
    assert x.mean().dtype == jnp.mean(x.value).dtype


DIFFERENTIABLE = [
    name
    for name in OPERATIONS
    if name not in ("a comparison", "astype", "max of integers", "all", "any", "argmax", "argmin")
]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_invalid_entries_do_not_affect_gradients(name):
    ours = OPERATIONS[name][0]
    run = ours if name in METHODS else vn.implicit(ours)

    def loss(values, masks, d):
        return jnp.sin(run(*map(Masked, values, masks), d).filled()).sum()

    def gradient(invalid):
        x, y, d = operands(0, invalid)
        of = jax.grad(loss, (0, 2))([x.value, y.value], [x.mask, y.mask], d)
        return of, (x, y)

    with_nan, (x, y) = gradient(np.nan)
    with_numbers, _ = gradient(0.7)
    for one, other in zip(*map(jax.tree.leaves, (with_nan, with_numbers)), strict=True):
        assert jnp.isfinite(one).all()
        assert jnp.allclose(one, other, rtol=1e-4, atol=1e-6)
    for leaf, value in zip(with_nan[0], (x, y), strict=True):
        assert not leaf[~value.mask].any()


def test_a_gradient_under_implicit_is_masked():
    x = operands()[0]
    gradient = vn.implicit(jax.grad(lambda x: (x * x).sum()))(x)
    assert_agrees(gradient, 2 * in_numpy(x))


@pytest.mark.parametrize("find", [jnp.argmax, jnp.argmin])
def test_argmax_finds_a_valid_entry_that_is_infinite(find):
    worst = -jnp.inf if find is jnp.argmax else jnp.inf
    x = Masked(jnp.array([0.0, worst, worst]), jnp.array([False, True, True]))
    assert vn.implicit(find)(x).filled() == 1


def test_argsort_puts_invalid_entries_last():
    x = Masked(jnp.array([3.0, jnp.nan, jnp.inf, 1.0]), jnp.array([True, False, True, True]))
    assert x.argsort().tolist() == [3, 0, 2, 1]


def test_reads_out_of_bounds_are_invalid():
    x = Masked(jnp.arange(3.0), jnp.ones(3, bool))
    out = vn.implicit(lambda x: x.at[jnp.array([1, 5])].get(mode="fill"))(x)
    assert out.mask.tolist() == [True, False]


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int8", "float16", "bool"])
def test_max_and_min_skip_invalid_entries_of_every_dtype(dtype):
    x = Masked(jnp.array([1, 0, 1], dtype), jnp.array([True, False, False]))
    out = vn.implicit(lambda x: (x.max(), x.min()))(x)
    assert [(o.dtype, int(o.filled())) for o in out] == [(x.dtype, 1)] * 2


def test_reductions_of_no_entries_are_invalid():
    x = Masked(jnp.ones((2, 0)), jnp.ones((2, 0), bool))
    assert not x.sum(-1).mask.any()
    assert not vn.implicit(jnp.matmul)(x, jnp.ones((0, 3))).mask.any()


# Errors.

STATISTICS = (jnp.mean, jnp.var, jnp.std, jnp.median, lambda x: jnp.quantile(x, 0.5), jnp.nanmean)


@pytest.mark.parametrize("function", STATISTICS)
def test_statistics_that_count_invalid_entries_raise(function):
    with pytest.raises(TypeError, match=r"counts all entries.* Use "):
        vn.implicit(function)(operands()[0])


@pytest.mark.parametrize("function", STATISTICS)
@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: vn.implicit(jax.jit(f)),
        lambda f: jax.jit(vn.implicit(f)),
        lambda f: vn.implicit(jax.vmap(f)),
        lambda f: vn.implicit(lambda x: jax.lax.map(f, x)),
        lambda f: vn.implicit(jax.grad(f)),
        lambda f: vn.implicit(jax.checkpoint(f)),
    ],
)
def test_counting_statistics_raise_in_transformed_functions(function, transformed):
    x = operands()[0]
    of_a_slice = lambda x: function(x).sum()
    with pytest.raises(TypeError, match=r"counts all entries.* Use "):
        transformed(of_a_slice)(x)


def test_a_sum_can_be_divided_by_another_number():
    x = Masked(jnp.ones(4), jnp.array([True, True, False, True]))
    assert vn.implicit(jax.jit(lambda x: x.sum() / 3))(x).filled() == 1
    assert vn.implicit(jax.jit(lambda x: (x.sum() + 1) / 4))(x).filled() == 1
    with pytest.raises(TypeError, match="counts all entries"):
        vn.implicit(jax.jit(lambda x: x.mean(keepdims=True)))(x)


def test_a_masked_array_cannot_be_materialized():
    x = operands()[0]
    for dense in (vn.materialise, np.asarray, vn.implicit(jnp.linalg.qr)):
        with pytest.raises(TypeError, match=r"Use x.filled\(0.0\)"):
            dense(x)


ERRORS = {
    "a list": (lambda: Masked([1.0], np.array([True])), TypeError, "array for value"),
    "numbers for a mask": (lambda: Masked(np.ones(2), np.ones(2)), TypeError, "boolean mask"),
    "a mask of a row": (
        lambda: Masked(np.ones((2, 3)), np.ones(3, bool)),
        ValueError,
        r"value \(2, 3\), mask \(3,\)",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_invalid_arguments_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_nbytes_counts_one_byte_per_entry_for_the_mask():
    assert operands()[0].nbytes == 12 * (4 + 1)
    assert repr(operands()[0]) == "Masked(value=f32[4,3], mask=bool[4,3])"


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum() / x.size,
        lambda x: x.sum(0).sum() / x.size,
        lambda x: -x.sum() / x.size,
        lambda x: x.sum().astype("float16") / x.size,
    ],
)
@pytest.mark.parametrize("dtype", ["int32", "float16", "float32"])
def test_a_sum_divided_by_the_number_of_all_entries_raises(run, dtype):
    x = Masked(jnp.ones((2, 2), dtype), jnp.array([[True, False]] * 2))
    with pytest.raises(TypeError, match="counts all entries"):
        vn.implicit(run)(x)
