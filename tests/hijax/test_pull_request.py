"""The behaviors that JAX's pull request 28781 lists, with implicit arrays.

Its central case, a Box that changes type in `jit` and `grad` of `jit`, is in `test_box_structure`.
"""

import jax
import jax.numpy as jnp
import pytest

import veneer as vn
from veneer._jax.primitives import find_primitive
from veneer._jax.tracing import Tracer, current_trace
from veneer.hijax import Box
from veneer.hijax.values import high


@vn.hijax.primitive
def scaled(w: vn.quant.QArray, *, by):
    return vn.quant.QArray(w.packed, by * w.scale, None, w.qtype)


@pytest.fixture
def w():
    return vn.quant.quantize(jax.random.normal(jax.random.key(0), (4, 6)), "int8")


def test_a_jaxpr_with_a_high_type_is_high(x, w):
    is_high = lambda f, *args: jax.make_jaxpr(f)(*args).is_high
    assert not is_high(jnp.dot, x, vn.materialise(w))
    assert not is_high(lambda w: w, w)  # arguments and results are passed as leaves
    assert is_high(jnp.dot, x, w)
    assert is_high(lambda x: jnp.dot(x, w), x)


def test_a_call_of_a_high_jaxpr_is_high(x, w):
    """A primitive that contains a jaxpr is high if the jaxpr in its parameters is."""
    for function, expected in ((jnp.dot, True), (lambda x, w: x, False)):
        (equation,) = jax.make_jaxpr(jax.jit(function))(x, w).eqns
        avals = [v.aval for v in equation.invars]
        assert equation.primitive.is_high(*avals, **equation.params) == expected


def test_primitives_state_whether_they_are_high():
    array = jax.core.ShapedArray((2,), jnp.float32)
    assert high.is_high(array)
    assert not find_primitive("sin").is_high(array, accuracy=None)


def test_an_operation_runs_only_where_the_trace_requires_low(w, agree):
    """`bind` runs `to_lojax` in a trace that lowers. One that only stages records the equation."""
    traces = []

    @vn.hijax.primitive
    def noted(w: vn.quant.QArray):
        traces.append(current_trace().requires_low)
        return scaled(w, by=2.0)

    jaxpr = jax.make_jaxpr(lambda w: vn.materialise(noted(w)))(w)
    assert "noted" in str(jaxpr)
    assert True not in traces[:-1]  # the earlier calls only infer the types of results
    traces.clear()
    agree(jax.jit(lambda w: jnp.sum(noted(w)))(w), 2 * jnp.sum(vn.materialise(w)))
    assert traces[-1]


def test_an_operation_receives_and_returns_low_tracers(w, agree):
    values = []

    @vn.hijax.primitive
    def noted(w: vn.quant.QArray):
        out = vn.quant.QArray(w.packed, 2.0 * w.scale, None, w.qtype)
        values[:] = [w, out]
        return out

    agree(jax.jit(lambda w: jnp.sum(noted(w)))(w), 2 * jnp.sum(vn.materialise(w)))
    for value in values:
        assert type(value) is vn.quant.QArray
        leaves = jax.tree.leaves(value)
        assert all(isinstance(leaf, Tracer) and not leaf.aval.is_high for leaf in leaves)


def test_types_of_implicit_arrays_are_immutable(w):
    """JAX 0.10 marks mutable types, such as the type of a Box, with the flag `has_qdd`."""
    (equation, *_) = jax.make_jaxpr(jnp.sin)(w).eqns
    (out,) = equation.outvars
    assert (out.aval.is_high, getattr(out.aval, "has_qdd", False)) == (True, False)


def test_the_final_types_of_a_box_are_known_while_tracing(w):
    """After a nested jit call writes a Box, the outer function sees the new types."""
    seen = []

    @jax.jit
    def program(box, x):
        jax.jit(lambda box: box.set({"w": w, "n": x.sum()}))(box)
        seen.append({name: value.shape for name, value in box.get().items()})
        box.set([jnp.dot(x, box.get()["w"])])
        seen.append(box.get()[0].shape)

    box = Box()
    program(box, jnp.ones((3, 4)))
    assert seen[-2:] == [{"w": (4, 6), "n": ()}, (3, 6)]
    assert box.get()[0].shape == (3, 6)


def test_grad_of_jit_reads_a_box(x, w, agree):
    """The backward pass has a reference to the Box, whose contents become quantized."""
    box = Box()

    def loss(x):
        box.set(w)
        y = jnp.dot(x, box.get())
        box.set({"y": y})
        return jnp.sum(jnp.sin(y))

    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x @ vn.materialise(w))))(x)
    for transform in (
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.jit(jax.grad(jax.jit(f))),
    ):
        box.set(None)
        agree(transform(loss)(x), expected)
        agree(box.get()["y"], x @ vn.materialise(w))
