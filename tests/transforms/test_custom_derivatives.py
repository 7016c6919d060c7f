"""custom_jvp, custom_vjp and checkpoint: their authors' rules hold for implicit operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import MAKERS, Tagged, assert_close

import veneer as vn
from veneer._core import rules

X = arrays.array(np.linspace(-1.0, 1.0, 18).reshape(3, 6))
KEY = arrays.key(5)
LORA = MAKERS["lora"](KEY)


@jax.custom_jvp
def twisted(x, w):
    return jnp.tanh(x @ w)


@twisted.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return twisted(x, w), 3 * (dx @ w) + 5 * (x @ dw)  # not the derivative: it must show


def zeros_aware(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    zero = jax.custom_derivatives.SymbolicZero
    out = twisted(x, w)
    parts = [7 * (dx @ w)] if not isinstance(dx, zero) else []
    parts += [x @ dw] if not isinstance(dw, zero) else []
    return out, sum(parts) if parts else jnp.zeros_like(out)


twisted_symbolic = jax.custom_jvp(lambda x, w: jnp.tanh(x @ w))
twisted_symbolic.defjvp(zeros_aware, symbolic_zeros=True)


@jax.custom_vjp
def bent(x, w):
    return jnp.tanh(x @ w)


bent.defvjp(
    lambda x, w: (bent(x, w), (x, w)),
    lambda saved, ct: (3 * ct @ saved[1].T, 5 * saved[0].T @ ct),
)

bent_nondiff = jax.custom_vjp(lambda n, x, w: jnp.tanh(x @ w) * n, nondiff_argnums=(0,))
bent_nondiff.defvjp(
    lambda n, x, w: (bent_nondiff(n, x, w), (x, w, x @ w)),
    lambda n, saved, ct: (n * ct @ saved[1].T, saved[2].sum() * saved[0].T @ ct),
)

bent_zero = jax.custom_vjp(lambda x, w: x @ w)
bent_zero.defvjp(lambda x, w: (x @ w, w), lambda w, ct: (ct @ w.T, None))

FUNCTIONS = {
    "custom_jvp": twisted,
    "custom_jvp, symbolic zeros": twisted_symbolic,
    "custom_vjp": bent,
    "custom_vjp, nondiff_argnums": lambda x, w: bent_nondiff(2.0, x, w),
    "custom_vjp, no cotangent": bent_zero,
    "relu": lambda x, w: jax.nn.relu(x @ w) + jax.nn.relu(w)[0],
    "checkpoint": jax.checkpoint(lambda x, w: jnp.sin(jnp.tanh(x @ w))),
    "checkpoint, policy": jax.checkpoint(
        lambda x, w: jnp.sin(jnp.tanh(x @ w)), policy=jax.checkpoint_policies.dots_saveable
    ),
    "checkpoint, prevent_cse an operand": jax.checkpoint(
        lambda x, w: jnp.sin(jnp.tanh(x @ w)), prevent_cse=(True, False)
    ),
    "checkpoint of custom_vjp": jax.checkpoint(lambda x, w: jnp.sin(bent(x, w))),
}
SHAPES = {"plain": lambda f: f, "jit": jax.jit, "scan": lambda f: in_scan(f)}


def in_scan(f):
    return lambda x, w: jax.lax.scan(lambda c, _: (c + 1, f(x, w)), 0, None, length=2)[1].sum(0)


@pytest.fixture(params=FUNCTIONS.values(), ids=FUNCTIONS)
def function(request):
    return request.param


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["lora", "int4"])
def test_values_agree_with_dense(function, shape, name):
    w = MAKERS[name](KEY)
    f = shape(function)
    expected = f(X, vn.materialise(w))
    assert_close(vn.implicit(f)(X, w), expected)
    assert_close(jax.jit(vn.implicit(f))(X, w), expected)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradient_by_the_leaves(function, shape):
    f = lambda x, w: jnp.sin(shape(function)(x, w)).sum()
    rebuild = lambda leaves: jax.tree.unflatten(jax.tree.structure(LORA), leaves)
    by_leaves = lambda x, leaves: f(x, vn.materialise(rebuild(leaves)))
    expected = jax.grad(by_leaves, (0, 1))(X, jax.tree.leaves(LORA))
    for g in (jax.grad(vn.implicit(f), (0, 1)), jax.jit(jax.grad(jax.jit(vn.implicit(f)), (0, 1)))):
        dx, dw = g(X, LORA)
        assert_close((dx, jax.tree.leaves(dw)), expected, tol=2e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["lora", "int4"])
def test_gradient_by_the_dense_array(function, shape, name):
    w = MAKERS[name](KEY)
    f = lambda x, w: jnp.sin(shape(function)(x, w)).sum()
    expected = jax.grad(f, (0, 1))(X, vn.materialise(w))
    assert_close(vn.implicit(jax.grad(f, (0, 1)))(X, w), expected, tol=2e-5)
    assert_close(jax.jit(vn.implicit(jax.grad(f, (0, 1))))(X, w), expected, tol=2e-5)


def test_gradients_with_a_quantized_operand(function):
    w = MAKERS["nf4"](KEY)
    f = lambda x, w: jnp.sin(function(x, w)).sum()
    assert_close(jax.grad(vn.implicit(f))(X, w), jax.grad(f)(X, vn.materialise(w)), tol=2e-5)


def test_vmap_agrees_with_dense(function):
    ws = MAKERS["int8"](KEY, (2, 6, 6))
    expected = jax.vmap(function, (None, 0))(X, vn.materialise(ws))
    assert_close(jax.vmap(vn.implicit(function), (None, 0))(X, ws), expected)
    assert_close(vn.implicit(jax.vmap(function, (None, 0)))(X, ws), expected)


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, jax.jit], ids=["call", "grad", "jit"])
def test_custom_functions_may_capture_values(transform):
    def f(x, w):
        @jax.custom_jvp
        def by_jvp(x):
            return x @ w

        by_jvp.defjvp(lambda primals, tangents: (by_jvp(*primals), 2 * (tangents[0] @ w)))
        by_vjp = jax.custom_vjp(lambda x: x @ w)
        by_vjp.defvjp(lambda x: (x @ w, x), lambda x, ct: (x * ct.sum(),))
        return (by_jvp(x) + by_vjp(x)).sum()

    expected = transform(lambda x: f(x, vn.materialise(LORA)))(X)
    assert_close(vn.implicit(lambda x, w: transform(lambda x: f(x, w))(x))(X, LORA), expected)
    assert_close(transform(lambda x: vn.implicit(f)(x, LORA))(X), expected)


USES = {
    "multiplied": lambda ct: 7 * ct,
    "transposed": lambda ct: ct.T.T,
    "indexed": lambda ct: ct[:],
    "codes": lambda ct: ct.qvalue * 7.0,
    "materialised": vn.materialise,
    "dequantized": lambda ct: ct.dequantize(),
    "asarray": jnp.asarray,
    "numpy": np.asarray,
    "jax.numpy": lambda ct: jnp.multiply(ct, 7),
    "implicit": lambda ct: vn.implicit(jnp.multiply)(ct, 7),
    "dot": lambda ct: vn.quant.dot(X[:, :6], ct),
    "quantized": lambda ct: vn.quant.quantize(ct, "int8"),
}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("name", USES)
def test_using_a_cotangent_of_leaves_as_an_array_raises(name, inside, jit):
    """Codes have no gradient, and zeros in their place would look like a real gradient."""
    quantize = lambda w: vn.quant.quantize(w, "int8", channelwise_axes=[1])
    f = jax.custom_vjp(quantize)
    f.defvjp(lambda w: (f(w), None), lambda _, ct: (USES[name](ct),))
    product = lambda w: jnp.dot(X, f(w)).sum()
    outside = lambda w: vn.implicit(jnp.dot)(X, f(w)).sum()
    with pytest.raises(TypeError, match=r"leaves of a value are not an array.*vn\.hijax\.enabled"):
        jit(jax.grad(vn.implicit(product) if inside else outside))(jnp.ones((6, 6)))


def test_a_backward_function_can_use_leaf_cotangents():
    quantize = lambda w: vn.quant.quantize(w, "int8", channelwise_axes=[1])
    f = jax.custom_vjp(quantize)
    f.defvjp(lambda w: (f(w), f(w)), lambda q, ct: (ct.scale * q.qvalue.astype("float32"),))
    w = arrays.normal(6, 6)
    q = quantize(w)
    by_scale = jax.grad(lambda s: vn.implicit(jnp.dot)(X, q.replace(scale=s)).sum())(q.scale)
    found = jax.grad(lambda w: vn.implicit(jnp.dot)(X, f(w)).sum())(w)
    assert_close(found, by_scale * q.qvalue.astype("float32"))


def test_a_cotangent_may_have_another_dtype():
    f = jax.custom_vjp(lambda x, w: x @ w)
    backward = lambda saved, ct: (ct @ saved[1].T, (saved[0].T @ ct).astype("bfloat16"))
    f.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    gradient = jax.grad(vn.implicit(lambda w: f(X, w).sum()))(LORA)
    expected = jax.grad(vn.implicit(lambda w: (X @ w).sum()))(LORA)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradient))
    assert_close(jax.tree.leaves(gradient), jax.tree.leaves(expected), tol=0.1)


def test_on_materialise_applies_to_backward_functions():
    @jax.custom_vjp
    def f(x, w):
        return (x @ w).sum()

    def backward(saved, ct):
        x, w = saved
        return ct * x, ct * jnp.exp(w)  # no rule fits

    f.defvjp(lambda x, w: (f(x, w), (x, w)), backward)
    strict = vn.implicit(f, on_materialise="error")
    assert_close(strict(X, LORA), f(X, vn.materialise(LORA)))
    with pytest.raises(vn.MaterialiseError, match=r"exp\(Lora"):
        jax.grad(strict)(X, LORA)


def test_a_label_is_kept_under_every_transformation():
    same = jax.custom_jvp(lambda t: jnp.sin(t))
    same.defjvp(lambda p, t: (jnp.sin(*p), jnp.tanh(*p) * t[0]))
    f, tagged = vn.implicit(same), Tagged(X, "m")
    for out in (f(tagged), jax.jit(f)(tagged), jax.vmap(f)(tagged)):
        assert (type(out), out.label) == (Tagged, "m")
        assert_close(out.x, jnp.sin(X))
    out, tangent = jax.jvp(f, (tagged,), (Tagged(2 * X, "m"),))
    assert (out.label, tangent.label) == ("m", "m")
    assert_close(tangent.x, jnp.tanh(X) * 2 * X)


def test_the_cotangent_of_a_label_is_the_leaf_cotangent():
    same = jax.custom_vjp(lambda t: jnp.sin(t))
    same.defvjp(lambda t: (jnp.sin(t), jnp.tanh(t)), lambda tanh, ct: (tanh * ct,))
    _, vjp = jax.vjp(vn.implicit(same), Tagged(X, "m"))
    assert_close(vjp(Tagged(3 * X, "m"))[0].x, jnp.tanh(X) * 3 * X)


def test_a_derivative_must_keep_metadata():
    f = jax.custom_jvp(lambda t: jnp.sin(t))
    f.defjvp(lambda p, t: (jnp.sin(*p), jnp.cos(t[0])))

    class Fickle(Tagged):
        pass

    @vn.register("cos")
    def _(x: Fickle, **params):
        return Fickle(jnp.cos(x.x), "another")

    with pytest.raises(TypeError, match="must have the same metadata"):
        jax.jvp(vn.implicit(f), (Fickle(X, "m"),), (Fickle(X, "m"),))


@pytest.mark.parametrize("name", ["custom_jvp_call", "custom_vjp_call"])
def test_rules_of_users_do_not_replace_custom_derivatives(name, monkeypatch):
    table = {p: list(of_primitive) for p, of_primitive in rules._rules.items()}
    monkeypatch.setattr(rules, "_rules", table)

    @vn.register(name)
    def _(*operands: type(LORA), **params):
        raise AssertionError("JAX gives it functions")

    function = {"custom_jvp_call": twisted, "custom_vjp_call": bent}[name]
    grad = jax.grad(vn.implicit(lambda x, w: function(x, w).sum()))
    assert_close(grad(X, LORA), jax.grad(lambda x, w: function(x, w).sum())(X, LORA.materialise()))
