"""High primitives of a user's: with rules and without, in the mode and out of it."""

import jax
import jax.numpy as jnp
import pytest

import veneer as vn

primitive = vn.hijax.primitive


@primitive
def derived(x: jax.Array, w, *, factor=2.0):
    """What is derived from it alone."""
    return factor * jnp.dot(jnp.sin(x), w)


def forward(x, w, *, factor=2.0):
    return 3 * factor * jnp.dot(x, vn.materialise(w)), (x, w)


@primitive
def by_vjp(x, w, *, factor=2.0):
    """With a derivative that is not its own, so that it is seen to be used."""
    return 3 * factor * jnp.dot(x, vn.materialise(w))


def backward(residuals, ct, *, factor=2.0):
    x, w = residuals
    if isinstance(w, vn.types.LoraArray):
        dense = x.T @ ct
        da, db = w.scale * dense @ w.b.T, w.scale * w.a.T @ dense
        dw = vn.types.LoraArray(dense, da, db, scale=w.scale)
    else:
        dw = x.T @ ct
    return ct @ vn.materialise(w).T, dw  # without the factors


by_vjp.defvjp(forward, backward)


@primitive
def by_jvp(x, w):
    """With a derivative by `x` alone, and twice that."""
    return jnp.dot(x, w)


@by_jvp.defjvp
def _(primals, tangents):
    return by_jvp(*primals), 2 * jnp.dot(tangents[0], primals[1])


@primitive
def by_transpose(x, w):
    return jnp.dot(x, w)


@by_transpose.deftranspose(0)
def _(ct, x, w):
    assert x is None
    return 5 * jnp.dot(ct, jnp.transpose(w))


# What each is to agree with, of dense arrays: the function, and its derivatives by x and w.
EXPECTED = {
    derived: (lambda x, w: 2 * jnp.sin(x) @ w, None),
    by_vjp: (lambda x, w: 6 * x @ w, lambda x, w: x @ w),
    by_jvp: (lambda x, w: x @ w, lambda x, w: 2 * x @ jax.lax.stop_gradient(w)),
    by_transpose: (lambda x, w: x @ w, lambda x, w: 5 * x @ jax.lax.stop_gradient(w)),
}


def name_of(value):
    return getattr(value, "name", str(value))


every = pytest.mark.parametrize("op", EXPECTED, ids=name_of)
in_and_out = pytest.mark.parametrize("on", [True, False], ids=["in the mode", "out of it"])
both = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])


@pytest.fixture(autouse=True)
def mode(request):
    """As `on` says, and on for tests that do not say."""
    params = getattr(request.node, "callspec", None)
    if params is None or params.params.get("on", True):
        with vn.hijax.enabled():
            yield
    else:
        yield


def dense_function(op, *, differentiated):
    function, derivative = EXPECTED[op]
    return derivative if differentiated and derivative else function


@in_and_out
@both
@every
def test_its_value(op, jit, on, x, weight, agree):
    expected = EXPECTED[op][0](x, weight.dense)
    agree((jax.jit(op) if jit else op)(x, weight.value), expected)
    agree((jax.jit(op) if jit else op)(x, weight.dense), expected)


def pulled(f):
    """Gradients of the sum, so that those of the value itself do not come into it."""
    return lambda x, w: jax.grad(lambda x, w: jnp.sum(f(x, w)))(x, w)


GRADIENTS = {
    "grad": pulled,
    "jitted": lambda f: jax.jit(pulled(f)),
    "of a jitted function": lambda f: pulled(jax.jit(f)),
    "checkpoint": lambda f: pulled(jax.checkpoint(f)),
    "loop": lambda f: pulled(
        lambda x, w: jax.lax.scan(lambda c, row: (c, f(row[None], w)[0]), 0.0, x)[1]
    ),
    "vmap within": lambda f: pulled(jax.vmap(lambda row, w: f(row[None], w)[0], (0, None))),
    "vmap outside": lambda f: jax.vmap(lambda row, w: pulled(f)(row[None], w)[0], (0, None)),
    "branch": lambda f: pulled(
        lambda x, w: jax.lax.cond(x[0, 0] > -9, f, lambda x, w: jnp.zeros((3, 6)), x, w)
    ),
    "forward": lambda f: lambda x, w: jax.jacfwd(lambda x: f(x, w).sum())(x),
}


@in_and_out
@pytest.mark.parametrize("name", GRADIENTS)
@every
def test_its_gradient(op, name, on, x, weight, agree):
    transform = GRADIENTS[name]
    expected = transform(dense_function(op, differentiated=True))(x, weight.dense)
    if op is by_transpose and name == "forward":
        expected = expected / 5  # which does not transpose
    agree(transform(op)(x, weight.value), expected, atol=1e-4)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("op", [derived, by_vjp], ids=name_of)
def test_its_gradient_by_the_weight(op, jit, x, weight, agree_by_leaves):
    of = lambda f: lambda w: jnp.sum(f(x, w))
    expected = weight.reference(jax.grad, of(dense_function(op, differentiated=True)))
    grad = jax.jit(jax.grad(of(op))) if jit else jax.grad(of(op))
    agree_by_leaves(grad(weight.value), expected)


@pytest.mark.parametrize("on", [False], ids=["out of it"])
@pytest.mark.parametrize("op", [derived, by_vjp], ids=name_of)
def test_out_of_the_mode_gradients_are_of_leaves(op, on, x, weight, agree_by_leaves):
    of = lambda f: lambda w: jnp.sum(f(x, vn.materialise(w)))
    grad = lambda f: jax.grad(f, allow_int=True)(weight.value)
    found = grad(lambda w: jnp.sum(op(x, w)))
    floating = lambda tree: [
        leaf for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.dtypes.float0
    ]
    agree_by_leaves(floating(found), floating(grad(of(dense_function(op, differentiated=True)))))


@in_and_out
@every
def test_under_implicit(op, on, x, weight, agree):
    dense = weight.dense
    agree(vn.implicit(op)(x, weight.value), op(x, dense))
    agree(vn.implicit(jax.jit(op))(x, weight.value), op(x, dense))
    by_x = lambda f: jax.grad(lambda x: jnp.sum(f(x, weight.value)))(x)
    expected = jax.grad(lambda x: jnp.sum(dense_function(op, differentiated=True)(x, dense)))(x)
    agree(by_x(vn.implicit(op)), expected)
    agree(by_x(vn.implicit(jax.jit(op))), expected)
    agree(vn.implicit(pulled(op))(x, weight.value), expected)


@primitive
def quantise(x: jax.Array, *, qtype="int8") -> vn.quant.QArray:
    return vn.quant.quantize(x, qtype)


@primitive
def dequantise(q: vn.quant.QArray):
    return q.qvalue * q.scale


quantise.defvjp(lambda x, **params: (quantise(x, **params), None), lambda _, ct, **params: (ct,))
dequantise.defvjp(lambda q: (dequantise(q), None), lambda _, ct: (ct,))


def test_a_jaxpr_has_one_equation_on_types(x):
    text = str(jax.make_jaxpr(lambda x: dequantise(quantise(x)))(x))
    assert "b:q8[3,4] = quantise" in text
    assert "c:f32[3,4] = dequantise b" in text
    text = str(jax.make_jaxpr(lambda x: derived(x, x.T, factor=3.0))(x))
    assert "derived[factor=3.0]" in text


@both
def test_a_gradient_goes_straight_through_a_typed_result(jit, x, agree):
    loss = lambda x: jnp.sum(dequantise(quantise(x)) ** 2)
    transform = (lambda f: jax.jit(jax.grad(f))) if jit else jax.grad
    expected = 2 * dequantise(quantise(x))
    agree(transform(loss)(x), expected)
    rows = jnp.stack([x, 2 * x])
    agree(jax.vmap(transform(loss))(rows), jnp.stack([expected, 2 * expected]))
    agree(transform(lambda xs: jnp.sum(jax.vmap(loss)(xs)))(rows)[1], 2 * expected)
    agree(jax.jvp(loss, (x,), (x,))[1], jnp.sum(expected * x))
    agree(jax.hessian(loss)(x[0]), jax.hessian(lambda x: jnp.sum(x**2))(x[0]))


def test_a_gradient_by_a_typed_argument_is_dense(x, agree):
    q = quantise(x)
    assert type(q) is vn.quant.QArray
    assert type(jax.jit(quantise)(x)) is vn.quant.QArray
    agree(jax.grad(lambda q: jnp.sum(dequantise(q) ** 2))(q), 2 * vn.materialise(q))


@pytest.mark.parametrize("on", [False], ids=["out of it"])
def test_out_of_the_mode_a_typed_tangent_is_refused(on, x):
    with pytest.raises(TypeError, match=r"bwd returns QArray.*vn\.hijax\.enabled"):
        jax.grad(lambda x: jnp.sum(dequantise(quantise(x))))(x)


@in_and_out
def test_trees_go_in_and_out(on, x, weight, agree):
    @primitive
    def both(pair, more):
        return {"dot": jnp.dot(pair["x"], pair["w"]), "more": (more, -more[0])}

    out = jax.jit(both)({"x": x, "w": weight.value}, [x])
    agree(out["dot"], x @ weight.dense)
    agree(out["more"][1], -x)
    loss = lambda x: jnp.sum(both({"x": x, "w": weight.value}, [x])["dot"])
    agree(jax.grad(loss)(x), jax.grad(lambda x: jnp.sum(x @ weight.dense))(x))


@in_and_out
def test_a_rule_for_vmap(on, x, weight, agree):
    seen = []

    @primitive
    def op(x, w):
        return jnp.dot(x, w)

    @op.defvmap
    def _(size, has_axis, x, w):
        seen.append((size, has_axis))
        return jnp.dot(x, w), True

    agree(jax.vmap(op, (0, None))(x, weight.value), x @ weight.dense)
    agree(jax.vmap(op, (1, None))(x.T, weight.value), x @ weight.dense)
    assert seen[0] == (3, (True, False))


@in_and_out
def test_a_transpose_that_jax_could_not_find(on, x, weight, agree):
    """Of what is a call of the host's, say, on each end of a vmap."""

    @primitive
    def host(x, w):
        out = jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[-1]), x.dtype)
        dense = vn.materialise(w)
        return jax.pure_callback(lambda x, w: x @ w, out, x, dense, vmap_method="sequential")

    host.deftranspose(0)(lambda ct, x, w: jnp.dot(ct, jnp.transpose(vn.materialise(w))))
    grad = lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(f(x, weight.value))))
    by_rows = lambda x, w: jax.vmap(lambda row: host(row, w))(x)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x @ weight.dense)))(x)
    agree(grad(host)(x), expected)
    agree(grad(by_rows)(x), expected)
    agree(jax.vmap(grad(host))(x), expected)


@in_and_out
def test_a_transpose_by_what_is_not_mapped_is_a_sum(on, x, agree):
    @primitive
    def scaled(x, c):
        return x * c

    scaled.deftranspose(1)(lambda ct, x, c: jnp.sum(ct * x))
    by_rows = lambda c: jnp.sum(jax.vmap(lambda row: scaled(row, c))(x))
    agree(jax.grad(by_rows)(2.0), jnp.sum(x))


def test_a_rule_that_is_not_linear(x, agree):
    """Clipping of a gradient, which is no derivative, for each of a batch."""

    @primitive
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))
    loss = lambda x: jnp.sum(3 * clipped(x))
    agree(jax.grad(loss)(x), jnp.ones_like(x))
    agree(jax.vmap(jax.grad(loss))(x), jnp.ones_like(x))
    agree(jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x)))(x), jnp.ones_like(x))


# What is refused.


def refused(match):
    return pytest.raises(TypeError, match=match)


def test_operands_of_another_class_are_refused(x, weight):
    with refused("dequantise: operand 0 must be QArray, as annotated, not f32"):
        dequantise(x)
    with refused(r"derived: operand 0 must be a dense array, as annotated, not \w+\[4,6\]"):
        derived(weight.value, x)
    with refused("parameter factor has the type ArrayImpl"):
        derived(x, x.T, factor=jnp.ones(()))
    with refused("takes a function, not <class"):
        primitive(int)


WRONG_BACKWARD = {
    "too few": (lambda r, ct: (ct,), "must return a tuple of 2"),
    "no tuple": (lambda r, ct: ct, "must return a tuple of 2"),
    "another shape": (lambda r, ct: (ct[0], ct), r"bwd returns f32\[4\].*f32\[3,4\]"),
    "another dtype": (lambda r, ct: (ct.astype(jnp.bfloat16), ct), "bwd returns bf16"),
}


@pytest.mark.parametrize("case", WRONG_BACKWARD)
def test_cotangents_that_do_not_fit_are_refused(case, x):
    bwd, message = WRONG_BACKWARD[case]

    @primitive
    def op(x, y):
        return x + y

    op.defvjp(lambda x, y: (x + y, None), bwd)
    with refused(message):
        jax.grad(lambda x: jnp.sum(op(x, x)))(x)


def test_other_results_than_the_expansions_are_refused(x):
    @primitive
    def op(x):
        return x

    op.defvjp(lambda x: (x[0], None), lambda r, ct: (ct,))
    with refused(r"fwd returns \(f32\[4\]\), but the function itself \(f32\[3,4\]\)"):
        jax.grad(lambda x: jnp.sum(op(x)))(x)

    @primitive
    def other(x):
        return x

    other.defjvp(lambda primals, tangents: (primals[0], tangents[0][0]))
    with refused(r"rule of defjvp returns f32\[4\]"):
        jax.grad(lambda x: jnp.sum(other(x)))(x)

    @primitive
    def mapped(x):
        return x

    mapped.defvmap(lambda size, has_axis, x: (x, False))
    with refused("mapped over 3, returns"):
        jax.vmap(mapped)(x)


def test_a_second_derivative_is_refused():
    @primitive
    def op(x):
        return x

    op.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    with pytest.raises(ValueError, match="op already has a rule, set by defjvp"):
        op.defvjp(lambda x: (x, None), lambda r, ct: (ct,))


def test_a_box_from_outside_is_refused_by_name():
    box = vn.hijax.Box(0.0)

    @vn.hijax.primitive
    def counted(x):
        box.update(lambda n: n + 1)
        return 2 * x

    for program in jax.jit(counted), jax.grad(counted):
        with pytest.raises(NotImplementedError, match=r"counted.*\(.*Box"):
            program(1.0)
