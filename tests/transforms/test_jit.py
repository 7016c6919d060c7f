"""jit keeps types, shardings, donated memory and cached programs.

matrix/test_calls.py tests its results, in every position and with every option.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import arrays
from support.array_types import MAKERS, Lora, assert_close

import veneer as vn
from veneer._core.primitives import staging

X = arrays.array(np.linspace(-1.0, 1.0, 18).reshape(3, 6))
KEY = arrays.key(1)


def test_implicit_results_leave_jit_unchanged():
    w = MAKERS["int4"](KEY)
    for wrap in (lambda f: jax.jit(vn.implicit(f)), lambda f: vn.implicit(jax.jit(f))):
        out = wrap(lambda w: (w, w.T))(w)
        assert [type(o) for o in out] == [vn.quant.QArray] * 2
        assert_close(out, (vn.materialise(w), vn.materialise(w).T))


def test_a_static_argument_of_an_implicit_function():
    w = MAKERS["lora"](KEY)
    g = jax.jit(vn.implicit(lambda x, w, n: x @ w * n), static_argnums=2)
    assert_close(g(X, w, 3), X @ vn.materialise(w) * 3)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_leaves_are_deleted():
    w = MAKERS["lora"](KEY)
    dense = vn.materialise(w)
    g = jax.jit(lambda w: w, donate_argnums=0)
    out = vn.implicit(g)(w)
    assert_close(out, dense)
    assert w.w.is_deleted()
    assert w.a.is_deleted()


def computed_shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all results in a jaxpr and in the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield from (out.aval.shape for out in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from computed_shapes(inner)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit inside"])
def test_the_dense_weight_of_a_lora_is_never_computed(wrap):
    x, w = jnp.ones((1, 512)), MAKERS["lora"](KEY, (512, 512))
    shapes = lambda f: set(computed_shapes(jax.make_jaxpr(vn.implicit(wrap(f)))(x, w)))
    assert (512, 512) not in shapes(lambda x, w: x @ w)
    assert (512, 512) in shapes(lambda x, w: jnp.exp(w))  # for which there is no rule


def test_shardings_of_dense_operands_are_kept():
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    by_rows = NamedSharding(mesh, PartitionSpec("rows"))
    w = MAKERS["lora"](KEY)
    g = jax.jit(lambda x, w: (x, x @ w), in_shardings=(by_rows, None))
    same, product = vn.implicit(g)(jnp.ones((8, 6)), w)
    assert same.sharding.is_equivalent_to(by_rows, 2)
    assert product.sharding.is_equivalent_to(by_rows, 2)


@pytest.fixture
def stagings(monkeypatch):
    """Grows by one each time that a jaxpr is staged for implicit operands."""
    stage, calls = staging._stage, []
    monkeypatch.setattr(staging, "_stage", lambda *args: calls.append(args) or stage(*args))
    return calls


def test_a_second_call_stages_nothing_new(stagings):
    w = MAKERS["lora"](KEY)
    g = jax.jit(lambda x, w: x @ w)
    for _ in range(3):
        vn.implicit(g)(X, w)
    assert len(stagings) == 1


def test_operands_of_another_type_are_staged_for(stagings):
    g = jax.jit(lambda x, w: x @ w)
    for name in ("lora", "int8", "lora of int8", "lora"):
        vn.implicit(g)(X, MAKERS[name](KEY))
    assert len(stagings) == 3


def test_a_rule_registered_late_stages_anew(stagings):
    class Late(Lora):
        pass

    w = MAKERS["lora"](KEY)
    w = Late(w.w, w.a, w.b)
    g = jax.jit(lambda w: jnp.cos(w))
    vn.implicit(g)(w)

    @vn.register("cos")
    def _(x: Late, **params):
        return x.w

    assert_close(vn.implicit(g)(w), w.w)
    assert len(stagings) == 2


def test_staged_programs_are_freed_with_the_function():
    w = MAKERS["lora"](KEY)
    token = type("Token", (), {})()
    freed = weakref.ref(token)

    def scope(token):
        g = jax.jit(lambda x, w: (token, x @ w)[1])
        vn.implicit(g)(X, w)

    scope(token)
    del token
    jax.clear_caches()
    gc.collect()
    assert freed() is None
