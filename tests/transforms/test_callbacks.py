"""Host functions get dense arrays. The materialization of implicit operands is reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from support import arrays
from support.array_types import MAKERS, Tagged, assert_close, lora

import veneer as vn


def total(x, w):
    """A host function: of arrays, and of nothing else."""
    assert isinstance(w, jax.Array | np.ndarray)
    return np.asarray(x) @ np.asarray(w) + np.float32(1)


def pure(x, w, **how):
    out = jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[-1]), jnp.float32)
    return jax.pure_callback(total, out, x, w, **how)


def io(x, w, **how):
    return io_callback(total, jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[-1]), jnp.float32), x, w)


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (2, 6))


@pytest.mark.parametrize("call", [pure, io])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_host_function_gets_the_dense_array(make, call, x):
    w = make(jax.random.key(0))
    for f in (vn.implicit(call), jax.jit(vn.implicit(call)), vn.implicit(jax.jit(call))):
        assert_close(f(x, w), total(x, vn.materialise(w)))


@pytest.mark.parametrize("call", [pure, io])
def test_materialized_callback_operands_are_reported(call, x):
    q = MAKERS["int4"](jax.random.key(0))
    (event,) = vn.explain(call)(x, q).materialised
    assert event.primitive == f"{call.__name__}_callback"
    assert event.nbytes == 6 * 6 * 4


@pytest.mark.parametrize(
    "method", ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"]
)
def test_every_vmap_method_works(method):
    xs = jax.random.normal(jax.random.key(1), (3, 2, 6))
    ws = MAKERS["nf4"](jax.random.key(0), (3, 6, 6))
    f = lambda x, w: pure(x, w, vmap_method=method)
    dense = jax.vmap(f)(xs, vn.materialise(ws))
    assert_close(jax.vmap(vn.implicit(f))(xs, ws), dense)
    assert_close(vn.implicit(jax.vmap(f))(xs, ws), dense)
    one = jax.tree.map(lambda leaf: leaf[0], ws)
    dense = jax.vmap(f, (0, None))(xs, vn.materialise(one))
    assert_close(vn.implicit(jax.vmap(f, (0, None)))(xs, one), dense)


def test_a_loop_of_many_large_callbacks_ends():
    w = lora(jax.random.key(0), (512, 512))
    column = lambda w: jax.pure_callback(
        lambda w: np.asarray(w)[:, 0], jax.ShapeDtypeStruct((512,), jnp.float32), w
    )
    f = lambda w: jax.lax.scan(lambda c, _: (c + column(w), None), jnp.zeros(512), length=50)[0]
    assert_close(jax.jit(vn.implicit(f))(w), 50 * vn.materialise(w)[:, 0], 1e-4)
    for _ in range(20):  # dispatched one after the other, and waited for at the end
        last = vn.implicit(column)(w)
    assert_close(last, vn.materialise(w)[:, 0])


def test_ordered_effects_keep_their_order():
    seen = []
    q = MAKERS["int8"](jax.random.key(0))

    def f(q):
        def body(i, c):
            io_callback(lambda i, q: seen.append((int(i), q.shape)), None, i, q, ordered=True)
            return c + 1

        return jax.lax.fori_loop(0, 5, body, 0)

    jax.jit(vn.implicit(f))(q)
    jax.effects_barrier()
    assert seen == [(i, (6, 6)) for i in range(5)]


def test_debug_callback_sees_the_dense_array():
    q, seen = MAKERS["nf4"](jax.random.key(0)), []
    see = lambda *args, unit: seen.append((*args, unit))
    f = lambda q: jax.debug.callback(see, q, "weight", unit="kg")
    jax.jit(vn.implicit(f))(q)
    jax.effects_barrier()
    ((array, *rest),) = seen
    assert_close(jnp.asarray(array), vn.materialise(q))
    assert rest == ["weight", "kg"]


def test_a_type_without_dense_array_is_passed_unchanged():
    def host(x):
        assert isinstance(x, Tagged)
        assert x.label == "kg"
        return 2 * np.asarray(x.x)

    f = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((3,), jnp.float32), x)
    for run in (vn.implicit(f), jax.jit(vn.implicit(f))):
        assert run(Tagged(jnp.ones(3), "kg")).tolist() == [2, 2, 2]


def test_a_compiled_callback_is_compiled_once():
    traces = []

    @jax.jit
    def f(x, w):
        traces.append(0)
        return vn.implicit(pure)(x, w)

    for seed in range(3):
        f(jnp.ones((2, 6)), MAKERS["int8"](jax.random.key(seed)))
    assert len(traces) == 1


def test_gradients_of_callbacks_raise_the_error_of_jax(x):
    w = lora(jax.random.key(0))
    loss = lambda x, w: jnp.sum(pure(x, w))
    for f in (jax.grad(vn.implicit(loss)), vn.implicit(jax.grad(loss))):
        with pytest.raises(ValueError, match="do not support JVP"):
            f(x, w)


# debug.print

PRINTED = {
    "a label": (Tagged(arrays.arange(2.0), "kg"), "Tagged(x=[0. 1.], label='kg')"),
    "a codebook": (
        vn.quant.QArray(arrays.array([1, -2], jnp.int8), arrays.array([0.5]), qtype="int8"),
        "QArray(packed=[ 1 -2], scale=[0.5], zero_point=None, minimum=None, qtype='int8', "
        "packing=None, dense_dtype='float32')",
    ),
}


@pytest.mark.parametrize(("value", "text"), PRINTED.values(), ids=PRINTED)
def test_debug_print_shows_the_leaves(value, text, capfd):
    def f(q, x):
        jax.debug.print("{} is {q}, {x:.2f}", "this", q=q, x=x)

    strict = vn.implicit(f, on_materialise="error")
    for run in (strict, jax.jit(strict)):
        run(value, 1 / 3)
        jax.effects_barrier()
        assert capfd.readouterr().out == f"this is {text}, 0.33\n"


def test_debug_print_formats_the_numbers_of_a_scalar(capfd):
    vn.implicit(lambda x: jax.debug.print("{:.3f}", x))(Tagged(jnp.float32(1 / 3), "kg"))
    jax.effects_barrier()
    assert capfd.readouterr().out == "Tagged(x=0.333, label='kg')\n"


def test_debug_prints_are_in_order_in_a_loop(capfd):
    q = Tagged(jnp.zeros(1), "kg")

    def f(q):
        body = lambda i, c: jax.debug.print("{} {}", i, q, ordered=True) or c
        return jax.lax.fori_loop(0, 3, body, 0)

    jax.jit(vn.implicit(f))(q)
    jax.effects_barrier()
    expected = [f"{i} Tagged(x=[0.], label='kg')" for i in range(3)]
    assert capfd.readouterr().out.splitlines() == expected


def test_debug_print_does_not_change_a_gradient(capfd):
    w, x = lora(jax.random.key(0)), jnp.ones((2, 6))

    def loss(w):
        jax.debug.print("{}", w)
        return jnp.sum(x @ w)

    assert_close(vn.implicit(jax.grad(loss))(w), jax.grad(loss)(vn.materialise(w)))
    grads = jax.grad(vn.implicit(loss))(w)
    assert_close(grads.w, jnp.full((6, 6), 2.0))
