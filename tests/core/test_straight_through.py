"""`vn.ste`: the value of a function, the derivative of the identity, under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import Tagged, assert_close, lora, lora_of_int8
from support.policies import only_by_rules, without_rule

import veneer as vn

W, X = arrays.normal(6, 4), arrays.normal(3, 6, seed=1)


def int8(w):
    return vn.quant.quantize(w, "int8", channelwise_axes=[1])


FUNCTIONS = {"round": jnp.round, "int8": int8}


@pytest.fixture(params=FUNCTIONS.values(), ids=FUNCTIONS)
def fn(request):
    return request.param


def by_a_difference(fn):
    """The straight-through estimator as people write it, exact up to rounding."""
    return lambda w: w + jax.lax.stop_gradient(vn.materialise(fn(w)) - w)


def loss_with(estimator, nonlinear=False):
    def loss(w, x):
        rounded = estimator(w)
        out = jnp.sin(x @ rounded)
        return (out + (rounded * rounded)[:3] * out if nonlinear else out).sum()

    return loss


def stacked(f):
    return lambda w, x: jax.vmap(f)(jnp.stack([w, 2 * w]), jnp.stack([x, -x]))


def over_rows(f):
    def scanned(w, x):
        step = lambda total, row: (total + f(w, row[None].repeat(3, 0)), None)
        return jax.lax.scan(step, 0.0, x)[0]

    return scanned


def gradient_penalty(f):
    penalty = lambda w, x: sum((g**2).sum() for g in jax.grad(f, (0, 1))(w, x))
    return jax.grad(penalty, (0, 1))


def tangent(f):
    return lambda w, x: jax.jvp(f, (w, x), (jnp.cos(w), jnp.cos(x)))


TRANSFORMATIONS = {
    "the value": lambda f: f,
    "jit": jax.jit,
    "jvp": tangent,
    "grad": lambda f: jax.grad(f, (0, 1)),
    "grad of jit": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "jit of grad": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "grad of vmap": lambda f: jax.grad(lambda w, x: stacked(f)(w, x).sum(), (0, 1)),
    "vmap of grad": lambda f: stacked(jax.grad(f, (0, 1))),
    "grad of scan": lambda f: jax.grad(over_rows(f), (0, 1)),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "implicit of grad": lambda f: vn.implicit(jax.grad(f, (0, 1))),
    "jvp of grad": lambda f: tangent(jax.grad(f, (0, 1))),
    "grad of grad": gradient_penalty,
}


@pytest.mark.parametrize("nonlinear", [False, True], ids=["linear", "nonlinear"])
@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_derivatives_go_straight_through(fn, transform, nonlinear):
    ours = transform(loss_with(vn.ste(fn), nonlinear))
    assert_close(ours(W, X), transform(loss_with(by_a_difference(fn), nonlinear))(W, X), 1e-4)


@pytest.mark.parametrize("nonlinear", [False, True], ids=["linear", "nonlinear"])
@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_high_types_have_the_same_derivatives(fn, transform, nonlinear):
    expected = transform(loss_with(by_a_difference(fn), nonlinear))(W, X)
    with vn.hijax.enabled():
        assert_close(transform(loss_with(vn.ste(fn), nonlinear))(W, X), expected, 1e-4)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_high_types_move_a_result_straight_through(jit):
    moved = lambda f: lambda w: jnp.sin(X @ f(w).T.T).sum()
    with vn.hijax.enabled():
        gradient = jit(jax.grad(moved(vn.ste(int8))))(W)
    assert_close(gradient, jax.grad(moved(by_a_difference(int8)))(W))


def test_the_value_is_not_rounded():
    tiny = lambda x: jnp.full_like(x, 1e-9)  # which x + (tiny(x) - x) is not
    value, gradient = jax.value_and_grad(vn.ste(tiny))(1.0)
    assert (value, gradient) == (jnp.float32(1e-9), 1)


def test_values_and_rules_match_the_program_without_ste():
    straight, plain = (lambda w, f=f: X @ f(w) for f in (vn.ste(int8), int8))
    assert (straight(W) == plain(W)).all()
    assert (jax.vjp(straight, W)[0] == plain(W)).all()
    rules = {event.operands: event.rule for event in vn.explain(straight)(W).events}
    assert rules[("f32[3,6]", "QArray:f32[6,4]")] == vn.explain(plain)(W).events[0].rule
    assert not without_rule(vn.explain(straight)(W))


def test_materialization_in_derivatives_is_reported():
    gradient = jax.grad(loss_with(vn.ste(int8)))
    (event,) = without_rule(vn.explain(gradient)(W, X))
    assert (event.primitive, event.nbytes) == ("dot_general", W.nbytes)
    with pytest.raises(vn.MaterialiseError, match="StraightThrough"):
        vn.implicit(gradient, on_materialise=only_by_rules)(W, X)


STRUCTURAL = {
    "transpose": lambda w: w.T,
    "slice": lambda w: w[1:4],
    "stop_gradient": jax.lax.stop_gradient,
}


@pytest.mark.parametrize("name", STRUCTURAL)
def test_structural_operations_keep_the_type(name):
    operation = vn.implicit(STRUCTURAL[name])
    kept = operation(int8(W))
    assert type(kept) is vn.quant.QArray
    result = operation(vn.ste(int8)(W))
    assert type(result.value) is vn.quant.QArray
    assert_close(result, kept)
    gradient = lambda f: jax.grad(lambda w: jnp.sin(vn.materialise(operation(f(w)))).sum())(W)
    assert_close(gradient(vn.ste(int8)), gradient(by_a_difference(int8)))


def test_an_unchanged_model_has_straight_through_gradients():
    def model(params, x):
        step = lambda x, w: (jnp.tanh(x @ w), None)
        return jax.lax.scan(step, x, params["layers"])[0] @ params["out"]

    def loss(params, f):
        return vn.implicit(model)(vn.tree.map(f, params), X).sum()

    each = lambda w: vn.quant.quantize(w, "int8", channelwise_axes=range(w.ndim))
    params = {"layers": jnp.stack([W @ W.T, -W @ W.T]), "out": W}
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    assert_close(gradient(params, vn.ste(each)), gradient(params, by_a_difference(each)), 1e-4)


def test_a_result_crosses_jit_and_vmap():
    estimator = jax.vmap(jax.jit(vn.ste(int8)))

    def loss(w):
        return jnp.sin(vn.materialise(estimator(jnp.stack([w, -w])))).sum()

    reference = lambda w: jnp.sin(jax.vmap(by_a_difference(int8))(jnp.stack([w, -w]))).sum()
    assert_close(jax.grad(loss)(W), jax.grad(reference)(W))


def test_primitives_with_several_results_agree():
    def loss(f):
        def of(w):
            values, indices = vn.implicit(jax.lax.top_k)(f(w), 2)
            return (values * indices).sum()

        return of

    assert_close(jax.grad(loss(vn.ste(int8)))(W), jax.grad(loss(by_a_difference(int8)))(W))


def test_a_comparison_has_no_derivative():
    loss = lambda w: jnp.where(vn.ste(int8)(w) > 0, 2 * w, w).sum()
    assert_close(jax.grad(loss)(W), jnp.where(vn.materialise(int8(W)) > 0, 2.0, 1.0))


def test_other_arguments_are_passed_unchanged():
    seen = []

    def fn(x, scale, *, mode, offset=None, more):
        seen.append((type(mode), offset, more["n"]))
        return jnp.round(x * scale["s"]) / scale["s"]

    def loss(x, scale):
        return vn.ste(fn)(x, {"s": scale}, mode="up", more={"n": 3, "array": scale}).sum()

    by_x, by_scale = jax.jit(jax.grad(loss, (0, 1)))(jnp.array([0.3, 0.6]), 4.0)
    assert seen == [(str, None, 3)]
    assert (by_x.tolist(), by_scale) == ([1, 1], 0)


def test_captured_variables_are_not_differentiated():
    for fn in (jnp.sin, lambda x: vn.quant.quantize(x, "int8")):
        loss = lambda x, scale, fn=fn: (2 * vn.ste(lambda x: fn(x * scale))(x)).sum()
        by_x, by_scale = jax.grad(loss, (0, 1))(jnp.arange(3.0), 4.0)
        assert (by_x.tolist(), by_scale) == ([2, 2, 2], 0)


def test_a_function_without_derivative_is_accepted():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    on_host = lambda x, y: jax.pure_callback(lambda x, y: np.floor(x) + y, shape, x, y)
    loss = lambda x: (vn.ste(on_host)(x, x) ** 2).sum()
    assert jax.grad(loss)(jnp.array([0.5, 1.5, 2.5])).tolist() == [1, 5, 9]


@pytest.mark.parametrize("make", [lora, lora_of_int8])
def test_the_array_can_be_implicit(make):
    w = make(jax.random.key(1))
    rounded = lambda w: jnp.round(vn.materialise(w) * 8) / 8
    out_of_place = jax.random.normal(jax.random.key(2), (2, 6))

    def loss(a, b, f):
        value = type(w)(w.w, a, b, scale=w.scale)
        return jnp.sin(out_of_place @ f(value)).sum()

    gradient = lambda f: jax.grad(loss, (0, 1))(w.a, w.b, f)
    expected = gradient(lambda w: by_a_difference(rounded)(vn.materialise(w)))
    assert_close(gradient(vn.ste(rounded)), expected)
    assert_close(gradient(vn.implicit(vn.ste(rounded))), expected)
    quantized = lambda w: vn.quant.quantize(w, "int8", channelwise_axes=[1])
    expected = gradient(lambda w: by_a_difference(quantized)(vn.materialise(w)))
    assert_close(gradient(vn.ste(quantized)), expected)
    assert_close(gradient(vn.implicit(vn.ste(quantized))), expected)
    assert_close(gradient(lambda w: vn.ste(quantized)(w).T.T), expected)


def test_cotangents_can_be_implicit():
    out, pull_back = jax.vjp(vn.implicit(vn.ste(jnp.sin)), Tagged(jnp.arange(3.0), "kg"))
    assert_close(out.x, jnp.sin(jnp.arange(3.0)))
    (cotangent,) = pull_back(Tagged(jnp.ones(3), "kg"))
    assert (out.label, cotangent.label, cotangent.x.tolist()) == ("kg", "kg", [1, 1, 1])


def test_an_implicit_result_has_shape_and_repr():
    result = vn.ste(int8)(W)
    assert (result.shape, result.dtype) == (W.shape, W.dtype)
    assert repr(result).startswith("StraightThrough(value=QArray(")


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda x: x[:1], r"returned f32\[1\] for f32\[3\]. .* same shape and dtype"),
        (lambda x: x.astype("bfloat16"), r"returned bf16\[3\] for f32\[3\]"),
        (lambda x: vn.quant.quantize(x[:2], "int8"), r"returned QArray:f32\[2\] for f32\[3\]"),
        (lambda x: (x, x), r"to an array, .* vn\.tree\.map"),
    ],
    ids=["shape", "dtype", "implicit", "tree"],
)
def test_a_result_of_another_shape_or_type_raises(fn, says):
    with pytest.raises(TypeError, match=says):
        vn.ste(fn)(jnp.ones(3))
