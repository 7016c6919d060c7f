"""Implicit arrays that a program builds or reads from a container are operands of JAX."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support import arrays
from support.array_types import assert_close
from support.implicit_weights import lora, nf4, qlora
from support.policies import only_by_rules

import veneer as vn

DENSE = arrays.normal(8, 6)
X = arrays.normal(4, 8, seed=1)
VALUES = arrays.OnDemand(
    {"nf4": lambda: nf4(DENSE), "lora": lambda: lora(DENSE), "qlora": lambda: qlora(DENSE)}
)
CONTAINER = {}


@pytest.fixture(params=VALUES)
def value(request):
    CONTAINER["w"] = VALUES[request.param]
    return CONTAINER["w"]


def built(leaves):
    return jax.tree.unflatten(jax.tree.structure(CONTAINER["w"]), leaves)


def combined(leaves):
    whole = built(leaves)
    return vn.tree.combine(*vn.tree.partition(whole, vn.trainable(whole)))


def from_a_container(leaves):
    del leaves
    return CONTAINER["w"]


WAYS = {"built": built, "combined": combined, "from a container": from_a_container}

# Functions of jax.numpy and jax.lax, and operators, that use an array.
USES = {
    "dot": lambda x, w: jnp.dot(x, w),
    "operator": lambda x, w: x @ w,
    "lax": lambda x, w: jax.lax.dot(x, w),
    "einsum": lambda x, w: jnp.einsum("ij,jk->ik", x, w),
    "elementwise": lambda x, w: jnp.tanh(w),
    "several": lambda x, w: jnp.concatenate([x @ w, jnp.asarray(w)[:2]]),
}


def scanned(f):
    return lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0, None, length=2)[1]


def looped(f):
    return lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y + f(x).sum(), 0.0)


def branched(f):
    return lambda x: jax.lax.cond(x.sum() > 100, lambda: 2 * f(x), lambda: f(x))


def with_custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), f(*tangents)))
    return g


# Transformations of JAX that run the function under `implicit`.
WITHIN = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "jit in jit": lambda f: jax.jit(lambda x: jax.jit(f)(x) + 1),
    "checkpoint": jax.checkpoint,
    "scan": scanned,
    "loop": looped,
    "cond": branched,
    "custom_jvp": with_custom_jvp,
    "jit of scan": lambda f: jax.jit(scanned(f)),
    "vmap": lambda f: jax.vmap(f, axis_size=2, in_axes=None),
    "grad": lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum()),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: jnp.sin(f(x)).sum())),
    "grad of jit": lambda f: jax.grad(jax.jit(lambda x: jnp.sin(f(x)).sum())),
}
AROUND = {"nothing": lambda f: f, "jit": jax.jit}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use", USES)
def test_arrays_built_inside_a_function_are_operands(value, way, use):
    leaves = jax.tree.leaves(value)
    f = lambda x, leaves: USES[use](x, WAYS[way](leaves))
    assert_close(jax.jit(vn.implicit(f))(X, leaves), USES[use](X, vn.materialise(value)))


@pytest.mark.parametrize("within", WITHIN)
def test_container_weights_work_inside_transformations(value, within):
    f = lambda x: jnp.dot(x, CONTAINER["w"])
    dense = vn.materialise(value)
    found = jax.jit(vn.implicit(WITHIN[within](f)))(X)
    assert_close(found, WITHIN[within](lambda x: jnp.dot(x, dense))(X))


@pytest.mark.parametrize("within", ["nothing", "jit", "scan", "checkpoint"])
def test_a_container_weight_stays_packed(value, within):
    f = WITHIN[within](lambda x: jnp.dot(x, CONTAINER["w"]))
    jax.jit(vn.implicit(f, on_materialise=only_by_rules))(X)


def test_an_eager_call_without_values_raises_and_runs_once(value):
    ran = []

    def f(x):
        ran.append(x)
        return jnp.dot(x, CONTAINER["w"])

    with pytest.raises(RuntimeError, match=r"pass the array as an argument"):
        vn.implicit(f)(X)
    assert len(ran) == 1
    assert_close(jax.jit(vn.implicit(f))(X), jnp.dot(X, vn.materialise(value)))
    assert len(ran) == 2


def test_a_box_is_written_once_per_call(value):
    box = vn.hijax.Box(jnp.zeros(()))

    def f(box, x):
        box.set(box.get() + 1)
        return jnp.dot(x, CONTAINER["w"])

    for _ in range(2):
        assert_close(vn.jit(f)(box, X), jnp.dot(X, vn.materialise(value)))
    assert box.get() == 2


def test_nested_calls_do_not_affect_later_calls(value):
    f = vn.implicit(lambda x: jnp.dot(x, CONTAINER["w"]))
    expected = jnp.dot(X, vn.materialise(value))
    outer = lambda x: f(x)
    assert_close(jax.jit(outer)(X), expected)
    both = vn.implicit(lambda w, x: f(x) + jnp.dot(x, w))
    assert_close(both(value, X), 2 * expected)
    assert_close(jax.jit(outer)(X), expected)
    assert_close(jax.jit(vn.implicit(lambda x: 1 + jnp.dot(x, CONTAINER["w"])))(X), 1 + expected)


def test_container_weights_and_arguments_combine(value):
    f = lambda x, w: jnp.dot(x, CONTAINER["w"]) + jnp.dot(x, w)
    assert_close(vn.implicit(f)(X, value), 2 * jnp.dot(X, vn.materialise(value)))


@pytest.mark.parametrize("within", WITHIN)
def test_a_value_can_wrap_an_argument(value, within):
    leaves, _ = vn.tree.flatten_one_layer(VALUES["lora"])
    f = lambda x, w: WITHIN[within](
        lambda x: jnp.dot(x, vn.types.LoraArray(w, *leaves[1:]))  # of one that is an argument
    )(x)
    dense = vn.materialise(value) + leaves[1] @ leaves[2]
    expected = WITHIN[within](lambda x: jnp.dot(x, dense))(X)
    assert_close(vn.implicit(f)(X, value), expected)
    assert_close(jax.jit(vn.implicit(f))(X, value), expected)


@pytest.mark.parametrize("jit", AROUND.values(), ids=AROUND)
def test_inner_derivatives_by_leaves_agree(jit):
    w, a, b = jax.tree.leaves(VALUES["lora"])
    of_leaves = lambda a, b: jnp.sin(jnp.dot(X, vn.types.LoraArray(w, a, b))).sum()
    dense = lambda a, b: jnp.sin(X @ (w + a @ b)).sum()
    expected = jax.grad(dense, argnums=(0, 1))(a, b)
    found = jax.jit(vn.implicit(jit(jax.grad(of_leaves, argnums=(0, 1)))))(a, b)
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_vmap_builds_a_batch_of_values(value):
    many = jax.tree.map(lambda x: jnp.stack([x, x]), jax.tree.leaves(value))
    f = lambda leaves: jnp.dot(X, built(leaves))
    found = jax.jit(vn.implicit(jax.vmap(f), on_materialise=only_by_rules))(many)
    assert_close(found, jnp.stack(2 * [jnp.dot(X, vn.materialise(value))]))


def test_types_without_batch_axes_are_materialized_in_vmap():
    class Normed(vn.ImplicitArray):
        x: jax.Array
        batch_transparent = False

        def materialise(self):
            return self.x / jnp.linalg.norm(self.x)

    xs = arrays.normal(3, 8, seed=2)
    found = jax.jit(vn.implicit(jax.vmap(lambda x: jnp.cos(Normed(x)))))(xs)
    assert_close(found, jnp.cos(xs / jnp.linalg.norm(xs, axis=1, keepdims=True)))


# Parts.


def parts(name):
    params = {"w": VALUES[name], "b": jnp.ones(6)}
    return vn.tree.partition(params, vn.trainable(params))


def loss(params):
    return jnp.sin(jnp.dot(X, params["w"]) + params["b"]).sum()


CALLS = {
    "an argument and a captured one": lambda t, r: vn.implicit(
        lambda t: loss(vn.tree.combine(t, r))
    )(t),
    "two arguments": lambda t, r: vn.implicit(lambda t, r: loss(vn.tree.combine(t, r)))(t, r),
    "combined before": lambda t, r: vn.implicit(loss)(vn.tree.combine(t, r)),
    "beside one that is captured": lambda t, r: vn.implicit(lambda p: (t, loss(p))[1])(
        vn.tree.combine(t, r)
    ),
    "in a jitted function": lambda t, r: vn.implicit(
        jax.jit(lambda t, r: loss(vn.tree.combine(t, r)))
    )(t, r),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("jit", AROUND.values(), ids=AROUND)
def test_partitions_are_plain_trees(call, name, jit):
    trained, rest = parts(name)
    expected = loss(vn.materialise(vn.tree.combine(trained, rest)))
    assert_close(jit(CALLS[call])(trained, rest), expected)


@pytest.mark.parametrize("order", ["grad of implicit", "implicit of grad"])
@pytest.mark.parametrize("name", VALUES)
def test_the_gradient_of_a_partition_has_its_leaves(name, order):
    trained, rest = parts(name)
    f = lambda trained: loss(vn.tree.combine(trained, rest))
    before = jax.grad(lambda trained: vn.implicit(loss)(vn.tree.combine(trained, rest)))(trained)
    f = jax.grad(vn.implicit(f)) if order == "grad of implicit" else vn.implicit(jax.grad(f))
    found = f(trained)
    assert jax.tree.structure(found) == jax.tree.structure(trained)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(before), strict=True):
        assert_close(one, other)


def test_types_without_array_annotations_can_be_partitioned():
    class Shifted(vn.ImplicitArray):
        parts: tuple

        def materialise(self):
            return self.parts[0] + self.parts[1]

    w = Shifted((DENSE, jnp.ones(())))
    trained, rest = vn.tree.partition(w, lambda x: x.ndim > 0)
    f = lambda trained, rest: jnp.dot(X, vn.tree.combine(trained, rest))
    assert_close(vn.implicit(f)(trained, rest), X @ (DENSE + 1))


@pytest.mark.parametrize("mode", [lambda f: f, vn.implicit, jax.jit])
def test_a_partition_is_rejected_as_an_operand(mode):
    trained, _ = parts("lora")
    with pytest.raises(TypeError, match=r"LoraArray\(w=None.*has None instead.*vn\.tree\.combine"):
        mode(lambda trained: jnp.dot(X, trained["w"]))(trained)


# Without `implicit`.

REFUSED = {
    "dot": lambda w: jnp.dot(X, w),
    "sin": lambda w: jnp.sin(w),
    "asarray": lambda w: jnp.asarray(w),
    "relu": lambda w: jax.nn.relu(w),
    "einsum": lambda w: jnp.einsum("ij,jk->ik", X, w),
    "stack": lambda w: jnp.stack([w, w]),
}


@pytest.mark.parametrize("jit", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("name", REFUSED)
def test_functions_outside_implicit_raise(name, jit):
    f = jit(functools.partial(REFUSED[name], VALUES["nf4"]))
    with pytest.raises(RuntimeError, match=r"QArray:f32\[8,6\] outside vn\.implicit"):
        f()


def test_functions_of_lax_outside_implicit_raise():
    with pytest.raises(RuntimeError, match=r"^JAX functions cannot take QArray:f32\[8,6\] outside"):
        jax.lax.dot(X, VALUES["nf4"])


def test_a_program_traced_under_implicit_raises_without_it():
    f = jax.jit(lambda x: jnp.dot(x, CONTAINER["w"]))
    CONTAINER["w"] = VALUES["nf4"]
    assert_close(jax.jit(vn.implicit(f))(X), X @ vn.materialise(VALUES["nf4"]))
    with pytest.raises(RuntimeError, match=r"vn\.implicit"):
        f(X)


def test_operators_and_methods_agree_with_the_dense_array(value):
    dense = vn.materialise(value)
    assert_close(X @ value, X @ dense)
    assert_close(DENSE - value, DENSE - dense)
    assert ((value == DENSE) == (dense == DENSE)).all()
    assert_close(jax.jit(lambda x: x @ value)(X), X @ dense)


def test_a_partition_without_missing_fields_raises():
    lora = vn.types.LoraArray(DENSE, jnp.ones((8, 2)), jnp.ones((2, 6)), magnitude=jnp.ones((1, 6)))
    rest, magnitude = vn.tree.partition(
        {"w": lora}, jax.tree.map(lambda x: x is not lora.magnitude, {"w": lora})
    )
    dense = vn.materialise(lora)
    assert_close(vn.materialise(vn.tree.combine(rest, magnitude)["w"]), dense)
    f = lambda p, q: jnp.dot(X, vn.tree.combine(p, q)["w"])
    with pytest.raises(TypeError, match="Combine the trees outside vn"):
        vn.implicit(f)(rest, magnitude)


def test_an_optional_field_can_be_none():
    class Sum(vn.ImplicitArray):
        a: jax.Array
        b: jax.Array = None

        def materialise(self):
            return self.a if self.b is None else self.a + self.b

    assert_close(vn.implicit(lambda w: jnp.dot(X, w))(Sum(DENSE)), X @ DENSE)
    assert_close(X @ Sum(DENSE, DENSE), 2 * X @ DENSE)


@pytest.mark.parametrize("use", [lambda w: X @ w, lambda w: w + w, lambda w: -w, lambda w: w.sum()])
def test_operators_of_a_partition_name_the_missing_arrays(use):
    part, _ = parts("lora")
    with pytest.raises(TypeError, match="has None instead of some arrays"):
        use(part["w"])
