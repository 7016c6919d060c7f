"""Materialization is reported on every call, whatever JAX or veneer has cached."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import pytest
from support import arrays
from support.array_types import lora

import veneer as vn
from veneer._core.primitives import staging

W = lora(arrays.key(0))
X = arrays.ones((6, 6))


@jax.jit
def captures(x):
    return x + (W * 1.5).sum()


PROGRAMS = {
    "an argument": (jax.lax.exp, W),
    "an argument of a jitted function": (jax.jit(jnp.exp), W),
    "captured by a jitted function": (captures, X),
}


@pytest.mark.parametrize(("program", "operand"), PROGRAMS.values(), ids=PROGRAMS)
def test_every_call_raises_the_error(program, operand):
    vn.implicit(program)(operand)  # cached where it is allowed
    for _ in range(2):
        with pytest.raises(vn.MaterialiseError):
            vn.implicit(program, on_materialise="error")(operand)


def test_every_call_warns_and_names_the_file_of_the_user():
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            vn.implicit(jnp.exp, on_materialise="warn")(W)
        assert [(w.category, w.filename) for w in caught] == [(vn.MaterialiseWarning, __file__)]


def test_a_callback_runs_each_time_and_can_be_unhashable():
    @dataclasses.dataclass
    class Count:
        seen: int = 0

        def __call__(self, event):
            self.seen += 1

    count = Count()
    for _ in range(2):
        vn.implicit(jnp.exp, on_materialise=count)(W)
    assert count.seen == 2


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_every_explain_reports_captures_of_a_jit(wrap):
    program = wrap(vn.implicit(captures))
    for _ in range(2):
        assert [e.primitive for e in vn.explain(program)(X).events] == ["mul"]


def test_explain_reports_an_overridden_default():
    class Loud(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            return self.x

        @staticmethod
        def default(primitive, values, params):
            return jnp.zeros(2)

    [event] = vn.explain(lambda x: jnp.sin(x))(Loud(jnp.ones(2))).events
    assert (event.primitive, "test_policy.py:" in event.rule) == ("sin", True)


def test_cached_programs_report_events_on_every_call(monkeypatch):
    stage, staged, seen = staging._stage, [], []
    monkeypatch.setattr(staging, "_stage", lambda *args: staged.append(args) or stage(*args))
    f = vn.implicit(jax.jit(lambda w: jnp.exp(w) + 1), on_materialise=seen.append)
    for _ in range(3):
        f(W)
    assert (len(staged), [event.primitive for event in seen]) == (1, ["exp"] * 3)


def test_discarded_attempts_are_not_reported():
    loop = lambda w: jax.lax.fori_loop(0, 2, lambda i, w: jnp.exp(w), w)  # goes on dense
    report = vn.explain(loop)(W)
    assert [event.primitive for event in report.events] == ["scan"]


def test_each_branch_is_reported_once():
    choose = lambda w: jax.lax.cond(True, lambda w: w, lambda w: jnp.exp(w), w)
    assert sorted(e.primitive for e in vn.explain(choose)(W).events) == ["cond", "exp"]


def test_events_have_the_line_of_their_operation():
    def model(x, w):
        x = x @ w
        x = jnp.tanh(x)
        return x @ w  # jax.numpy has traced this before

    first = model.__code__.co_firstlineno
    lines = [event.line for event in vn.explain(model)(X, W).events]
    assert [line.rpartition(" (")[0] for line in lines] == [
        f"{__file__}:{first + i}" for i in (1, 3)
    ]
    again = [event.line for event in vn.explain(jax.jit(model))(X, W).events]
    assert [line.rpartition(" (")[0] for line in again] == [
        line.rpartition(" (")[0] for line in lines
    ]
