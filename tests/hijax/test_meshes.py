"""Typed values on meshes of several devices: in `shard_map`, and with shardings in types."""

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

eager_and_jitted = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])


def lora():
    return vn.types.LoraArray(*(jax.random.normal(KEY, s) for s in ((8, 8), (8, 2), (2, 8))))


def quantized():
    return vn.quant.quantize(jax.random.normal(KEY, (8, 8)), "int8", channelwise_axes=(1,))


def nested():
    w = lora()
    return vn.types.LoraArray(quantized(), w.a, w.b)


MAKE = {"lora": lora, "quantized": quantized, "lora of quantized": nested}


@pytest.fixture(params=MAKE)
def w(request):
    return MAKE[request.param]()


@pytest.fixture
def x():
    return jax.random.normal(KEY, (4, 8))


def mapped(f, in_specs, out_specs, mesh=AUTO):
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def by_batch(x, w):
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


@eager_and_jitted
@pytest.mark.parametrize("f", [by_batch, by_columns, by_rows, closed_over, closed_over_by_a_loop])
def test_shard_map_of_typed_values_agrees(f, jit, x, w, high, agree):
    program = lambda x, w: f(x, high(w))
    agree((jax.jit(program) if jit else program)(x, w), x @ vn.materialise(w))


@eager_and_jitted
def test_shard_map_returns_a_typed_result(jit, w, high, agree):
    program = lambda w: mapped(jnp.transpose, P(None, "y"), P("y"))(high(w))
    out = (jax.jit(program) if jit else program)(w)
    agree(out, vn.materialise(w).T)
    assert type(out) is type(w)


def test_in_specs_accept_a_spec_for_each_leaf(x, agree):
    w = lora()
    specs = jax.tree.unflatten(jax.tree.structure(w), [P(None, "y"), P(), P(None, "y")])
    agree(mapped(jnp.dot, (P(), specs), P(None, "y"))(x, w), x @ vn.materialise(w))


def quantize_columns(w):
    return vn.quant.quantize(w, "int8", channelwise_axes=(1,))


MAKE_FROM_BLOCKS = {
    "lora": lambda w, a, b: vn.types.LoraArray(w, a, b),
    "quantized": lambda w, a, b: quantize_columns(w),
    "lora of quantized": lambda w, a, b: vn.types.LoraArray(quantize_columns(w), a, b),
    "typed": lambda w, a, b: vn.types.LoraArray(2 * w, a, b).T.T,  # has a high type
}


@eager_and_jitted
@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P("x", "y"), P()], ids=str)
@pytest.mark.parametrize("name", MAKE_FROM_BLOCKS)
def test_shard_map_joins_the_leaves_of_returned_trees(jit, spec, name, agree):
    """A leaf is concatenated only along axes that belong to an axis of the array."""
    if "quantized" in name and "x" in spec:
        pytest.skip("a scale belongs to a whole column")
    make, leaves = MAKE_FROM_BLOCKS[name], (lora().w, lora().a, lora().b)
    rows, columns = (*spec, None, None)[:2]
    blocks = spec, P(rows), P(None, columns)
    program = mapped(lambda *leaves: {"w": make(*leaves)}, blocks, {"w": spec})
    out = (jax.jit(program) if jit else program)(*leaves)["w"]
    agree(out, make(*leaves))
    assert isinstance(out, vn.ImplicitArray)


def test_shard_map_rejects_trees_that_cannot_be_joined(agree):
    w = lora()
    body = lambda w, a, b: vn.types.LoraArray(w, a, b)
    with pytest.raises(TypeError, match=r"cannot join a LoraArray .* by .*Return vn.materialise"):
        mapped(body, (P("x"), P("x"), P("x")), P("x"))(w.w, w.a, jnp.tile(w.b, (2, 1)))
    join = mapped(body, (P("x"), P("x"), P()), P("x"))
    agree(join(w.w, w.a, w.b), w)
    part = jax.tree.unflatten(jax.tree.structure(w), [None, w.a, w.b])
    with pytest.raises(
        TypeError, match=r"in_specs of shard_map has .*, which does not represent an array"
    ):
        mapped(lambda part: part.a, P("x"), P("x"))(part)


@eager_and_jitted
def test_typed_values_accept_a_spec_for_each_leaf(jit, agree, high):
    w = lora()
    by_leaf = jax.tree.unflatten(jax.tree.structure(w), [P("x"), P("x"), P()])
    program = lambda w: mapped(lambda w: high(w), (by_leaf,), by_leaf)(high(w))
    agree((jax.jit(program) if jit else program)(w), w)
    with pytest.raises(TypeError, match=r"out_specs .* a LoraArray with a spec for .* float32"):
        mapped(lambda w: vn.materialise(w), (by_leaf,), by_leaf)(high(w))


def test_a_shard_map_made_before_the_mode_raises(mode_off):
    w = lora()
    identity = mapped(lambda w: w, P("x"), P("x"))
    join = mapped(lambda *leaves: vn.types.LoraArray(*leaves), (P("x"), P("x"), P()), P("x"))
    with vn.hijax.enabled():
        for run in (lambda: identity(w), lambda: join(w.w, w.a, w.b)):
            with pytest.raises(TypeError, match="made before high types were turned on"):
                run()


@pytest.mark.parametrize("f", [by_batch, closed_over])
def test_derivatives_through_shard_map_agree(f, x, high, agree, agree_by_leaves):
    w = lora()
    loss = lambda x, w: jnp.sum(jnp.sin(f(x, high(w))))
    actual = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    dense = lambda x, w: jnp.sum(jnp.sin(x @ vn.materialise(w)))
    agree_by_leaves(actual, jax.grad(dense, (0, 1))(x, w))


def test_shard_map_rejects_gradients_of_a_quantized_weight(x, high, agree):
    loss = lambda convert: lambda x, w: jnp.sum(jnp.sin(by_batch(x, convert(w))))
    w = quantized()
    with pytest.raises(NotImplementedError, match=r"A shard_map .* vn\.materialise"):
        jax.grad(loss(high), 1)(x, w)
    dense = vn.materialise(w)
    by_w = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(dense)
    agree(jax.grad(loss(vn.materialise), 1)(x, w), by_w)  # the remedy that the error names
    by_x = jax.grad(lambda x: jnp.sum(jnp.sin(x @ dense)))(x)
    agree(jax.jit(jax.grad(loss(high)))(x, w), by_x)


def test_shard_map_rejects_a_spec_that_splits_tiles(x, high):
    w = vn.quant.quantize(jnp.ones((8, 8)), "int4", channelwise_axes=(1,), tiled_axes={0: 4})
    part = lambda x, w: lax.psum(jnp.dot(x, w), "y")
    program = lambda x, w: mapped(part, (P(None, "y"), P("y")), P())(x, high(w))
    with pytest.raises(
        TypeError, match=r"shard_map cannot split a QArray of the type q4\[8,8\] by"
    ):
        jax.jit(program)(x, w)


def test_a_sharding_constraint_keeps_the_values(x, w, high, agree):
    columns = NamedSharding(AUTO, P(None, "y"))
    program = lambda x, w: jnp.dot(x, lax.with_sharding_constraint(high(w), columns))
    agree(jax.jit(program)(x, w), x @ vn.materialise(w))


def replicate(tree):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(EXPLICIT, P())), tree)


def test_explicit_mesh_axes_agree(x, w, high, agree):
    dense = vn.materialise(w)
    xe, we = replicate((x, w))
    agree(jax.jit(lambda x, w: jnp.dot(x, high(w)))(xe, we), x @ dense)
    in_map = lambda x, w: mapped(jnp.dot, (P(), P()), P(), EXPLICIT)(x, high(w))
    agree(jax.jit(in_map)(xe, we), x @ dense)
    loss = lambda x, w: jnp.sum(jnp.sin(jnp.dot(x, high(w))))
    agree(jax.jit(jax.grad(loss))(xe, we), jax.grad(lambda x: jnp.sum(jnp.sin(x @ dense)))(x))


def test_types_have_the_sharding_of_the_dense_array(high):
    w = replicate(quantized())
    columns = NamedSharding(EXPLICIT, P(None, "y"))
    placed = jax.jit(lambda w: jax.sharding.reshard(high(w), columns))
    (out,) = jax.make_jaxpr(placed)(w).out_avals
    assert str(out) == "q8[8,8]"
    assert out.sharding.spec == P(None, "y")
    assert placed(w).packed.sharding.spec == P(None, "y")


def gather_means(x):
    """Return the means of both halves of `x`, gathered on each device."""
    body = lambda x: lax.all_gather(jnp.mean(x, 0), "x")
    return jax.shard_map(body, mesh=AUTO, in_specs=P("x"), out_specs=P(), check_vma=False)(x)


def test_nested_derivatives_through_shard_map_agree(high, agree):
    """The transpose of the inner `shard_map` closes over a cotangent, which is a tree."""
    inner = lambda x, s: jnp.sum(jnp.tanh(gather_means(s * x)).astype("float32"))
    outer = lambda x, s: jnp.sum(jnp.tanh(jax.grad(inner, argnums=1)(x.T, 0.5) * s))
    x = jax.random.normal(KEY, (2, 8), "float16")
    named = vn.types.Named(x, ("a", "b"))
    actual = jax.jit(jax.grad(lambda s: outer(high(s * named), s)))(0.5)
    agree(actual, jax.grad(lambda s: outer(s * x, s))(0.5), atol=2e-2)


def test_a_typed_residual_of_an_eager_shard_map_raises(high):
    """An eager `shard_map` asks the type of a residual for a spec, and a high type has none."""
    named = vn.types.Named(jax.random.normal(KEY, (2, 8), "float16"), ("a", "b"))
    inner = lambda x, s: jnp.sum(jnp.tanh(gather_means(s * x)).astype("float32"))
    with pytest.raises(
        NotImplementedError, match=r"backward pass of a shard_map .*named\[.*vn\.material"
    ):
        jax.grad(lambda s: jax.grad(inner, argnums=1)(high(s * named), s))(0.5)
