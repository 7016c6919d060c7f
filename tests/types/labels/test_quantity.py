"""Tests of `Quantity`: units of results, conversions, and errors where units differ."""

import subprocess
import sys

import astropy.units as astropy
import jax
import jax.numpy as jnp
import pytest
from support import arrays
from support.array_types import quantized
from support.claims import Claim, claims
from support.policies import only_by_rules

import veneer as vn
from veneer._jax.primitives import find_primitive
from veneer.types.named import Named
from veneer.types.quantity import Quantity


def strict(f):
    return vn.implicit(f, on_materialise=only_by_rules)


def quantity(unit, *shape):
    """Return a maker of positive quantities, of shape `[n]` by default."""
    return lambda draw: Quantity(draw.positive(*(shape or (draw.n,))), unit)


X, T = quantity("m"), quantity("s")
MATRIX = quantity("m", 3, 3)

# A program, makers of its operands, and the unit of its result (None if it has none).
PROGRAMS = {
    "sum": (jnp.add, [X, X], "m"),
    "difference": (lambda x: x - x[:1], [X], "m"),
    "product": (jnp.multiply, [X, T], "m s"),
    "product with a number": (lambda x: 3 * x, [X], "m"),
    "quotient": (jnp.divide, [X, T], "m / s"),
    "quotient of the same": (jnp.divide, [X, X], None),
    "reciprocal": (lambda t: 1 / t, [T], "1 / s"),
    "integer power": (lambda x: x**3, [X], "m3"),
    "power": (lambda x: x**1.5, [X], "m(3/2)"),
    "power of no unit": (lambda x, y: (x / x) ** y, [X, lambda draw: draw(draw.n)], None),
    "square root": (jnp.sqrt, [X], "m(1/2)"),
    "root of a square": (lambda x: jnp.sqrt(x * x), [X], "m"),
    "reciprocal root": (jax.lax.rsqrt, [X], "1 / m(1/2)"),
    "cube root": (jnp.cbrt, [X], "m(1/3)"),
    "magnitude": (lambda x: jnp.abs(-x), [X], "m"),
    "exponential of a number": (lambda x, y: jnp.exp(x / y), [X, X], None),
    "angle of two": (jnp.arctan2, [X, X], None),
    "comparison": (lambda x, y: jnp.where(x > y, x, y), [X, X], "m"),
    "choice of zero": (lambda x: jnp.where(x > x[0], x, 0), [X], "m"),
    "choice of NaN": (lambda x: jnp.where(x > x[0], x, jnp.nan), [X], "m"),
    "bound by zero": (lambda x: jnp.clip(x, 0), [X], "m"),
    "total": (jnp.sum, [X], "m"),
    "mean": (jnp.mean, [X], "m"),
    "variance": (jnp.var, [X], "m2"),
    "standard deviation": (jnp.std, [X], "m"),
    "maximum": (jnp.max, [X], "m"),
    "place of the maximum": (jnp.argmax, [X], None),
    "product of all": (jnp.prod, [quantity("m", 4)], "m4"),
    "norm": (jnp.linalg.norm, [X], "m"),
    "dot product": (jnp.matmul, [X, T], "m s"),
    "einsum": (lambda a, b: jnp.einsum("ij,kj->ki", a, b), [MATRIX, MATRIX], "m2"),
    "convolution": (jnp.convolve, [X, T], "m s"),
    "cumulative sum": (jnp.cumsum, [X], "m"),
    "joined": (lambda x, y: jnp.concatenate([x, y, jnp.zeros_like(x)]), [X, X], "m"),
    "stacked and turned": (lambda x: jnp.stack([x, -x]).T, [X], "m"),
    "updated": (lambda x: x.at[0].set(2 * x[0]), [X], "m"),
    "scaled in part": (lambda x: x.at[0].multiply(2.0), [X], "m"),
    "looked up": (lambda x: x[jnp.array([0, 0])], [X], "m"),
    "sorted": (jnp.sort, [X], "m"),
    "median": (jnp.median, [X], "m"),
    "rounded": (jnp.round, [X], "m"),
    "integral": (jnp.trapezoid, [X, T], "m s"),
    "triangular solve": (
        lambda a, b: jax.scipy.linalg.solve_triangular(a, b),
        [MATRIX, quantity("s", 3)],
        "s / m",
    ),
    "Cholesky": (lambda a: jnp.linalg.cholesky(a @ a.T), [MATRIX], "m"),
    "singular values": (lambda a: jnp.linalg.svd(a).S, [MATRIX], "m"),
    "singular vectors": (lambda a: jnp.linalg.svd(a).U, [MATRIX], None),
    "eigenvalues": (lambda a: jnp.linalg.eigh(a).eigenvalues, [MATRIX], "m"),
    "QR": (lambda a: jnp.linalg.qr(a).R, [MATRIX], "m"),
}

BY_VALUE = """
    sum|product|quotient of the same|power|choice of zero|standard deviation|dot product|joined
""".strip()

WITHOUT_UNITS = ("implicit of grad",)  # it computes the sine of the result

CLAIMS = {
    name: Claim(
        run,
        operands,
        unit and Quantity,
        sizes=(1, 5),
        without=WITHOUT_UNITS if unit else (),
    )
    for name, (run, operands, unit) in PROGRAMS.items()
    if name in BY_VALUE.split("|")
}

test_under, test_over_sizes_and_dtypes = claims(CLAIMS)


def is_in(out, unit):
    assert isinstance(out, Quantity if unit else jax.Array | jax.ShapeDtypeStruct)
    return unit is None or out.unit == astropy.Unit(unit)


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_have_the_expected_units(name):
    run, operands, unit = PROGRAMS[name]
    operands = Claim(run, operands).make()
    out = strict(run)(*operands)
    assert is_in(out, unit)
    numbers = [x.value if isinstance(x, Quantity) else x for x in operands]
    assert jnp.allclose(out.value if unit else out, run(*numbers), equal_nan=True, atol=1e-5)
    assert is_in(jax.eval_shape(jax.jit(strict(run)), *operands), unit)
    assert is_in(jax.eval_shape(strict(jax.jit(run)), *operands), unit)


OTHERS = {"m": "km", "s": "ms"}
IN_ITS_UNIT = {"rounded"}


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - IN_ITS_UNIT))
def test_results_do_not_depend_on_the_units_of_operands(name):
    run, operands, unit = PROGRAMS[name]
    operands = Claim(run, operands).make()
    other = [x.to(OTHERS[str(x.unit)]) if isinstance(x, Quantity) else x for x in operands]
    out, expected = strict(run)(*other), strict(run)(*operands)
    if unit:
        out, expected = out.to(unit).value, expected.value
    assert jnp.allclose(out, expected, rtol=1e-4, equal_nan=True)


METERS, KILOMETERS = Quantity(arrays.array([500.0, 2000.0]), "m"), Quantity(arrays.ones(2), "km")

CONVERTED = {
    "add": (lambda x, y: x + y, "m", [1500, 3000]),
    "other order": (lambda x, y: y + x, "km", [1.5, 3]),
    "compare": (lambda x, y: x > y, None, [False, True]),
    "maximum": (jnp.maximum, "m", [1000, 2000]),
    "choose": (lambda x, y: jnp.where(x > y, x, y), "m", [1000, 2000]),
    "join": (lambda x, y: jnp.concatenate([x, y])[1:3], "m", [2000, 1000]),
    "set": (lambda x, y: x.at[0].set(y[0]), "m", [1000, 2000]),
    "divide": (lambda x, y: x / y, None, [0.5, 2]),
    "remainder": (lambda x, y: x % y, "m", [500, 0]),
    "whole turns": (lambda x, y: x // y, None, [0, 2]),
    "clamp": (lambda x, y: jax.lax.clamp(y / 4, x, y), "km", [0.5, 1]),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_results_have_the_unit_of_the_first_operand(name):
    run, unit, expected = CONVERTED[name]
    out = strict(run)(METERS, KILOMETERS)
    assert is_in(out, unit)
    assert jnp.allclose(out.value if unit else out, jnp.array(expected))


LENGTH, TIME = Quantity(arrays.array([1.0, 2.0]), "m"), Quantity(arrays.array([3.0, 4.0]), "s")

REFUSED = {
    "add": lambda x, t: x + t,
    "sub": lambda x, t: x - 1.0,
    "gt": lambda x, t: x > 2,
    "max": lambda x, t: jnp.maximum(x, 1.0),
    "select_n": lambda x, t: jax.lax.select(x > 0, x, t),
    "concatenate": lambda x, t: jnp.concatenate([x, t]),
    "scatter": lambda x, t: x.at[0].set(1.0),
    "exp": lambda x, t: jnp.exp(x),
    "sin": lambda x, t: jnp.sin(x),
    "logistic": lambda x, t: jax.nn.sigmoid(x),
    "cumprod": lambda x, t: jnp.cumprod(x),
    "pow": lambda x, t: x ** jnp.array([1.0, 2.0]),
    "lu": lambda x, t: jax.lax.linalg.lu(jnp.outer(x, x)),
    "triangular_solve": lambda x, t: jax.lax.linalg.triangular_solve(
        jnp.outer(x, x), jnp.outer(t, t), unit_diagonal=True
    ),
}


@pytest.mark.parametrize("primitive", REFUSED)
def test_incompatible_units_raise(primitive):
    run = REFUSED[primitive]
    with pytest.raises(ValueError, match=rf"^{primitive}\(.*Quantity\(f32\[.*, 'm2?'\).*\): "):
        strict(run)(LENGTH, TIME)


def test_a_primitive_without_a_law_raises_with_a_remedy():
    with pytest.raises(ValueError, match=r"has a unit.*\.to\(unit\)\.value") as info:
        vn.implicit(lambda x: jax.lax.bitcast_convert_type(x, "int32"))(LENGTH)
    assert "bitcast_convert_type(Quantity:f32[2]" in info.value.__notes__[0]


def test_zeros_and_infinities_fit_any_unit():
    assert (LENGTH + 0).unit == (0 + LENGTH).unit == sum([LENGTH, LENGTH]).unit == astropy.m
    assert (LENGTH > 0).all()
    assert strict(jnp.less)(LENGTH, jnp.array([jnp.inf, 0.0])).tolist() == [True, False]
    last = strict(lambda x: jax.lax.fori_loop(0, 3, lambda i, _: x, jnp.zeros(2)))
    assert jax.jit(last)(LENGTH).value.tolist() == [1, 2]


def test_angles_are_converted_for_trigonometric_functions():
    for degrees in (Quantity(60.0, "deg"), Quantity(3600.0, "arcmin")):
        assert jnp.allclose(strict(jnp.cos)(degrees), 0.5)


def test_to_converts_to_another_unit():
    assert KILOMETERS.to("m").value.tolist() == [1000, 1000]
    assert METERS.to(astropy.km).unit == astropy.km
    with pytest.raises(ValueError, match="m cannot be converted to s"):
        METERS.to("s")


def test_integer_quotients_use_the_smaller_unit():
    meters, millimeters = Quantity(jnp.array([5, 7]), "m"), Quantity(jnp.array([40, 3000]), "mm")
    div = strict(jax.lax.div)
    assert div(meters, millimeters).tolist() == [125, 2]
    assert div(millimeters, meters).tolist() == [0, 0]
    assert div(millimeters, meters).dtype == meters.dtype


def test_integers_are_converted_only_by_integer_factors():
    one = Quantity(jnp.array(1), "km")
    assert (one.to("m").value == 1000, one.to("m").dtype) == (True, one.dtype)
    with pytest.raises(ValueError, match="int32 cannot represent"):
        Quantity(jnp.array(1), "m").to("km")
    assert Quantity(jnp.array(1), "m") / Quantity(jnp.array(2), "km") == 1 / 2000


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_factor_out_of_the_range_of_the_dtype_raises(dtype):
    with pytest.raises(ValueError, match=f"multiplies by 1000000000.0, which {dtype} cannot"):
        Quantity(jnp.ones((), dtype), "Gm").to("m")


def test_only_dimensionless_quantities_can_be_materialized():
    with pytest.raises(ValueError, match=r"Quantity\(f32\[2\], 'm'\) has a unit"):
        vn.materialise(LENGTH)
    assert vn.materialise(Quantity(2.0, "km / m")) == 2000
    assert jnp.allclose(vn.implicit(jnp.exp)(Quantity(1.0, "m / km")), jnp.exp(1e-3))


@pytest.mark.parametrize(
    ("value", "unit", "error", "match"),
    [
        ([1.0], "m", TypeError, "value"),
        (1.0, 3, TypeError, "a unit must be a unit of astropy"),
        (1.0, astropy.dex(astropy.m), TypeError, "a unit must be"),
        (1.0, "furlongs per blink", ValueError, "did not parse as unit"),
        (Named(arrays.ones(2), ("a",)), "m", TypeError, r"Named\(Quantity\(value, unit\), names\)"),
    ],
)
def test_invalid_arguments_raise(value, unit, error, match):
    with pytest.raises(error, match=match):
        Quantity(value, unit)


def test_enabled_equivalencies_of_astropy_are_ignored():
    with (
        astropy.set_enabled_equivalencies(astropy.spectral()),
        pytest.raises(ValueError, match="Hz"),
    ):
        Quantity(1.0, "m").to("Hz")


def speed(x, t):
    return (x * x / t).sum()


def test_gradients_under_implicit_have_the_quotient_unit():
    by_x, by_t = strict(jax.grad(speed, (0, 1)))(LENGTH, TIME)
    assert is_in(by_x, "m / s")
    assert is_in(by_t, "m2 / s2")
    expected = jax.grad(speed, (0, 1))(LENGTH.value, TIME.value)
    assert jnp.allclose(by_x.value, expected[0])
    assert jnp.allclose(by_t.value, expected[1])


def test_gradients_of_leaves_are_of_the_stored_numbers():
    g = jax.grad(lambda x: strict(speed)(x, TIME).to("km2 / s").value)(LENGTH)
    assert is_in(g, "m")
    assert jnp.allclose(g.value, 1e-6 * jax.grad(speed)(LENGTH.value, TIME.value))


def test_gradients_of_a_sum_have_the_units_of_the_operands():
    by_m, by_km = strict(jax.grad(lambda x, y: ((x + y) ** 2).sum(), (0, 1)))(METERS, KILOMETERS)
    assert is_in(by_m, "m")
    assert jnp.allclose(by_km.to("m").value, 2 * (METERS + KILOMETERS).value)
    by_m, by_km = jax.grad(lambda x, y: (strict(jnp.add)(x, y).value ** 2).sum(), (0, 1))(
        METERS, KILOMETERS
    )
    assert jnp.allclose(by_km.value, 1000 * by_m.value)  # by the number of kilometers


def test_a_loop_that_changes_the_unit_raises():
    fall = lambda x, v: jax.lax.scan(lambda x, _: (x + v * TIME[0], x), x, None, length=3)
    end, path = strict(fall)(LENGTH, LENGTH / TIME)
    assert is_in(end, "m")
    assert is_in(path, "m")
    assert path.shape == (3, 2)
    with pytest.raises(TypeError, match=r"'m'\) on one side and Quantity\(.*'m2'\) on the other"):
        vn.implicit(lambda x: jax.lax.fori_loop(0, 2, lambda i, y: y * x, x))(LENGTH)


def test_a_unit_that_cancels_in_a_loop_keeps_its_object():
    loop = lambda x, t: jax.lax.fori_loop(0, 2, lambda i, y: (y * t) / t, x)
    assert is_in(strict(loop)(LENGTH, TIME), "m")


def test_the_condition_of_a_while_loop_converts_units():
    double = lambda x, bound: jax.lax.while_loop(lambda x: x < bound, lambda x: x + x, x)
    out = strict(double)(Quantity(1.0, "m"), Quantity(1.0, "km"))
    assert (out.value, out.unit) == (1024, astropy.m)


def test_an_array_can_have_names_and_a_unit():
    x = Named(LENGTH, ("time",))
    out = strict(lambda x, y: jnp.where(x > 0, x * y, 0).cumsum())(x, Named(TIME, (None,)))
    assert (out.names, type(out.array)) == (("time",), Quantity)
    assert is_in(strict(jnp.sum)(x), "m")
    with pytest.raises(ValueError, match="s cannot be converted to m"):
        x + Named(TIME, ("time",))


def test_products_with_quantized_weights_have_units():
    w = quantized("int8", None)(jax.random.key(0), (2, 3))
    out = strict(jnp.matmul)(LENGTH, w)
    assert is_in(out, "m")
    assert jnp.allclose(out.value, LENGTH.value @ w, atol=1e-5)
    weights = Quantity(w, "kg")
    assert is_in(strict(jnp.matmul)(LENGTH, weights), "kg m")
    assert weights.nbytes == w.nbytes < weights.size * 4


def test_units_add_nothing_to_the_jaxpr():
    shown = str(jax.make_jaxpr(strict(lambda x, t: (x * x + x * x) / t))(LENGTH, TIME))
    plain = str(jax.make_jaxpr(lambda x, t: (x * x + x * x) / t)(LENGTH.value, TIME.value))
    assert shown == plain


@pytest.fixture(scope="module")
def pint():
    import pint

    return pint


@pytest.fixture(scope="module")
def registry(pint):
    return pint.UnitRegistry()


def test_units_of_pint_obey_the_same_laws(registry):
    x, t = Quantity(jnp.array([1.0, 4.0]), registry.m), Quantity(2.0, registry.s)
    out = jax.jit(strict(lambda x, t: jnp.sqrt(x * x) / t + x.sum() / t))(x, t)
    assert (out.unit, out.value.tolist()) == (registry.Unit("m/s"), [3.0, 4.5])
    assert (x / x.to("km")).tolist() == [1000, 1000] or jnp.allclose(x / x.to("km"), 1)
    assert jnp.allclose(strict(jnp.cos)(Quantity(60.0, registry.degree)), 0.5)
    assert is_pint(strict(lambda x: (x**2) ** 0.5)(x), registry.m)
    loop = lambda x, t: jax.lax.fori_loop(0, 2, lambda i, y: (y * t) / t, x)
    assert is_pint(strict(loop)(x, t), registry.m)
    with pytest.raises(ValueError, match="second cannot be converted to meter"):
        x + t
    with pytest.raises(ValueError, match="'blinks' is not a unit"):
        x.to("blinks")


def is_pint(out, unit):
    return out.unit == unit


@pytest.mark.parametrize("unit", ["degC", "dBm"])
def test_units_with_an_offset_raise(registry, unit):
    with pytest.raises(ValueError, match="is not a multiple of base units"):
        Quantity(1.0, registry.Unit(unit))
    assert Quantity(1.0, registry.delta_degC).to("kelvin").value == 1


def test_units_of_two_libraries_raise(registry):
    with pytest.raises(ValueError, match=r"two libraries, .*astropy.units"):
        LENGTH * Quantity(1.0, registry.m)


def test_units_of_two_registries_of_pint_raise(pint, registry):
    other = Quantity(1.0, pint.UnitRegistry().m)
    with pytest.raises(ValueError, match="registries"):
        other + Quantity(1.0, registry.m)


WITHOUT = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
from veneer.types.quantity import Quantity
assert not {{"astropy", "pint"}} & {{n for n, m in sys.modules.items() if m}}
try:
    print(type(Quantity(1.0, "m").unit).__module__)
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("hidden", "printed"),
    [
        ((), "astropy"),
        (("astropy.units",), "pint"),
        (("astropy.units", "pint"), "to parse the unit 'm', install astropy or pint: pip "),
    ],
)
def test_strings_are_parsed_by_the_installed_library(pint, hidden, printed):
    program = WITHOUT.format(hidden=hidden)
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.startswith(printed), out.stderr


NEW_IN_JAX_0_12 = {"log2", "mulhi", "one_minus_square"}


@pytest.mark.parametrize("name", sorted({*Quantity.laws, *Named.laws}))
def test_each_law_has_the_name_of_a_primitive(name):
    if name in NEW_IN_JAX_0_12 and jax.__version_info__ < (0, 12):
        pytest.skip("a primitive of JAX 0.12")
    assert find_primitive(name).name == name
