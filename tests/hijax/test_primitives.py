"""Primitives that users define, with and without rules, with the mode on and off."""

import jax
import jax.numpy as jnp
import pytest

import veneer as vn

primitive = vn.hijax.primitive


@primitive
def derived(x: jax.Array, w, *, factor=2.0):
    """A primitive without rules."""
    return factor * jnp.dot(jnp.sin(x), w)


def forward(x, w, *, factor=2.0):
    return 3 * factor * jnp.dot(x, vn.materialise(w)), (x, w)


@primitive
def by_vjp(x, w, *, factor=2.0):
    """The rule returns another derivative than the function has, so that its use shows."""
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
    """The rule returns twice the derivative with respect to `x`, and no other."""
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


# For each primitive, the function of dense arrays, and a function with the derivatives of the rule.
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
    """Set the mode to the parameter `on` of a test. It is on in tests without the parameter."""
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
def test_a_primitive_computes_its_function(op, jit, on, x, weight, agree):
    expected = EXPECTED[op][0](x, weight.dense)
    agree((jax.jit(op) if jit else op)(x, weight.value), expected)
    agree((jax.jit(op) if jit else op)(x, weight.dense), expected)


def pulled(f):
    """Return the gradient of the sum of the results."""
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
def test_gradients_use_the_rules(op, name, on, x, weight, agree):
    transform = GRADIENTS[name]
    expected = transform(dense_function(op, differentiated=True))(x, weight.dense)
    if op is by_transpose and name == "forward":
        expected = expected / 5  # forward mode does not call the transpose rule
    agree(transform(op)(x, weight.value), expected, atol=1e-4)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("op", [derived, by_vjp], ids=name_of)
def test_gradients_of_weights_use_the_rules(op, jit, x, weight, agree_by_leaves):
    of = lambda f: lambda w: jnp.sum(f(x, w))
    expected = weight.reference(jax.grad, of(dense_function(op, differentiated=True)))
    grad = jax.jit(jax.grad(of(op))) if jit else jax.grad(of(op))
    agree_by_leaves(grad(weight.value), expected)


@pytest.mark.parametrize("on", [False], ids=["out of it"])
@pytest.mark.parametrize("op", [derived, by_vjp], ids=name_of)
def test_without_high_types_gradients_are_per_leaf(op, on, x, weight, agree_by_leaves):
    of = lambda f: lambda w: jnp.sum(f(x, vn.materialise(w)))
    grad = lambda f: jax.grad(f, allow_int=True)(weight.value)
    found = grad(lambda w: jnp.sum(op(x, w)))
    floating = lambda tree: [
        leaf for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.dtypes.float0
    ]
    agree_by_leaves(floating(found), floating(grad(of(dense_function(op, differentiated=True)))))


@in_and_out
@every
def test_implicit_uses_the_rules(op, on, x, weight, agree):
    dense = weight.dense
    agree(vn.implicit(op)(x, weight.value), op(x, dense))
    agree(vn.implicit(jax.jit(op))(x, weight.value), op(x, dense))
    by_x = lambda f: jax.grad(lambda x: jnp.sum(f(x, weight.value)))(x)
    expected = jax.grad(lambda x: jnp.sum(dense_function(op, differentiated=True)(x, dense)))(x)
    agree(by_x(vn.implicit(op)), expected)
    agree(by_x(vn.implicit(jax.jit(op))), expected)
    agree(vn.implicit(pulled(op))(x, weight.value), expected)


@primitive
def quantize(x: jax.Array, *, qtype="int8") -> vn.quant.QArray:
    return vn.quant.quantize(x, qtype)


@primitive
def dequantize(q: vn.quant.QArray):
    return q.qvalue * q.scale


quantize.defvjp(lambda x, **params: (quantize(x, **params), None), lambda _, ct, **params: (ct,))
dequantize.defvjp(lambda q: (dequantize(q), None), lambda _, ct: (ct,))


def test_a_jaxpr_has_one_equation_for_a_call(x):
    text = str(jax.make_jaxpr(lambda x: dequantize(quantize(x)))(x))
    assert "b:q8[3,4] = quantize" in text
    assert "c:f32[3,4] = dequantize b" in text
    text = str(jax.make_jaxpr(lambda x: derived(x, x.T, factor=3.0))(x))
    assert "derived[factor=3.0]" in text


@both
def test_a_straight_through_gradient_passes_a_typed_result(jit, x, agree):
    loss = lambda x: jnp.sum(dequantize(quantize(x)) ** 2)
    transform = (lambda f: jax.jit(jax.grad(f))) if jit else jax.grad
    expected = 2 * dequantize(quantize(x))
    agree(transform(loss)(x), expected)
    rows = jnp.stack([x, 2 * x])
    agree(jax.vmap(transform(loss))(rows), jnp.stack([expected, 2 * expected]))
    agree(transform(lambda xs: jnp.sum(jax.vmap(loss)(xs)))(rows)[1], 2 * expected)
    agree(jax.jvp(loss, (x,), (x,))[1], jnp.sum(expected * x))
    agree(jax.hessian(loss)(x[0]), jax.hessian(lambda x: jnp.sum(x**2))(x[0]))


def test_the_gradient_of_a_typed_argument_is_dense(x, agree):
    q = quantize(x)
    assert type(q) is vn.quant.QArray
    assert type(jax.jit(quantize)(x)) is vn.quant.QArray
    agree(jax.grad(lambda q: jnp.sum(dequantize(q) ** 2))(q), 2 * vn.materialise(q))


@pytest.mark.parametrize("on", [False], ids=["out of it"])
def test_without_high_types_a_dense_tangent_raises(on, x):
    with pytest.raises(TypeError, match=r"bwd returns QArray.*vn\.hijax\.enabled"):
        jax.grad(lambda x: jnp.sum(dequantize(quantize(x))))(x)


@in_and_out
def test_operands_and_results_can_be_trees(on, x, weight, agree):
    @primitive
    def both(pair, more):
        return {"dot": jnp.dot(pair["x"], pair["w"]), "more": (more, -more[0])}

    out = jax.jit(both)({"x": x, "w": weight.value}, [x])
    agree(out["dot"], x @ weight.dense)
    agree(out["more"][1], -x)
    loss = lambda x: jnp.sum(both({"x": x, "w": weight.value}, [x])["dot"])
    agree(jax.grad(loss)(x), jax.grad(lambda x: jnp.sum(x @ weight.dense))(x))


@in_and_out
def test_vmap_uses_the_batching_rule(on, x, weight, agree):
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
def test_a_callback_is_transposed_by_the_rule(on, x, weight, agree):
    """JAX cannot transpose a callback. The rule also applies inside and outside of vmap."""

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
def test_the_cotangent_of_an_unmapped_operand_is_summed(on, x, agree):
    @primitive
    def scaled(x, c):
        return x * c

    scaled.deftranspose(1)(lambda ct, x, c: jnp.sum(ct * x))
    by_rows = lambda c: jnp.sum(jax.vmap(lambda row: scaled(row, c))(x))
    agree(jax.grad(by_rows)(2.0), jnp.sum(x))


def test_a_nonlinear_backward_rule_is_used(x, agree):
    """A rule that clips the cotangent is not linear."""

    @primitive
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))
    loss = lambda x: jnp.sum(3 * clipped(x))
    agree(jax.grad(loss)(x), jnp.ones_like(x))
    agree(jax.vmap(jax.grad(loss))(x), jnp.ones_like(x))
    agree(jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x)))(x), jnp.ones_like(x))


# Errors.


def refused(match):
    return pytest.raises(TypeError, match=match)


def test_operands_of_another_class_raise(x, weight):
    with refused("dequantize: operand 0 must be QArray, as annotated, not f32"):
        dequantize(x)
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
def test_wrong_cotangents_raise(case, x):
    bwd, message = WRONG_BACKWARD[case]

    @primitive
    def op(x, y):
        return x + y

    op.defvjp(lambda x, y: (x + y, None), bwd)
    with refused(message):
        jax.grad(lambda x: jnp.sum(op(x, x)))(x)


def test_wrong_results_of_rules_raise(x):
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


def test_a_second_derivative_rule_raises():
    @primitive
    def op(x):
        return x

    op.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    with pytest.raises(ValueError, match="op already has a rule, set by defjvp"):
        op.defvjp(lambda x: (x, None), lambda r, ct: (ct,))


def test_a_captured_box_raises_with_the_name():
    box = vn.hijax.Box(0.0)

    @vn.hijax.primitive
    def counted(x):
        box.update(lambda n: n + 1)
        return 2 * x

    for program in jax.jit(counted), jax.grad(counted):
        with pytest.raises(NotImplementedError, match=r"counted.*\(.*Box"):
            program(1.0)
