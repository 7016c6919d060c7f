"""JAX settings, fields of traced values, nested transformations, eager calls and refs."""

import copy
import pickle
import threading
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import veneer as vn

POLICIES = ["nothing_saveable", "everything_saveable", "dots_saveable"]


@pytest.fixture
def loss(x, high):
    return lambda w: jnp.sum(jnp.sin(jnp.dot(x, high(w))))


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_agree_under_checkpoint_policies(name, loss, weight, agree_by_leaves):
    policy = getattr(jax.checkpoint_policies, name)
    actual = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))(weight.value)
    agree_by_leaves(actual, weight.reference(jax.grad, loss))


def test_checkpoint_name_accepts_a_typed_value(x, weight, high, agree_by_leaves):
    def loss(w):
        named = jax.ad_checkpoint.checkpoint_name(high(w), "w")
        return jnp.sum(jnp.sin(jnp.dot(x, named)))

    policy = jax.checkpoint_policies.save_only_these_names("w")
    actual = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))(weight.value)
    agree_by_leaves(actual, weight.reference(jax.grad, loss))


SETTINGS = {
    "disable_jit": lambda: jax.disable_jit(),
    "debug_nans": lambda: jax.debug_nans(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "x64": lambda: jax.enable_x64(True),
    "checks": lambda: jax.enable_checks(True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_results_agree_under_jax_settings(name, loss, weight, high, agree, agree_by_leaves):
    expected = weight.reference(jax.grad, loss)
    with SETTINGS[name]():
        agree_by_leaves(jax.jit(jax.grad(loss))(weight.value), expected)
        agree(jax.jit(high)(weight.value), weight.dense)


def test_debug_nans_finds_nans_of_typed_operands(weight, high):
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.jit(lambda w: jnp.log(-jnp.abs(high(w))))(weight.value)


def test_gradients_of_float64_leaves_are_float64():
    with jax.enable_x64(True):
        w = vn.types.LoraArray(*(jnp.ones(s, jnp.float64) for s in ((4, 6), (4, 2), (2, 6))))
        grad = jax.jit(jax.grad(lambda w: jnp.sum(jnp.transpose(w))))(w)
    assert grad.a.dtype == jnp.float64


# Fields.


def test_fields_of_a_traced_value_can_be_read(x):
    w = vn.types.LoraArray(jnp.ones((4, 6)), jnp.ones((4, 2)), 2 * jnp.ones((2, 6)))
    transposed_a = jax.jit(lambda w: jnp.transpose(w).a)(w)
    assert (transposed_a == w.b.T).all()
    loss = lambda convert: lambda w: jnp.sum(convert(w).b ** 2)
    of_typed = jax.grad(loss(lambda w: jnp.transpose(jnp.transpose(w))))(w)
    assert (of_typed.b == jax.grad(loss(lambda w: w))(w).b).all()


def test_traced_values_have_the_methods_of_their_class(weight, high, agree):
    agree(jax.jit(lambda w: high(w).materialise())(weight.value), weight.dense)
    has = jax.jit(lambda w: [hasattr(high(w), name) for name in ("materialise", "nothing")])
    assert has(weight.value) == [True, False]


def test_a_field_can_be_named_value():
    class Held(vn.ImplicitArray):
        value: jax.Array
        name: str = vn.static(default="held")

        def materialise(self):
            return self.value

    h = Held(jnp.arange(3.0))
    reshape = lambda h: jnp.reshape(jnp.reshape(h, (1, 3)), (3,))
    assert jax.jit(lambda h: lax.neg(h))(h).tolist() == [0.0, -1.0, -2.0]
    read = lambda h: getattr(reshape(h), "value", reshape(h))
    assert jax.jit(read)(h).tolist() == [0.0, 1.0, 2.0]


# Nested transformations.


def test_a_jit_in_a_scan_in_a_vmap_agrees(x, weight, high, agree):
    row_of = lambda w: lambda c, row: (c, jax.jit(lambda w: jnp.dot(row, high(w)))(high(w)))
    run = lambda ws: jax.vmap(lambda w: lax.scan(row_of(w), 0.0, x)[1])(ws)
    agree(jax.jit(run)(weight.stack), jnp.einsum("ij,njk->nik", x, weight.dense_stack))


def test_lax_map_in_batches_agrees(x, weight, high, agree):
    run = lambda ws: lax.map(lambda w: jnp.dot(x, high(w)), ws, batch_size=2)
    agree(jax.jit(run)(weight.stack), jnp.einsum("ij,njk->nik", x, weight.dense_stack))


def test_switch_agrees(x, weight, high, agree):
    branches = [lambda w: jnp.dot(x, w), lambda w: 2 * jnp.dot(x, high(w)), lambda w: x @ w]
    run = jax.jit(lambda i, w: lax.switch(i, branches, w))
    agree(run(1, weight.value), 2 * x @ weight.dense)
    agree(jax.jit(lambda i, w: lax.switch(i, branches, high(w)))(2, weight.value), x @ weight.dense)


def test_an_associative_scan_agrees(weight, high, agree):
    run = jax.jit(lambda w: lax.associative_scan(jnp.add, high(w)))
    agree(run(weight.value), jnp.cumsum(weight.dense, 0))


def test_jit_works_in_several_threads(x, weight, high, agree):
    actual = []

    def work():
        with vn.hijax.enabled():
            actual.append(jax.jit(lambda x, w: jnp.dot(x, high(w)))(x, weight.value))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    agree(actual, [x @ weight.dense] * 4)


# Eager calls.

EAGER = {
    "transpose": jnp.transpose,
    "lax": lambda w: lax.transpose(w, (1, 0)),
    "pieces": lambda w: jnp.split(w, 2)[0],
    "loop": lambda w: lax.fori_loop(0, 2, lambda i, w: w.T.T, jnp.transpose(w)),
}


@pytest.mark.parametrize("name", EAGER)
def test_eager_results_keep_their_class(name, weight, agree):
    out = EAGER[name](weight.value)
    agree(out, EAGER[name](weight.dense))
    if isinstance(vn.implicit(EAGER[name])(weight.value), vn.ImplicitArray):
        assert type(out) is type(weight.value)


def test_asarray_of_a_value_behaves_like_the_value(x, weight, agree):
    w = jnp.asarray(weight.value)
    assert (len(w), w.T.shape, w.nbytes) == (4, (6, 4), weight.value.nbytes)
    agree(x @ w, x @ weight.dense)
    agree([*w], [*weight.dense])
    for same in (pickle.loads(pickle.dumps(w)), copy.deepcopy(w)):
        agree(jnp.dot(x, same), x @ weight.dense)


def test_units_follow_jit_and_scan():
    m = vn.types.Quantity(jnp.arange(1.0, 4.0), "m")
    squares = jax.jit(lambda m: jnp.sum(m * m))(m)
    assert (float(squares.value), str(squares.unit)) == (14.0, "m2")
    area = jax.jit(lambda m: (m * m).value)
    assert area(m).tolist() == [1.0, 4.0, 9.0]
    total, _ = lax.scan(lambda c, v: (c + v, None), vn.types.Quantity(jnp.zeros(()), "m"), m)
    assert (float(total.value), str(total.unit)) == (6.0, "m")
    with pytest.raises(ValueError, match="m cannot be converted to a number"):
        jax.jit(jnp.exp)(m)


def test_copies_that_share_leaves_are_separate_values(weight, x, agree, agree_by_leaves):
    """In one trace, `w.T` of a LoRA weight is a new value with the leaves of `w`."""
    f = lambda x, w: (x @ w) @ w.T + x @ w[:, ::-1] @ jnp.swapaxes(w, 0, 1)
    agree(jax.jit(f)(x, weight.value), f(x, weight.dense), atol=1e-3)
    loss = lambda w: jnp.mean(f(x, w))
    actual = jax.jit(jax.grad(loss))(weight.value)
    agree_by_leaves(actual, weight.reference(jax.grad, loss))


def test_a_used_value_can_be_copied_while_tracing(weight, x):
    jax.jit(lambda x, w: (x @ w, copy.deepcopy(w))[0])(x, weight.value)


class Doubled(eqx.Module, vn.ImplicitArray):
    w: Any

    def materialise(self):
        return 2 * vn.materialise(self.w)


@flax.struct.dataclass
class Halved(vn.ImplicitArray):
    w: Any

    def materialise(self):
        return vn.materialise(self.w) / 2


HOLDERS = {
    "LoraArray": lambda q: vn.types.LoraArray(q, jnp.ones((4, 2)), jnp.ones((2, 6))),
    "equinox.Module": Doubled,
    "flax.struct": Halved,
}
COPIES = {
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)
def test_a_used_value_can_be_pickled_and_copied(make, copied, x, agree):
    w = make(vn.quant.quantize(jnp.arange(24.0).reshape(4, 6), "int8", channelwise_axes=[1]))
    jax.jit(lambda x: x @ w)(x)
    assert hasattr(w, "_high")  # the tracer of the value, which cannot be pickled
    vn.explain(lambda x: x @ w)(x)
    same = copied(w)
    assert type(same) is type(w)
    assert jax.tree.structure(same) == jax.tree.structure(w)
    agree(jax.jit(jnp.dot)(x, same), x @ vn.materialise(w))


REFERENCES = {
    "new_ref": lambda w: jax.new_ref(w)[...],
    "swap": lambda w: jax.ref.swap(jax.new_ref(jnp.zeros(w.shape)), (), w),
    "empty_ref": lambda w: jax.empty_ref(jax.typeof(w))[...],
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", REFERENCES)
def test_a_ref_to_an_implicit_array_raises(jit, name, weight):
    run = jax.jit(REFERENCES[name]) if jit else REFERENCES[name]
    with pytest.raises(
        TypeError, match=rf"{name}\(.*\[4,6\].*\): a jax.Ref cannot hold an implicit"
    ):
        run(weight.value)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize(
    "use", [lambda r: r[...], lambda r: r * 2, jnp.sum], ids=["read", "operator", "function"]
)
def test_a_tree_of_refs_raises_when_used_as_an_array(jit, use, weight):
    """`run_state` passes its body such a tree, whose refs can be read and written one by one."""
    run = lambda w: use(jax.tree.map(jax.new_ref, w))
    name = type(weight.value).__name__
    with pytest.raises(TypeError, match=f"This {name} holds a jax.Ref for each leaf"):
        (jax.jit(run) if jit else run)(weight.value)
    by_leaf = lambda w: jax.tree.map(lambda ref: ref[...], jax.tree.map(jax.new_ref, w))
    assert type((jax.jit(by_leaf) if jit else by_leaf)(weight.value)) is type(weight.value)
