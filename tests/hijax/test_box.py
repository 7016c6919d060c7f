"""A Box under the transformations of plain JAX, with the mode off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer.hijax import Box

pytestmark = pytest.mark.usefixtures("mode_off")

JITS = {"eager": lambda f, **options: f, "jitted": jax.jit, "vn.jit": vn.jit}
GRADS = {
    "grad": jax.grad,
    "jit of grad": lambda f, *args: jax.jit(jax.grad(f, *args)),
    "grad of jit": lambda f, *args: jax.grad(jax.jit(f), *args),
    "vn.jit of grad": lambda f, *args: vn.jit(jax.grad(f, *args)),
    "grad of vn.jit": lambda f, *args: jax.grad(vn.jit(f), *args),
}
any_jit = pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
any_grad = pytest.mark.parametrize("grad", GRADS.values(), ids=GRADS)


def add(box, x):
    box.update(lambda tree: {"n": tree["n"] + x})
    return 2 * box.get()["n"]


def contents(box):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), box.get())


def test_a_box_holds_values_outside_of_programs():
    box = Box()
    assert box.get() is None
    box.set([1.0, jnp.arange(2)])
    assert contents(box) == [1.0, [0, 1]]
    assert repr(box) == "Box(['f32[]', 'i32[2]'])"
    box.update(lambda tree: tree[0])
    assert contents(box) == 1.0


@any_jit
def test_a_program_writes_a_box_argument(jit):
    box, program = Box({"n": 1.0}), jit(add)
    assert [program(box, x).item() for x in (2.0, 3.0)] == [6.0, 12.0]
    assert contents(box) == {"n": 6.0}
    assert program(Box({"n": 5.0}), 1.0) == 12.0


@any_jit
def test_a_program_writes_a_captured_box(jit):
    box = Box({"n": 1.0})
    program = jit(lambda x: add(box, x))
    assert [program(x).item() for x in (2.0, 3.0)] == [6.0, 12.0]
    assert contents(box) == {"n": 6.0}
    box.set({"n": 0.0})
    assert program(1.0) == 2.0


@any_jit
def test_derivatives_flow_through_a_box_made_inside(jit):
    def program(x):
        box = Box()
        box.set({"n": x})
        jax.jit(lambda y: add(box, y))(3 * x)
        return box.get()["n"]

    assert jit(program)(2.0) == 8.0
    assert jax.grad(jit(program))(2.0) == 4.0
    assert jax.jvp(jit(program), (2.0,), (1.0,)) == (8.0, 4.0)
    np.testing.assert_allclose(jax.vmap(jit(program))(jnp.arange(2.0)), [0.0, 4.0])


@any_grad
def test_a_box_outside_stores_primals(grad):
    box = Box({"n": 1.0})

    def loss(x):
        box.set({"n": x})
        return x**2 * box.get()["n"]

    program = grad(loss)
    for x in (3.0, 4.0):
        assert program(x) == 2 * x * x  # and not 3 * x**2
        assert contents(box) == {"n": x}


@any_grad
def test_a_differentiated_function_writes_a_box_argument(grad):
    box = Box({"n": 1.0})

    def loss(x, box):
        return jnp.sin(x) * add(box, x)

    assert grad(loss)(2.0, box) == pytest.approx(6 * np.cos(2.0))
    assert contents(box) == {"n": 3.0}


def test_second_derivatives_store_primals():
    box = Box(0.0)

    def loss(x):
        box.set(x)
        return x**3

    for program in (loss, jax.jit(loss), vn.jit(loss)):
        box.set(0.0)
        assert jax.grad(jax.grad(program))(2.0) == 12.0
        assert contents(box) == 2.0


def in_scan(box, x):
    def body(c, _):
        box.update(lambda s: s + c)
        return c * x, None

    return lax.scan(body, x, None, length=3)[0]


@any_jit
def test_a_scan_writes_a_box(jit):
    box = Box(0.0)
    assert jit(lambda x: in_scan(box, x))(2.0) == 16.0
    assert contents(box) == 14.0
    assert jit(in_scan)(box, 2.0) == 16.0
    assert contents(box) == 28.0


@any_grad
def test_a_differentiated_scan_writes_a_box(grad):
    box = Box(0.0)
    assert grad(lambda x: in_scan(box, x))(2.0) == 32.0
    assert contents(box) == 14.0


@any_grad
def test_a_scan_is_differentiated_through_a_box_made_inside(grad):
    def loss(x):
        box = Box(0.0)
        in_scan(box, x)
        return box.get()

    assert grad(loss)(2.0) == 1 + 4 + 12


def test_a_box_made_in_a_jit_around_grad_stores_primals():
    """The Box is made outside the differentiated function, inside the compiled one."""

    def step(x):
        box = Box(0.0)
        return jax.grad(jax.jit(lambda x: in_scan(box, x)))(x), box.get()

    for jit in (jax.jit, vn.jit):
        assert jit(step)(2.0) == (32.0, 14.0)


@any_jit
def test_an_outer_derivative_sees_writes_of_an_inner_one(jit):
    """The outer derivative differentiates the primal that the inner one stores."""

    def function(x):
        box = Box()
        gradient = jax.grad(lambda y: (box.set([y]), y**2)[1])(x)
        return gradient, box.get()[0]

    assert jax.jvp(jit(function), (3.0,), (1.0,)) == ((6.0, 3.0), (2.0, 1.0))


def test_scan_slices_a_box_argument():
    box = Box(jnp.zeros(3))

    def body(c, one):
        one[0].set(one[1] + c)
        return c, None

    lax.scan(body, 1.0, (box, jnp.arange(3.0)))
    assert contents(box) == [1.0, 2.0, 3.0]


@any_jit
def test_a_branch_writes_a_box(jit):
    box = Box(0.0)
    program = jit(lambda x: lax.cond(x > 0, lambda: box.set(x), lambda: None))
    for x, expected in ((-1.0, 0.0), (2.0, 2.0)):
        program(x)
        assert contents(box) == expected
    operand = jit(lambda b, x: lax.cond(x > 0, lambda b: b.set(x), lambda b: None, b))
    operand(box, 3.0)
    assert contents(box) == 3.0


@any_grad
def test_a_differentiated_branch_writes_a_box(grad):
    box = Box(0.0)

    def loss(x):
        return x**2 + lax.cond(x > 0, lambda: (box.set(x), x)[1], lambda: 0.0)

    assert grad(loss)(3.0) == 7.0
    assert contents(box) == 3.0


@any_jit
def test_a_while_loop_writes_a_box(jit):
    box = Box(0.0)

    def program(x):
        def body(i):
            box.update(lambda s: s + x)
            return i + 1

        return lax.while_loop(lambda i: i < 3, body, 0)

    assert jit(program)(2.0) == 3
    assert contents(box) == 6.0
    jit(lambda n: lax.fori_loop(0, n, lambda i, c: box.set(box.get() + i), None))(3)
    assert contents(box) == 9.0


def test_a_box_in_a_loop_condition_raises():
    box = Box(0.0)

    def body(i):
        box.set(box.get() + 1)
        return i + 1

    with pytest.raises(NotImplementedError, match=r"condition of a while_loop\. .* do not show"):
        lax.while_loop(lambda i: box.get() < 3, body, 0)
    assert contents(box) == 0.0


def test_lax_map_writes_a_box():
    box = Box(0.0)
    lax.map(lambda x: box.set(box.get() + x), jnp.arange(4.0))
    assert contents(box) == 6.0


@any_jit
def test_vmap_writes_a_mapped_box_argument(jit):
    box = Box({"n": jnp.zeros(3)})
    found = jax.vmap(jit(add))(box, jnp.arange(3.0))
    np.testing.assert_allclose(found, [0.0, 2.0, 4.0])
    assert contents(box) == {"n": [0.0, 1.0, 2.0]}
    found = jit(jax.vmap(add))(box, jnp.arange(3.0))
    assert contents(box) == {"n": [0.0, 2.0, 4.0]}


@any_grad
def test_a_differentiated_vmap_writes_a_box(grad):
    box = Box({"n": jnp.zeros(3)})
    program = grad(lambda x, box: jnp.sum(x * jax.vmap(add)(box, x)))
    np.testing.assert_allclose(program(jnp.arange(3.0), box), [0.0, 2.0, 4.0])
    assert contents(box) == {"n": [0.0, 1.0, 2.0]}


@any_jit
def test_writing_mapped_values_to_a_captured_box_raises(jit):
    box = Box(0.0)
    # In a compiled function, JAX raises the error, of the class Exception.
    refused = r"cannot be written to .* from outside\. Pass the Box|vmapped value on an unbatched"
    with pytest.raises(Exception, match=refused):
        jax.vmap(jit(lambda x: box.set(x)))(jnp.arange(3.0))
    with pytest.raises(ValueError, match="Pass the Box to the mapped function"):
        jit(jax.vmap(lambda x: box.set(x)))(jnp.arange(3.0))
    assert contents(box) == 0.0
    np.testing.assert_allclose(jax.vmap(jit(lambda x: x + box.get()))(jnp.arange(2.0)), [0, 1])


def counted(box):
    def function(x):
        box.update(lambda n: n + x)
        return jnp.sin(x)

    return jax.checkpoint(function)


@any_jit
def test_a_checkpoint_writes_a_box(jit):
    box = Box(0.0)
    assert jit(counted(box))(2.0) == pytest.approx(np.sin(2.0))
    assert contents(box) == 2.0
    argument = jit(jax.checkpoint(lambda b, x: (b.set(x), b.get() * x)[1]))
    assert argument(box, 3.0) == 9.0
    assert contents(box) == 3.0


@any_grad
def test_a_differentiated_checkpoint_writes_once(grad):
    box = Box(0.0)
    assert grad(counted(box))(2.0) == pytest.approx(np.cos(2.0))
    assert contents(box) == 2.0


@any_grad
def test_a_recomputed_checkpoint_ignores_later_writes(grad):
    box = Box(3.0)

    def loss(x):
        out = jax.checkpoint(lambda x: jnp.sin(x * box.get()))(x)
        box.set(100.0)
        return out

    assert grad(loss)(2.0) == pytest.approx(3 * np.cos(6.0), rel=1e-5)
    assert contents(box) == 100.0


@any_grad
def test_a_checkpoint_reads_a_box_of_the_function_around(grad):
    def reads(x):
        box = Box(3.0 * x)
        out = jax.checkpoint(lambda x: jnp.sin(x * box.get()))(x)
        box.set(100.0)
        return out

    def writes(x):
        box = Box(3.0)
        jax.checkpoint(lambda x: box.set(x))(x)
        return box.get()

    def within(x):
        def function(x):
            box = Box()
            box.set(jnp.sin(x))
            return box.get()

        return jax.checkpoint(function)(x)

    assert grad(reads)(2.0) == pytest.approx(12 * np.cos(12.0), rel=1e-5)
    assert grad(within)(2.0) == pytest.approx(np.cos(2.0))
    with pytest.raises(NotImplementedError, match="would lose the derivative"):
        grad(writes)(2.0)


def with_passes(box, *, writes):
    @jax.custom_vjp
    def function(x):
        if writes:
            box.set(x)
        return jnp.sin(x)

    def forward(x):
        box.set(10 * x)
        return jnp.sin(x), None

    function.defvjp(forward, lambda _, ct: (ct * box.get(),))
    return function


@pytest.mark.parametrize("writes", [False, True])
@any_grad
def test_a_backward_pass_reads_writes_of_the_forward_pass(grad, writes):
    box = Box(0.0)
    assert grad(with_passes(box, writes=writes))(2.0) == 20.0
    assert contents(box) == 20.0


@any_grad
def test_a_backward_pass_writes_a_box(grad):
    box = Box(0.0)
    function = jax.custom_vjp(jnp.sin)
    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (box.set(ct), ct * jnp.cos(x))[1:])
    assert grad(lambda x: 5 * function(x))(0.0) == 5.0
    assert contents(box) == 5.0


@pytest.mark.parametrize("jit", [jax.jit, vn.jit])
def test_passing_a_box_twice_or_also_capturing_it_raises(jit):
    box, other = Box(0.0), Box(0.0)
    twice = jit(lambda a, b: a.set(b.get() + 1))
    closed = jit(lambda a: a.set(box.get() + 1))
    for program, args in ((twice, (box, box)), (closed, (box,))):
        with pytest.raises(ValueError, match=r"passed twice|one reference|captured|closed over"):
            program(*args)
    assert contents(box) == 0.0
    twice(box, other)
    with pytest.raises(ValueError, match=r"passed twice|only one reference"):
        twice(box, box)
    closed(other)
    # JAX checks captured references while it traces. Without a trace, XLA rejects the buffer.
    with pytest.raises(Exception, match=r"captured|closed over|donate the same buffer twice"):
        closed(box)
    assert (contents(box), contents(other)) == (1.0, 2.0)


def test_passing_a_box_twice_raises_before_donation():
    program = vn.jit(lambda a, b: a.set(b.get() + 1), donate_argnums=1)
    box = Box(jnp.zeros(3))
    for _ in range(2):
        with pytest.raises(ValueError, match="passed twice"):
            program(box, box)
        assert contents(box) == [0.0] * 3
        program(box, Box(jnp.full(3, -1.0)))  # compiled, now


@any_jit
def test_a_failed_trace_keeps_the_contents(jit):
    box = Box({"n": 1.0})

    def program(box, x):
        box.set({"n": x})
        raise RuntimeError("no")

    if jit is not JITS["eager"]:  # which fails when it has written
        for function in (program, functools.partial(program, box)):
            args = (box, 2.0) if function is program else (2.0,)
            with pytest.raises(RuntimeError, match="no"):
                jit(function)(*args)
            assert contents(box) == {"n": 1.0}


def test_contents_that_are_not_arrays_raise():
    with pytest.raises(TypeError, match="must hold a pytree of arrays, not a str"):
        Box("text")
    with pytest.raises(TypeError, match="cannot hold another Box"):
        Box([Box(1.0)])


def test_a_box_holds_keys_and_integers():
    box = Box({"key": jax.random.key(0), "n": 0})

    def program(x):
        key, own = jax.random.split(box.get()["key"])
        box.set({"key": key, "n": box.get()["n"] + 1})
        return x * jax.random.uniform(own)

    jax.grad(jax.jit(program))(1.0)
    jax.jit(jax.grad(program))(1.0)
    assert box.get()["n"] == 2
