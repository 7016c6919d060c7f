"""Code written for Quax, on our core: types of the kinds that its users write."""

import importlib
import inspect
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int
from support import arrays
from support.array_types import assert_close

import veneer as vn
import veneer.interop.quax as quax


def by_length_and_time(unit: tuple[int, int] | str) -> tuple[int, int]:
    return {"m": (1, 0), "s": (0, 1)}[unit] if isinstance(unit, str) else unit


class Unitful(quax.ArrayValue):
    """An array with a unit, which refuses to lose it."""

    array: Array = eqx.field(converter=jnp.asarray)
    unit: tuple[int, int] = eqx.field(static=True, converter=by_length_and_time)

    def __check_init__(self):
        if len(self.unit) != 2:
            raise ValueError("a unit has two exponents")

    def aval(self):
        return jax.typeof(self.array)

    def materialise(self):
        raise ValueError("refusing to lose a unit")


def same_unit(x: Unitful, y: Unitful) -> tuple[int, int]:
    if x.unit != y.unit:
        raise ValueError(f"units {x.unit} and {y.unit} differ")
    return x.unit


for _primitive in (lax.add_p, lax.sub_p, jax.extend.core.primitives.add_jaxvals_p):

    @quax.register(_primitive)
    def _(x: Unitful, y: Unitful, *, _primitive=_primitive, **params) -> Unitful:
        return Unitful(_primitive.bind(x.array, y.array, **params), same_unit(x, y))


@quax.register(lax.mul_p)
def _(x: Unitful, y: Unitful, **params) -> Unitful:
    unit = (x.unit[0] + y.unit[0], x.unit[1] + y.unit[1])
    return Unitful(lax.mul_p.bind(x.array, y.array, **params), unit)


@quax.register(lax.mul_p)
def _(x: Unitful, y: ArrayLike, **params) -> Unitful:
    return Unitful(lax.mul_p.bind(x.array, y, **params), x.unit)


@quax.register(lax.mul_p)
def _(x: ArrayLike, y: Unitful, **params) -> Unitful:
    return Unitful(lax.mul_p.bind(x, y.array, **params), y.unit)


@quax.register(lax.pow_p)
def _(x: Unitful, y: ArrayLike, **params) -> Unitful:
    exponent = int(y)  # a concrete one: it decides the unit
    return Unitful(x.array**exponent, (x.unit[0] * exponent, x.unit[1] * exponent))


for _primitive in (
    lax.broadcast_in_dim_p,
    lax.convert_element_type_p,
    lax.reduce_sum_p,
    lax.reshape_p,
    lax.squeeze_p,
):

    @quax.register(_primitive)
    def _(x: Unitful, *, _primitive=_primitive, **params) -> Unitful:
        return Unitful(_primitive.bind(x.array, **params), x.unit)


class Lora(quax.ArrayValue):
    """A weight and a low-rank update of it."""

    w: Float[Array, "*batch m n"]
    a: Float[Array, "*batch m rank"]
    b: Float[Array, "*batch rank n"]

    def aval(self):
        return jax.typeof(self.w)

    def materialise(self):
        return self.w + self.a @ self.b


@quax.register(lax.dot_general_p)
def _(x: ArrayLike | quax.ArrayValue, w: Lora, *, dimension_numbers, **params):
    if dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
        return NotImplemented
    dot = quax.quaxify(jnp.matmul)
    return dot(x, w.w) + dot(dot(x, w.a), w.b)


class SparseVector(quax.ArrayValue):
    """A vector with few nonzero entries, whose class defines `__init__`."""

    values: Float[Array, "*batch k"]
    indices: Int[Array, "*batch k"]
    n: int = eqx.field(static=True)

    def __init__(self, entries: dict[int, float], n: int):
        self.values = arrays.array(list(entries.values()))
        self.indices = arrays.array(list(entries))
        self.n = n

    def aval(self):
        return jax.core.ShapedArray((*self.values.shape[:-1], self.n), self.values.dtype)

    def materialise(self):
        one = lambda values, indices: jnp.zeros(self.n).at[indices].add(values)
        return jnp.vectorize(one, signature="(k),(k)->(n)")(self.values, self.indices)


@quax.register(lax.mul_p)
def _(x: SparseVector, y: ArrayLike, **params):
    if jnp.ndim(y) != 1:
        return NotImplemented
    return eqx.tree_at(lambda v: v.values, x, x.values * y[x.indices])


@quax.register(lax.reduce_sum_p)
def _(x: SparseVector, *, axes, **params):
    return NotImplemented if axes != (x.ndim - 1,) else jnp.sum(x.values, axis=-1)


NUMBERS = np.array([0.5, 2.0, -1.0])
X = arrays.array(NUMBERS)
VALUES = {
    "unit": (Unitful(arrays.array([1.0, -2.0, 3.0]), "m"), lambda v, x: jnp.sum(v * v * x)),
    "lora": (
        Lora(
            arrays.array(np.linspace(-1, 1, 6).reshape(3, 2)),
            arrays.array(NUMBERS[:, None]),
            arrays.array([[0.3, -0.4]]),
        ),
        lambda v, x: jnp.sum(jnp.sin(x @ v)),
    ),
    "sparse": (SparseVector({2: 0.7, 0: -1.5}, 3), lambda v, x: jnp.sum(v * x)),
}


def dense(v):
    return v.array if isinstance(v, Unitful) else vn.materialise(v)


def with_custom_vjp(f):
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda v, x: (f(v, x), (v, x)), lambda res, ct: jax.vjp(f, *res)[1](ct))
    return wrapped


# Transformations of a function of a value and an array, inside `quaxify`.
INSIDE = {
    "as it is": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: (
        lambda v, x: jnp.sum(jax.vmap(f, in_axes=(None, 0))(v, jnp.stack([x, 2 * x])))
    ),
    "scan": lambda f: lambda v, x: lax.scan(lambda c, _: (c + f(v, x), None), f(v, x), length=2)[0],
    "fori_loop": lambda f: lambda v, x: lax.fori_loop(0, 2, lambda _, c: c * 0.5, f(v, x)),
    "cond": lambda f: lambda v, x: lax.cond(x[0] > 0, f, lambda v, x: f(v, x) * 2.0, v, x),
    "custom_vjp": with_custom_vjp,
}

# Transformations of the function of leaves that `quaxify` returns.
OUTSIDE = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(f, argnums=1),
    "vmap": lambda f: (
        lambda v, x: jax.vmap(f)(
            jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), v), jnp.stack([x, x + 1])
        )
    ),
}


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("kind", VALUES)
def test_transformations_agree_with_the_dense_program(kind, inside, outside):
    v, f = VALUES[kind]
    program = INSIDE[inside](f)
    transformed = OUTSIDE[outside](lambda v, x: dense(quax.quaxify(program)(v, x)))
    expected = OUTSIDE[outside](lambda v, x: program(dense(v), x))
    assert_close(transformed(v, X), expected(v, X))


@pytest.mark.parametrize("inside", INSIDE)
def test_no_transformation_loses_metadata(inside):
    v, f = VALUES["unit"]
    assert quax.quaxify(INSIDE[inside](f))(v, X).unit == (2, 0)


# Types.


def test_a_type_is_a_module_of_equinox_and_a_value_of_ours():
    length = Unitful([1.0, 2.0], "m")
    assert isinstance(length, eqx.Module)
    assert isinstance(length, vn.Value)
    assert isinstance(length.array, jax.Array)  # converted
    assert length.unit == (1, 0)
    assert (length.shape, length.dtype, length.ndim, length.size) == ((2,), jnp.float32, 1, 2)
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(length)] == [
        ".array"
    ]


def test_construction_is_checked():
    with pytest.raises(ValueError, match="two exponents"):
        Unitful([1.0], (1, 0, 0))
    with pytest.raises(AttributeError):
        Unitful([1.0], "m").unit = (0, 1)


def test_aval_and_materialise_must_be_defined():
    class Nothing(quax.ArrayValue):
        x: Array

        def aval(self):
            return jax.typeof(self.x)

    with pytest.raises(TypeError, match=r"abstract.*materialise"):
        Nothing(X)


def test_operators_are_for_the_type_to_choose():
    class Adding(Unitful):
        __add__ = quax.quaxify(jnp.add)

    with pytest.raises(TypeError, match="unsupported operand"):
        Unitful(X, "m") + Unitful(X, "m")
    assert_close((Adding(X, "m") + Adding(X, "m")).array, X + X)


def test_a_class_may_be_strict():
    class Strict(Unitful, strict=True):
        pass

    assert_close(quax.quaxify(jnp.add)(Strict(X, "m"), Strict(X, "m")).array, X + X)


# Fallbacks if no rule fits.


def test_operands_are_materialised_where_no_rule_fits():
    v = VALUES["sparse"][0]
    assert_close(quax.quaxify(jnp.sin)(v), jnp.sin(dense(v)))


def test_the_user_sees_the_error_of_materialise():
    with pytest.raises(ValueError, match="refusing to lose a unit"):
        quax.quaxify(jnp.sin)(Unitful(X, "m"))


class Recording(Unitful):
    @staticmethod
    def default(primitive, values, params):
        arrays = [v.array if isinstance(v, Recording) else v for v in values]
        return Recording(primitive.bind(*arrays, **params), (0, 0))


def test_a_default_receives_primitive_values_and_parameters():
    out = quax.quaxify(lambda x: jnp.cumsum(jnp.sin(x)))(Recording(X, "m"))
    assert type(out) is Recording
    assert_close(out.array, jnp.cumsum(jnp.sin(X)))


def test_two_defaults_are_refused():
    class Other(Recording):
        @staticmethod
        def default(primitive, values, params):
            return Recording.default(primitive, values, params)

    with pytest.raises(TypeError, match="Recording"):
        quax.quaxify(jnp.arctan2)(Recording(X, "m"), Other(X, "m"))


def test_a_carry_whose_metadata_changes_is_refused():
    with pytest.raises(TypeError, match=r"carry 0 of scan.*\(2, 0\)"):
        quax.quaxify(lambda x: lax.scan(lambda c, _: (c * c, None), x, length=2))(Unitful(X, "m"))


# quaxify.


class Linear(eqx.Module):
    weight: Array | quax.ArrayValue

    def __call__(self, x):
        return jnp.sum(jnp.sin(x @ self.weight))

    @quax.quaxify
    def method(self, x):
        return self(x)


@pytest.fixture
def linear() -> Linear:
    return Linear(VALUES["lora"][0])


def test_a_quaxified_module_has_its_leaves(linear):
    model = quax.quaxify(linear)
    assert jax.tree.leaves(model) == [*jax.tree.leaves(linear), True]
    g = eqx.filter_grad(lambda model: model(X))(model)
    expected = jax.grad(lambda w: Linear(w.materialise())(X))(linear.weight)
    assert_close(g.fn.weight.a, expected.a)


def test_a_method_may_be_quaxified(linear):
    assert_close(linear.method(X), Linear(dense(linear.weight))(X))
    assert_close(eqx.filter_jit(linear.method)(X), linear.method(X))


def test_a_quaxified_function_keeps_its_name():
    def f(x):
        "Doc."

    assert quax.quaxify(f).__name__ == "f"
    assert inspect.unwrap(quax.quaxify(f)) is f


def test_a_transformed_module_is_quaxified_without_a_warning():
    f = jax.grad(Linear(jnp.ones((3, 2))))
    assert_close(quax.quaxify(f)(X), f(X))


@pytest.mark.parametrize(
    "filter_spec",
    [
        lambda v: isinstance(v, Lora),
        (False, (True, False), True),
        (False, (lambda v: isinstance(v, Lora), lambda v: isinstance(v, Lora)), False),
    ],
    ids=["predicate", "position", "both"],
)
def test_a_filter_spec_leaves_values_for_a_nested_quaxify(filter_spec):
    seen = []

    def f(w, length):
        seen.extend([isinstance(w, Lora), isinstance(length, Unitful)])
        return quax.quaxify(lambda length: length * jnp.sum(X @ w))(length)

    w, length = VALUES["lora"][0], Unitful(2.0, "m")
    out = quax.quaxify(f, filter_spec)(w, length)
    assert seen == [False, True]
    assert_close(out.array, 2.0 * jnp.sum(X @ dense(w)))


def test_without_values_the_function_is_called_directly():
    assert quax.quaxify(lambda x: np.asarray(x).sum())(X) == X.sum()


def test_rules_see_concrete_values_in_jax_numpy_functions():
    assert quax.quaxify(jnp.power)(Unitful(X, "m"), 3.0).unit == (3, 0)


# register.


def new_primitive() -> jax.extend.core.Primitive:
    """One with no rules, which gives its first operand."""
    p = jax.extend.core.Primitive("first")
    p.def_impl(lambda x, *_: x)
    p.def_abstract_eval(lambda x, *_: x)
    return p


OPERANDS = {
    "f[3]": X,
    "f[2]": arrays.array(NUMBERS[:2]),
    "i[3]": arrays.arange(3),
    "numpy": np.ones(3, np.float32),
}


@pytest.mark.parametrize("last", ["general", "conditional"])
def test_rules_with_shapes_and_dtypes_are_preferred(last):
    p = new_primitive()

    def general(x: Unitful, y: ArrayLike):
        return Unitful(x.array, (0, 0))

    def conditional(x: Unitful, y: Float[Array, "3"]):
        return Unitful(x.array, (3, 3))

    rules = [general, conditional] if last == "conditional" else [conditional, general]
    for rule in rules:
        assert quax.register(p)(rule) is rule
    chosen = {k: quax.quaxify(p.bind)(Unitful(X, "m"), y).unit for k, y in OPERANDS.items()}
    assert chosen == {"f[3]": (3, 3), "f[2]": (0, 0), "i[3]": (0, 0), "numpy": (0, 0)}


def test_a_condition_on_further_operands():
    p = new_primitive()

    @quax.register(p)
    def _(x: Unitful, *rest: Int[Array, "..."]):
        return Unitful(x.array, (len(rest), 0))

    i = jnp.arange(3)
    assert quax.quaxify(p.bind)(Unitful(X, "m"), i, i).unit == (2, 0)
    with pytest.raises(ValueError, match="refusing"):
        quax.quaxify(p.bind)(Unitful(X, "m"), i, X)


def test_precedence_breaks_a_tie():
    p = new_primitive()

    @quax.register(p)
    def _(x: Unitful, y: quax.ArrayValue):
        return Unitful(x.array, (0, 0))

    with_precedence = quax.register(p, precedence=1)

    @with_precedence
    def _(x: quax.ArrayValue, y: Unitful):
        return Unitful(x.array, (7, 7))

    assert quax.quaxify(p.bind)(Unitful(X, "m"), Unitful(X, "m")).unit == (7, 7)


def test_a_report_names_the_rule():
    rules = vn.explain(lambda x, y: x * y)(Unitful(X, "m"), X).events
    assert [e.primitive for e in rules] == ["mul"]
    assert rules[0].rule.startswith(__file__)


def test_without_equinox_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "equinox", None)
    for name in [name for name in sys.modules if name.startswith("veneer.interop.quax")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"needs equinox"):
        importlib.import_module("veneer.interop.quax")
