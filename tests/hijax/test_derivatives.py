"""Derivatives with respect to leaves, or to the dense array of types with dense tangents."""

import jax
import jax.numpy as jnp
import pytest

import veneer as vn

TRANSFORMS = {
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "jitted grad": lambda f: jax.jit(jax.grad(f)),
    "grad of a jitted function": lambda f: jax.grad(jax.jit(f)),
    "vjp": lambda f: lambda w: jax.vjp(f, w)[1](jnp.ones(())),
    "hessian": lambda f: jax.hessian(f),
    "jitted hessian": lambda f: jax.jit(jax.hessian(jax.jit(f))),
    "jacrev": jax.jacrev,
    "jacfwd": jax.jacfwd,
}


@pytest.fixture(params=["argument", "typed"])
def loss(request, x, high):
    """A function of a weight. The weight is a pytree or a typed value."""
    see = high if request.param == "typed" else lambda w: w
    return lambda w: jnp.sum(jnp.sin(jnp.dot(x, see(w))))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_of_a_weight_agree(name, loss, weight, agree_by_leaves):
    transform = TRANSFORMS[name]
    agree_by_leaves(transform(loss)(weight.value), weight.reference(transform, loss))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_of_the_other_operand_agree(name, x, weight, high, agree):
    loss = lambda x, w: jnp.sum(jnp.sin(jnp.dot(x, high(w))))
    transform = TRANSFORMS[name]
    found = transform(lambda x: loss(x, weight.value))(x)
    agree(found, transform(lambda x: loss(x, weight.dense))(x), atol=1e-4)


def test_mixed_second_derivatives_agree(x, weight, high, agree):
    loss = lambda x, w: jnp.sum(jnp.sin(jnp.dot(x, high(w))))
    mixed = jax.jacrev(jax.grad(loss, 0), 1)
    expected = weight.reference(lambda f: jax.jacrev(f), lambda dense: jax.grad(loss, 0)(x, dense))
    agree(jax.tree.leaves(mixed(x, weight.value)), jax.tree.leaves(expected))


def tangent_of(weight):
    return weight.dense if weight.dense_tangent else weight.value


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_jvp_of_a_weight_agrees(jit, loss, weight, agree):
    t = tangent_of(weight)
    push = lambda f: lambda w: jax.jvp(f, (w,), (t,))
    pushed = jax.jit(push(loss)) if jit else push(loss)
    if weight.dense_tangent:
        expected = jax.jvp(loss, (weight.dense,), (t,))
    else:
        expected = jax.jvp(lambda v: loss(vn.materialise(v)), (weight.value,), (t,))
    agree(pushed(weight.value), expected)


def test_linearize_agrees_with_jvp(loss, weight, agree):
    t = tangent_of(weight)
    value, linear = jax.linearize(loss, weight.value)
    agree((value, linear(t)), jax.jvp(loss, (weight.value,), (t,)))


def test_dense_tangent_decides_the_class_of_a_gradient(loss, weight):
    found = jax.jit(jax.grad(loss))(weight.value)
    expected = jax.Array if weight.dense_tangent else vn.types.LoraArray
    assert isinstance(found, expected)
    assert found.shape == (4, 6)


def test_the_tangent_of_a_typed_result_is_a_tree(weight):
    t = tangent_of(weight)
    out, tangent = jax.jvp(jnp.transpose, (weight.value,), (t,))
    assert type(out) is type(weight.value)
    assert tangent.shape == (6, 4)


def test_the_gradient_of_a_scale_agrees(x, high, agree):
    """The quantized array is made inside the differentiated function."""
    q = vn.quant.quantize(jax.random.normal(jax.random.key(0), (4, 6)), "int8")
    of = lambda see: lambda scale: jnp.sum(jnp.sin(jnp.dot(x, see(q.replace(scale=scale)))))
    agree(jax.grad(of(high))(q.scale), jax.grad(of(vn.materialise))(q.scale))


def test_auxiliary_results_keep_their_class(loss, weight):
    _, aux = jax.grad(lambda w: (loss(w), w), has_aux=True)(weight.value)
    assert type(aux) is type(weight.value)


def test_a_partitioned_value_is_a_tree(x, agree):
    """equinox.filter_grad passes a quantized array with its scale and without codes."""
    q = vn.quant.quantize(jax.random.normal(jax.random.key(0), (4, 6)), "int8")
    part = vn.quant.QArray.from_packed(q.packed, q.scale, qtype="int8")
    object.__setattr__(part, "packed", None)

    def loss(part):
        whole = q.replace(scale=part.scale)
        return jnp.sum(jnp.sin(jnp.dot(x, whole)))

    dense = lambda scale: jnp.sum(jnp.sin(x @ vn.materialise(q.replace(scale=scale))))
    agree(jax.grad(loss)(part).scale, jax.grad(dense)(q.scale))


def test_unpacking_a_type_with_dense_tangents_raises(x):
    """A dense cotangent has no unique cotangents of codes and scales."""
    from veneer.hijax.types import type_of
    from veneer.hijax.values import Unpack, apply

    q = vn.quant.quantize(jnp.ones((4, 6)), "int8")
    with pytest.raises(NotImplementedError, match=r"unpack\(q8\[4,6\]\) cannot be differentiated"):
        jax.grad(lambda w: apply(Unpack(type_of(q)), w)[1].sum())(q)


# Leaves that have no derivative.

WITH_INTEGERS = {
    "SparseArray": lambda: vn.types.SparseArray.from_dense(jnp.tri(4) + 1.0),
    "Permutation": lambda: vn.types.Permutation(jnp.array([2, 0, 1, 3])),
    "NMSparse": lambda: vn.types.NMSparse.prune(jnp.arange(16.0).reshape(4, 4), 2, 4),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", WITH_INTEGERS)
def test_gradients_of_values_with_integer_leaves_agree(jit, name, x, high):
    value = WITH_INTEGERS[name]()
    see = high if name != "NMSparse" else lambda w: w
    loss = lambda w: jnp.sum(jnp.sin(x @ see(w)))
    grad = lambda f: jax.grad(f, allow_int=True)
    found = (jax.jit(grad(loss)) if jit else grad(loss))(value)
    expected = grad(lambda w: loss(vn.materialise(w)))(value)
    assert jax.tree.structure(found) == jax.tree.structure(value)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        if one.dtype != jax.dtypes.float0:
            assert jnp.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", WITH_INTEGERS)
@pytest.mark.parametrize("use", [lambda g: g * 2.0, jnp.sum], ids=["operator", "function"])
def test_using_leaf_derivatives_as_an_array_raises(jit, name, use, x):
    value = WITH_INTEGERS[name]()
    run = lambda w: use(jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)), allow_int=True)(w))
    with pytest.raises(TypeError, match=r"derivatives (with respect to the|of its) leaves"):
        (jax.jit(run) if jit else run)(value)


@pytest.mark.parametrize("name", ["LoraArray", *WITH_INTEGERS])
def test_vmap_of_a_branch_without_derivatives_agrees(name, x):
    """The derivative of one branch is mapped. The other is an unmapped zero."""
    lora = lambda: vn.types.LoraArray(jnp.ones((4, 4)), jnp.ones((4, 2)), jnp.ones((2, 4)))
    value = {"LoraArray": lora, **WITH_INTEGERS}[name]()
    see = (lambda w: w.T) if name != "NMSparse" else lambda w: w
    branches = lambda w: jax.lax.cond(x[0, 0] > -9, lambda w: jnp.sum(x @ w), lambda w: 1.0, w)
    grads = lambda f: jax.vmap(lambda s: jax.grad(lambda w: f(w) * s, allow_int=True)(value))
    found = jax.jit(grads(lambda w: branches(see(w))))(jnp.arange(3.0))
    expected = grads(lambda w: branches(see(vn.materialise(w))))(jnp.arange(3.0))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == jax.dtypes.float0 or jnp.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("name", ["LoraArray", "SparseArray", "NMSparse"])
def test_forward_mode_of_a_custom_vjp_raises(name, x):
    lora = lambda: vn.types.LoraArray(jnp.ones((4, 4)), jnp.ones((4, 2)), jnp.ones((2, 4)))
    value = {"LoraArray": lora, **WITH_INTEGERS}[name]()
    f = jax.custom_vjp(lambda w: jnp.sum(x @ w))
    f.defvjp(lambda w: (f(w), None), lambda residuals, ct: (None,))
    scaled = lambda w, s: jax.tree.map(lambda a: a * s if a.dtype == jnp.float32 else a, w)
    see = (lambda w: w.T) if name != "NMSparse" else lambda w: w
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jit(lambda s: jax.jvp(lambda s: f(see(scaled(value, s))), (s,), (s,)))(1.0)
    assert jnp.allclose(jax.jit(jax.grad(lambda s: f(see(scaled(value, s)))))(1.0), 0)


# Results and rules of values that are typed or pytrees.

both_ways = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])


@both_ways
@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd])
def test_jacobians_of_typed_results_agree(transform, jit, weight, high, agree_by_leaves):
    """A Jacobian is an array for the dense array or for each leaf."""
    by_weight = transform(high)
    found = (jax.jit(by_weight) if jit else by_weight)(weight.value)
    plain = (lambda w: 1 * w) if weight.dense_tangent else lambda w: jax.tree.map(jnp.copy, w)
    agree_by_leaves(found, transform(plain)(weight.dense if weight.dense_tangent else weight.value))

    by_scalar = lambda w: transform(lambda s: {"w": high(w) * s})(2.0)["w"]
    found = (jax.jit(by_scalar) if jit else by_scalar)(weight.value)
    if weight.dense_tangent:
        agree_by_leaves(found, weight.dense)
    else:
        agree_by_leaves(
            found, jax.jacfwd(lambda s: vn.implicit(jnp.multiply)(weight.value, s))(2.0)
        )


@both_ways
def test_auxiliary_results_of_jacobians_keep_their_class(jit, weight, high):
    jacobian = jax.jacrev(lambda w: (high(w), w), has_aux=True)
    _, aux = (jax.jit(jacobian) if jit else jacobian)(weight.value)
    assert type(aux) is type(weight.value)


GIVEN = {"typed": lambda high: high, "a tree": lambda high: lambda w: w}


@both_ways
@pytest.mark.parametrize("argument", GIVEN)
@pytest.mark.parametrize("cotangent", GIVEN)
def test_a_backward_rule_returns_typed_values_or_trees(
    cotangent, argument, jit, weight, x, high, agree_by_leaves
):
    plain = lambda w: jnp.sum(jnp.sin(jnp.dot(x, w)))

    def implicit(ct):
        if not weight.dense_tangent:
            return ct
        return vn.types.LoraArray(ct, jnp.zeros((4, 1)), jnp.zeros((1, 6)))

    f = jax.custom_vjp(plain)
    given = GIVEN[cotangent](high)
    pull = lambda _, ct: (given(implicit(jax.vjp(plain, weight.value)[1](ct)[0])),)
    f.defvjp(lambda w: (f(w), None), pull)
    loss = lambda w: f(GIVEN[argument](high)(w))
    found = (jax.jit(jax.grad(loss)) if jit else jax.grad(loss))(weight.value)
    agree_by_leaves(found, weight.reference(jax.grad, plain))
    assert type(found) is type(weight.reference(jax.grad, plain))


@both_ways
@pytest.mark.parametrize("argument", GIVEN)
def test_a_dense_cotangent_is_pulled_back_to_leaves(argument, jit, high):
    """The shapes of the leaves equal the shape of the dense array here."""
    w = vn.types.LoraArray(jnp.eye(4), 2 * jnp.eye(4), 3 * jnp.eye(4))
    f = jax.custom_vjp(lambda w: jnp.sum(w))
    f.defvjp(lambda w: (f(w), w), lambda w, ct: (jnp.full((4, 4), ct),))
    run = jax.grad(lambda w: f(GIVEN[argument](high)(w)))
    found = (jax.jit(run) if jit else run)(w)
    assert type(found) is type(w)
    for leaf, expected in zip(jax.tree.leaves(found), [1, 3, 2], strict=True):
        assert (leaf == expected).all()


@both_ways
def test_a_cotangent_of_another_shape_raises(jit):
    w = vn.types.LoraArray(*[jnp.eye(4)] * 3)
    f = jax.custom_vjp(lambda w: jnp.sum(w))
    grad = jax.jit(jax.grad(f)) if jit else jax.grad(f)
    f.defvjp(lambda w: (f(w), w), lambda w, ct: (jnp.full((4,), ct),))
    with pytest.raises(TypeError, match=r"returns f32\[4\] for the argument LoraArray:f32\[4,4\]"):
        grad(w)


OPERANDS = {
    "int8": lambda w: quantize(w),
    "LoraArray": lambda w: vn.types.LoraArray(w, w[:, :2], w[:2]),
    "LoraArray of int8": lambda w: vn.types.LoraArray(quantize(w), w[:, :2], w[:2]),
    "LowRank": lambda w: vn.types.LowRank(w[:, :2], w[:2]),
    "FakeQuantized": lambda w: vn.quant.FakeQuantized(w, qtype="int8"),
}
CALLS = {
    "eager": lambda f: f,
    "jitted grad": jax.jit,
    "grad of jit": lambda f: f,
}
BACKWARD = {
    "dense": lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct),
    "zeros": lambda kept, ct: (ct @ kept[1].T, jnp.zeros_like(kept[1])),
    "none": lambda kept, ct: (ct @ kept[1].T, None),
}


def quantize(w):
    return vn.quant.quantize(w, "int8", channelwise_axes=[1])


@pytest.mark.parametrize("by", [0, 1], ids=["by x", "by w"])
@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", OPERANDS)
def test_a_dense_custom_vjp_takes_implicit_arrays(name, call, backward, by, x, agree_by_leaves):
    w = OPERANDS[name](jax.random.normal(jax.random.key(0), (4, 6)))
    matmul = jax.custom_vjp(lambda x, w: x @ w)
    matmul.defvjp(lambda x, w: (x @ w, (x, w)), BACKWARD[backward])

    def gradient(product):
        loss = lambda x, w: jnp.sum(jnp.sin(product(x, w)))
        return CALLS[call](jax.grad(jax.jit(loss) if call == "grad of jit" else loss, by))(x, w)

    factor = 1 if by == 0 or backward == "dense" else 0
    expected = jax.tree.map(lambda g: factor * g, gradient(lambda x, w: x @ w))
    found = gradient(matmul)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    agree_by_leaves(found, expected)


def test_a_custom_vjp_has_gradients_of_scales(x, agree):
    q = quantize(jax.random.normal(jax.random.key(0), (4, 6)))
    matmul = jax.custom_vjp(lambda x, w: x @ w)
    matmul.defvjp(lambda x, w: (x @ w, (x, w)), BACKWARD["dense"])
    of = lambda product: lambda s: jnp.sum(jnp.sin(product(x, q.replace(scale=s))))
    expected = jax.grad(of(lambda x, w: x @ vn.materialise(w)))(q.scale)
    for run in (jax.grad(of(matmul)), jax.jit(jax.grad(of(matmul)))):
        agree(run(q.scale), expected)


def over_rows(f):
    return lambda w, x: jax.lax.scan(lambda c, row: (c + f(w, row[None]), None), 0.0, x)[0]


QUANTIZING = {
    "eager": lambda f: f,
    "jitted": jax.jit,
    "checkpoint": jax.checkpoint,
    "implicit": vn.implicit,
    "scan": over_rows,
    "branch": lambda f: lambda w, x: jax.lax.cond(True, f, lambda w, x: 0.0, w, x),
}


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
@both_ways
@pytest.mark.parametrize("transform", QUANTIZING.values(), ids=QUANTIZING)
def test_rules_receive_dense_derivatives_of_results(transform, jit, kind, x, agree):
    if kind == "vjp":
        f = jax.custom_vjp(quantize)
        f.defvjp(lambda w: (f(w), None), lambda _, ct: (7 * ct,))
    else:
        f = jax.custom_jvp(quantize)
        f.defjvp(lambda primals, tangents: (f(*primals), 7 * tangents[0]))
    w = jax.random.normal(jax.random.key(0), (4, 6))
    run = jax.grad(transform(lambda w, x: jnp.sum(x @ f(w))))
    agree((jax.jit(run) if jit else run)(w, x), 7 * x.T @ jnp.ones((3, 6)))
    assert type(f(w)) is vn.quant.QArray


def test_a_rule_receives_dense_cotangents_in_a_tree(x, agree):
    held = lambda w: vn.types.LoraArray(quantize(w), w[:, :2], w[:2])
    f = jax.custom_vjp(lambda w: {"a": quantize(w), "b": (w, held(w))})
    f.defvjp(lambda w: (f(w), None), lambda _, ct: (ct["a"] + ct["b"][0] + ct["b"][1].w,))

    def loss(w):
        out = f(w)
        return jnp.sum(x @ out["a"] + x @ out["b"][0] + x @ out["b"][1])

    agree(jax.grad(loss)(jnp.ones((4, 6))), 3 * x.T @ jnp.ones((3, 6)))


@pytest.mark.parametrize("symbolic_zeros", [False, True])
@pytest.mark.parametrize("optimize_remat", [False, True])
@both_ways
def test_a_backward_rule_receives_its_residuals(jit, optimize_remat, symbolic_zeros, weight, x):
    if symbolic_zeros and optimize_remat:
        pytest.skip("JAX does not support both")
    f = jax.custom_vjp(lambda x, w: x @ w)
    seen = []

    def forward(x, w):
        x, w = (x.value, w.value) if symbolic_zeros else (x, w)
        return x @ w, {"kept": w}

    def backward(residuals, ct):
        seen.append(list(residuals))
        return ct @ residuals["kept"].T, None

    f.defvjp(forward, backward, symbolic_zeros=symbolic_zeros, optimize_remat=optimize_remat)
    run = jax.grad(lambda x, w: jnp.sum(f(x, w)), (0, 1), allow_int=True)
    (jax.jit(run) if jit else run)(x, weight.value)
    assert seen == [["kept"]]


RULED = {
    "grad": lambda f, t: jax.grad(f),
    "jvp": lambda f, t: lambda w: jax.jvp(f, (w,), (t,)),
    "jacfwd": lambda f, t: jax.jacfwd(f),
}


@both_ways
@pytest.mark.parametrize("argument", GIVEN)
@pytest.mark.parametrize("typed_result", [False, True], ids=["dense result", "typed result"])
@pytest.mark.parametrize("name", RULED)
def test_a_rule_can_call_jvp(name, typed_result, argument, jit, weight, x, high, agree_by_leaves):
    inner = high if typed_result else lambda w: jnp.sin(jnp.dot(x, w))
    f = jax.custom_jvp(inner)
    f.defjvp(lambda primals, tangents: jax.jvp(inner, primals, tangents))
    see = GIVEN[argument](high)
    last = lambda y: jnp.sum(jnp.sin(jnp.dot(x, y)) if typed_result else y)
    run = RULED[name](lambda w: last(f(see(w))), tangent_of(weight))
    found = (jax.jit(run) if jit else run)(weight.value)
    plain = RULED[name](lambda w: last(inner(w)), tangent_of(weight))
    agree_by_leaves(found, plain(weight.value))


@pytest.mark.parametrize("use", [lambda t: t[..., None], lambda t: 2 * t, jnp.sum])
def test_using_a_typed_tangent_as_an_array_raises(use, weight, high):
    if weight.dense_tangent:
        pytest.skip("its tangent is an array")
    tangent = lambda w: jax.jvp(lambda s: high(w) * s, (1.0,), (1.0,))[1]
    with pytest.raises(
        TypeError, match=r"lora\[4,6\]ᵀ.*: derivatives with respect to the leaves of"
    ):
        jax.jit(lambda w: use(tangent(w)))(weight.value)
    assert type(jax.jit(tangent)(weight.value)) is type(weight.value)


@both_ways
def test_the_gradient_of_an_implicit_scalar_loss_agrees(jit):
    x = vn.types.Constant(jnp.arange(1.0, 4.0), (1, 2))
    loss = lambda see: lambda s: jnp.sum(jnp.sin(see(x) * s))
    for transform in (jax.grad, jax.jacrev, jax.jacfwd):
        run = transform(loss(lambda x: x))
        expected = transform(loss(vn.materialise))(0.5)
        assert jnp.allclose((jax.jit(run) if jit else run)(0.5), expected)
