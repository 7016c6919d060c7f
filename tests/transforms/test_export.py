"""Export, ahead-of-time compilation and inspection of programs of implicit arrays."""

import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from support.annotations import unless_checked
from support.array_types import MAKERS, Lora, OneHot, Tagged, assert_close, lora
from support.every_type import value

import veneer as vn


def rebuilt(f, *args):
    """`f`, exported for these arguments, written and read again."""
    return export.deserialize(export.export(jax.jit(f))(*args).serialize())


def model(w, x):
    """Gives a dense and an implicit result."""
    return jnp.tanh(x @ w), w.T


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (2, 6))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_exported_program_agrees_with_the_dense_one(make, x):
    w = make(jax.random.key(0))
    program = rebuilt(vn.implicit(model), w, x)
    out = program.call(w, x)
    assert_close(out, model(vn.materialise(w), x))
    assert jax.tree.structure(out) == jax.tree.structure(vn.implicit(model)(w, x))


def test_types_that_cannot_be_materialized_are_exported():
    value, one_hot = Tagged(jnp.ones(3), "kg"), OneHot(jnp.float32(2.0), 1, n=3)
    f = vn.implicit(lambda x, e: (jnp.sin(x), jnp.arange(3.0) @ e, e))
    tagged, picked, same = rebuilt(f, value, one_hot).call(value, one_hot)
    assert_close(tagged.x, jnp.sin(value.x))
    assert (tagged.label, float(picked), same.index, same.n) == ("kg", 2.0, 1, 3)


def test_a_gradient_is_exported(x):
    w = lora(jax.random.key(0))
    f = jax.grad(vn.implicit(lambda w, x: jnp.sum(model(w, x)[0])))
    program = rebuilt(f, w, x)
    for one, other in zip(
        jax.tree.leaves(program.call(w, x)), jax.tree.leaves(f(w, x)), strict=True
    ):
        assert_close(one, other)
    assert program.in_tree == export.export(jax.jit(f))(w, x).in_tree


def test_an_exported_program_rejects_other_metadata(x):
    w = lora(jax.random.key(0))
    other = Lora(w.w, w.a, w.b, scale=2.0)
    with pytest.raises(ValueError, match="structure"):
        rebuilt(vn.implicit(model), w, x).call(other, x)


class Pair(NamedTuple):
    """Metadata in metadata."""

    left: int
    right: "tuple[float, ...]"


class Labelled(vn.ImplicitArray):
    """With metadata of any kind that the test asks for."""

    x: jax.Array
    data: Any = vn.static(default=None)
    pair: "Pair | None" = vn.static(default=None)

    def materialise(self):
        return self.x


METADATA = [
    None,
    True,
    2,
    2.0,
    -0.0,
    1e-300,
    float("inf"),
    "kg",
    (),
    (1, (2.0, "a"), None),
    np.dtype("float32"),
    jnp.dtype("bfloat16"),
    jnp.float32,
    np.float32,
    jnp.dtype("int4"),
]


@pytest.mark.parametrize("data", METADATA, ids=str)
def test_metadata_survives_an_export(data):
    value = Labelled(jnp.ones(2), data)
    out = rebuilt(lambda x: x, value).call(value)
    assert out.data == data
    assert type(out.data) is type(data)


def test_a_named_tuple_survives_an_export():
    value = Labelled(jnp.ones(2), pair=Pair(1, (2.0,)))
    out = rebuilt(lambda x: x, value).call(value)
    assert out.pair == Pair(1, (2.0,))
    assert type(out.pair) is Pair


@pytest.mark.parametrize(
    "data",
    [object(), Pair(1, ()), frozenset({1}), (1, 2j)],
    ids=["object", "named tuple", "set", "complex"],
)
def test_unsupported_metadata_raises(data):
    with pytest.raises(TypeError, match=r"jax\.export cannot write Labelled\.data"):
        rebuilt(lambda x: x, Labelled(jnp.ones(2), data))


def test_a_class_can_be_defined_again():
    def define(scale):
        class Scaled(vn.ImplicitArray):
            x: jax.Array
            by: float = vn.static(default=scale)

            def materialise(self):
                return self.x * self.by

        return Scaled

    for scale in (2.0, 3.0):
        value = define(scale)(jnp.ones(2))
        out = rebuilt(vn.implicit(lambda x: (x, x + 1)), value).call(value)
        assert type(out[0]) is type(value)
        assert_close(out, (jnp.full(2, scale), jnp.full(2, scale + 1)))


READER = """
import sys
import jax, jax.numpy as jnp, veneer as vn
q = vn.quant.quantize(jnp.eye(4), "nf4", channelwise_axes=[1])
program = jax.export.deserialize(open(sys.argv[1], "rb").read())
print(program.call(q, jnp.arange(4.0)).tolist())
"""


def test_a_file_is_read_by_another_process(tmp_path):
    q = vn.quant.quantize(jnp.eye(4), "nf4", channelwise_axes=[1])
    f = jax.jit(vn.implicit(lambda q, x: x @ q))
    file = tmp_path / "program"
    file.write_bytes(export.export(f)(q, jnp.arange(4.0)).serialize())
    run = subprocess.run(
        [sys.executable, "-c", READER, str(file)], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[0.0, 1.0, 2.0, 3.0]"


# Ahead of time.


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_compiled_program_runs_with_other_weights(make, x):
    w = make(jax.random.key(0))
    compiled = jax.jit(vn.implicit(model)).lower(w, x).compile()
    assert_close(compiled(w, x), model(vn.materialise(w), x))
    other = make(jax.random.key(7))
    assert_close(compiled(other, x), model(vn.materialise(other), x))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_eval_shape_gives_implicit_results_of_abstract_leaves(make, x):
    w = make(jax.random.key(0))
    abstract = jax.eval_shape(vn.implicit(model), w, x)
    concrete = vn.implicit(model)(w, x)
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    for one, other in zip(jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    again = jax.eval_shape(vn.implicit(model), *jax.eval_shape(lambda *args: args, w, x))
    assert jax.tree.structure(again) == jax.tree.structure(abstract)
    assert jax.tree.leaves(again) == jax.tree.leaves(abstract)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_jaxprs_take_and_return_leaves(make, x):
    w = make(jax.random.key(0))
    program, shape = jax.make_jaxpr(vn.implicit(model), return_shape=True)(w, x)
    out = jax.core.eval_jaxpr(program.jaxpr, program.consts, *jax.tree.leaves((w, x)))
    result = jax.tree.unflatten(jax.tree.structure(shape), out)
    assert_close(result, model(vn.materialise(w), x))


def test_a_flax_class_is_exported():
    import flax.struct as flax_struct

    @flax_struct.dataclass
    class Shifted(vn.ImplicitArray):
        x: jax.Array
        by: float = vn.static(default=1.0)

        def materialise(self):
            return self.x + self.by

    value = Shifted(jnp.ones(2), 2.0)
    f = vn.implicit(lambda x: (x, 2 * x))
    assert_close(rebuilt(f, value).call(value), f(value))


# Symbolic sizes.


def exported_for_any_batch(f, weights, *args):
    """Export `f(weights, *args)` with a symbolic first axis of `args`, and call it."""
    (n,) = export.symbolic_shape("n")
    abstract = [jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype) for x in args]
    program = export.export(jax.jit(vn.implicit(f)))(weights, *abstract)
    return export.deserialize(program.serialize()).call(weights, *args)


def rounded(**how):
    """Return a weight whose activations are quantized, too."""
    rule = vn.quant.Rule("w", "int8", act_qtype="int8", **how)
    args = jnp.ones((2, 6)), {"w": jax.random.normal(jax.random.key(0), (6, 6))}
    model = lambda x, params: x @ params["w"]
    tree = vn.quant.quantize_tree(args[1], [rule], model=lambda p, x: model(x, p), args=args[:1])
    return tree["w"]


SYMBOLIC = {
    "product": lambda w, x: x @ w,
    "gradient": jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)), argnums=1),
    "rows": lambda w, x: w[x[:, 0].astype(jnp.int32)],
    "rows in a product": lambda w, x: w[x[:, 0].astype(jnp.int32)] @ w,
    "moved": lambda w, x: jnp.broadcast_to(w, (x.shape[0], 6, 6)).reshape(-1, 6).T,
    "turned": lambda w, x: w[x[:, 0].astype(jnp.int32)].reshape(6, x.shape[0]),
    "quantized": lambda w, x: vn.quant.quantize(x @ w, "int8", channelwise_axes=[0]),
}


@pytest.mark.parametrize("name", SYMBOLIC)
@pytest.mark.parametrize("make", [*MAKERS.values(), rounded], ids=[*MAKERS, "activations"])
def test_a_program_is_exported_for_any_batch(make, name, x):
    w = make() if make is rounded else make(jax.random.key(0))
    expected = jax.jit(vn.implicit(SYMBOLIC[name]))(w, x)
    assert_close(exported_for_any_batch(SYMBOLIC[name], w, x), expected, 1e-4)


WITH_A_BATCH = ("Banded", "Constant", "Diagonal", "LoraArray", "Permuted", "QArray, int8", "Scaled")


@pytest.mark.parametrize("name", WITH_A_BATCH)
def test_values_may_have_a_symbolic_batch(name):
    w = value(name, (3,))
    (n,) = export.symbolic_shape("n")
    in_batch = lambda x: (n, *x.shape[1:]) if x.shape[0] == 3 else x.shape
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(in_batch(x), x.dtype), w)

    @vn.implicit
    def f(w):
        moved = jnp.stack([w, w]).sum(), w.reshape(-1, 4) + 1, *jnp.split(w + 0, 2, -1)
        return *moved, w[0] @ jnp.ones(4), w[::-1] * 1.0, w[jnp.array([0, 1])] @ jnp.ones(4)

    assert_close(export.export(jax.jit(f))(abstract).call(w), f(w))


CACHE_USES = {
    "attention": lambda c, x: jax.nn.dot_product_attention(x, c, c),
    "masked write": lambda c, x: lax.dynamic_update_slice(
        c, jnp.where(x > 0, x, c[:, 2:3]), (0, 2, 0, 0)
    ),
    "write at an index": lambda c, x: c.at[:, 3].set(x[:, 0]),
    "product": lambda c, x: x[:, :, 0] @ c[:, :, 0].mT,
    "experts": lambda c, x: jnp.einsum("ebd,efd->ebf", x[:, :, 0], c[:, :, 0]),
}


@unless_checked  # a symbolic size is no int
@pytest.mark.parametrize("use", CACHE_USES)
@pytest.mark.parametrize("qtype", ["int8", "uint4", "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_may_have_a_symbolic_batch(use, qtype, dtype):
    cache = vn.quant.zeros((3, 8, 2, 16), qtype, channelwise_axes=(0, 1, 2), dtype=dtype)
    cache = cache.at[:].set(jax.random.normal(jax.random.key(0), cache.shape, dtype))
    x = jax.random.normal(jax.random.key(1), (3, 1, 2, 16), dtype)
    (n,) = export.symbolic_shape("n")
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), (cache, x))
    f = jax.jit(vn.implicit(CACHE_USES[use]))
    found = export.export(f)(*abstract).call(cache, x)
    assert_close(vn.materialise(found), vn.materialise(f(cache, x)), 2e-2)
