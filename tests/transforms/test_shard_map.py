"""shard_map: values split into blocks and joined, on a mesh of 2 x 4 devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.array_types import MAKERS, Lora, Normed, OneHot, Tagged, assert_close
from support.meshes import (
    AUTO,
    EXPLICIT,
    KEY,
    MAKE,
    TOLERANCE,
    WAYS,
    ColumnLora,
    Stated,
    X,
    check,
    matmul,
    of_each_type,
    of_the_flat_types,
    put,
)

import veneer as vn


def shard(f, in_specs, out_specs, **options):
    return jax.shard_map(f, mesh=AUTO, in_specs=in_specs, out_specs=out_specs, **options)


def reduced(x, w):
    return jax.lax.psum(x @ w, "y")


ROWS = (P("x"), P()), P("x")
COLUMNS = (P(), P(None, "x")), P(None, "x")
CONTRACTED = (P(None, "y"), P("y", None)), P()


@jax.custom_vjp
def doubled_gradient(x, w):
    """With respect to w; and none with respect to x."""
    return x @ w


doubled_gradient.defvjp(
    lambda x, w: (x @ w, x), lambda x, ct: (0 * x, jax.lax.psum(2 * x.T @ ct, "x"))
)


# Programs of x [4, 8] and w [8, 8].
PROGRAMS = {
    "rows of x": shard(matmul, *ROWS),
    "rows of x, unchecked": shard(matmul, *ROWS, check_vma=False),
    "columns of w": shard(matmul, *COLUMNS),
    "columns of w, unchecked": shard(matmul, *COLUMNS, check_vma=False),
    "contracted, with a psum": shard(reduced, *CONTRACTED),
    "both axes of w": shard(
        lambda x, w: jax.lax.psum(x @ w, "x"), (P(None, "x"), P("x", "y")), P(None, "y")
    ),
    "two mesh axes on one of w": shard(matmul, (P(), P(None, ("x", "y"))), P(None, ("x", "y"))),
    "manual over one axis": shard(matmul, *COLUMNS, axis_names={"x"}),
    "jit in the body": shard(jax.jit(matmul), *COLUMNS),
    "checkpoint in the body": shard(jax.checkpoint(matmul), *ROWS),
    "scan in the body": shard(
        lambda x, w: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=2)[0],
        *ROWS,
    ),
    "cond in the body": shard(
        lambda x, w: jax.lax.cond(jax.lax.axis_index("x") == 0, matmul, jnp.matmul, x, w), *ROWS
    ),
    "captured": lambda x, w: shard(lambda x: matmul(x, w), P("x"), P("x"))(x),
    "captured, unchecked": lambda x, w: shard(
        lambda x: matmul(x, w), P("x"), P("x"), check_vma=False
    )(x),
    "captured by a jit in the body": lambda x, w: shard(
        jax.jit(lambda x: matmul(x, w)), P("x"), P("x")
    )(x),
    "captured by a jit around it": lambda x, w: jax.jit(
        shard(lambda x: matmul(x, w), P("x"), P("x"))
    )(x),
    "custom_vjp in the body": shard(doubled_gradient, *ROWS),
    "grad of custom_vjp in the body": jax.grad(
        lambda x, w: shard(doubled_gradient, *ROWS)(x, w).sum(), argnums=1
    ),
    "vmap of it": jax.vmap(shard(matmul, *ROWS), in_axes=(None, None), axis_size=2),
    "vmap over a mesh axis": lambda x, w: jax.vmap(
        shard(matmul, *COLUMNS), in_axes=(0, None), spmd_axis_name="y"
    )(jnp.stack([x] * 4), w),
    "grad of it": jax.grad(lambda x, w: shard(matmul, *COLUMNS)(x, w).sum(), argnums=1),
    "grad of it, unchecked": jax.grad(
        lambda x, w: shard(matmul, *COLUMNS, check_vma=False)(x, w).sum(), argnums=1
    ),
    "grad of what it captures": jax.grad(
        lambda x, w: shard(lambda x: matmul(x, w), P("x"), P("x"))(x).sum(), argnums=1
    ),
}


@of_the_flat_types
@pytest.mark.parametrize("program", PROGRAMS)
def test_shard_map_agrees_with_dense(program, name):
    w = MAKE[name]()
    if program == "two mesh axes on one of w" and name == "int4":
        w = MAKE[name]((8, 16))  # so that each of the 8 devices has a byte
    check(PROGRAMS[program], X, w)


@of_each_type
@pytest.mark.parametrize("program", ["columns of w", "captured", "grad of it"])
def test_shard_map_agrees_under_every_transformation(program, name):
    check(PROGRAMS[program], X, MAKE[name](), ways=WAYS)


@of_each_type
def test_nested_shard_maps_agree_with_dense(name):
    def outer(x, w):
        inner = jax.shard_map(matmul, in_specs=ROWS[0], out_specs=ROWS[1], axis_names={"x"})
        return inner(x, w)

    f = shard(outer, (P(), P(None, "y")), P(None, "y"), axis_names={"y"})
    check(f, X, MAKE[name]())


@of_the_flat_types
@pytest.mark.parametrize("program", ["rows of x", "columns of w, unchecked", "captured"])
def test_grad_with_respect_to_the_leaves(program, name):
    w = MAKE[name]()
    loss = lambda f: lambda w: (f(X, w) ** 2).sum()
    grad = lambda f: jax.jit(jax.grad(loss(f), allow_int=True))(w)
    got = grad(vn.implicit(PROGRAMS[program]))
    expected = grad(lambda x, w: matmul(x, vn.materialise(w)))
    is_float = lambda leaf: leaf.dtype != jax.dtypes.float0
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert is_float(one) == is_float(other)
        if is_float(one):
            assert jnp.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("program", ["rows of x", "columns of w, unchecked", "captured"])
@pytest.mark.parametrize("outside", [True, False], ids=["vmap outside", "vmap inside"])
def test_vmap_of_shard_map_agrees_with_dense(program, outside):
    w = MAKE["lora"]((3, 8, 8))
    f = PROGRAMS[program]
    over = lambda f: jax.vmap(f, in_axes=(None, 0))
    mapped = over(vn.implicit(f)) if outside else vn.implicit(over(f))
    assert_close(jax.jit(mapped)(X, w), matmul(X, vn.materialise(w)), TOLERANCE)


# Inputs and results.


@of_each_type
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P("x", "y")], ids=str)
def test_shard_map_returns_values_of_the_same_type(spec, name):
    w = MAKE[name]()
    assert type(check(shard(lambda w: w, spec, spec), w)) is type(w)


def test_shard_map_keeps_labels():
    f = shard(jnp.sin, P("x", "y"), P("x", "y"))
    captured = lambda x: shard(lambda: jnp.sin(x), (), P())()
    for program in (f, captured):
        for way in WAYS.values():
            out = way(program)(Tagged(X, "metres"))
            assert out.label == "metres"
            assert_close(out.x, jnp.sin(X))


def test_a_loop_in_shard_map_keeps_labels():
    loop = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=2)
    f = shard(loop, P("x"), (P("x"), P(None, "x")))
    last, all_ = jax.jit(vn.implicit(f))(Tagged(X, "metres"))
    assert (last.label, all_.label) == ("metres", "metres")
    assert_close((last.x, all_.x), (jnp.sin(jnp.sin(X)), jnp.stack([X, jnp.sin(X)])))


def test_every_leaf_is_split_along_batch_axes():
    w = MAKERS["lora"](KEY, (4, 8, 8))
    out = check(shard(lambda w: w, P("y"), P("y")), w)
    assert type(out) is Lora


def test_types_without_batch_transparency_are_materialized():
    check(shard(lambda w: w * 2, P("x"), P("x")), Normed(X), events=("shard_map",))


def test_types_without_a_partition_are_materialized():
    w = MAKERS["lora"](KEY, (8, 8))
    check(PROGRAMS["columns of w"], X, w, events=("shard_map",))
    check(PROGRAMS["rows of x"], X, w)


def test_splitting_a_type_without_dense_form_raises():
    hot = OneHot(jnp.float32(2.0), index=1, n=8)
    f = lambda spec: vn.implicit(shard(lambda x, y: x @ y, (P(None, *spec), spec), P()))
    assert_close(f(P())(X, hot), 2 * X[:, 1])
    with pytest.raises(RuntimeError, match="refuses to be dense"):
        f(P("x"))(X, hot)


class Rescaled(ColumnLora):
    """One whose factors share a scale in a way of each device's own."""


@vn.register("neg")
def _(w: Rescaled, **params):
    own = 1.0 + jax.lax.axis_index("x")
    return Rescaled(-w.w, -w.a / own, w.b * own, w.scale)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_leaf_that_varies_over_blocks_is_not_replicated(check_vma):
    w = MAKE["lora"]()
    f = shard(lambda w: -w, P("x"), P("x"), check_vma=check_vma)
    check(f, Rescaled(w.w, w.a, w.b, w.scale), events=("shard_map",))


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_aval_can_omit_the_varying_axes(check_vma):
    f = shard(lambda x: x, P("x"), P("x"), check_vma=check_vma)
    assert type(check(f, Stated(X))) is Stated


class Constant(vn.ImplicitArray):
    """One that is wrong about its blocks, which are as long as the whole by its metadata."""

    value: jax.Array  # []
    n: int = vn.static()

    def materialise(self):
        return jnp.full(self.n, self.value)

    def partition(self, spec, shape):
        return Constant(P(), self.n)


def test_blocks_with_another_shape_than_dense_materialize():
    check(shard(lambda c: c * 2, P("x"), P("x")), Constant(jnp.ones(()), 8), events=("shard_map",))


def test_a_wrong_partition_is_rejected():
    class Wrong(Lora):
        def partition(self, spec, shape):
            return spec

    with pytest.raises(
        TypeError, match=r"Wrong\.partition must return None, or a Wrong with a .*PartitionSpec"
    ):
        vn.implicit(shard(lambda w: w, P("x"), P("x")))(Wrong(jnp.eye(8), X.T, X))


def test_wrong_specs_raise_the_error_of_dense_arrays():
    f = shard(lambda x, w: {"a": x, "w": w}, (P(), P("x")), {"a": P(), "w": P()})
    with pytest.raises(ValueError, match=r"out_specs\['w'\] is P\(\) which implies"):
        jax.jit(vn.implicit(f))(X, MAKE["lora"]())


# Over explicit axes.


def test_leaves_can_be_split_along_fewer_axes_than_dense():
    w = MAKE["lora"]()
    with jax.set_mesh(EXPLICIT):
        w = ColumnLora(put(w.w, None, "y"), put(w.a, "x"), put(w.b, None, "y"), w.scale)
        assert w.aval().sharding.spec == P("x", "y")
        for names in ({"x", "y"}, {"x"}):
            spec = P("x", "y" if "y" in names else None)
            f = lambda w, spec=spec, names=names: jax.shard_map(
                lambda w: w * 2, in_specs=spec, out_specs=spec, axis_names=names
            )(w)
            expected = 2 * vn.materialise(MAKE["lora"]())
            assert_close(vn.implicit(f)(w), expected, TOLERANCE)
            assert_close(jax.jit(vn.implicit(f))(w), expected, TOLERANCE)


def test_captured_sharded_values_raise_as_dense_ones_do():
    f = lambda x, w: jax.shard_map(lambda x: x @ w, out_specs=P("x"))(x)
    with jax.set_mesh(EXPLICIT):
        x, w = put(X, "x"), put(MAKE["lora"]())
        for operand, call in ((vn.materialise(w), f), (w, vn.implicit(f))):
            with pytest.raises(NotImplementedError, match="Closing over inputs to shard_map"):
                call(x, operand)
