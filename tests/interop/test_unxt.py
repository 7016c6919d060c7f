"""Run `unxt` and `quaxed` unchanged, with `veneer.interop.quax` in place of Quax."""

import importlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import arrays
from support.array_types import assert_close

import veneer as vn
import veneer.interop.quax as quax


@pytest.fixture(scope="module")
def unxt():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "quax", quax)
        yield importlib.import_module("unxt")


@pytest.fixture(scope="module")
def qnp(unxt):
    return importlib.import_module("quaxed.numpy")


LENGTH, TIME = arrays.array([1.0, 4.0, 9.0]), arrays.array([2.0, 0.5, 4.0])

# Functions of a module like jax.numpy, a length and a time, with the unit of the result.
FUNCTIONS = {
    "add": (lambda np, x, t: x + 3 * x, "m"),
    "subtract": (lambda np, x, t: x - x[0], "m"),
    "multiply": (lambda np, x, t: x * t, "m s"),
    "divide": (lambda np, x, t: x / t, "m / s"),
    "power": (lambda np, x, t: x**3, "m3"),
    "reciprocal": (lambda np, x, t: 1 / t, "1 / s"),
    "matmul": (lambda np, x, t: x @ t, "m s"),
    "sqrt": (lambda np, x, t: np.sqrt(x), "m(1/2)"),
    "sum": (lambda np, x, t: np.sum(x * x), "m2"),
    "mean": (lambda np, x, t: np.mean(x), "m"),
    "maximum": (lambda np, x, t: np.maximum(x, 2 * x[1]), "m"),
    "cumsum": (lambda np, x, t: np.cumsum(x), "m"),
    "stack": (lambda np, x, t: np.stack([x, -x]).T, "m"),
    "sin": (lambda np, x, t: np.sin(x / x[1]), ""),
    "where": (lambda np, x, t: np.where(x > x[1], x, -x), "m"),
}


def is_quantity(unxt, out, value, unit: str) -> None:
    assert out.unit == unxt.unit(unit)
    assert_close(out.value, value)


def test_unxt_runs_on_our_core(unxt, qnp):
    assert issubclass(unxt.Quantity, vn.Value)
    assert "quax._trace" not in sys.modules
    report = vn.explain(qnp.multiply)(unxt.Quantity(LENGTH, "m"), unxt.Quantity(TIME, "s"))
    assert [e.primitive for e in report.events] == ["mul"]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_quantities_are_numbers_times_units(unxt, qnp, name, wrap):
    f, unit = FUNCTIONS[name]
    out = wrap(lambda x, t: f(qnp, x, t))(unxt.Quantity(LENGTH, "m"), unxt.Quantity(TIME, "s"))
    is_quantity(unxt, out, f(jnp, LENGTH, TIME), unit)


def test_units_are_converted(unxt):
    out = unxt.Quantity(LENGTH, "m") + unxt.Quantity(LENGTH, "km")
    is_quantity(unxt, out, LENGTH + 1000 * LENGTH, "m")


def test_units_that_do_not_fit_are_refused(unxt):
    with pytest.raises(Exception, match="not convertible"):
        unxt.Quantity(LENGTH, "m") + unxt.Quantity(TIME, "s")


def test_a_quantity_refuses_to_be_dense(unxt):
    with pytest.raises(RuntimeError, match="Refusing to materialise"):
        quax.quaxify(jax.extend.core.Primitive("unheard_of").bind)(unxt.Quantity(LENGTH, "m"))


def test_the_gradient_of_a_quantity_has_the_unit_of_the_quotient(unxt, qnp):
    quaxed = importlib.import_module("quaxed")
    x = unxt.Quantity(3.0, "m")
    is_quantity(unxt, quaxed.grad(lambda x: x**3)(x), 27.0, "m2")
    is_quantity(unxt, unxt.experimental.grad(lambda x: x**3, units=("m",))(x), 27.0, "m2")


def test_the_gradient_by_leaves_is_a_quantity(unxt, qnp):
    t = unxt.Quantity(TIME, "s")
    speed = lambda x: qnp.sum(x / t).value
    g = jax.jit(jax.grad(speed))(unxt.Quantity(LENGTH, "m"))
    is_quantity(unxt, g, 1 / TIME, "m")


def test_vmap_of_quantities(unxt, qnp):
    x = unxt.Quantity(jnp.stack([LENGTH, -LENGTH]), "m")
    is_quantity(unxt, jax.vmap(qnp.sum)(x), jnp.sum(x.value, axis=1), "m")


def test_a_loop_over_quantities(unxt):
    x, v = unxt.Quantity(LENGTH, "m"), unxt.Quantity(TIME, "m / s")

    def steps(x, v, dt):
        return lax.scan(lambda x, _: (x + v * dt, x), x, length=3)

    end, path = quax.quaxify(steps)(x, v, unxt.Quantity(0.5, "s"))
    expected_end, expected_path = steps(LENGTH, TIME, 0.5)
    is_quantity(unxt, end, expected_end, "m")
    is_quantity(unxt, path, expected_path, "m")
