"""`HiValue` and `register_rules`: a Quax type whose leaf is a hijax value."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import arrays
from support.array_types import assert_close

import veneer.interop.quax as quax
from veneer.interop.quax.experimental import hijax
from veneer.interop.quax.experimental.hijax import HiValue, register_rules

# The hijax layer: an array of meters to some power, its type, and four primitives.


class LengthMeta(type):
    def __instancecheck__(cls, x):
        is_tracer = isinstance(x, jax.core.Tracer) and isinstance(jax.typeof(x), LengthType)
        return is_tracer or super().__instancecheck__(x)


@dataclass(frozen=True)
class Length(metaclass=LengthMeta):
    array: Any
    power: int


@dataclass(frozen=True)
class LeadingAxis(hijax.MappingSpec):
    """Map a `Length` along the first axis in `jax.vmap`."""


@dataclass(frozen=True)
class LengthType(hijax.HiType):
    shape: tuple[int, ...]
    dtype: Any
    power: int

    def lo_ty(self):
        return [hijax.ShapedArray(self.shape, self.dtype)]

    def lower_val(self, value):
        return [value.array]

    def raise_val(self, array):
        return Length(array, self.power)

    def to_tangent_aval(self):
        return self

    def to_ct_aval(self):
        return LengthType(self.shape, self.dtype, -self.power)

    def vspace_zero(self):
        return Length(jnp.zeros(self.shape, self.dtype), self.power)

    def vspace_add(self, x, y):
        return x if y is None else add(x, y)

    def dec_rank(self, size, spec):
        return LengthType(self.shape[1:], self.dtype, self.power)

    def inc_rank(self, size, spec):
        return LengthType((size, *self.shape), self.dtype, self.power)

    def leading_axis_spec(self):
        return LeadingAxis()

    def str_short(self, short_dtypes=False, **kwargs):
        return f"m{self.power}[{','.join(map(str, self.shape))}]"

    __repr__ = str_short


hijax.register_hitype(Length, lambda x: LengthType(x.array.shape, x.array.dtype, x.power))


def power_of(aval):
    return aval.power if isinstance(aval, LengthType) else 0


def array_of(x):
    return x.array if isinstance(x, Length) else x


class Operation(hijax.HiPrim):
    """A hijax primitive: a function of arrays, and the power of meters of its result."""

    def __init__(self, *avals, power, **params):
        self.in_avals = avals
        shapes = [hijax.ShapedArray(a.shape, a.dtype) for a in avals]
        out = jax.eval_shape(lambda *xs: self.compute(*xs, **params), *shapes)
        as_length = LengthType(out.shape, out.dtype, power)
        self.out_aval = hijax.ShapedArray(out.shape, out.dtype) if power is None else as_length
        self.params = {"power": power, **params}
        super().__init__()

    def expand(self, *xs):
        extra = {k: v for k, v in self.params.items() if k != "power"}
        out = self.compute(*map(array_of, xs), **extra)
        return out if self.params["power"] is None else Length(out, self.params["power"])

    def vjp_fwd(self, nonzero, *xs):
        return self(*xs), xs


class Wrap(Operation):
    compute = staticmethod(lambda x: x)

    def vjp_bwd_retval(self, xs, g):
        return (unwrap(hijax.instantiate_zeros(g)),)


class Unwrap(Operation):
    compute = staticmethod(lambda x: x)

    def vjp_bwd_retval(self, xs, g):
        return (wrap(hijax.instantiate_zeros(g), -power_of(self.in_avals[0])),)


class Add(Operation):
    compute = staticmethod(jnp.add)


class Mul(Operation):
    compute = staticmethod(jnp.multiply)

    def batch(self, axis_data, xs, axes):
        if not all(isinstance(axis, LeadingAxis) for axis in axes):
            raise NotImplementedError
        return mul(*xs), LeadingAxis()

    def vjp_bwd_retval(self, xs, g):
        x, y = xs
        back = lambda ct, aval: ct if isinstance(aval, LengthType) else unwrap(ct)
        return tuple(map(back, (mul(g, y), mul(g, x)), self.in_avals))


class Sum(Operation):
    compute = staticmethod(lambda x, axes: jnp.sum(x, axes))

    def vjp_bwd_retval(self, xs, g):
        (aval,) = self.in_avals
        return (mul(jnp.ones(aval.shape, aval.dtype), hijax.instantiate_zeros(g)),)


def wrap(x, power):
    return Wrap(jax.typeof(jnp.asarray(x)), power=power)(jnp.asarray(x))


def unwrap(x):
    return Unwrap(jax.typeof(x), power=None)(x)


def add(x, y):
    powers = {power_of(jax.typeof(v)) for v in (x, y)}
    if len(powers) > 1:
        raise TypeError(f"powers {powers} differ")
    return Add(jax.typeof(x), jax.typeof(y), power=powers.pop())(x, y)


def mul(x, y):
    avals = jax.typeof(x), jax.typeof(y)
    return Mul(*avals, power=sum(map(power_of, avals)))(x, y)


def total(x, *, axes):
    return Sum(jax.typeof(x), power=power_of(jax.typeof(x)), axes=tuple(axes))(x)


# The Quax layer.


class Meters(HiValue):
    """A Quax type made from an array or from the result of a rule."""

    def __init__(self, x, power=1, /):
        self.leaf = x if isinstance(x, Length) else wrap(x, power)

    @property
    def power(self):
        return jax.typeof(self.leaf).power


register_rules(
    Meters,
    {
        lax.mul_p: mul,
        lax.add_p: add,
        lax.reduce_sum_p: total,
        lax.neg_p: lambda x, **params: unwrap(x),  # no hijax value
    },
)


@pytest.fixture
def x() -> Meters:
    return Meters(arrays.array([1.0, 2.0, 3.0]))


def test_the_leaf_is_one_hijax_value(x):
    (leaf,) = jax.tree.leaves(x)
    assert isinstance(leaf, Length)
    assert type(x.aval()) is jax.core.ShapedArray
    assert (x.shape, x.dtype) == ((3,), jnp.float32)
    assert quax.quaxify(lambda x: isinstance(x, jax.Array))(x)


def test_a_class_without_init_takes_the_leaf(x):
    assert HiValue(x.leaf).leaf is x.leaf


def test_rules_take_the_type_on_either_side(x):
    y = arrays.array([2.0, 2.0, 2.0])
    outs = {
        2: quax.quaxify(lambda x: x * x)(x),
        1: quax.quaxify(lambda x: x * y)(x),
        -1: quax.quaxify(lambda x: y * x)(Meters(x.leaf.array, -1)),
    }
    for power, out in outs.items():
        assert (type(out), out.power) == (Meters, power)
        assert_close(out.leaf.array, x.leaf.array * (x.leaf.array if power == 2 else y))


def test_parameters_are_passed_by_keyword_only_names(x):
    rows = Meters(arrays.arange(6.0).reshape(2, 3))
    out = quax.quaxify(lambda x: jnp.sum(x, axis=1))(rows)
    assert_close(out.leaf.array, rows.leaf.array.sum(1))


def test_results_without_high_types_are_returned_unchanged(x):
    out = quax.quaxify(jnp.negative)(x)
    assert isinstance(out, jax.Array)


def test_the_jaxpr_shows_the_type(x):
    jaxpr = str(jax.jit(quax.quaxify(lambda x: x * x)).trace(x).jaxpr)
    assert "m1[3]" in jaxpr
    assert "m2[3]" in jaxpr


def test_jit_gives_what_eager_execution_gives(x):
    f = quax.quaxify(lambda x: jnp.sum(x * x))
    out = jax.jit(f)(x)
    assert out.power == 2
    assert_close(out.leaf.array, f(x).leaf.array)


@pytest.mark.parametrize("wrap_in", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_cotangent_has_the_type_that_the_hijax_type_states(x, wrap_in):
    loss = lambda x: unwrap(quax.quaxify(lambda x: jnp.sum(x * x))(x).leaf)
    g = wrap_in(jax.grad(loss))(x)
    assert g.power == -1
    assert_close(g.leaf.array, 2 * x.leaf.array)


def test_vmap_inside_and_outside_agree():
    rows = Meters(arrays.arange(6.0).reshape(3, 2))
    square = lambda x: x * x
    inside = quax.quaxify(jax.vmap(square))(rows)
    axes = {"in_axes": LeadingAxis(), "out_axes": LeadingAxis(), "axis_size": 3}
    outside = jax.vmap(quax.quaxify(square), **axes)(rows)
    for out in (inside, outside):
        assert out.power == 2
        assert_close(out.leaf.array, rows.leaf.array**2)


# Programs that return 4 * x by adding two values.
PROGRAMS = {
    "scan": lambda add, x: lax.scan(lambda c, _: (add(c, x), None), x, length=3)[0],
    "fori_loop": lambda add, x: lax.fori_loop(0, 3, lambda _, c: add(c, x), x),
    "while_loop": lambda add, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, add(c[1], x)), (0, x)
    )[1],
    "cond": lambda add, x: lax.cond(True, lambda x: add(add(x, x), add(x, x)), lambda x: x, x),
    "jit": lambda add, x: jax.jit(lambda x: add(add(x, x), add(x, x)))(x),
}


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_carry_a_value_of_hijax(name, inside, x):
    plain, f = (lambda x, y: x + y), PROGRAMS[name]
    out = quax.quaxify(lambda x: f(plain, x))(x) if inside else f(quax.quaxify(plain), x)
    assert (type(out), out.power) == (Meters, 1)
    assert_close(out.leaf.array, 4 * x.leaf.array)


def test_without_a_rule_materialising_is_refused(x):
    with pytest.raises(ValueError, match="Refusing to materialise Meters"):
        quax.quaxify(jnp.sin)(x)
    with pytest.raises(TypeError, match="powers"):
        quax.quaxify(jnp.add)(x, Meters(x.leaf.array, 2))


def test_a_primitive_with_several_results_is_refused():
    p = jax.extend.core.Primitive("several")
    p.multiple_results = True
    with pytest.raises(NotImplementedError, match="multiple results"):
        register_rules(Meters, {p: lambda x: x})


def test_the_names_of_hijax_are_there():
    assert set(hijax.__all__) <= set(dir(hijax))
    assert hijax.HIJAX_FLOOR == "0.10.2"
    assert isinstance(hijax.MappingSpec, type)


@pytest.mark.parametrize("function", [lambda *xs: xs[0], lambda: 0])
def test_functions_without_positional_operands_are_rejected(function):
    with pytest.raises(TypeError, match=r"takes \*args|takes no operand"):
        register_rules(HiValue, {jax.lax.mul_p: function})
