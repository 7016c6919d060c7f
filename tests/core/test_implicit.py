"""`vn.implicit`: its filter, its results, and its reports of materialization."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from support import arrays
from support.array_types import Lora, OneHot, Tagged, assert_close, by_numpy, lora

import veneer as vn

W = lora(arrays.key(0))
DENSE = arrays.array(by_numpy(W))

X = arrays.array(np.linspace(-1.0, 1.0, 18).reshape(3, 6))


def test_a_program_of_dense_values_has_the_same_jaxpr():
    f = lambda x: jnp.tanh(x @ DENSE).sum()
    with_values = lambda x, w: f(x)
    plain = jax.make_jaxpr(lambda x, a, b, c: f(x))(X, W.w, W.a, W.b)
    assert str(jax.make_jaxpr(vn.implicit(with_values))(X, W)) == str(plain)


def test_results_and_containers_can_be_implicit():
    out = vn.implicit(lambda tree: {"same": tree["w"], "x": tree["w"] @ X.T})({"w": W})
    assert isinstance(out["same"], Lora)
    assert_close(out["x"], DENSE @ X.T)


def test_keyword_arguments_can_be_implicit():
    assert_close(vn.implicit(lambda x, *, w: x @ w)(X, w=W), X @ DENSE)


def test_the_function_can_be_a_pytree_of_values():
    layer = jax.tree_util.Partial(lambda w, x: jnp.dot(x, w), W)
    assert_close(vn.implicit(layer)(X), X @ DENSE)


def test_a_captured_value_works_through_operators():
    assert_close(vn.implicit(lambda x: x @ W + 1)(X), X @ DENSE + 1)
    assert_close(jax.jit(vn.implicit(lambda x: x @ W))(X), X @ DENSE)


@pytest.mark.parametrize(
    "spec",
    [lambda v: isinstance(v, Lora), (False, (False, True), False), (False, True, False)],
    ids=["predicate", "position", "prefix"],
)
def test_filter_spec_selects_the_implicit_operands(spec):
    seen = []
    f = lambda x, w: seen.append(type(w)) or x
    vn.implicit(f, spec)(X, W)
    vn.implicit(f, lambda v: False)(X, W)
    vn.implicit(f, False)(X, W)
    assert [t is Lora for t in seen] == [False, True, True]


def test_filter_spec_must_be_a_tree_prefix():
    with pytest.raises(ValueError, match=r"prefix of \(fn, args, kwargs\)"):
        vn.implicit(lambda x: x, (True, (True, True)))(W)


class Hidden(vn.ImplicitArray):
    x: jax.Array

    def materialise(self):
        raise RuntimeError("Hidden stays hidden")

    def aval(self):
        return jax.typeof(self.x)


@vn.register("dot_general")
def _(x: Hidden, y: vn.ArrayLike | vn.ImplicitArray, **params):
    return vn.implicit(lambda x, y: jax.lax.dot_general(x, y, **params))(x.x, y)


IS_HIDDEN = lambda v: isinstance(v, Hidden)
IS_ONE_HOT = lambda v: isinstance(v, OneHot)


def test_nested_transforms_resolve_an_ambiguity():
    hidden, one_hot = Hidden(X), OneHot(jnp.float32(2), 1, 6)
    with pytest.raises(vn.AmbiguousLookupError):
        vn.implicit(jnp.matmul)(hidden, one_hot)
    inner = vn.implicit(jnp.matmul, IS_HIDDEN)
    assert_close(vn.implicit(inner, IS_ONE_HOT)(hidden, one_hot), X[:, 1] * 2)
    inner = vn.implicit(jnp.matmul, (False, (True, False), False))
    outer = vn.implicit(inner, (False, (False, True), False))
    assert_close(outer(hidden, one_hot), X[:, 1] * 2)


def test_the_wrong_order_of_nesting_is_an_error():
    hidden, one_hot = Hidden(X), OneHot(jnp.float32(2), 1, 6)
    inner = vn.implicit(jnp.matmul, IS_ONE_HOT)
    with pytest.raises(RuntimeError, match="Hidden stays hidden"):
        vn.implicit(inner, IS_HIDDEN)(hidden, one_hot)


@pytest.mark.parametrize(
    "use",
    [jnp.sin, lambda w: jax.make_jaxpr(lambda: jnp.sin(w))(), lambda w: vn.implicit(jnp.add)(W, w)],
    ids=["eagerly", "in a trace", "in another call"],
)
def test_a_leaked_value_is_an_error(use):
    leaked = []
    vn.implicit(lambda w: leaked.append(w))(W)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        use(leaked[0])


def test_rules_keep_metadata():
    out = vn.implicit(lambda t: jnp.tanh(-jnp.sin(t)))(Tagged(X, "m"))
    assert (type(out), out.label) == (Tagged, "m")
    with pytest.raises(RuntimeError, match="refuses to lose its label 'm'"):
        vn.implicit(jnp.exp)(Tagged(X, "m"))


# on_materialise and explain.


def test_the_error_names_primitive_types_bytes_and_line():
    # Not jnp.exp, which is jitted: its line is that where JAX first traced it for the shape.
    with pytest.raises(vn.MaterialiseError) as error:
        vn.implicit(lambda w: jax.lax.exp(w), on_materialise="error")(W)
    message = str(error.value)
    assert message.startswith("exp(Lora:f32[6,6]) at ")
    assert "test_implicit.py:" in message
    assert "144 bytes" in message


def test_on_materialise_warn_warns():
    with pytest.warns(vn.MaterialiseWarning, match=r"exp\(Lora:f32\[6,6\]\)"):
        vn.implicit(jnp.exp, on_materialise="warn")(W)


def test_on_materialise_reports_no_inner_events():
    class Doubled(vn.ImplicitArray):
        w: vn.ImplicitArray

        def materialise(self):
            return self.w * 2.0  # for which a Lora has no rule

    with pytest.warns(vn.MaterialiseWarning) as warned:
        out = vn.implicit(jnp.exp, on_materialise="warn")(Doubled(W))
    assert_close(out, jnp.exp(DENSE * 2.0))
    assert [str(w.message).partition(" at ")[0] for w in warned] == ["exp(Doubled:f32[6,6])"]


def test_on_materialise_calls_a_callback():
    events = []
    vn.implicit(lambda x, w: x @ w + w.sum(), on_materialise=events.append)(X, W)
    assert [(e.primitive, e.nbytes) for e in events] == [("reduce_sum", 144)]


def test_an_unknown_on_materialise_raises():
    with pytest.raises((ValueError, TypeCheckError), match="sometimes"):
        vn.implicit(jnp.exp, on_materialise="sometimes")


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda w: jax.lax.map(lambda _: f(w), jnp.arange(2)),
        lambda f: vn.implicit(lambda w: f(w)),
        lambda f: jax.grad(lambda w: f(w).sum()),
    ],
    ids=["jit", "checkpoint", "map", "nested", "grad"],
)
def test_on_materialise_applies_inside_other_programs(wrap):
    f = wrap(lambda w: jnp.exp(w))
    vn.implicit(f)(W)  # staged once where it is allowed
    with pytest.raises(vn.MaterialiseError):
        vn.implicit(f, on_materialise="error")(W)


def test_explain_reports_rules_and_materialisations():
    report = vn.explain(jax.jit(lambda x, w: jnp.exp(x @ w)[0] + w))(X, W)
    assert [e.primitive for e in report.events] == ["dot_general", "add"]
    ran, fell_back = report.events
    assert "array_types.py:" in ran.rule
    assert "test_implicit.py:" in ran.line
    assert (fell_back.rule, fell_back.nbytes) == (None, 144)
    assert report.materialised == (fell_back,)
    assert "materialized" in str(report)
    assert "144" in str(report)
    assert "<td>dot_general</td>" in report.to_html()


def test_explain_takes_transformed_functions():
    for fn in (vn.implicit(jnp.matmul), jax.jit(vn.implicit(jnp.matmul))):
        for _ in range(2):  # nothing cached hides an event
            assert [e.primitive for e in vn.explain(fn)(X, W).events] == ["dot_general"]


def test_explain_passes_other_arguments_unchanged():
    f = lambda x, w, name, n: x.reshape(n, -1) @ w if name == "go" else None
    assert len(vn.explain(f)(X, W, "go", 3).events) == 1
