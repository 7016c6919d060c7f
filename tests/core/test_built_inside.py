"""Implicit arrays that a program under `implicit` builds from dense arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays
from support.array_types import assert_close
from support.policies import only_by_rules

import veneer as vn
from veneer._core import nesting
from veneer.types import Diagonal, Kronecker, LowRank, Masked, Named, Quantity

FIRST, LAST = arrays.array([False, True, True]), arrays.array([True, True, False])


def scanned(f):
    return lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1]


def with_custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), f(*tangents)))
    return g


def without_jit(f):
    def run(x):
        with jax.disable_jit():
            return f(x)

    return run


def in_shard_map(f):
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


# Transformations that run a function of an array under `implicit`.
WITHIN = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: lax.cond(True, f, f, x),
    "switch": lambda f: lambda x: lax.switch(1, [f, f, f], x),
    "scan": scanned,
    "map": lambda f: lambda xs: lax.map(f, xs),
    "vmap": lambda f: jax.vmap(f),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "implicit": vn.implicit,
    "implicit in jit": lambda f: jax.jit(vn.implicit(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[0],
    "custom_jvp": with_custom_jvp,
    "disable_jit": without_jit,
    "shard_map": in_shard_map,
    "shard_map in jit": lambda f: jax.jit(in_shard_map(f)),
}
STACKED = ("map", "vmap", "jit of vmap")


def run(within, f, x):
    """Return the result of a function; under a map, the result for the first of a stack."""
    if within in STACKED:
        x = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), x)
    out = vn.implicit(WITHIN[within](f))(x)
    return jax.tree.map(lambda leaf: leaf[0], out) if within in (*STACKED, "scan") else out


def masked(mask):
    return Masked(jnp.arange(1.0, 4), mask)


USES = {
    "operator": lambda x, y: x * y,
    "reflected": lambda x, y: y * x,
    "function": lambda x, y: jnp.multiply(x, y),
    "method": lambda x, y: y.__mul__(x.reshape(3)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("within", WITHIN)
def test_a_mask_built_inside_combines_with_an_argument(within, use):
    out = run(within, lambda x: USES[use](x, masked(LAST)), masked(FIRST))
    assert type(out) is Masked
    np.testing.assert_array_equal(out.mask, FIRST & LAST)
    np.testing.assert_array_equal(out.value[1], 4)


@pytest.mark.parametrize("within", WITHIN)
def test_units_built_inside_are_multiplied(within):
    out = run(within, lambda m: m * Quantity(9.5, "m / s**2"), Quantity(2.0, "kg"))
    assert type(out) is Quantity
    assert out.unit == Quantity(1.0, "kg m / s**2").unit
    assert out.value == 19


@pytest.mark.parametrize("within", WITHIN)
def test_units_built_inside_are_converted(within):
    out = run(within, lambda x: x + Quantity(1.0, "km"), Quantity(3.0, "m"))
    assert out.unit == Quantity(1.0, "m").unit
    assert out.value == 1003


@pytest.mark.parametrize("within", WITHIN)
def test_names_built_inside_are_compared(within):
    x = Named(jnp.ones((2, 3)), ("b", "d"))
    with pytest.raises(ValueError, match=r"'d'.*'x'"):
        run(within, lambda x: x @ Named(jnp.ones((3, 4)), ("x", "o")), x)
    out = run(within, lambda x: x @ Named(jnp.ones((3, 4)), ("d", "o")), x)
    assert out.names == ("b", "o")


def test_the_condition_of_a_loop_compares_units():
    limit = lambda x: x < Quantity(0.005, "km")
    step = lambda x: x + Quantity(1.0, "m")
    out = vn.implicit(lambda x: lax.while_loop(limit, step, x))(Quantity(3.0, "m"))
    assert (out.value, out.unit) == (5, Quantity(1.0, "m").unit)


@pytest.mark.parametrize("within", [name for name in WITHIN if "vmap" not in name])
def test_structure_built_inside_is_kept(within):
    diagonal = Diagonal(jnp.arange(3.0))
    out = run(within, lambda x: x @ Diagonal(jnp.arange(3.0)), diagonal)
    assert type(out) is Diagonal
    np.testing.assert_array_equal(out.diagonal, [0, 1, 4])


@pytest.mark.parametrize("within", WITHIN)
def test_types_built_from_tracers_work_with_other_types(within):
    x = jnp.array([[1.0, 2], [3, 4]])
    f = lambda k, d: jnp.asarray((k @ d + d) @ jnp.ones(4))
    out = run(within, lambda x: f(Kronecker(x, x), Diagonal(jnp.arange(4.0))), x)
    assert_close(vn.materialise(out), f(jnp.kron(x, x), jnp.diag(jnp.arange(4.0))))


def test_gradients_with_a_mask_built_inside_agree():
    loss = lambda x: vn.implicit(lambda x: (x * masked(LAST)).sum())(x).filled(0.0)
    grad = jax.grad(loss, allow_int=True)(masked(FIRST))
    np.testing.assert_array_equal(grad.value, [0, 2, 0])
    inside = vn.implicit(jax.grad(lambda x: vn.materialise((x * Diagonal(LAST * 1.0)).sum())))
    np.testing.assert_array_equal(inside(jnp.ones((3, 3))), jnp.diag(LAST * 1.0))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_gradients_by_leaves_of_built_arrays_agree(jit):
    f = lambda x, s: (Diagonal(s) @ x).sum()
    x, s = Quantity(jnp.arange(3.0), "m"), jnp.ones(3)
    grad = vn.implicit(jit(jax.grad(lambda s, x: f(x, s).astype("float32"))))(s, x)
    assert grad.unit == x.unit
    np.testing.assert_array_equal(grad.value, x.value)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_a_call_of_implicit_in_another_captures_its_arrays(jit):
    inner = lambda x: vn.implicit(lambda y: x * y)(masked(LAST))
    out = vn.implicit(jit(inner))(masked(FIRST))
    assert type(out) is Masked
    assert not isinstance(out.value, vn.Value)
    np.testing.assert_array_equal(out.mask, FIRST & LAST)


def test_a_custom_jvp_takes_built_arrays_and_arguments():
    @jax.custom_jvp
    def product(x, y):
        return x * y

    product.defjvp(lambda p, t: (product(*p), t[0] * p[1] + p[0] * t[1]))
    f = lambda x: vn.implicit(product)(x, masked(LAST))
    out = vn.implicit(f)(masked(FIRST))
    np.testing.assert_array_equal(out.mask, FIRST & LAST)


def test_jitted_functions_are_cached_separately_under_implicit():
    """JAX caches the trace of a jitted function by the shapes of the operands."""
    double = jax.jit(lambda x: x * masked(LAST))
    outside = double(jnp.ones(3))
    np.testing.assert_array_equal(outside.mask, LAST)
    np.testing.assert_array_equal(vn.implicit(double)(masked(FIRST)).mask, FIRST & LAST)
    np.testing.assert_array_equal(double(jnp.ones(3)).mask, LAST)


def test_a_type_that_cannot_hold_an_implicit_leaf_is_dense():
    f = lambda x: jnp.asarray(Diagonal(x)) @ jnp.ones(3)
    out = vn.implicit(f)(Quantity(jnp.arange(3.0), "m"))
    assert out.unit == Quantity(1.0, "m").unit
    np.testing.assert_array_equal(out.value, jnp.arange(3.0))
    with pytest.raises(vn.MaterialiseError, match="Diagonal cannot hold it"):
        vn.implicit(f, on_materialise="error")(Quantity(jnp.arange(3.0), "m"))


def test_an_inner_call_handles_arrays_that_a_filter_skips():
    nested = lambda x: vn.implicit(lambda y: y @ x)(LowRank(jnp.ones((3, 1)), jnp.ones((1, 3))))
    f = vn.implicit(nested, (False, True, False))
    out = f(Diagonal(jnp.arange(3.0)))
    assert_close(vn.materialise(out), jnp.ones((3, 3)) * jnp.arange(3.0))


def test_arrays_built_inside_stay_implicit():
    f = lambda x: x @ Diagonal(jnp.arange(3.0)) @ Diagonal(jnp.ones(3)) * 2
    out = vn.implicit(jax.jit(f), on_materialise=only_by_rules)(Diagonal(jnp.ones(3)))
    assert type(out) is Diagonal


@pytest.mark.parametrize("mapped", [jax.vmap(jnp.sum), lambda x: lax.map(lambda v: v + 1, x)])
@pytest.mark.parametrize("make", [lambda w: LowRank(w, w), lambda w: Diagonal(w[0])])
def test_mapping_over_the_leaves_of_a_built_array_is_rejected(make, mapped):
    """JAX treats an array that a program builds as a tree of its leaves."""
    with pytest.raises(ValueError, match="has too few axes") as error:
        jax.jit(vn.implicit(lambda w: mapped(make(w))))(jnp.ones((4, 4)))
    assert "may have been mapped leaf by leaf" in error.value.__notes__[0]


@pytest.mark.parametrize("call", [jax.jit, scanned])
def test_a_program_with_a_lazy_operand_builds_arrays(call):
    x = vn.types.Lazy(jnp.tanh, jnp.linspace(-1, 1, 9).reshape(3, 3))
    f = lambda x: x + jnp.asarray(LowRank(x, jnp.ones((3, 3))) * 1.0)
    expected = call(lambda x: x + x @ jnp.ones((3, 3)))(x.materialise())
    assert_close(vn.materialise(vn.implicit(call(f))(x)), expected)


class Doubled(vn.ImplicitArray):
    """An array whose check doubles a field, so a second check would double it again."""

    x: jax.Array

    def __post_init__(self):
        object.__setattr__(self, "x", self.x * 2)

    def materialise(self):
        return self.x


class NotNegative(vn.ImplicitArray):
    """An array whose check needs its values."""

    x: jax.Array

    def __post_init__(self):
        if bool((self.x < 0).any()):
            raise ValueError("negative")

    def materialise(self):
        return self.x


@pytest.mark.parametrize("transform", [jax.jit, vn.implicit, lambda f: jax.jit(vn.implicit(f))])
@pytest.mark.parametrize("use", [lambda x: x + 1, lambda x: x.sum() + x])
def test_checks_of_a_class_run_on_no_traced_operand(use, transform):
    doubled, other = Doubled(jnp.ones(3)), NotNegative(jnp.ones(3))
    assert_close(vn.materialise(transform(use)(doubled)), use(2 * jnp.ones(3)))
    assert_close(vn.materialise(transform(use)(other)), use(jnp.ones(3)))
    built = transform(lambda s: jnp.asarray(use(Doubled(s) * 1.0)))
    assert_close(jax.jit(built)(jnp.ones(3)), use(2 * jnp.ones(3)))


def test_dense_programs_are_not_searched_for_values(monkeypatch):
    def search(*_):
        raise AssertionError("a program was searched")

    monkeypatch.setattr(nesting, "is_or_contains", search)
    monkeypatch.setattr(nesting, "_is_pack_used", False)
    jaxpr = jax.make_jaxpr(vn.implicit(jax.jit(lambda x: jax.nn.softmax(x) @ x)))(jnp.ones((3, 3)))
    assert jaxpr.eqns
