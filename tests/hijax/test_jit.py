"""`vn.jit`: the arguments and options of `jax.jit`, for functions of implicit arrays."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

import veneer as vn
from veneer.hijax import Box

pytestmark = pytest.mark.usefixtures("mode_off")


@pytest.fixture(params=[False, True], ids=["off", "on"])
def either_mode(request):
    if not request.param:
        yield False
        return
    with vn.hijax.enabled():
        yield True


def test_implicit_arrays_are_arguments_and_results(x, weight, agree, either_mode):
    program = vn.jit(lambda x, w: (jnp.dot(x, w), jnp.transpose(w), w))
    product, transposed, same = program(x, weight.value)
    agree(product, x @ weight.dense)
    agree(transposed, weight.dense.T)
    assert type(transposed) is type(same) is type(weight.value)


def test_derivatives_follow_the_mode(x, weight, agree, agree_by_leaves, either_mode):
    loss = lambda w: jnp.sum(jnp.sin(jnp.dot(x, w)))
    if either_mode:
        expected = weight.reference(jax.grad, lambda w: jnp.sum(jnp.sin(x @ w)))
        agree_by_leaves(vn.jit(jax.grad(loss))(weight.value), expected)
        agree_by_leaves(jax.grad(vn.jit(loss))(weight.value), expected)
        return
    # As with `implicit`: derivatives inside are dense, and derivatives outside are per leaf.
    agree(vn.jit(jax.grad(loss))(weight.value), jax.grad(loss)(weight.dense))
    if not weight.dense_tangent:
        expected = weight.reference(jax.grad, loss)
        agree_by_leaves(jax.grad(vn.jit(loss))(weight.value), expected)


def test_a_second_call_traces_nothing(x, weight, either_mode):
    """A call of a compiled function runs in C++, apart from `Jitted` and flattening."""
    traces = []
    program = vn.jit(lambda x, w: (traces.append(1), jnp.dot(x, w), jnp.transpose(w))[1:])
    program(x, weight.value)
    with jax.no_tracing():
        program(x, weight.value)
    assert traces == [1]


def test_options_of_jax_jit_apply():
    @functools.partial(vn.jit, static_argnames="n", donate_argnums=0)
    def program(x, *, n):
        return [x * i for i in range(n)]

    x = jnp.ones(2)
    assert len(program(x, n=3)) == 3
    assert x.is_deleted()
    assert vn.jit(static_argnums=(1,))(lambda x, n: x + n)(1.0, 2) == 3.0
    with pytest.raises(TypeError, match="no_such_option"):
        vn.jit(lambda x: x, no_such_option=1)


def test_the_name_and_signature_are_kept():
    def program(x, /, *, scale=2):
        """Scales."""
        return x * scale

    jitted = vn.jit(program)
    assert (jitted.__name__, jitted.__doc__) == ("program", "Scales.")
    assert inspect.signature(jitted) == inspect.signature(program)
    assert "name=program" in str(jax.make_jaxpr(jitted)(1.0))
    assert vn.jit(functools.partial(program, scale=3))(2.0) == 6.0


def test_methods_can_be_jitted():
    class Model:
        @vn.jit
        def __call__(self, x):
            return x + 1

        @functools.partial(vn.jit, static_argnums=0)
        def twice(self, x):
            return 2 * x

    assert Model().twice(2.0) == 4.0
    with pytest.raises(TypeError, match="Model"):
        Model()(1.0)


def test_a_function_can_be_compiled_ahead_of_time(x, weight, agree):
    program = vn.jit(lambda x, w: jnp.dot(x, w))
    agree(program.lower(x, weight.value).compile()(x, weight.value), x @ weight.dense)
    assert program.eval_shape(x, weight.value).shape == (3, 6)
    assert "dot_general" in str(program.trace(x, weight.value).jaxpr)


def test_an_ahead_of_time_program_writes_a_box():
    box = Box(1.0)

    def program(box, x):
        box.set(box.get() + x)

    compiled = vn.jit(program).lower(box, 2.0).compile()
    compiled(box, 2.0)
    assert box.get() == 3.0
    with pytest.raises(TypeError, match=r"vn.jit if a function is only traced"):
        vn.jit(lambda box: box.set([1.0])).lower(box)


def test_clear_cache_traces_again():
    traces = []
    program = vn.jit(lambda x: traces.append(1))
    for _ in range(2):
        program(1.0)
        program(1.0)
        program.clear_cache()
    assert traces == [1, 1]


def test_programs_of_replaced_contents_are_removed():
    box = Box()
    program = vn.jit(lambda x: box.set([*(box.get() or []), x]))
    for n in range(4):
        program(1.0)
        assert len(box.get()) == n + 1
    assert len(program._programs) <= 2


def test_boxes_in_trees_and_keywords_are_written():
    one, other = Box(1.0), Box(2.0)

    @functools.partial(vn.jit, static_argnames="n")
    def program(x, tree, *, last, n):
        tree["box"].set([x, last.get()])
        last.set(n)

    program(5.0, {"box": one}, last=other, n=3)
    program(6.0, {"box": Box(0.0)}, last=Box(1.0), n=3)
    assert one.get() == [5.0, 2.0]
    assert other.get() == 3


def test_a_donated_box_keeps_its_contents():
    box = Box(jnp.ones(2))
    program = vn.jit(lambda box: box.get() + 1, donate_argnums=0)
    for _ in range(2):
        assert program(box).tolist() == [2.0, 2.0]
        assert box.get().tolist() == [1.0, 1.0]


def test_disable_jit_runs_the_function():
    box, closed = Box(1.0), Box(1.0)

    @vn.jit
    def program(box, x):
        box.set([x])
        closed.set([x, x])
        return x

    with jax.disable_jit():
        assert program(box, 2.0) == 2.0
    assert (box.get(), closed.get()) == ([2.0], [2.0, 2.0])


def test_a_change_of_the_mode_traces_again(x):
    """Derivatives differ between the modes, so a trace of one is not used in the other."""
    w = vn.types.LoraArray(jnp.ones((4, 6)), jnp.ones((4, 2)), jnp.ones((2, 6)))
    grad = vn.jit(jax.grad(lambda w: jnp.sum(jnp.dot(x, w))))
    assert isinstance(grad(w), jax.Array)
    with vn.hijax.enabled():
        assert isinstance(grad(w), vn.types.LoraArray)
    assert isinstance(grad(w), jax.Array)


def test_an_outer_program_follows_boxes_of_a_cached_one():
    """JAX does not run the inner function again, so it cannot record its Boxes in the outer one."""
    box = Box(jnp.ones(2))
    inner = vn.jit(lambda x: box.update(lambda tree: jax.tree.map(lambda v: v + x, tree)))
    inner(1.0)
    outer = vn.jit(lambda x: inner(x))
    outside = jax.jit(lambda x: inner(x))
    outer(1.0)
    outside(1.0)
    box.set([jnp.zeros(2)])
    outer(1.0)
    outside(1.0)
    assert box.get()[0].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="both an argument"):
        vn.jit(lambda box, x: inner(x))(box, 1.0)


def test_passing_a_box_that_a_cached_function_holds_raises():
    """JAX does not run the cached function again, so the Box does not see the use."""
    box, other = Box(1.0), Box(1.0)
    inner = jax.jit(lambda x: box.set(x))
    inner(1.0)
    outer = vn.jit(lambda c, x: (inner(x), c.set([c.get()]))[0])
    with pytest.raises(ValueError, match="both an argument"):
        outer(box, 7.0)
    outer(other, 7.0)
    assert (box.get(), other.get()) == (7.0, [1.0])
    with pytest.raises(ValueError, match="both an argument"):  # the program is cached
        outer(box, 8.0)
    assert box.get() == 7.0


def test_passing_a_box_that_a_closure_changes_raises():
    box, other = Box(1.0), Box(1.0)
    change = vn.jit(lambda c, x: (box.set([x]), c.get())[1])
    change(other, 2.0)
    box.set(1.0)
    with pytest.raises(ValueError, match="both an argument"):
        change(box, 3.0)
    assert box.get() == 1.0
