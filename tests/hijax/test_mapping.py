"""`vmap`, scans and `pmap` over an axis of an implicit array, for every type and axis.

The arrays are single values or batches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import scan as lax_scan
from support import arrays
from support.matrix import TYPES, N, of
from support.policies import only_by_rules

import veneer as vn
from veneer.hijax.types import type_of

T = vn.types

# Every axis of a value and of its batches has the same size, N. So a test fails if a rule
# identifies an axis by its size.
MAKERS = {name: probe.make for name, probe in TYPES.items()} | {
    "Lazy": of(lambda a: T.Lazy(lambda x: x[..., ::-1, :] * 2, a(N, N))),
    "Lazy, reversed along batches": of(lambda a: T.Lazy(lambda x: x[::-1], a(N, N))),
    "Frozen Diagonal": of(lambda a: T.Frozen(T.Diagonal(a(N)))),
    "LoraArray of Diagonal": of(lambda a: T.LoraArray(T.Diagonal(a(N)), a(N, N), a(N, N))),
    "square LowRank": of(lambda a: T.LowRank(a(N, N), a(N, N))),
    "square Banded": of(lambda a: T.Banded(a(N, N), N - 1, 0)),
    "Kronecker with one block": of(lambda a: T.Kronecker(a(1, 1), a(N, N))),
}


def quantized(qtype, *axes, tile=None):
    """Return a maker of quantized arrays with a scale per index of `axes`, negative numbers."""

    def make(key, shape):
        channelwise = (*range(len(shape) - 2), *(a % len(shape) for a in axes))
        tiles = tile and {len(shape) - 2: tile}
        x = jax.random.normal(key, shape)
        return vn.quant.quantize(x, qtype, channelwise_axes=channelwise, tiled_axes=tiles)

    return make


MAKERS |= {
    "int8 by columns": quantized("int8", -1),
    "int8 by rows": quantized("int8", -2),
    "int8 by entries": quantized("int8", -1, -2),
    "int4 in tiles": quantized("int4", -1, tile=2),
    "nf4 with a scale": quantized("nf4"),
    "LoraArray of int8": of(
        lambda a: T.LoraArray(
            vn.quant.quantize(a(N, N), "int8", channelwise_axes=range(a(N).ndim)), a(N, 2), a(2, N)
        )
    ),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture(params=[(), (N,)], ids=["alone", "batch"])
def value(request, make):
    return make(jax.random.key(1), (*request.param, N, N))


def agree(out, expected):
    out, expected = map(vn.materialise, (out, expected))
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-5)


def total(x):
    return jnp.sum(jnp.sin(x)) + jnp.tanh(x)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_vmap_along_any_axis_agrees(jit, value):
    dense = vn.materialise(value)
    for axis in (0, -1) if jit else range(1, value.ndim):
        run = jax.vmap(total, in_axes=axis, out_axes=axis)
        agree((jax.jit(run) if jit else run)(value), run(dense))


@pytest.mark.parametrize("qtype", vn.quant.FORMATS)
def test_vmap_of_every_format_agrees(qtype):
    tile = vn.quant.get_format(qtype).tile_size or 2
    axes = () if vn.quant.get_format(qtype).tile_size else (-1,)
    value = quantized(qtype, *axes, tile=tile)(jax.random.key(1), (N, 32, N))
    for axis in range(3):
        run = jax.vmap(total, in_axes=axis, out_axes=axis)
        agree(run(value), run(vn.materialise(value)))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap_of_a_masked_array_moves_its_axes(axis):
    x = jax.random.normal(jax.random.key(1), (3, 2))
    out = jax.vmap(lambda row: row * 2, axis, axis)(T.Masked(x, x > 0))
    agree((out.filled(0.0), out.mask), (jnp.maximum(2 * x, 0), x > 0))


def test_nested_vmaps_agree(value):
    run = jax.vmap(jax.vmap(total, in_axes=-1, out_axes=0))
    agree(run(value), run(vn.materialise(value)))


def test_vmap_of_the_identity_agrees(value):
    """The result may be a stack of implicit arrays or a dense array. The numbers are the same."""
    for axis in (0, -1):
        agree(jax.vmap(lambda x: x, in_axes=axis, out_axes=axis)(value), vn.materialise(value))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_loops_over_slices_agree(jit, value):
    def run(x):
        carry, rows = lax.scan(lambda c, row: (c + jnp.sum(jnp.sin(row)), row * 2), 0.0, x)
        return carry, rows, lax.map(total, x), lax.map(total, x, batch_size=3)

    agree((jax.jit(run) if jit else run)(value), run(vn.materialise(value)))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_an_associative_scan_agrees(jit, value):
    for axis in (0, value.ndim - 1):
        run = lambda x, axis=axis: lax.associative_scan(jnp.add, x, axis=axis)
        agree((jax.jit(run) if jit else run)(value), run(vn.materialise(value)))


def scan_outputs(x):
    """Stack scan outputs that have the type of a slice, and others that do not."""
    return lax.scan(lambda c, row: (c + 1, (row * 2, jnp.stack([row, row]))), 0, x)[1]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_vmap_of_stacked_scan_outputs_agrees(jit, value):
    for out_axis in (0, 1):
        run = jax.vmap(scan_outputs, out_axes=out_axis)
        agree((jax.jit(run) if jit else run)(value), run(vn.materialise(value)))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_vmap_and_scan_add_unnamed_axes(jit):
    values = T.Named(jax.random.normal(jax.random.key(1), (3, 6, 1)), (None, "a", "b"))
    run = jax.vmap(lambda x: lax.scan(lambda c, x: (c + 1, jnp.pad(x, 1)), 0, x)[1])
    out = (jax.jit(run) if jit else run)(values)
    assert out.names == (None, None, "b")
    agree(out, run(values.array))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_vmap_of_a_scan_that_stacks_tangents_agrees(jit):
    """In the leaves of a tangent, the axis of the vmap follows the axis of the scan."""
    a = jax.random.normal(jax.random.key(1), (3, N, N, N))
    for value in (T.LowRank(a, a), T.BlockDiagonal(a[..., None, :, :]), T.Diagonal(a)):
        tangent_of = lambda f: lambda along: jax.jvp(f, (along,), (along,))[1]
        inside, outside = jax.vmap(tangent_of(scan_outputs)), tangent_of(jax.vmap(scan_outputs))
        actual, expected = (jax.jit(inside) if jit else inside)(value), outside(value)
        agree(jax.tree.leaves(actual), jax.tree.leaves(expected))
        loss = lambda x: sum(jnp.sum(jnp.sin(y)) for y in scan_outputs(x))
        gradients = [
            jax.grad(loss)(jax.tree.map(lambda leaf, i=i: leaf[i], value)) for i in range(3)
        ]
        gradient = jax.vmap(jax.grad(loss))
        actual = (jax.jit(gradient) if jit else gradient)(value)
        expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)
        for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x: f(jax.tree.map(lambda leaf: leaf[0], x)),
        jax.vmap,
        lambda f: lambda x: lax.map(f, x),
        lambda f: lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x)[1],
        lambda f: lambda x: lax.cond(True, f, f, x),
        lambda f: lambda x: lax.switch(1, [f, f, f], x),
        jax.jit,
    ],
    ids=["first slice", "vmap", "map", "scan", "cond", "switch", "jit"],
)
def test_a_tangent_result_has_the_class_of_the_primal(transform):
    a = jax.random.normal(jax.random.key(1), (N, N, N))
    for value in (T.LowRank(a, a), T.BlockDiagonal(a[..., None, :, :]), T.Diagonal(a)):
        out = transform(lambda x: jax.jvp(lambda s: s * x * 2, (0.5,), (1.0,))[1])(value)
        assert type(out) is type(value)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out))


BRANCHES = {
    "a branch": lambda x, n: lax.cond(n > 1, lambda x: x * 0.5, lambda x: x, x),
    "dense branches": lambda x, n: lax.cond(n > 1, jnp.sin, jnp.tanh, x),
    "jitted branches": lambda x, n: lax.cond(
        n > 1, jax.jit(jnp.triu), jax.jit(lambda x: jnp.sin(x) + x), jnp.flip(x, 0)
    ),
    "switch": lambda x, n: lax.switch(n, [jnp.sin, lambda x: x, lambda x: -x], x),
    "within a loop": lambda x, n: lax.scan(
        lambda x, _: (lax.cond(n > 1, lambda x: x * 0.5, lambda x: x, x), None), x, None, length=2
    )[0],
    "length of a loop": lambda x, n: lax.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 0.5), (0, x)
    )[1],
}


@pytest.mark.parametrize("name", BRANCHES)
def test_vmap_of_branches_agrees(make, name):
    """A mapped `cond` runs all branches and selects among results of the same type."""
    value, index = make(jax.random.key(1), (N, N, N)), jnp.arange(N)
    dense = vn.materialise(value)
    run = jax.vmap(BRANCHES[name])
    agree(run(value, index), run(dense, index))
    if name != "length of a loop":
        loss = lambda s, x: jnp.sum(jax.vmap(lambda x, n: BRANCHES[name](s * x, n))(x, index))
        for transform in (lambda f: f, jax.jit):
            agree(transform(jax.grad(loss))(0.5, value), jax.grad(loss)(0.5, dense))


MAPPINGS = {
    "vmap": lambda x: jax.vmap(lambda row: jnp.sin(row) * row)(x),
    "vmap along the last": lambda x: jax.vmap(lambda row: jnp.sin(row) * row, -1)(x),
    "scan": lambda x: lax.scan(lambda c, row: (c, jnp.sin(row) * row), 0.0, x)[1],
    "associative_scan": lambda x: lax.associative_scan(jnp.add, jnp.sin(x)),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_gradients_of_vmap_and_scan_agree(name, value):
    loss = lambda v: jnp.sum(MAPPINGS[name](v) ** 2)
    grad = lambda f: jax.jit(jax.grad(f, allow_int=True))
    if value.dense_tangent:
        expected = grad(loss)(vn.materialise(value))
    else:
        expected = jax.grad(lambda v: loss(vn.materialise(v)), allow_int=True)(value)
    for x, y in zip(*map(jax.tree.leaves, (grad(loss)(value), expected)), strict=True):
        assert x.dtype == y.dtype
        if x.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


# Values with and without a batch axis.


def test_mapping_a_batch_materializes_nothing(weight, x):
    """Values whose leaves all have the mapped axis stay implicit, and so do the results."""
    transform = lambda f: vn.implicit(f, False, on_materialise=only_by_rules)
    out = transform(jax.vmap(lambda w: w))(weight.stack)
    assert jax.tree.structure(out) == jax.tree.structure(weight.stack)
    agree(transform(jax.vmap(lambda w: x @ w))(weight.stack), x @ weight.dense_stack)
    agree(transform(lambda w: lax.map(lambda w: x @ w, w))(weight.stack), x @ weight.dense_stack)


@pytest.mark.parametrize("name", MAPPINGS)
def test_mapping_without_a_batch_axis_reports_materialization(name):
    a = jnp.arange(1.0, 5).reshape(2, 2)
    with pytest.raises(vn.MaterialiseError, match=r"LowRank:f32\[2,2\]"):
        vn.implicit(MAPPINGS[name], False, on_materialise="error")(T.LowRank(a, a))


def test_mapping_typed_values_agrees(high):
    """Under jit, a value that a primitive returned is not mapped by slicing its leaves."""
    a = jnp.arange(1.0, 5).reshape(2, 2)
    rows = jax.jit(lambda r: (jax.vmap(jnp.sum)(high(r)), lax.map(jnp.sum, high(r))))
    agree(rows(T.LowRank(a, a)), (jnp.array([17.0, 37.0]),) * 2)
    rows = jax.jit(lambda r: lax.map(lambda row: row * 2, high(r)))
    agree(rows(T.Lazy(lambda x: x[::-1], a)), 2 * a[::-1])


def test_in_axes_accept_an_axis_for_each_leaf():
    """`equinox.filter_vmap` passes such `in_axes`."""
    import equinox as eqx

    a = jnp.arange(1.0, 5).reshape(2, 2)
    value = T.LowRank(a, a)
    agree(eqx.filter_vmap(lambda r: r.sum())(value), jnp.array([17.0, 37.0]))
    axes = lambda *axes: jax.tree.unflatten(jax.tree.structure(value), axes)
    agree(jax.vmap(lambda r: r.sum(), (axes(1, 1),))(value), (a @ a).sum(0))
    two = jax.vmap(lambda r, x: r["w"].sum() + x, ({"w": axes(0, 0)}, None))
    agree(two({"w": value}, 1.0), jnp.array([18.0, 38.0]))
    with pytest.raises(TypeError, match="different axes for the leaves of one array"):
        jax.vmap(lambda r: r.sum(), (axes(0, None),))(value)


def test_out_axes_accept_an_axis_for_each_leaf(high):
    a = jnp.arange(12.0).reshape(3, 2, 2)
    value = T.LowRank(a, a)
    axes = lambda *axes: jax.tree.unflatten(jax.tree.structure(value), axes)
    for convert in (high, lambda x: x):
        out = jax.vmap(convert, out_axes=axes(0, 0))(value)
        assert type(out) is T.LowRank
        agree(out, a @ a)
        agree(jax.vmap(convert, out_axes=1)(T.LowRank(a, a)), jnp.swapaxes(a @ a, 0, 1))
        with pytest.raises(TypeError, match="different axes for the leaves of one array"):
            jax.vmap(convert, out_axes=axes(0, 1))(value)


def test_vmap_of_results_that_cannot_be_stacked_raises():
    x = jnp.ones((3, 2))
    reversed_rows = lambda row: T.Lazy(lambda x: x[::-1], row)
    for transform in (lambda f: jax.vmap(f)(x), lambda f: lax.map(f, x)):
        with pytest.raises(TypeError, match="cannot stack a Lazy of the type lazy"):
            transform(reversed_rows)
        assert transform(lambda row: vn.materialise(reversed_rows(row))).shape == (3, 2)


def test_axes_whose_size_matches_by_chance_are_not_batches():
    a = jnp.ones((2, 2))
    for value in (T.LowRank(a, a), T.Lazy(lambda x: x[::-1], a)):
        with pytest.raises(TypeError, match="not a batch axis"):
            type_of(value).dec_rank(2, 0)
    with pytest.raises(TypeError, match="does not represent a stack"):
        type_of(T.Lazy(lambda x: x[::-1], a)).inc_rank(2, 0)


def test_jacobians_differentiate_each_leaf():
    """A tangent is a plain tree. Its leaves have the axes that JAX adds to them."""
    a = jnp.arange(1.0, 5).reshape(2, 2)
    value = T.LowRank(a, a + 1)
    f = lambda v: jnp.sin(jnp.sum(v, 0))
    for transform in (jax.jacrev, jax.jacfwd, lambda f: jax.hessian(lambda v: f(v).sum())):
        actual, expected = transform(f)(value), transform(lambda v: f(vn.materialise(v)))(value)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    jacobian = jax.jacfwd(lambda x: T.LowRank(x, x * 2))(a)
    agree(jax.tree.leaves(jacobian), jax.tree.leaves(jax.jacfwd(lambda x: (x, x * 2))(a)))
    lazy = T.Lazy(lambda x: x[::-1], a)
    agree(
        jax.tree.leaves(jax.jacrev(lambda v: jnp.sum(v * v, 0))(lazy)),
        jax.tree.leaves(jax.jacrev(lambda a: jnp.sum(a * a, 0))(a)),
    )


def test_scan_imported_before_the_mode_takes_implicit_arrays():
    a = jnp.arange(1.0, 5).reshape(2, 2)
    agree(lax_scan(lambda c, row: (c, row.sum()), 0.0, xs=T.LowRank(a, a))[1], (a @ a).sum(1))


def test_pmap_of_a_value_without_a_batch_axis_raises():
    a = jnp.arange(1.0, 5).reshape(2, 2)
    over_devices = jax.pmap(lambda r: r.sum())
    with pytest.raises(TypeError, match="pmap cannot map a LowRank along axis 0"):
        over_devices(T.LowRank(a, a))
    agree(
        over_devices(T.LowRank(a[:, None], a[:, :, None])), (a[:, None] @ a[:, :, None]).sum((1, 2))
    )


@pytest.mark.parametrize(
    "value",
    [T.Toeplitz(arrays.arange(3.0), arrays.arange(3.0)), T.Named(arrays.ones((3, 4)), ("a", "b"))],
    ids=["Toeplitz", "Named"],
)
def test_pmap_rejects_out_axes_other_than_0(value):
    add = lambda x: jax.tree.map(lambda leaf: leaf + x, value)
    zero = jnp.zeros(1)
    agree(jax.pmap(add)(zero), vn.materialise(value)[None])
    agree(jax.pmap(add, out_axes=None)(zero), vn.materialise(value))
    for axis in (1, -1):
        with pytest.raises(TypeError, match=rf"pmap cannot stack .* along axis {axis}"):
            jax.pmap(add, out_axes=axis)(zero)


def test_pmap_rejects_results_that_cannot_be_stacked():
    lazy = lambda x: T.Lazy(lambda x: x[::-1], jnp.ones((3, 4)) + x)
    with pytest.raises(TypeError, match=r"pmap cannot stack a Lazy .*vn.materialise"):
        jax.pmap(lazy)(jnp.zeros(1))
