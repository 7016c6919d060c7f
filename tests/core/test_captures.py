"""Captured implicit arrays work like arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import MAKERS, OneHot, Tagged, assert_close, by_numpy

import veneer as vn
from veneer._core.surface import implicit

W = MAKERS["lora"](arrays.key(0))
X = arrays.array(np.linspace(-1.0, 1.0, 18).reshape(3, 6))
EXPECTED = arrays.array(np.asarray(X) @ by_numpy(W))


def _by_module_variable(x):
    return jnp.dot(x, W)


def _by_default(x, w=W):
    return jnp.dot(x, w)


def _by_keyword_default(x, *, w=W):
    return jnp.dot(x, w)


class Model:  # no pytree
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return jnp.dot(x, self.w)


def captures(w):
    """Functions of an array that capture `w`, each in its own way."""
    tree = {"layers": [w]}
    helper = lambda x: jnp.dot(x, w)

    @jax.tree_util.register_pytree_node_class
    class Module:
        def __init__(self, w):
            self.w = w

        def apply(self, x):
            return jnp.dot(x, self.w)

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

    def by_scan_body(x):
        return jax.lax.scan(lambda c, _: (c, jnp.dot(x, w)), 0, None, length=1)[1][0]

    def by_while_body(x):
        return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, jnp.dot(x, w)), (0, x))[
            1
        ]

    @jax.custom_vjp
    def differentiable(x):
        return x @ w

    differentiable.defvjp(lambda x: (x @ w, None), lambda _, ct: (ct @ w.T,))
    compiled = jax.jit(lambda x: x @ w)

    return {
        "lambda": lambda x: jnp.dot(x, w),
        "tree": lambda x: jnp.dot(x, tree["layers"][0]),
        "function": lambda x: helper(x),
        "partial": functools.partial(jnp.dot, b=w),
        "partial in a lambda": lambda x: functools.partial(helper)(x),
        "method of a pytree": Module(w).apply,
        "scan body": by_scan_body,
        "while body": by_while_body,
        "jit in a function": lambda x: jax.jit(lambda x: jnp.dot(x, w))(x),
        "checkpoint": lambda x: jax.checkpoint(lambda x: jnp.dot(x, w))(x),
        "compiled before, by its operators": lambda x: compiled(x),
        "custom_vjp, by its operators": lambda x: differentiable(x),
        "module variable": _by_module_variable,
        "default": _by_default,
        "keyword default": _by_keyword_default,
    }


@pytest.mark.parametrize("how", captures(W))
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_captured_weights_are_operands(how, wrap):
    f = captures(W)[how]
    assert_close(wrap(vn.implicit(f))(X), EXPECTED)


@pytest.mark.parametrize("how", ["lambda", "function", "scan body", "checkpoint"])
def test_functions_with_captured_weights_have_gradients(how):
    loss = lambda f: lambda x: jnp.sum(jnp.sin(f(x)))
    f = captures(W)[how]
    grad = jax.grad(loss(lambda x: jnp.dot(x, vn.materialise(W))))(X)
    assert_close(jax.grad(loss(vn.implicit(f)))(X), grad)
    assert_close(vn.implicit(jax.grad(loss(f)))(X), grad)


def test_the_rules_run_for_a_captured_value():
    hot = OneHot(jnp.float32(2.0), index=1, n=6)  # refuses to be dense
    assert_close(vn.implicit(lambda x: jnp.dot(x, hot))(X), 2 * X[:, 1])


@pytest.mark.parametrize("spec", [False, (False, True, False)], ids=str)
def test_a_captured_value_obeys_the_filter(spec):
    seen, w = set(), W
    vn.implicit(lambda x: seen.add(type(w)) or x, spec)(X)
    assert seen == {type(W)}  # the value, and no tracer of it
    with pytest.raises(RuntimeError, match="Lora"):
        vn.implicit(lambda x: jnp.dot(x, w), spec)(X)


def test_attributes_of_a_plain_object_are_operands():
    assert_close(jax.jit(vn.implicit(Model(W)))(X), EXPECTED)


def test_functions_without_captured_values_are_not_copied():
    seen = []
    inner = lambda: None
    vn.implicit(lambda w: seen.append(inner))(W)
    assert seen == [inner]


def test_assignments_to_captured_variables_are_seen():
    calls = 0

    def f(x):
        nonlocal calls
        calls += 1
        return jnp.dot(x, W)

    for _ in range(2):
        vn.implicit(f)(X)
    assert calls == 2


def test_a_function_can_capture_itself():
    def f(x, depth):
        return jnp.sin(W).sum() + (f(x, depth - 1) if depth else 0) if depth else x.sum()

    dense = vn.materialise(W)
    assert_close(vn.implicit(f)(X, 1), jnp.sin(dense).sum() + X.sum(), 1e-4)


def test_a_captured_value_keeps_its_label():
    tagged = Tagged(X, "m")
    out = jax.jit(vn.implicit(lambda: jnp.sin(tagged)))()
    assert (type(out), out.label) == (Tagged, "m")


SCALE = 1.0


def _rescale():
    global SCALE
    SCALE += 1.0


def _reads_what_changes(x):
    _rescale()
    return jnp.dot(x, W) * SCALE


def test_module_variables_are_read_at_each_call():
    before = SCALE
    assert_close(vn.implicit(_reads_what_changes)(X), EXPECTED * (before + 1))
    assert before + 1 == SCALE


def _assigns_within(x):
    def rescale():
        global SCALE
        SCALE += 1.0

    rescale()
    return x @ W * SCALE


def test_an_assignment_to_a_module_variable_is_not_lost():
    before = SCALE
    assert_close(vn.implicit(_assigns_within)(X), EXPECTED * (before + 1))
    assert before + 1 == SCALE


def _helper(x):
    return jnp.dot(x, W)


PARAMETERS = {"w": W}


@pytest.mark.parametrize(
    "f", [lambda x: _helper(x), lambda x: jnp.dot(x, PARAMETERS["w"])], ids=["helper", "container"]
)
def test_arrays_deep_inside_a_module_are_operands(f):
    assert_close(jax.jit(vn.implicit(f))(X), EXPECTED)


def test_an_assignment_to_a_captured_value_is_seen_everywhere():
    def scope(w):
        def double():
            nonlocal w
            w = w * 2.0

        def f(x):
            double()
            return x @ w

        def g(x):
            nonlocal w
            w = w * 2.0
            return x @ w

        return f, g

    for i in range(2):
        implicit, dense = scope(W)[i], scope(vn.materialise(W))[i]
        for _ in range(2):
            assert_close(vn.implicit(implicit)(X), dense(X), 1e-4)


def test_a_captured_container_without_values_is_the_same_object():
    seen, w = [], W
    vn.implicit(lambda x: seen.append(x) or jnp.dot(x, w))(X)
    assert len(seen) == 1


def test_an_assignment_that_would_be_lost_raises():
    def scope(w):
        def double():
            nonlocal w
            w = w * 2.0

        g = lambda x: jnp.dot(x, w)
        hidden = {"double": double}

        def f(x):
            hidden["double"]()
            return g(x)

        return f

    with pytest.raises(TypeError, match=r"captures an implicit array in a variable.*argument"):
        vn.implicit(scope(W))(X)


def _imports_and_defines(x):
    from math import pi

    class Local:
        factor = pi if EXPECTED is not None else 0.0

    return jnp.dot(x, W) * Local.factor


def test_a_function_with_captures_can_import_and_define():
    assert_close(vn.implicit(_imports_and_defines)(X), EXPECTED * jnp.pi, 1e-4)


def test_functions_of_our_own_rules_are_not_rewritten(monkeypatch):
    opened = []
    monkeypatch.setattr(implicit, "open_closure", lambda fn: opened.append(fn) or fn)

    def loss(w, x):
        return jnp.sum((x @ w).T * 2)

    w = vn.types.LoraArray(jnp.ones((4, 4)), jnp.ones((4, 2)), jnp.ones((2, 4)))
    jax.grad(vn.implicit(loss))(w, jnp.ones((3, 4)))
    assert opened == [loss]
