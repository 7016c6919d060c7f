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


def test_outside_of_programs():
    box = Box()
    assert box.get() is None
    box.set([1.0, jnp.arange(2)])
    assert contents(box) == [1.0, [0, 1]]
    assert repr(box) == "Box(['f32[]', 'i32[2]'])"
    box.update(lambda tree: tree[0])
    assert contents(box) == 1.0


@any_jit
def test_argument(jit):
    box, program = Box({"n": 1.0}), jit(add)
    assert [program(box, x).item() for x in (2.0, 3.0)] == [6.0, 12.0]
    assert contents(box) == {"n": 6.0}
    assert program(Box({"n": 5.0}), 1.0) == 12.0


@any_jit
def test_closure(jit):
    box = Box({"n": 1.0})
    program = jit(lambda x: add(box, x))
    assert [program(x).item() for x in (2.0, 3.0)] == [6.0, 12.0]
    assert contents(box) == {"n": 6.0}
    box.set({"n": 0.0})
    assert program(1.0) == 2.0


@any_jit
def test_made_inside(jit):
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
def test_what_is_written_outside_is_the_primal(grad):
    box = Box({"n": 1.0})

    def loss(x):
        box.set({"n": x})
        return x**2 * box.get()["n"]

    program = grad(loss)
    for x in (3.0, 4.0):
        assert program(x) == 2 * x * x  # and not 3 * x**2
        assert contents(box) == {"n": x}


@any_grad
def test_argument_of_what_is_differentiated(grad):
    box = Box({"n": 1.0})

    def loss(x, box):
        return jnp.sin(x) * add(box, x)

    assert grad(loss)(2.0, box) == pytest.approx(6 * np.cos(2.0))
    assert contents(box) == {"n": 3.0}


def test_second_derivatives():
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
def test_scan(jit):
    box = Box(0.0)
    assert jit(lambda x: in_scan(box, x))(2.0) == 16.0
    assert contents(box) == 14.0
    assert jit(in_scan)(box, 2.0) == 16.0
    assert contents(box) == 28.0


@any_grad
def test_derivative_of_scan(grad):
    box = Box(0.0)
    assert grad(lambda x: in_scan(box, x))(2.0) == 32.0
    assert contents(box) == 14.0


@any_grad
def test_derivative_through_a_box_made_inside(grad):
    def loss(x):
        box = Box(0.0)
        in_scan(box, x)
        return box.get()

    assert grad(loss)(2.0) == 1 + 4 + 12


def test_derivative_of_scan_inside_of_a_program():
    """The Box is made outside of what is differentiated, and inside of what is compiled."""

    def step(x):
        box = Box(0.0)
        return jax.grad(jax.jit(lambda x: in_scan(box, x)))(x), box.get()

    for jit in (jax.jit, vn.jit):
        assert jit(step)(2.0) == (32.0, 14.0)


@any_jit
def test_derivative_of_what_an_inner_derivative_writes(jit):
    """The primal of the inner derivative is differentiated by the outer one."""

    def function(x):
        box = Box()
        gradient = jax.grad(lambda y: (box.set([y]), y**2)[1])(x)
        return gradient, box.get()[0]

    assert jax.jvp(jit(function), (3.0,), (1.0,)) == ((6.0, 3.0), (2.0, 1.0))


def test_length_of_a_box_that_a_scan_goes_through():
    box = Box(jnp.zeros(3))

    def body(c, one):
        one[0].set(one[1] + c)
        return c, None

    lax.scan(body, 1.0, (box, jnp.arange(3.0)))
    assert contents(box) == [1.0, 2.0, 3.0]


@any_jit
def test_cond(jit):
    box = Box(0.0)
    program = jit(lambda x: lax.cond(x > 0, lambda: box.set(x), lambda: None))
    for x, expected in ((-1.0, 0.0), (2.0, 2.0)):
        program(x)
        assert contents(box) == expected
    operand = jit(lambda b, x: lax.cond(x > 0, lambda b: b.set(x), lambda b: None, b))
    operand(box, 3.0)
    assert contents(box) == 3.0


@any_grad
def test_derivative_of_cond(grad):
    box = Box(0.0)

    def loss(x):
        return x**2 + lax.cond(x > 0, lambda: (box.set(x), x)[1], lambda: 0.0)

    assert grad(loss)(3.0) == 7.0
    assert contents(box) == 3.0


@any_jit
def test_while(jit):
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


def test_condition_of_a_loop():
    box = Box(0.0)

    def body(i):
        box.set(box.get() + 1)
        return i + 1

    with pytest.raises(NotImplementedError, match=r"condition of a while_loop\. .* do not show"):
        lax.while_loop(lambda i: box.get() < 3, body, 0)
    assert contents(box) == 0.0


def test_map():
    box = Box(0.0)
    lax.map(lambda x: box.set(box.get() + x), jnp.arange(4.0))
    assert contents(box) == 6.0


@any_jit
def test_vmap_over_an_argument(jit):
    box = Box({"n": jnp.zeros(3)})
    found = jax.vmap(jit(add))(box, jnp.arange(3.0))
    np.testing.assert_allclose(found, [0.0, 2.0, 4.0])
    assert contents(box) == {"n": [0.0, 1.0, 2.0]}
    found = jit(jax.vmap(add))(box, jnp.arange(3.0))
    assert contents(box) == {"n": [0.0, 2.0, 4.0]}


@any_grad
def test_derivative_of_vmap(grad):
    box = Box({"n": jnp.zeros(3)})
    program = grad(lambda x, box: jnp.sum(x * jax.vmap(add)(box, x)))
    np.testing.assert_allclose(program(jnp.arange(3.0), box), [0.0, 2.0, 4.0])
    assert contents(box) == {"n": [0.0, 1.0, 2.0]}


@any_jit
def test_mapped_values_are_refused_outside(jit):
    box = Box(0.0)
    # What is compiled is refused by JAX, whose class of errors is Exception.
    refused = r"cannot be written to .* from outside\. Pass the Box|vmapped value on an unbatched"
    with pytest.raises(Exception, match=refused):
        jax.vmap(jit(lambda x: box.set(x)))(jnp.arange(3.0))
    assert contents(box) == 0.0
    np.testing.assert_allclose(jax.vmap(jit(lambda x: x + box.get()))(jnp.arange(2.0)), [0, 1])


def counted(box):
    def function(x):
        box.update(lambda n: n + x)
        return jnp.sin(x)

    return jax.checkpoint(function)


@any_jit
def test_checkpoint(jit):
    box = Box(0.0)
    assert jit(counted(box))(2.0) == pytest.approx(np.sin(2.0))
    assert contents(box) == 2.0
    argument = jit(jax.checkpoint(lambda b, x: (b.set(x), b.get() * x)[1]))
    assert argument(box, 3.0) == 9.0
    assert contents(box) == 3.0


@any_grad
def test_derivative_of_checkpoint_writes_once(grad):
    box = Box(0.0)
    assert grad(counted(box))(2.0) == pytest.approx(np.cos(2.0))
    assert contents(box) == 2.0


@any_grad
def test_derivative_of_checkpoint_that_reads_what_is_written_later(grad):
    box = Box(3.0)

    def loss(x):
        out = jax.checkpoint(lambda x: jnp.sin(x * box.get()))(x)
        box.set(100.0)
        return out

    assert grad(loss)(2.0) == pytest.approx(3 * np.cos(6.0), rel=1e-5)
    assert contents(box) == 100.0


@any_grad
def test_checkpoint_in_a_function_with_a_box(grad):
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
def test_backward_pass_reads_what_the_forward_pass_wrote(grad, writes):
    box = Box(0.0)
    assert grad(with_passes(box, writes=writes))(2.0) == 20.0
    assert contents(box) == 20.0


@any_grad
def test_backward_pass_writes(grad):
    box = Box(0.0)
    function = jax.custom_vjp(jnp.sin)
    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (box.set(ct), ct * jnp.cos(x))[1:])
    assert grad(lambda x: 5 * function(x))(0.0) == 5.0
    assert contents(box) == 5.0


@pytest.mark.parametrize("jit", [jax.jit, vn.jit])
def test_aliases_are_refused(jit):
    box, other = Box(0.0), Box(0.0)
    twice = jit(lambda a, b: a.set(b.get() + 1))
    closed = jit(lambda a: a.set(box.get() + 1))
    for program, args in ((twice, (box, box)), (closed, (box,))):
        with pytest.raises(ValueError, match=r"passed twice|only one reference|closed over"):
            program(*args)
    assert contents(box) == 0.0
    twice(box, other)
    with pytest.raises(ValueError, match=r"passed twice|only one reference"):
        twice(box, box)
    closed(other)
    # JAX looks for what is closed over as it traces, and else XLA refuses the buffer.
    with pytest.raises(Exception, match=r"closed over|donate the same buffer twice"):
        closed(box)
    assert (contents(box), contents(other)) == (1.0, 2.0)


def test_aliases_are_refused_before_they_are_donated():
    program = vn.jit(lambda a, b: a.set(b.get() + 1), donate_argnums=1)
    box = Box(jnp.zeros(3))
    for _ in range(2):
        with pytest.raises(ValueError, match="passed twice"):
            program(box, box)
        assert contents(box) == [0.0] * 3
        program(box, Box(jnp.full(3, -1.0)))  # compiled, now


@any_jit
def test_after_a_failed_trace(jit):
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


def test_contents_must_be_arrays():
    with pytest.raises(TypeError, match="must hold a pytree of arrays, not a str"):
        Box("text")
    with pytest.raises(TypeError, match="cannot hold another Box"):
        Box([Box(1.0)])


def test_keys_and_integers():
    box = Box({"key": jax.random.key(0), "n": 0})

    def program(x):
        key, own = jax.random.split(box.get()["key"])
        box.set({"key": key, "n": box.get()["n"] + 1})
        return x * jax.random.uniform(own)

    jax.grad(jax.jit(program))(1.0)
    jax.jit(jax.grad(program))(1.0)
    assert box.get()["n"] == 2
