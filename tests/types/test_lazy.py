"""`Lazy`: its results, and how often its function runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.claims import Claim, claims

import veneer as vn
from veneer.types.lazy import Lazy


def gram(x):
    return x @ jnp.swapaxes(x, -1, -2)


def lazy(draw):
    return Lazy(gram, draw(draw.n, 2))


def of_several(draw):
    return Lazy(scaled, {"x": draw(draw.n)}, draw(1))


def scaled(tree, y):
    return jnp.tanh(tree["x"]) * y


NEEDED = {"made_dense": True}

# Transformations after the materialization are not specific to this type.
COMPILED = ("implicit of jit", "implicit of vmap", "implicit of scan")

CLAIMS = {
    "elementwise": Claim(lambda x: jnp.sin(x) + x, [lazy], **NEEDED),
    "operands that are trees": Claim(lambda x: x * 2, [of_several], **NEEDED),
    "a product": Claim(lambda x, y: y @ x, [lazy, lambda d: d(2, d.n)], **NEEDED),
    "needed in a loop": Claim(
        lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + x.sum(), jnp.zeros((), x.dtype)),
        [lazy],
        **NEEDED,
    ),
    "one branch": Claim(
        lambda x: jax.lax.cond(x.ndim == 2, lambda x: x.sum(), lambda x: x.max(), x),
        [lazy],
        **NEEDED,
        sizes=(1, 5),  # max raises for size 0
    ),
    "branches that defer otherwise": Claim(
        lambda x, p: jax.lax.cond(p.sum() > 0, lambda x: x.mT, lambda x: x, x),
        [lazy, lambda d: d.positive()],
        **NEEDED,
    ),
    "stop_gradient": Claim(jax.lax.stop_gradient, [lazy], Lazy, without=COMPILED),
    "astype": Claim(lambda x: x.astype("int32"), [lazy], Lazy, without=COMPILED),
}

test_under, test_over_sizes_and_dtypes = claims(CLAIMS)


class Counter:
    """A function that counts its runs, including runs of compiled programs."""

    def __init__(self):
        self._runs = 0

    def __call__(self, x):
        jax.debug.callback(self._count)
        return x @ x.T

    def _count(self):
        self._runs += 1

    @property
    def runs(self) -> int:
        jax.effects_barrier()
        return self._runs


X = arrays.array(np.arange(6.0).reshape(3, 2))


@pytest.fixture
def counter():
    return Counter()


ONCE = {
    "two primitives": lambda x: jnp.sin(x) + jnp.cos(x),
    "two jitted functions": lambda x: jnp.linalg.norm(x) + jnp.var(x),
    "a jitted function of one's own": jax.jit(lambda x: jnp.sin(x) + x.sum()),
    "a custom derivative": lambda x: jax.nn.relu(x) + jax.nn.silu(x),
    "others made of it": lambda x: x + x.astype(int) + jax.lax.stop_gradient(x),
    "a loop": lambda x: jax.lax.scan(lambda c, _: (c + x.sum(), None), 0.0, length=4)[0],
    "an open loop": lambda x: jax.lax.fori_loop(0, 4, lambda i, c: c + x.sum(), 0.0),
    "a derivative of the program": jax.grad(lambda x: (jnp.sin(x) * x).sum()),
}


@pytest.mark.parametrize("program", ONCE.values(), ids=ONCE)
def test_function_runs_once(program, counter):
    x = Lazy(counter, X)
    out = vn.implicit(program)(x)
    assert counter.runs == 1
    assert jnp.allclose(out, program(X @ X.T), rtol=1e-5)


def test_eager_operators_run_the_function_once(counter):
    x = Lazy(counter, X)
    dense = X @ X.T
    assert jnp.allclose((x + 1) @ x - x.sum(), (dense + 1) @ dense - dense.sum())
    assert counter.runs == 1


UNNEEDED = {
    "ignored": lambda x: 0.0,
    "its shape": lambda x: jnp.zeros(x.shape),
    "handed through a jit": jax.jit(lambda x: (x, 1.0)),
    "in the branch not taken": lambda x: jax.lax.cond(False, lambda: x.sum(), lambda: 0.0),
}


@pytest.mark.parametrize("program", UNNEEDED.values(), ids=UNNEEDED)
def test_function_does_not_run_unless_needed(program, counter):
    vn.implicit(program)(Lazy(counter, X))
    assert counter.runs == 0


def test_traced_results_are_not_cached(counter):
    x = Lazy(counter, X)
    with jax.check_tracer_leaks():
        jax.jit(lambda y: vn.implicit(lambda y: y + x)(y))(1.0)
    assert jnp.array_equal(vn.materialise(x), X @ X.T)


def test_cache_depends_on_the_matmul_precision(counter):
    x = Lazy(counter, X)
    vn.materialise((x, x))
    with jax.default_matmul_precision("bfloat16"):
        vn.materialise((x, x))
    assert counter.runs == 2


def test_report_names_the_operation_that_materializes():
    report = vn.explain(lambda x: jnp.sin(x.astype(float)))(Lazy(gram, X))
    assert [event.primitive for event in report.materialised] == ["sin"]


class Doubled(vn.ImplicitArray):
    """Twice an array, with a rule for `sin`."""

    x: jax.Array

    def materialise(self):
        return self.x * 2


@vn.register("sin")
def _(x: Doubled, **params):
    return jnp.zeros_like(x.x)


def test_rules_of_implicit_operands_run():
    assert jnp.array_equal(vn.materialise(Lazy(jnp.sin, Doubled(X))), jnp.zeros_like(X))
    assert jnp.array_equal(vn.materialise(Lazy(jnp.cos, Doubled(X))), jnp.cos(2 * X))
    assert jnp.array_equal(vn.materialise(Lazy(lambda x: x, Doubled(X))), 2 * X)


# Deferred primitives.

LU = jax.make_jaxpr(jax.lax.linalg.lu)(arrays.eye(2)).eqns[0].params
SQUARE, HALF = arrays.array([[1.0, 2.0], [3.0, 4.0]]), arrays.array([[0.5, 1.0], [1.5, 2.0]])


@pytest.mark.parametrize("operand", [SQUARE, Doubled(HALF)], ids=["dense", "implicit"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_each_result_of_a_primitive_is_lazy(operand, transform):
    outputs = Lazy.deferred("lu", [operand], LU)
    expected = jax.lax.linalg.lu(SQUARE)
    for output, e in zip(transform(vn.materialise)(outputs), expected, strict=True):
        assert (output.shape, output.dtype) == (e.shape, e.dtype)
        assert jnp.array_equal(output, e)


def test_results_of_a_primitive_share_a_run(monkeypatch):
    primitive = jax.lax.linalg.lu_p
    bind, runs = primitive.bind, []
    vn.materialise(Lazy.deferred(primitive, [SQUARE], LU))  # compilation binds it once more
    outputs = Lazy.deferred(primitive, [SQUARE], LU)
    monkeypatch.setattr(primitive, "bind", lambda *x, **p: runs.append(1) or bind(*x, **p))
    vn.materialise(outputs)
    assert len(runs) == 1


def test_results_of_a_primitive_share_a_compiled_run():
    program = jax.jit(lambda x: vn.materialise(Lazy.deferred("lu", [x], LU)))
    assert program.lower(SQUARE).compile().as_text().count(" custom-call(") == 1


def test_rule_can_defer_its_own_primitive():
    @vn.register("exp")
    def _(x: Doubled, **params):
        return Lazy.deferred("exp", [x], params)

    y = vn.implicit(jnp.exp)(Doubled(X))
    assert isinstance(y, Lazy)
    assert jnp.array_equal(vn.materialise(y), jnp.exp(2 * X))


# Equality and display.


def test_equal_partials_are_compiled_once():
    rows, also_rows = (Lazy(functools.partial(jnp.sum, axis=0), X) for _ in range(2))
    columns = Lazy(functools.partial(jnp.sum, axis=1), X)
    assert jax.tree.structure(rows) == jax.tree.structure(also_rows)
    assert jax.tree.structure(rows) != jax.tree.structure(columns)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (lambda: Lazy(gram, X), "Lazy(gram, f32[3,2])"),
        (lambda: Lazy(functools.partial(jnp.sum, axis=0), X), "Lazy(sum[axis=0], f32[3,2])"),
        (lambda: Lazy(gram, Doubled(X)), "Lazy(gram, Doubled(x=f32[3,2]))"),
        (lambda: Lazy.deferred("lu", [SQUARE], LU)[2], "Lazy(lu, f32[2,2])[2]"),
    ],
)
def test_repr_looks_like_a_call(value, shown):
    assert repr(value()) == shown


def test_nbytes_counts_the_operands():
    assert Lazy(gram, X).nbytes == X.nbytes


ERRORS = {
    "no function": (lambda: Lazy(X, X), "takes a function and its operands"),
    "a function that holds arrays": (
        lambda: Lazy(functools.partial(jnp.add, np.ones(3)), X),
        "cannot be hashed.*Pass the arrays that it holds as operands",
    ),
    "an operand that is no array": (lambda: Lazy(gram, "x"), r"Lazy.operands\[0\] is 'x'"),
    "operands that do not fit": (lambda: Lazy(jnp.matmul, X, X), "dot_general requires"),
    "a captured tracer": (
        lambda: jax.grad(lambda w: Lazy(lambda x: x * w, X).sum())(1.0),
        "captures a traced array.* Pass it as an operand",
    ),
    "several results": (lambda: Lazy(lambda x: (x, x), X), "must return an array"),
}


@pytest.mark.parametrize(("make", "message"), ERRORS.values(), ids=ERRORS)
def test_invalid_arguments_raise(make, message):
    with pytest.raises(TypeError, match=message):
        make()
