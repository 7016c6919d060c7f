"""Typed values over meshes of several devices: in shard_map, and where types say shardings."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import arrays

import veneer as vn

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

AUTO = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
KEY = arrays.key(0)

both_ways = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])


def lora():
    return vn.types.LoraArray(*(jax.random.normal(KEY, s) for s in ((8, 8), (8, 2), (2, 8))))


def quantised():
    return vn.quant.quantize(jax.random.normal(KEY, (8, 8)), "int8", channelwise_axes=(1,))


def nested():
    w = lora()
    return vn.types.LoraArray(quantised(), w.a, w.b)


MAKE = {"lora": lora, "quantised": quantised, "lora of quantised": nested}


@pytest.fixture(params=MAKE)
def w(request):
    return MAKE[request.param]()


@pytest.fixture
def x():
    return jax.random.normal(KEY, (4, 8))


def mapped(f, in_specs, out_specs, mesh=AUTO):
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def whole(x, w):
    return mapped(jnp.dot, (P("x"), P()), P("x"))(x, w)


def by_columns(x, w):
    return mapped(jnp.dot, (P(), P(None, "y")), P(None, "y"))(x, w)


def by_rows(x, w):
    part = lambda x, w: lax.psum(jnp.dot(x, w), "x")
    return mapped(part, (P(None, "x"), P("x")), P())(x, w)


def closed_over(x, w):
    return mapped(lambda x: jnp.dot(x, w), P("x"), P("x"))(x)


def closed_over_by_a_loop(x, w):
    rows = lambda x: lax.scan(lambda c, row: (c, lax.dot(row[None], w)[0]), 0.0, x)[1]
    return mapped(rows, P("x"), P("x"))(x)


@both_ways
@pytest.mark.parametrize("f", [whole, by_columns, by_rows, closed_over, closed_over_by_a_loop])
def test_shard_map_of_typed_values(f, jit, x, w, high, agree):
    program = lambda x, w: f(x, high(w))
    agree((jax.jit(program) if jit else program)(x, w), x @ vn.materialise(w))


@both_ways
def test_a_typed_result(jit, w, high, agree):
    program = lambda w: mapped(jnp.transpose, P(None, "y"), P("y"))(high(w))
    out = (jax.jit(program) if jit else program)(w)
    agree(out, vn.materialise(w).T)
    assert type(out) is type(w)


def test_a_tree_of_specs_has_one_for_each_leaf(x, agree):
    w = lora()
    specs = jax.tree.unflatten(jax.tree.structure(w), [P(None, "y"), P(), P(None, "y")])
    agree(mapped(jnp.dot, (P(), specs), P(None, "y"))(x, w), x @ vn.materialise(w))


def in_eights(w):
    return vn.quant.quantize(w, "int8", channelwise_axes=(1,))


MADE_OF_BLOCKS = {
    "lora": lambda w, a, b: vn.types.LoraArray(w, a, b),
    "quantised": lambda w, a, b: in_eights(w),
    "lora of quantised": lambda w, a, b: vn.types.LoraArray(in_eights(w), a, b),
    "typed": lambda w, a, b: vn.types.LoraArray(2 * w, a, b).T.T,  # of a high type
}


@both_ways
@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P("x", "y"), P()], ids=str)
@pytest.mark.parametrize("name", MADE_OF_BLOCKS)
def test_a_tree_that_the_body_returns_is_joined_as_its_array_is(jit, spec, name, agree):
    """A leaf that does not follow an axis of the array is not put together along it."""
    if "quantised" in name and "x" in spec:
        pytest.skip("columns are quantised as a whole")
    make, leaves = MADE_OF_BLOCKS[name], (lora().w, lora().a, lora().b)
    rows, columns = (*spec, None, None)[:2]
    blocks = spec, P(rows), P(None, columns)
    program = mapped(lambda *leaves: {"w": make(*leaves)}, blocks, {"w": spec})
    out = (jax.jit(program) if jit else program)(*leaves)["w"]
    agree(out, make(*leaves))
    assert isinstance(out, vn.ImplicitArray)


def test_a_tree_that_cannot_be_joined_is_refused(agree):
    w = lora()
    body = lambda w, a, b: vn.types.LoraArray(w, a, b)
    with pytest.raises(TypeError, match=r"cannot join a LoraArray .* by .*Return vn.materialise"):
        mapped(body, (P("x"), P("x"), P("x")), P("x"))(w.w, w.a, jnp.tile(w.b, (2, 1)))
    cut = mapped(body, (P("x"), P("x"), P()), P("x"))
    agree(cut(w.w, w.a, w.b), w)
    part = jax.tree.unflatten(jax.tree.structure(w), [None, w.a, w.b])
    with pytest.raises(
        TypeError, match=r"in_specs of shard_map has .*, which does not represent an array"
    ):
        mapped(lambda part: part.a, P("x"), P("x"))(part)


@both_ways
def test_specs_by_leaf_of_typed_values(jit, agree, high):
    w = lora()
    by_leaf = jax.tree.unflatten(jax.tree.structure(w), [P("x"), P("x"), P()])
    program = lambda w: mapped(lambda w: high(w), (by_leaf,), by_leaf)(high(w))
    agree((jax.jit(program) if jit else program)(w), w)
    with pytest.raises(TypeError, match=r"out_specs .* a LoraArray with a spec for .* float32"):
        mapped(lambda w: vn.materialise(w), (by_leaf,), by_leaf)(high(w))


def test_a_shard_map_made_without_high_types_raises(mode_off):
    w = lora()
    turned = mapped(lambda w: w, P("x"), P("x"))
    made = mapped(lambda *leaves: vn.types.LoraArray(*leaves), (P("x"), P("x"), P()), P("x"))
    with vn.hijax.enabled():
        for run in (lambda: turned(w), lambda: made(w.w, w.a, w.b)):
            with pytest.raises(TypeError, match="made before high types were turned on"):
                run()


@pytest.mark.parametrize("f", [whole, closed_over])
def test_derivatives_through_shard_map(f, x, high, agree, agree_by_leaves):
    w = lora()
    loss = lambda x, w: jnp.sum(jnp.sin(f(x, high(w))))
    found = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    dense = lambda x, w: jnp.sum(jnp.sin(x @ vn.materialise(w)))
    agree_by_leaves(found, jax.grad(dense, (0, 1))(x, w))


def test_the_gradient_of_a_quantised_operand_is_refused(x, high, agree):
    loss = lambda see: lambda x, w: jnp.sum(jnp.sin(whole(x, see(w))))
    w = quantised()
    with pytest.raises(NotImplementedError, match=r"A shard_map .* vn\.materialise"):
        jax.grad(loss(high), 1)(x, w)
    dense = vn.materialise(w)
    by_w = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(dense)
    agree(jax.grad(loss(vn.materialise), 1)(x, w), by_w)  # the way out
    by_x = jax.grad(lambda x: jnp.sum(jnp.sin(x @ dense)))(x)
    agree(jax.jit(jax.grad(loss(high)))(x, w), by_x)


def test_a_cut_that_does_not_fit_is_refused(x, high):
    w = vn.quant.quantize(jnp.ones((8, 8)), "int4", channelwise_axes=(1,), tiled_axes={0: 4})
    part = lambda x, w: lax.psum(jnp.dot(x, w), "y")
    program = lambda x, w: mapped(part, (P(None, "y"), P("y")), P())(x, high(w))
    with pytest.raises(
        TypeError, match=r"shard_map cannot split a QArray of the type q4\[8,8\] by"
    ):
        jax.jit(program)(x, w)


def test_constraints_and_placement(x, w, high, agree):
    columns = NamedSharding(AUTO, P(None, "y"))
    program = lambda x, w: jnp.dot(x, lax.with_sharding_constraint(high(w), columns))
    agree(jax.jit(program)(x, w), x @ vn.materialise(w))


def put(tree):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(EXPLICIT, P())), tree)


def test_explicit_axes(x, w, high, agree):
    dense = vn.materialise(w)
    xe, we = put((x, w))
    agree(jax.jit(lambda x, w: jnp.dot(x, high(w)))(xe, we), x @ dense)
    in_map = lambda x, w: mapped(jnp.dot, (P(), P()), P(), EXPLICIT)(x, high(w))
    agree(jax.jit(in_map)(xe, we), x @ dense)
    loss = lambda x, w: jnp.sum(jnp.sin(jnp.dot(x, high(w))))
    agree(jax.jit(jax.grad(loss))(xe, we), jax.grad(lambda x: jnp.sum(jnp.sin(x @ dense)))(x))


def test_types_have_the_shardings_of_dense_arrays(high):
    w = put(quantised())
    columns = NamedSharding(EXPLICIT, P(None, "y"))
    placed = jax.jit(lambda w: jax.sharding.reshard(high(w), columns))
    (out,) = jax.make_jaxpr(placed)(w).out_avals
    assert str(out) == "q8[8,8]"
    assert out.sharding.spec == P(None, "y")
    assert placed(w).packed.sharding.spec == P(None, "y")


def gathered(x):
    """Of halves of `x` what one device has of them all."""
    of = lambda x: lax.all_gather(jnp.mean(x, 0), "x")
    return jax.shard_map(of, mesh=AUTO, in_specs=P("x"), out_specs=P(), check_vma=False)(x)


def test_a_derivative_of_a_shard_map_within_another(high, agree):
    """What the inner one transposes closes over a cotangent by leaves."""
    inner = lambda x, s: jnp.sum(jnp.tanh(gathered(s * x)).astype("float32"))
    outer = lambda x, s: jnp.sum(jnp.tanh(jax.grad(inner, argnums=1)(x.T, 0.5) * s))
    x = jax.random.normal(KEY, (2, 8), "float16")
    named = vn.types.Named(x, ("a", "b"))
    found = jax.jit(jax.grad(lambda s: outer(high(s * named), s)))(0.5)
    agree(found, jax.grad(lambda s: outer(s * x, s))(0.5), atol=2e-2)


def test_what_a_derivative_keeps_has_no_spec(high):
    """JAX asks a type for one where a `shard_map` is computed at once."""
    named = vn.types.Named(jax.random.normal(KEY, (2, 8), "float16"), ("a", "b"))
    inner = lambda x, s: jnp.sum(jnp.tanh(gathered(s * x)).astype("float32"))
    with pytest.raises(
        NotImplementedError, match=r"backward pass of a shard_map .*named\[.*vn\.material"
    ):
        jax.grad(lambda s: jax.grad(inner, argnums=1)(high(s * named), s))(0.5)
