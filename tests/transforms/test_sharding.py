"""shard_map, sharding constraints, device_put and explicit meshes, on a mesh of 2 x 4 devices."""

import jax
import jax.numpy as jnp
import pytest
from array_types import MAKERS, Lora, OneHot, Tagged, assert_close
from jax.sharding import AxisType, NamedSharding, auto_axes, explicit_axes, reshard
from jax.sharding import PartitionSpec as P

import veneer as vn
from veneer._core.sharding import leaf_specs

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

AUTO = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 8))

TOLERANCE = 1e-4  # sums are taken in another order on each number of devices


class ColumnLora(Lora):
    """A low-rank update that says how its leaves are cut."""

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
    """`f` on values agrees with `f` on dense arrays; the primitives in `events` make it dense."""
    expected = jax.jit(f)(*vn.materialise(operands))
    outs = [WAYS[way](f)(*operands) for way in ways]
    for out in outs:
        assert_close(out, expected, TOLERANCE)
    report = vn.explain(f)(*operands)
    assert tuple(event.primitive for event in report.materialised) == events
    return outs[0]


def shard(f, in_specs, out_specs, **options):
    return jax.shard_map(f, mesh=AUTO, in_specs=in_specs, out_specs=out_specs, **options)


def matmul(x, w):
    return jnp.tanh(x @ w)


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


# Of x [4, 8] and w [8, 8].
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
def test_shard_map(program, name):
    w = MAKE[name]()
    if program == "two mesh axes on one of w" and name == "int4":
        w = MAKE[name]((8, 16))  # so that each of the 8 devices has a byte
    check(PROGRAMS[program], X, w)


@of_each_type
@pytest.mark.parametrize("program", ["columns of w", "captured", "grad of it"])
def test_shard_map_in_every_way(program, name):
    check(PROGRAMS[program], X, MAKE[name](), ways=WAYS)


@of_each_type
def test_a_shard_map_within_another(name):
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
def test_vmap_over_values(program, outside):
    w = MAKE["lora"]((3, 8, 8))
    f = PROGRAMS[program]
    over = lambda f: jax.vmap(f, in_axes=(None, 0))
    mapped = over(vn.implicit(f)) if outside else vn.implicit(over(f))
    assert_close(jax.jit(mapped)(X, w), matmul(X, vn.materialise(w)), TOLERANCE)


# What goes in and comes out.


@of_each_type
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P("x", "y")], ids=str)
def test_values_come_out_as_they_went_in(spec, name):
    w = MAKE[name]()
    assert type(check(shard(lambda w: w, spec, spec), w)) is type(w)


def test_a_label_goes_through_whole():
    f = shard(jnp.sin, P("x", "y"), P("x", "y"))
    captured = lambda x: shard(lambda: jnp.sin(x), (), P())()
    for program in (f, captured):
        for way in WAYS.values():
            out = way(program)(Tagged(X, "metres"))
            assert out.label == "metres"
            assert_close(out.x, jnp.sin(X))


def test_a_label_goes_round_a_loop_in_the_body():
    loop = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=2)
    f = shard(loop, P("x"), (P("x"), P(None, "x")))
    last, all_ = jax.jit(vn.implicit(f))(Tagged(X, "metres"))
    assert (last.label, all_.label) == ("metres", "metres")
    assert_close((last.x, all_.x), (jnp.sin(jnp.sin(X)), jnp.stack([X, jnp.sin(X)])))


def test_batch_axes_are_cut_in_every_leaf():
    w = MAKERS["lora"](KEY, (4, 8, 8))
    out = check(shard(lambda w: w, P("y"), P("y")), w)
    assert type(out) is Lora


def test_a_type_that_is_not_batch_transparent_is_made_dense():
    class Normalised(vn.ImplicitArray):
        batch_transparent = False
        x: jax.Array

        def materialise(self):
            return self.x / jnp.linalg.norm(self.x)

    w = Normalised(X)
    check(shard(lambda w: w * 2, P("x"), P("x")), w, events=("shard_map",))


def test_a_type_that_does_not_say_how_it_is_cut_is_made_dense():
    w = MAKERS["lora"](KEY, (8, 8))
    check(PROGRAMS["columns of w"], X, w, events=("shard_map",))
    check(PROGRAMS["rows of x"], X, w)


def test_a_type_that_refuses_to_be_dense_is_not_cut():
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
def test_a_leaf_that_differs_between_blocks_is_not_taken_from_one_of_them(check_vma):
    w = MAKE["lora"]()
    f = shard(lambda w: -w, P("x"), P("x"), check_vma=check_vma)
    check(f, Rescaled(w.w, w.a, w.b, w.scale), events=("shard_map",))


class Stated(vn.ImplicitArray):
    """One whose stated aval says nothing of shardings, nor of varying along mesh axes."""

    x: jax.Array  # [...]

    def aval(self):
        return jax.core.ShapedArray(self.x.shape, self.x.dtype)

    def materialise(self):
        return self.x


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_aval_that_does_not_say_along_what_it_varies(check_vma):
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


def test_a_block_of_another_shape_than_the_dense_one_is_not_used():
    check(shard(lambda c: c * 2, P("x"), P("x")), Constant(jnp.ones(()), 8), events=("shard_map",))


def test_partial_sums_of_leaves_are_not_those_of_the_value():
    unreduced = P(None, None, unreduced={"x"})
    assert leaf_specs(MAKE["lora"](), unreduced, AUTO.shape, lambda size, _: size) is None


def test_a_partition_that_is_not_one_is_refused():
    class Wrong(Lora):
        def partition(self, spec, shape):
            return spec

    with pytest.raises(
        TypeError, match=r"Wrong\.partition returns .* a Wrong with a .*PartitionSpec"
    ):
        vn.implicit(shard(lambda w: w, P("x"), P("x")))(Wrong(jnp.eye(8), X.T, X))


def test_the_users_mistakes_are_told_as_for_dense_arrays():
    f = shard(lambda x, w: {"a": x, "w": w}, (P(), P("x")), {"a": P(), "w": P()})
    with pytest.raises(ValueError, match=r"out_specs\['w'\] is P\(\) which implies"):
        jax.jit(vn.implicit(f))(X, MAKE["lora"]())


# Constraints, and arrays put on devices.


def specs_of(value):
    return [leaf.sharding.spec for leaf in jax.tree.leaves(value)]


@of_each_type
@pytest.mark.parametrize("spec", [P("x", "y"), P(None, P.UNCONSTRAINED), P()], ids=str)
def test_a_constraint_keeps_the_type(spec, name):
    w = MAKE[name]()
    f = lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(AUTO, spec))
    out = check(f, w)
    assert jax.tree.structure(out) == jax.tree.structure(w)


def test_a_constraint_holds_for_each_leaf():
    f = lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(AUTO, P("x", "y")))
    out = jax.jit(vn.implicit(f))(MAKE["lora"]())
    assert specs_of(out) == [P("x", "y"), P("x"), P(None, "y")]
    out = jax.jit(vn.implicit(f))(MAKE["int8"]())
    assert specs_of(out) == [P("x", "y"), P(None, "y")]


def test_a_leaf_that_cannot_follow_a_constraint_stays():
    f = lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(AUTO, P("x", "y")))
    w = MAKERS["lora"](KEY, (8, 8))
    assert [e.primitive for e in vn.explain(f)(w).materialised] == []
    for one, other in zip(*map(jax.tree.leaves, (vn.implicit(f)(w), w)), strict=True):
        assert one is other


@of_the_flat_types
def test_the_cotangent_of_a_constraint(name):
    constrain = lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(AUTO, P("x", "y")))
    check(jax.grad(lambda x, w: matmul(x, constrain(w)).sum(), argnums=1), X, MAKE[name]())


@of_each_type
@pytest.mark.parametrize("to", [NamedSharding(AUTO, P("x", "y")), jax.devices()[1], None], ids=str)
def test_device_put_in_a_program(to, name):
    w = MAKE[name]()
    out = check(lambda w: jax.device_put(w, to), w, ways=["eager"])
    assert type(out) is type(w)
    if to is not None:
        devices = to.device_set if isinstance(to, NamedSharding) else {to}
        assert all(leaf.devices() == devices for leaf in jax.tree.leaves(out))


def test_device_put_of_leaves_that_cannot_be_cut_gives_each_device_all():
    w = MAKERS["lora"](KEY, (8, 8))
    out = vn.implicit(lambda w: jax.device_put(w, NamedSharding(AUTO, P("x"))))(w)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(out))
    assert_close(out, w)


@of_each_type
def test_at_top_level_a_value_is_put_as_a_pytree(name):
    w = MAKE[name]()
    expected = matmul(X, vn.materialise(w))
    everywhere = NamedSharding(AUTO, P())
    put = jax.device_put(w, everywhere)
    assert type(put) is type(w)
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(put))
    assert_close(vn.implicit(matmul)(X, put), expected, TOLERANCE)
    jitted = jax.jit(vn.implicit(matmul), in_shardings=(None, everywhere))
    assert_close(jitted(X, w), expected, TOLERANCE)


def test_at_top_level_leaves_may_be_cut_each_in_its_way():
    w = MAKE["lora"]()
    by_leaf = ColumnLora(*(NamedSharding(AUTO, spec) for spec in _COLUMNS_OF_LORA), scale=w.scale)
    put = jax.device_put(w, by_leaf)
    assert specs_of(put) == list(_COLUMNS_OF_LORA)
    assert_close(vn.implicit(matmul)(X, put), matmul(X, vn.materialise(w)), TOLERANCE)
    jitted = jax.jit(vn.implicit(matmul), in_shardings=(None, by_leaf))
    assert_close(jitted(X, w), matmul(X, vn.materialise(w)), TOLERANCE)


_COLUMNS_OF_LORA = P(None, "y"), P(), P(None, "y")


# Explicit meshes: the sharding is part of the type.


@pytest.fixture
def explicit():
    with jax.set_mesh(EXPLICIT):
        yield


def put(x, *spec):
    """An array, or a value leaf by leaf, sharded over the explicit mesh."""
    return vn.implicit(lambda x: jax.device_put(x, NamedSharding(EXPLICIT, P(*spec))))(x)


def columns(w):
    return put(w, None, "y")


EXPLICIT_PROGRAMS = {
    "matmul": matmul,
    "matmul, batched": lambda x, w: jnp.einsum("bij,jk->bik", jnp.stack([x, x]), w),
    "elementwise": lambda x, w: jnp.tanh(w) * 2 + w,
    "transpose": lambda x, w: w.T,
    "reduction": lambda x, w: w.sum(0),
    "grad by x": jax.grad(lambda x, w: matmul(x, w).sum()),
    "grad by w": jax.grad(lambda x, w: matmul(x, w).sum(), argnums=1),
    "vmap": lambda x, w: jax.vmap(lambda x: x @ w)(jnp.stack([x, x])),
    "scan over a constant": lambda x, w: jax.lax.scan(
        lambda c, _: (reshard(jnp.tanh(c @ w), P("x")), None), x, None, length=2
    )[0],
    "scan with a result": lambda x, w: jax.lax.scan(lambda c, _: (c, w), 0, None, length=2)[1],
    "cond": lambda x, w: jax.lax.cond(x.sum() > 0, lambda w: w, lambda w: w, w),
    "reshard": lambda x, w: reshard(w, P("x", None)),
    "reshard, replicated": lambda x, w: reshard(w, P()),
    "constraint": lambda x, w: jax.lax.with_sharding_constraint(w, P(None, "y")),
    "shard_map with inferred specs": lambda x, w: jax.shard_map(matmul, out_specs=P("x", "y"))(
        x, w
    ),
    "auto_axes": lambda x, w: auto_axes(matmul, out_sharding=P("x", None))(x, w),
}


@of_the_flat_types
@pytest.mark.parametrize("program", EXPLICIT_PROGRAMS)
def test_explicit_mesh(program, name, explicit):
    f = EXPLICIT_PROGRAMS[program]
    x, w = put(X, "x"), columns(MAKE[name]())
    assert w.aval() == jax.typeof(vn.materialise(w))
    expected = jax.jit(f)(x, vn.materialise(w))
    out = jax.jit(lambda x, w: vn.materialise(vn.implicit(f)(x, w)))(x, w)
    assert_close(out, expected, TOLERANCE)
    assert jax.typeof(out) == jax.typeof(expected)


@of_each_type
@pytest.mark.parametrize("spec", [P("x", None), P(None, "x"), P()], ids=str)
def test_reshard_keeps_the_type(spec, name, explicit):
    w = columns(MAKE[name]())
    out = check(lambda w: reshard(w, spec), w, ways=["eager", "jit inside"])
    assert type(out) is type(w)


@of_each_type
def test_an_explicit_mesh_without_jit(name, explicit):
    x, w = put(X, "x"), columns(MAKE[name]())
    check(matmul, x, w, ways=["eager"])


def test_reshard_makes_dense_what_cannot_be_cut(explicit):
    w = put(MAKERS["lora"](KEY, (8, 8)))
    check(lambda w: reshard(w, P("x")), w, events=("reshard",))


def test_reshard_gives_the_type_asked_for_though_an_aval_does_not_state_it(explicit):
    out = vn.implicit(lambda x: reshard(x, P("x")))(Stated(put(X, None, "y")))
    assert jax.typeof(out).sharding.spec == P("x", None)
    assert_close(out, X)


def test_explicit_axes_within_an_auto_mesh():
    with jax.set_mesh(AUTO):
        f = explicit_axes(matmul, in_sharding=(P("x"), P(None, "y")))
        for name in MAKE:
            check(f, X, MAKE[name]())


def test_leaves_may_be_cut_along_fewer_axes_than_the_dense_array(explicit):
    w = MAKE["lora"]()
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


def test_capture_in_a_shard_map_over_explicit_axes_is_refused_as_for_dense_arrays(explicit):
    f = lambda x, w: jax.shard_map(lambda x: x @ w, out_specs=P("x"))(x)
    x, w = put(X, "x"), put(MAKE["lora"]())
    for operand, call in ((vn.materialise(w), f), (w, vn.implicit(f))):
        with pytest.raises(NotImplementedError, match="Closing over inputs to shard_map"):
            call(x, operand)
