"""Boxes whose contents change their structure, and Boxes that hold implicit arrays."""

import copy
import functools
import gc
import pickle
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer.hijax import Box

pytestmark = pytest.mark.usefixtures("mode_off")


def high_jit(f, **options):
    """`jax.jit`, called with high types on."""
    jitted = jax.jit(f, **options)

    @functools.wraps(f)
    def call(*args):
        with vn.hijax.enabled():
            return jitted(*args)

    return call


OUTSIDE = {
    "eager": lambda f: f,
    "vn.jit": vn.jit,
    "jax.jit": high_jit,
    "jax.jit in jax.jit": lambda f: high_jit(lambda x: jax.jit(f)(x)),
    "jax.jit in vn.jit": lambda f: vn.jit(lambda x: high_jit(f)(x)),
    "vn.jit in jax.jit": lambda f: high_jit(lambda x: vn.jit(f)(x)),
    "implicit": lambda f: lambda x: vn.implicit(lambda x, w: f(x))(x, quantized(1.0)),
    "vn.jit in vn.jit": lambda f: vn.jit(lambda x: vn.jit(f)(x)),
}
GRADS = {
    "grad": jax.grad,
    "vn.jit of grad": lambda f: vn.jit(jax.grad(f)),
    "grad of vn.jit": lambda f: jax.grad(vn.jit(f)),
    "jax.jit of grad": lambda f: high_jit(jax.grad(f)),
    "grad of jax.jit": lambda f: jax.grad(high_jit(f)),
}
CHANGING_JITS = pytest.mark.parametrize("jit", [vn.jit, high_jit], ids=["vn.jit", "jax.jit"])


def quantized(x):
    return vn.quant.quantize(jnp.full((2, 2), x), "nf4")


def shapes(box):
    return jax.tree.map(jnp.shape, box.get())


@pytest.mark.parametrize("outside", OUTSIDE.values(), ids=OUTSIDE)
def test_an_empty_box_is_filled(outside):
    box, traces = Box(), []

    def program(x):
        traces.append(box.get())
        box.set({"n": x, "m": [x + 1]})
        return box.get()["m"][0]

    program = outside(program)
    assert program(2.0) == 3.0
    assert box.get() == {"n": 2.0, "m": [3.0]}
    assert traces
    assert all(seen is None for seen in traces)
    assert [program(3.0) == 4.0, program(4.0) == 5.0] == [True, True]
    assert box.get() == {"n": 4.0, "m": [5.0]}


@CHANGING_JITS
def test_a_known_structure_is_not_traced_again(jit):
    box, traces = Box(), []

    @jit
    def program(x):
        traces.append(1)
        found = box.get()
        box.set({"n": x} if found is None else {"n": found["n"] + x})

    for x in (1.0, 2.0, 3.0):
        program(x)
    # jax.jit starts once before it sees that the structure changes.
    assert (len(traces), box.get()) == (2 + (jit is high_jit), {"n": 6.0})
    box.set(None)
    program(5.0)
    assert box.get() == {"n": 5.0}


def test_jits_of_the_same_function_share_traces():
    traces = []

    def program(box, x):
        traces.append(1)
        box.set([x.sum()])
        return x

    with vn.hijax.enabled():
        for _ in range(3):
            jax.jit(program)(Box(), jnp.ones(3))
        assert len(traces) == 2
        jax.clear_caches()
        jax.jit(program)(Box(), jnp.ones(3))
        assert len(traces) == 4


@CHANGING_JITS
@pytest.mark.parametrize("caught", [Exception, TypeError])
def test_a_function_that_catches_errors_changes_a_box(jit, caught):
    box = Box()

    @jit
    def program(x):
        try:
            box.set({"x": x})
        except caught:
            return x - 1
        return x + 1

    assert program(2.0) == 3.0
    assert box.get() == {"x": 2.0}


@CHANGING_JITS
def test_out_shardings_do_not_apply_to_boxes(jit):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))

    def program(box, x):
        box.set([x.sum()])
        return x + 1

    box = Box()
    y = jit(program, out_shardings=sharding)(box, jnp.ones(4))
    assert (y.sharding, box.get()) == (sharding, [4.0])


@CHANGING_JITS
def test_attributes_of_a_callable_object_do_not_clash(jit):
    class Program:
        def __init__(self):
            self._programs, self.size = "of the user", 3

        def __call__(self, box):
            box.set([self.size])

    box = Box()
    jit(Program())(box)
    assert box.get() == [3]


@CHANGING_JITS
def test_an_argument_of_known_structure_is_not_traced_again(jit):
    traces = []

    @jit
    def program(box, x):
        traces.append(1)
        box.set([*(box.get() or []), x])

    for _ in range(2):
        box = Box()
        for x in (1.0, 2.0):
            program(box, x)
        assert box.get() == [1.0, 2.0]
    assert len(traces) == 2 + (jit is high_jit)


@CHANGING_JITS
@pytest.mark.parametrize("how", ["argument", "closure"])
def test_an_array_is_replaced_by_a_quantized_array(how, jit):
    box = Box(jnp.full((2, 2), 3.0))

    def program(x, box=box):
        box.update(lambda w: vn.quant.quantize(w, "int8"))
        return x @ box.get()

    args = (jnp.ones((1, 2)), box)[: 2 if how == "argument" else 1]
    np.testing.assert_allclose(jit(program)(*args), [[6.0, 6.0]], rtol=1e-2)
    assert isinstance(box.get(), vn.quant.QArray)
    np.testing.assert_allclose(box.get() @ jnp.ones(2), [6.0, 6.0], rtol=1e-2)


@pytest.mark.parametrize("grad", GRADS.values(), ids=GRADS)
def test_a_differentiated_function_fills_an_empty_box(grad):
    box = Box()

    def loss(x):
        box.set({"n": x, "i": 1})
        return x**2 * box.get()["n"]

    for x in (2.0, 3.0):
        assert grad(loss)(x) == 2 * x * x
        assert box.get() == {"n": x, "i": 1}
        assert not isinstance(box.get()["n"], jax.core.Tracer)
    box.set(None)
    assert jax.grad(jax.grad(loss))(2.0) == 4.0
    assert box.get() == {"n": 2.0, "i": 1}


def test_a_structure_change_under_plain_jit_raises():
    message = r"jax.jit keeps the structure and the types of a Box.*by vn.jit, .*high types"
    for value in (None, 1.0):
        box = Box(value)
        with pytest.raises(TypeError, match=message):
            jax.jit(lambda x, box=box: box.set({"n": x}))(2.0)
        with pytest.raises(TypeError, match=message):
            jax.jit(lambda box, x: box.set({"n": x}))(box, 2.0)
        with pytest.raises(TypeError, match=r"f32\[\].* cannot become .*i32\[3\]|None.* cannot"):
            jax.jit(lambda box: box.set(jnp.arange(3)))(box)
        assert box.get() == value


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, high_jit], ids=["eager", "off", "on"])
def test_errors_name_the_innermost_transformation(jit):
    """Several transformations surround the write."""
    box = Box(jnp.zeros(2))
    with pytest.raises(TypeError, match=r"jax.vmap keeps the structure.* capture the Box"):
        jit(jax.vmap(lambda box: box.set([1.0])))(box)
    with pytest.raises(TypeError, match=r"the body of scan keeps the structure"):
        jit(lambda box: lax.scan(lambda c, _: (box.set([1.0]), (c, c))[1], 0, None, 1))(box)
    with pytest.raises(TypeError, match=r"the body of scan keeps the structure"):
        jit(lambda box: lax.scan(lambda c, box: (box.set([1.0]), (c, c))[1], 0, box))(box)
    assert box.get().tolist() == [0.0, 0.0]


LOOPS = {
    "scan": lambda f: lax.scan(lambda c, _: (f(), (c, None))[1], 0.0, None, length=2),
    "while_body": lambda f: lax.while_loop(lambda i: i < 2, lambda i: (f(), i + 1)[1], 0),
    "cond": lambda f: lax.cond(jnp.bool_(True), f, lambda: None),
    "checkpoint": lambda f: jax.checkpoint(f)(),
}


@pytest.mark.parametrize("jit", [lambda f: f, vn.jit, high_jit], ids=["eager", "vn.jit", "jax.jit"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_structure_change_in_a_loop_raises(name, jit):
    box = Box(1.0)
    with pytest.raises(TypeError, match=rf"the body of {name}.* keeps the structure and the types"):
        jit(lambda: LOOPS[name](lambda: box.set([2.0, 3.0])))()
    assert box.get() == 1.0


@CHANGING_JITS
def test_a_structure_changes_before_a_loop(jit):
    box = Box()

    @jit
    def program(x):
        box.set({"sum": jnp.zeros(())})
        lax.scan(lambda c, t: (box.set({"sum": box.get()["sum"] + t}), (c, None))[1], 0.0, x)
        return box.get()["sum"]

    for _ in range(2):
        assert program(jnp.arange(4.0)) == 6.0
        assert box.get() == {"sum": 6.0}


def test_compiled_functions_follow_a_new_structure():
    """A compiled function holds references that a change of structure replaces."""
    box = Box(1.0)
    program = jax.jit(lambda x: x + jax.tree.leaves(box.get())[0])
    assert program(1.0) == 2.0
    box.set([5.0, 6.0])
    assert program(1.0) == 6.0
    inner = jax.jit(lambda x: box.set([x, x]))
    inner(7.0)
    vn.jit(lambda: box.set(8.0))()
    assert program(1.0) == 9.0
    with pytest.raises(TypeError, match="cannot become"):
        inner(7.0)


@CHANGING_JITS
def test_inner_functions_follow_a_new_structure(jit):
    box = Box(1.0)
    plain, ours = (j(lambda: jax.tree.leaves(box.get())[0] + 1) for j in (jax.jit, vn.jit))

    @jit
    def program(x):
        before = plain() + ours()
        box.set([x, x])
        return before, plain() + ours()

    assert program(5.0) == (4.0, 12.0)
    assert (plain(), ours()) == (6.0, 6.0)
    assert program(7.0) == (12.0, 16.0)


@CHANGING_JITS
def test_a_failed_trace_keeps_the_structure(jit):
    box = Box(1.0)

    def program(box, x):
        box.set([x, x])
        raise RuntimeError("no")

    for function, args in ((program, (box, 2.0)), (functools.partial(program, box), (2.0,))):
        with pytest.raises(RuntimeError, match="no"):
            jit(function)(*args)
        assert box.get() == 1.0


def test_a_program_returns_a_new_box():
    made = vn.jit(lambda x: {"box": Box([x, x]), "x": x})(2.0)
    assert made["box"].get() == [2.0, 2.0]
    made["box"].set(1.0)
    assert made["box"].get() == 1.0


@CHANGING_JITS
def test_a_returned_argument_is_another_box(jit):
    box = Box(1.0)
    program = jit(lambda box, x: (box.set([x]), box)[1])
    for x in (2.0, 3.0):
        returned = program(box, x)
        assert (returned.get(), box.get()) == ([x], [x])
        returned.set(0.0)
        assert box.get() == [x]


@CHANGING_JITS
def test_a_program_does_not_keep_a_changed_box_alive(jit):
    box = Box(1.0)
    found = weakref.ref(box)
    program = jit(lambda x: found().set([x]))
    program(2.0)
    assert box.get() == [2.0]
    of_box = weakref.ref(box._contents)
    del box
    gc.collect()
    assert (found(), of_box()) == (None, None)


def test_a_structure_change_raises_in_a_jit_around_vn_jit():
    box = Box(1.0)
    program = vn.jit(lambda x: box.set([x, x]))
    for around in (jax.make_jaxpr, jax.jit, lambda f: functools.partial(jax.eval_shape, f)):
        with pytest.raises(TypeError, match=r"Replace each jax.jit around this line by vn.jit"):
            around(program)(2.0)
        assert box.get() == 1.0


@pytest.mark.parametrize("jit", [jax.jit, vn.jit])
def test_a_structure_change_raises_in_trace_and_lower(jit):
    box = Box(1.0)
    program = jit(lambda x: box.set([x, x]))
    ways = (program.trace, program.lower, program.eval_shape, jax.make_jaxpr(program))
    with vn.hijax.enabled():
        for way in ways:
            with pytest.raises(TypeError, match=r"only traced .* Call the function"):
                way(2.0)
            assert box.get() == 1.0
        program(2.0)
        program.lower(3.0).compile()(3.0)  # the structure no longer changes
    assert box.get() == [3.0, 3.0]


@CHANGING_JITS
def test_vmap_sets_only_unmapped_contents(jit):
    box = Box()
    with pytest.raises(ValueError, match="which is mapped"):
        jax.vmap(jit(lambda x: box.set([x])))(jnp.arange(2.0))
    jax.vmap(lambda x: box.set([1.0, 2.0]))(jnp.arange(2.0))
    assert box.get() == [1.0, 2.0]


# `jax.jit` with high types on: the central case of JAX's pull request 28781.


def test_jit_options_apply_to_a_structure_change():
    def program(box, x, *, n):
        box.set([x + box.get()] * n)
        return x

    jitted = jax.jit(program, static_argnames="n", donate_argnums=1)
    box, x = Box(1.0), jnp.ones(3)
    with vn.hijax.enabled():
        jitted(box, x, n=2)
    assert (x.is_deleted(), jax.tree.map(jnp.shape, box.get())) == (True, [(3,), (3,)])


@CHANGING_JITS
@pytest.mark.parametrize("box", [Box, lambda: Box([1.0])], ids=["changes", "stays"])
def test_a_tree_of_out_shardings_does_not_apply_to_boxes(jit, box):
    sharding, box = jax.sharding.SingleDeviceSharding(jax.devices()[0]), box()
    program = jit(lambda x: (box.set([x]), (x, {"y": 2 * x}))[1], out_shardings=(sharding, None))
    for x in (1.0, 2.0):
        assert program(x) == (x, {"y": 2 * x})
        assert box.get() == [x]


def test_a_structure_alternates_between_calls():
    box = Box(0.0)

    def program(box, x):
        before = box.get()
        box.set(before["n"] + x if isinstance(before, dict) else {"n": before + x})

    jitted, closed = jax.jit(program), jax.jit(functools.partial(program, box))
    with vn.hijax.enabled():
        for expected in ({"n": 1.0}, 2.0, {"n": 3.0}):
            jitted(box, 1.0)
            assert box.get() == expected
        for expected in (4.0, {"n": 5.0}):
            closed(1.0)
            assert box.get() == expected


@CHANGING_JITS
def test_passing_a_changing_box_twice_raises(jit):
    box = Box()
    with pytest.raises(ValueError, match=r"passed twice|only one reference"):
        jit(lambda a, b: a.set([b.get()]))(box, box)
    with pytest.raises(ValueError, match=r"an argument of a jitted function and captured"):
        jit(lambda a: (box.get(), a.set([1.0])))(box)
    assert box.get() is None


def test_a_jitted_method_changes_a_structure():
    class Model:
        def __init__(self):
            self.box = Box()

        @functools.partial(jax.jit, static_argnums=0)
        def __call__(self, x):
            self.box.set({"x": x})
            return x + 1

    model = Model()
    with vn.hijax.enabled():
        assert [model(x).item() for x in (1.0, 2.0)] == [2.0, 3.0]
    assert model.box.get() == {"x": 2.0}


def test_without_high_types_a_structure_change_raises():
    box = Box()
    program = jax.jit(lambda x: box.set([*(box.get() or []), x]))
    with vn.hijax.enabled():
        program(1.0)
    with pytest.raises(TypeError, match=r"by vn.jit, or turn high types on"):
        program(2.0)
    with vn.hijax.enabled():
        program(3.0)
    assert box.get() == [1.0, 3.0]


def test_a_function_that_changes_a_box_is_freed():
    box = Box()
    program = jax.jit(lambda x: box.set([x]))
    with vn.hijax.enabled():
        program(1.0)
    function = weakref.ref(program.__wrapped__)
    del program
    jax.clear_caches()
    gc.collect()
    assert function() is None


@pytest.mark.parametrize("grad", GRADS.values(), ids=GRADS)
def test_a_backward_pass_reads_a_box_filled_before(grad):
    """The backward pass uses the references of the forward pass."""
    box = Box()
    scaled = jax.custom_vjp(lambda x: x)
    scaled.defvjp(lambda x: (x, None), lambda _, ct: (ct * box.get()["scale"],))

    def loss(x):
        box.set({"scale": jnp.ones(())})
        y = scaled(x)
        box.set({"scale": 10 * x})
        return y

    assert grad(loss)(2.0) == 20.0
    assert box.get() == {"scale": 20.0}


def test_an_inner_jit_changes_a_box_of_the_outer_one():
    @jax.jit
    def program(x):
        box = Box()
        jax.jit(lambda y: box.set({"y": y}))(x * x)
        jax.jit(lambda box: box.set([box.get()["y"], 1.0]))(box)
        return box.get()[0]

    with vn.hijax.enabled():
        assert program(3.0) == 9.0
        assert jax.grad(program)(3.0) == 6.0
        np.testing.assert_allclose(jax.vmap(program)(jnp.arange(3.0)), [0.0, 1.0, 4.0])


# Implicit arrays.


def loss(box, x):
    box.update(lambda tree: {**tree, "n": tree["n"] + 1})
    return jnp.sum(x @ box.get()["w"])


@pytest.mark.parametrize("mode", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, vn.jit], ids=["eager", "jitted", "vn.jit"])
def test_a_box_holds_a_quantized_weight(jit, mode, agree):
    box, x = Box({"w": quantized(3.0), "n": 0}), jnp.ones((1, 2))

    def in_loop(x):
        return lax.scan(lambda c, _: (c + loss(box, x), None), 0.0, None, length=2)[0]

    with vn.hijax.enabled() if mode else jax.numpy_dtype_promotion("standard"):
        agree(jit(loss)(box, x), 12.0)
        agree(jax.grad(jit(lambda x: loss(box, x)))(x), jnp.full((1, 2), 6.0))
        agree(jit(jax.grad(lambda x: loss(box, x)))(x), jnp.full((1, 2), 6.0))
        agree(jit(in_loop)(x), 24.0)
    assert box.get()["n"] == 5
    assert isinstance(box.get()["w"], vn.quant.QArray)


@pytest.mark.parametrize("mode", [False, True], ids=["off", "on"])
def test_a_program_writes_a_quantized_weight(mode, agree):
    box = Box()

    def program(w):
        box.set(jnp.transpose(w))
        return jnp.sum(box.get() @ jnp.ones((2, 1)))

    run = vn.jit if mode else lambda f: vn.implicit(f)
    with vn.hijax.enabled() if mode else jax.numpy_dtype_promotion("standard"):
        for transform in (run, vn.jit, lambda f: vn.jit(jax.value_and_grad(f, allow_int=True))):
            box.set(None)
            transform(program)(quantized(3.0))
            assert isinstance(box.get(), vn.quant.QArray)
            agree(box.get(), jnp.full((2, 2), 3.0))
        transpose = jnp.transpose if mode else vn.implicit(jnp.transpose)
        jax.jit(lambda w: box.set(transpose(w)))(quantized(4.0))
        agree(box.get(), jnp.full((2, 2), 4.0))


def test_a_box_stores_the_primal_of_a_typed_weight(agree):
    """With the mode on, a quantized weight is one leaf for `jax.grad`, with a dense tangent."""
    box, x = Box(quantized(0.0)), jnp.ones((1, 2))

    def program(w):
        box.set(w)
        return jnp.sum(jnp.dot(x, w))

    with vn.hijax.enabled():
        for transform in (
            jax.grad,
            lambda f: jax.jit(jax.grad(f)),
            lambda f: jax.grad(jax.jit(f)),
            lambda f: jax.grad(vn.jit(f)),
            lambda f: vn.jit(jax.grad(f)),
        ):
            box.set(quantized(0.0))
            agree(transform(program)(quantized(3.0)), jnp.ones((2, 2)))
            agree(box.get(), jnp.full((2, 2), 3.0))


def test_threads_that_trace_at_once_share_references():
    def look(box, found, together):
        together.wait()
        found.append(box._contents.references())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(10):
            found: list = []
            args = Box(0.0), found, threading.Barrier(4)
            threads = [threading.Thread(target=look, args=args) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert all(refs is found[0] for refs in found)
    finally:
        sys.setswitchinterval(interval)


def test_an_ahead_of_time_program_fails_after_a_change():
    """It would write to references that the Box no longer uses."""
    box = Box(jnp.zeros(()))
    add = jax.jit(lambda x: box.update(lambda v: v + x)).lower(1.0).compile()
    add(1.0)
    box.set([1.0])
    box.set(0.0)
    with pytest.raises(RuntimeError, match="deleted"):
        add(1.0)
    assert box.get() == 0


def test_contents_lost_by_a_runtime_error_can_be_set_again():
    def check(x):
        if x > 0:
            raise ValueError("positive")
        return x

    box = Box(jnp.zeros(2))

    @vn.jit
    def add(x):
        box.update(lambda v: v + x)
        return jax.pure_callback(check, x, x)

    with pytest.raises(Exception, match="positive"):
        jax.block_until_ready(add(1.0))
    with pytest.raises(RuntimeError, match=r"contents of Box\(f32\[2\]\) are lost.*Call set again"):
        box.get()
    box.set(jnp.ones(2))
    add(-1.0)
    assert box.get().tolist() == [0, 0]


def test_an_inner_function_is_traced_again_in_the_next_trace():
    box = Box()
    inner = jax.jit(lambda y: box.get()["n"] + y)
    outer = vn.jit(lambda x, k: (box.set({"n": x * k}), inner(x))[1], static_argnums=1)
    assert outer(1.0, 2) == 3
    box.set(None)
    assert outer(1.0, 5) == 6


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda box: pickle.loads(pickle.dumps(box))]
)
def test_copies_are_separate_boxes(copied):
    box = Box({"w": vn.quant.quantize(jnp.eye(4), "int8"), "n": jnp.ones(2)})
    other = copied(box)
    other.set(None)
    assert box.get()["n"].tolist() == [1, 1]
    assert box.get()["w"].shape == (4, 4)
