"""Tests of `Named`: names of results, and errors where names differ."""

import jax
import jax.numpy as jnp
import pytest
from support import arrays
from support.array_types import quantized
from support.claims import Claim, claims
from support.policies import only_by_rules
from support.probes import Opaque

import veneer as vn
from veneer.types.named import Named


def named(*names, shape=None):
    """Return a maker of arrays with these names, of shape `[n, 3, 2]` by default."""

    def make(draw):
        array = draw(*(shape or (draw.n, 3, 2)[: len(names)]))
        return Named(array, (None,) * (array.ndim - len(names)) + names)

    return make


def dense(*shape):
    return lambda draw: draw(*(shape or (draw.n, 3)))


def indices(draw):
    return jnp.zeros((*draw.batch, 2, 3), "int32")


X = named("batch", "seq")
TO_OUT = named("seq", "out", shape=(3, 2))

# A program, makers of its operands, and the names of its result; None if it is dense.
PROGRAMS = {
    "function of one array": (jnp.exp, [X], ("batch", "seq")),
    "same names": (jnp.add, [X, X], ("batch", "seq")),
    "dense operand": (jnp.multiply, [dense(), X], ("batch", "seq")),
    "number": (lambda x: 2 * x, [X], ("batch", "seq")),
    "names that complete each other": (
        jnp.add,
        [named("batch", None), named(None, "seq")],
        ("batch", "seq"),
    ),
    "stretched axis": (lambda x: x - x.mean(-1, keepdims=True), [X], ("batch", "seq")),
    "stretched axis of another name": (
        lambda x, y: x[:1] * y,
        [named("layer", "seq", shape=(2, 3)), X],
        ("batch", "seq"),
    ),
    "comparison and choice": (lambda x: jnp.where(x > 0, x, 0.0), [X], ("batch", "seq")),
    "reduction": (lambda x: x.sum(0), [X], ("seq",)),
    "reduction of all": (jnp.mean, [X], None),
    "variance": (lambda x: x.var(-1), [X], ("batch",)),
    "softmax": (jax.nn.softmax, [X], ("batch", "seq")),
    "transpose": (lambda x: x.T, [X], ("seq", "batch")),
    "new axis": (lambda x: x[:, None], [X], ("batch", None, "seq")),
    "squeeze": (lambda x: x[:, :1].squeeze(1), [X], ("batch",)),
    "slice and join": (lambda x: jnp.concatenate([x[:, 1:], x], 1), [X], ("batch", "seq")),
    "split": (lambda x: jnp.split(x, 3, axis=1)[1], [X], ("batch", "seq")),
    "stack": (lambda x: jnp.stack([x, x], 1), [X], ("batch", None, "seq")),
    "pad and reverse": (lambda x: jnp.pad(x[::-1], 1), [X], ("batch", "seq")),
    "repeat whole": (lambda x: jnp.tile(x, (1, 2)), [X], ("batch", None)),
    "astype": (lambda x: x.astype("float16").astype(x.dtype), [X], ("batch", "seq")),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), [X], ("batch", "seq")),
    "sort": (lambda x: jnp.sort(x, 1), [X], ("batch", "seq")),
    "top k": (lambda x: jax.lax.top_k(x, 2)[0], [X], ("batch", "seq")),
    "matmul": (jnp.matmul, [X, TO_OUT], ("batch", "out")),
    "matmul with dense weights": (jnp.matmul, [X, dense(3, 2)], ("batch", None)),
    "batched matmul": (
        lambda q, k: jnp.einsum("bhd,bkd->bhk", q, k),
        [named("batch", "query", "dim"), named("batch", "key", "dim")],
        ("batch", "query", "key"),
    ),
    "einsum": (
        lambda x, y: jnp.einsum("bs,so->ob", x, y),
        [X, TO_OUT],
        ("out", "batch"),
    ),
    "product with itself": (lambda x: x.T @ x, [X], ("seq", "seq")),
    "split of an axis": (
        lambda x: x.reshape(*x.shape[:-1], 2, 3),
        [named("batch", "heads x dim", shape=(2, 6))],
        ("batch", None, None),
    ),
    "merge of axes": (
        lambda x: x.reshape(x.shape[0], 6),
        [named("batch", "seq", "dim")],
        ("batch", None),
    ),
    "reshape that adds an axis": (
        lambda x: x.reshape(2, 1, 3),
        [named("batch", "seq", shape=(2, 3))],
        ("batch", None, "seq"),
    ),
    "look-up": (
        lambda table, i: table[i],
        [named("vocab", "dim", shape=(5, 2)), lambda draw: indices(draw)],
        (None, None, "dim"),
    ),
    "look-up by a named index": (
        lambda table, i: table[i],
        [
            named("vocab", "dim", shape=(5, 2)),
            lambda draw: Named(indices(draw), (*(None,) * len(draw.batch), "batch", "seq")),
        ],
        ("batch", "seq", "dim"),
    ),
    "along an axis": (
        lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1),
        [named("batch", "seq", shape=(2, 3))],
        ("batch", "seq"),
    ),
    "update": (
        lambda x, y: x.at[:, 0].set(y),
        [X, named("batch")],
        ("batch", "seq"),
    ),
}

CLAIMS = {
    name: Claim(run, operands, Named if names else None, sizes=(1, 5))
    for name, (run, operands, names) in PROGRAMS.items()
    if name
    in (
        "stretched axis",
        "softmax",
        "slice and join",
        "matmul",
        "batched matmul",
        "merge of axes",
        "look-up by a named index",
        "update",
    )
}

test_under, test_over_sizes_and_dtypes = claims(CLAIMS)


def names_of(x):
    assert isinstance(x, Named | jax.Array)
    return x.names if isinstance(x, Named) else None


def strict(f):
    return vn.implicit(f, on_materialise=only_by_rules)


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_have_the_expected_names(name):
    run, operands, expected = PROGRAMS[name]
    claim = Claim(run, operands)
    out = strict(run)(*claim.make())
    assert names_of(out) == expected
    assert jnp.allclose(vn.materialise(out), run(*vn.materialise(claim.make())))
    abstract = jax.eval_shape(strict(jax.jit(run)), *claim.make())
    assert (abstract.names if isinstance(abstract, Named) else None) == expected


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    "mapped", [lambda f: jax.vmap(strict(f)), lambda f: strict(jax.vmap(f))], ids=["in", "out"]
)
def test_an_axis_that_vmap_adds_has_no_name(mapped, name):
    run, operands, expected = PROGRAMS[name]
    out = jax.eval_shape(mapped(run), *Claim(run, operands).make(batch=(7,)))
    assert (out.names if isinstance(out, Named) else None) == (expected and (None, *expected))


def array(*names, shape=None):
    shape = shape or range(2, 2 + len(names))
    return Named(jnp.ones(tuple(shape)), names)


DISAGREEING = arrays.OnDemand(
    {
        "add": lambda: (jnp.add, [array("batch", "seq"), array("batch", "time")]),
        "dot_general": lambda: (
            jnp.matmul,
            [array("batch", "seq"), array("time", "out", shape=(3, 2))],
        ),
        "concatenate": lambda: (
            lambda x, y: jnp.concatenate([x, y]),
            [array("batch", "seq"), array("batch", "time")],
        ),
        "select_n": lambda: (
            jax.lax.select,
            [array("batch") > 0, array("batch"), array("seq", shape=(2,))],
        ),
        "scatter": lambda: (
            lambda x, y: x.at[0].set(y),
            [array("batch", "seq"), array("time", shape=(3,))],
        ),
    }
)


@pytest.mark.parametrize("primitive", DISAGREEING)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_different_names_of_corresponding_axes_raise(primitive, wrap):
    run, operands = DISAGREEING[primitive]
    with pytest.raises(ValueError, match=rf"^{primitive}\(.*Named.*: axis \d of \('.* is '.* '"):
        vn.implicit(wrap(run))(*operands)


def test_batch_axes_of_a_product_must_agree():
    x, y = array("batch", "a", "k", shape=(2, 3, 4)), array("head", "b", "k", shape=(2, 3, 4))
    with pytest.raises(ValueError, match=r"axis 0 of .* is 'batch', but axis 0 .* 'head'"):
        vn.implicit(lambda x, y: jnp.einsum("bik,bjk->bij", x, y))(x, y)


def test_axes_of_size_1_that_are_not_broadcast_must_agree():
    with pytest.raises(ValueError, match="'a', but axis"):
        array("a", shape=(1,)) + array("b", shape=(1,))


@pytest.mark.parametrize(
    ("names", "error", "match"),
    [
        (("a",), ValueError, "a name or None for each axis; got 1 names"),
        (("a", "a"), ValueError, "'a' is twice"),
        ("ab", TypeError, "names"),
        ((1, 2), TypeError, "names"),
    ],
)
def test_invalid_names_raise(names, error, match):
    with pytest.raises(error, match=match):
        Named(jnp.ones((2, 3)), names)


def test_values_that_are_not_unnamed_arrays_raise():
    with pytest.raises(TypeError, match="array"):
        Named([1.0], ("a",))
    with pytest.raises(TypeError, match="without names"):
        Named(array("a"), ("b",))


def test_axis_names_select_axes():
    x = array("batch", "seq", "dim")
    assert x.axis("dim") == 2
    assert x.sum(x.axis("seq")).names == ("batch", "dim")
    moved = x.order("dim", "batch", "seq")
    assert (moved.names, moved.shape) == (("dim", "batch", "seq"), (4, 2, 3))
    assert x.rename(seq="time", dim=None).names == ("batch", "time", None)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda x: x.axis("time"),
        lambda x: x.order("seq"),
        lambda x: x.order("seq", "time"),
        lambda x: x.rename(time="seq"),
        lambda x: x.rename(batch="seq"),
        lambda x: (x @ x.T).axis("batch"),
    ],
)
def test_a_name_without_exactly_one_axis_raises(misuse):
    with pytest.raises(ValueError, match=r"'(batch|time|seq)'"):
        misuse(array("batch", "seq"))


def test_a_primitive_without_a_law_materializes():
    report = vn.explain(lambda x: jnp.sin(jnp.fft.fft(x)))(array("batch", "time"))
    assert [event.primitive for event in report.materialised] == ["fft"]
    assert [event.primitive for event in report.events] == ["convert_element_type", "fft"]
    with pytest.raises(vn.MaterialiseError, match="fft"):
        strict(jnp.fft.fft)(array("batch", "time"))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_removes_the_name_of_the_mapped_axis(axis):
    x = array("a", "b", "c")
    rest = tuple(n for n in x.names if n != x.names[axis])
    double = lambda x: 2 * x
    assert jax.vmap(strict(double), axis)(x).names == (None, *rest)
    inside = strict(jax.vmap(double, axis, axis))(x)
    assert inside.names == x.names


def test_nested_vmaps_return_no_wrong_names():
    inner = jax.vmap(strict(lambda x, y: (x, x * y)), (None, 0))
    same, product = jax.vmap(inner, (0, None))(array("batch", "seq"), jnp.ones((5, 1)))
    assert same.names == product.names == (None, None, "seq")


def test_a_scan_removes_the_name_of_its_axis():
    x = array("time", "batch")
    step = lambda carry, now: (carry + now, carry * now)
    last, path = strict(lambda x: jax.lax.scan(step, jnp.zeros(3), x))(x)
    assert (last.names, path.names) == (("batch",), (None, "batch"))


def test_a_loop_that_changes_names_raises():
    loop = lambda x: jax.lax.fori_loop(0, 2, lambda i, x: x.T, x)
    with pytest.raises(TypeError, match=r"carry 1 of scan .*their metadata differs"):
        vn.implicit(loop)(Named(jnp.ones((2, 2)), ("a", "b")))


def test_gradients_have_the_names_of_their_argument():
    loss = lambda x, w: (jax.nn.softmax(x @ w) ** 2).sum()
    x, w = array("batch", "seq"), array("seq", "out", shape=(3, 2))
    for grad in (jax.grad(strict(loss), (0, 1)), strict(jax.grad(loss, (0, 1)))):
        by_x, by_w = grad(x, w)
        assert (by_x.names, by_w.names) == (x.names, w.names)


def test_jacobians_have_the_names_of_the_argument_last():
    x = array("batch", "seq")
    run = strict(lambda x: (x**2).sum(0) @ jnp.ones((3, 2)))
    for jacobian in (jax.jacrev, jax.jacfwd):
        assert jacobian(run)(x).shape == (2, 2, 3)
    assert jax.jacrev(run)(x).names == (None, "batch", "seq")
    hessian = jax.hessian(strict(lambda x: (x**2).sum()))(x)
    assert jnp.allclose(jax.tree.leaves(hessian)[0].reshape(6, 6), 2 * jnp.eye(6))


def test_collectives_keep_names():
    centred = lambda x: jax.vmap(lambda row: row - jax.lax.pmean(row, "i"), axis_name="i")(x)
    x = array("batch", "seq")
    out = strict(centred)(Named(jnp.arange(6.0).reshape(2, 3), x.names))
    assert (out.names, out.sum()) == (("batch", "seq"), 0)


def test_an_exported_program_takes_and_returns_names():
    x = array("batch", "seq")
    exported = jax.export.export(jax.jit(strict(lambda x: x.sum(0))))(x)
    assert jax.export.deserialize(exported.serialize()).call(x).names == ("seq",)


def test_products_with_quantized_weights_keep_names():
    w = quantized("int8", None)(jax.random.key(0), (3, 4))
    x = array("batch", "seq")
    product = strict(jnp.matmul)(x, w)
    assert product.names == ("batch", None)
    assert jnp.allclose(product.array, x.array @ w, atol=1e-5)
    of_int8 = Named(w, ("seq", "out"))
    assert strict(jnp.matmul)(x, of_int8).names == ("batch", "out")
    assert of_int8.nbytes == w.nbytes < of_int8.size * 4


MOVES = {
    "squeeze": (lambda x: x.squeeze(1), ("a", "c", "d")),
    "index": (lambda x: x[:, 0], ("a", "c", "d")),
    "new axis": (lambda x: x[:, None], ("a", None, "b", "c", "d")),
    "transpose": (lambda x: x.swapaxes(0, 1), ("b", "a", "c", "d")),
    "stack": (lambda x: jnp.stack([x, x], 1), ("a", None, "b", "c", "d")),
}


@pytest.mark.parametrize("name", MOVES)
def test_names_of_a_quantized_array_follow_their_axes(name):
    run, names = MOVES[name]
    int8 = quantized("int8", None)(jax.random.key(0), (2, 1, 3, 4))
    assert vn.implicit(run)(Named(int8, ("a", "b", "c", "d"))).names == names


def test_an_array_that_cannot_be_materialized_keeps_names():
    out = strict(lambda x: jnp.tanh(x).sum(0))(Named(Opaque(jnp.ones((2, 3))), ("a", "b")))
    assert (out.names, type(out.array)) == (("b",), Opaque)


def test_repr_shows_the_names():
    assert repr(array("batch", None)) == "Named(f32[batch=2, 3])"
    assert "Named(f32[a=2])" in str(jax.eval_shape(lambda x: x, array("a")))
