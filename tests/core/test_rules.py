"""Multiple dispatch: the rule that runs, and the errors when no rule can."""

import importlib
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jaxtyping import Array, Float, TypeCheckError
from support import arrays
from support.array_types import OneHot

import veneer as vn
from veneer._jax.primitives import _find_primitives

X = arrays.arange(3.0)

PUBLIC_PRIMITIVES = {
    name.removesuffix("_p"): value
    for name, value in vars(jax.lax).items()
    if name.endswith("_p") and isinstance(value, Primitive)
}


@pytest.fixture
def primitive():
    """A binary primitive that only these tests know, without shapes to check results against."""
    p = Primitive("combine")
    p.def_impl(lambda x, y: jnp.add(x, y))
    return p


class Animal(vn.ImplicitArray):
    x: jax.Array

    def materialise(self):
        return self.x


class Dog(Animal):
    pass


class Puppy(Dog):
    pass


class Cat(Animal):
    pass


def combine(primitive, x, y):
    return vn.implicit(lambda x, y: primitive.bind(x, y))(x, y)


def rule(primitive, left, right, result, precedence=0):
    def function(x, y):
        return result

    function.__annotations__ = {"x": left, "y": right}
    vn.register(primitive, precedence=precedence)(function)


def test_the_most_specific_rule_runs(primitive):
    rule(primitive, vn.ImplicitArray, vn.ArrayLike, 1)
    rule(primitive, Dog, vn.ArrayLike, 2)
    assert combine(primitive, Puppy(X), X) == 2
    assert combine(primitive, Cat(X), X) == 1


def test_a_rule_for_a_subclass_does_not_take_its_base(primitive):
    rule(primitive, Puppy, vn.ArrayLike, 1)
    assert combine(primitive, Dog(X), X).tolist() == (X + X).tolist()  # materialised


@pytest.mark.parametrize(
    "dense", [X, np.ones(3), np.float32(2), 2, 2.0, True], ids=lambda d: type(d).__name__
)
def test_every_dense_operand_has_the_same_class(primitive, dense):
    rule(primitive, Dog, jax.Array, 1)
    assert combine(primitive, Dog(X), dense) == 1


T = TypeVar("T", bound=Animal)


@pytest.mark.parametrize(
    "annotation",
    [Animal, Animal | vn.ArrayLike, "Dog", T, Annotated[Dog, "good"], Any, object, vn.Value],
    ids=str,
)
def test_annotations_select_implicit_operands(primitive, annotation):
    rule(primitive, annotation, vn.ArrayLike, 1)
    assert combine(primitive, Dog(X), X) == 1


@pytest.mark.parametrize(
    "annotation",
    [jax.Array, vn.ArrayLike, np.ndarray, float, Array, Float[Array, " n"], "jax.Array"],
    ids=str,
)
def test_annotations_select_dense_operands(primitive, annotation):
    rule(primitive, Dog, annotation, 1)
    assert combine(primitive, Dog(X), X) == 1
    assert combine(primitive, Dog(X), Dog(X)).shape == (3,)  # not 1: it takes no second Dog


def test_an_operand_without_annotation_accepts_anything(primitive):
    @vn.register(primitive)
    def _(x: Dog, y):
        return 1

    assert combine(primitive, Dog(X), X) == combine(primitive, Dog(X), Cat(X)) == 1


def test_an_annotation_must_be_an_operand_type(primitive):
    with pytest.raises(TypeError, match=r"operand 'x' is annotated .*neither dense"):
        rule(primitive, dict, vn.ArrayLike, 1)


def test_ambiguity_names_both_rules_with_file_and_line(primitive):
    rule(primitive, Dog, vn.ArrayLike | vn.ImplicitArray, 1)
    rule(primitive, vn.ArrayLike | vn.ImplicitArray, Cat, 2)
    with pytest.raises(vn.AmbiguousLookupError) as error:
        combine(primitive, Dog(X), Cat(X))
    assert str(error.value).count("test_rules.py:") == 2
    assert "combine(Dog, Cat)" in str(error.value)


def test_precedence_breaks_a_tie(primitive):
    rule(primitive, Dog, vn.ArrayLike | vn.ImplicitArray, 1, precedence=1)
    rule(primitive, vn.ArrayLike | vn.ImplicitArray, Cat, 2)
    assert combine(primitive, Dog(X), Cat(X)) == 1


def test_precedence_does_not_outweigh_specificity(primitive):
    rule(primitive, Animal, vn.ArrayLike, 1, precedence=5)
    rule(primitive, Dog, vn.ArrayLike, 2)
    assert combine(primitive, Dog(X), X) == 2


def test_a_later_rule_resolves_an_ambiguity(primitive):
    rule(primitive, Dog, vn.ArrayLike | vn.ImplicitArray, 1)
    rule(primitive, vn.ArrayLike | vn.ImplicitArray, Cat, 2)
    with pytest.raises(vn.AmbiguousLookupError):
        combine(primitive, Dog(X), Cat(X))
    rule(primitive, Dog, Cat, 3)
    assert combine(primitive, Dog(X), Cat(X)) == 3


def test_registering_the_same_signature_replaces_a_rule(primitive):
    rule(primitive, Dog, vn.ArrayLike, 1)
    assert combine(primitive, Dog(X), X) == 1
    rule(primitive, Dog, vn.ArrayLike, 2)
    assert combine(primitive, Dog(X), X) == 2


def test_a_new_rule_keeps_rules_of_higher_precedence(primitive):
    rule(primitive, Dog, vn.ArrayLike, 1, precedence=1)
    rule(primitive, Dog, vn.ArrayLike, 2)
    assert combine(primitive, Dog(X), X) == 1
    rule(primitive, Dog, vn.ArrayLike, 3, precedence=1)
    assert combine(primitive, Dog(X), X) == 3


def test_a_late_rule_reaches_functions_already_staged():
    p = Primitive("late")
    p.def_impl(jnp.sin)
    p.def_abstract_eval(lambda x: x)
    jax.interpreters.mlir.register_lowering(
        p, jax.interpreters.mlir.lower_fun(jnp.sin, multiple_results=False)
    )
    f = jax.jit(lambda x: p.bind(x) * 1)
    np.testing.assert_allclose(vn.implicit(f)(Dog(X)), jnp.sin(X), rtol=1e-6)

    @vn.register(p)
    def _(x: Dog):
        return x.x * 10

    np.testing.assert_allclose(vn.implicit(f)(Dog(X)), X * 10)


def test_not_implemented_tries_the_next_rule_then_materialises(primitive):
    rule(primitive, Animal, vn.ArrayLike, 1)
    rule(primitive, Dog, vn.ArrayLike, NotImplemented)
    rule(primitive, Puppy, vn.ArrayLike, NotImplemented)
    assert combine(primitive, Puppy(X), X) == 1


def test_operands_are_materialized_if_all_rules_decline(primitive):
    rule(primitive, Animal, vn.ArrayLike, NotImplemented)
    assert combine(primitive, Puppy(X), X).tolist() == (X + X).tolist()


def test_a_rule_that_returns_nothing_is_named(primitive):
    rule(primitive, Dog, vn.ArrayLike, None)
    with pytest.raises(
        TypeError, match=r"rule at .*test_rules.py:.* for combine\(Dog.* returns None"
    ):
        combine(primitive, Dog(X), X)


def test_a_rule_can_take_any_number_of_operands(primitive):
    @vn.register("concatenate")
    def _(first: Puppy, *rest: Dog | vn.ArrayLike, dimension):
        return jnp.full(3 + 3 * len(rest), 7.0)

    concatenate = vn.implicit(lambda *xs: jax.lax.concatenate_p.bind(*xs, dimension=0))
    assert concatenate(Puppy(X)).tolist() == [7] * 3
    assert concatenate(Puppy(X), X, Dog(X)).tolist() == [7] * 9
    assert concatenate(Puppy(X), Cat(X)).tolist() == [*X, *X]


def test_a_rule_can_be_registered_for_several_primitives():
    @vn.register(["add", jax.lax.sub_p, "mul"])
    def _(x: Puppy, y: vn.ArrayLike, **params):
        return jnp.full(3, 7.0)

    p = Puppy(X)
    assert (p + X).tolist() == (p - X).tolist() == (p * X).tolist() == [7] * 3


def test_an_unknown_primitive_name_suggests_another():
    with pytest.raises(ValueError, match=r"no primitive named 'dot_genera'.*'dot_general'"):
        vn.register("dot_genera")


def test_register_rejects_objects_that_are_not_primitives():
    with pytest.raises((TypeError, TypeCheckError), match="primitive"):
        vn.register([lambda x: x])


class Loud(vn.ImplicitArray):
    x: jax.Array

    def materialise(self):
        return self.x

    @staticmethod
    def default(primitive, values, params):
        return jnp.full(3, 5.0)


class Quiet(Loud):
    @staticmethod
    def default(primitive, values, params):
        return jnp.full(3, 6.0)


def test_an_overridden_default_runs_if_no_rule_fits(primitive):
    assert combine(primitive, Loud(X), X).tolist() == [5] * 3
    assert combine(primitive, Dog(X), Quiet(X)).tolist() == [6] * 3
    rule(primitive, Loud, vn.ArrayLike, 4)
    assert combine(primitive, Loud(X), X) == 4


INDEXING = {
    "slice": lambda w: w[1:],
    "index": lambda w: w[1],
    "transpose": lambda w: w.T,
    "reshape": lambda w: w.reshape(2, 3, 4),
    "fori_loop": lambda w: jax.lax.fori_loop(0, 3, lambda i, c: c + w[i].sum(), 0.0),
}


@pytest.mark.parametrize("function", INDEXING.values(), ids=INDEXING)
def test_batch_axes_are_kept_if_a_default_declines(function):
    class Halved(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            return self.x / 2

    class WithDefault(Halved):
        @staticmethod
        def default(primitive, values, params):
            return NotImplemented

    x = jnp.arange(24.0).reshape(6, 4)
    without, with_default = (vn.explain(function)(cls(x)) for cls in (Halved, WithDefault))
    assert [e.primitive for e in without.materialised] == [
        e.primitive for e in with_default.materialised
    ]
    out, expected = (vn.implicit(function)(cls(x)) for cls in (WithDefault, Halved))
    assert (vn.materialise(out) == function(x / 2)).all()
    assert (type(out) is WithDefault) == (type(expected) is Halved)


def test_a_default_runs_before_batch_axes():
    class Sliced(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            return self.x / 2

        @staticmethod
        def default(primitive, values, params):
            return primitive.bind(values[0].x, **params)

    assert vn.implicit(lambda w: w[1:])(Sliced(jnp.arange(3.0))).tolist() == [1, 2]


def test_a_rule_that_declines_before_a_default_runs_once():
    calls = []

    class Declining(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            return self.x / 2

        @staticmethod
        def default(primitive, values, params):
            return NotImplemented

    @vn.register("cosh")
    def _(x: Declining, **params):
        calls.append(x)
        return NotImplemented

    vn.implicit(jnp.cosh)(Declining(jnp.arange(3.0)))
    assert len(calls) == 1


def test_two_different_defaults_raise(primitive):
    with pytest.raises(TypeError, match="Loud and Quiet each define `default`"):
        combine(primitive, Loud(X), Quiet(X))


def test_redispatch_works_with_unknown_types():
    class Scaled(vn.ImplicitArray):
        x: vn.ImplicitArray | jax.Array
        by: float = vn.static(default=2.0)

        def materialise(self):
            raise RuntimeError("refused")

        def aval(self):
            return jax.typeof(jnp.zeros(3))

    @vn.register("dot_general", precedence=1)  # OneHot does not know Scaled
    def _(x: Scaled, y: vn.ArrayLike | vn.ImplicitArray, **params):
        return vn.implicit(lambda a, b: jax.lax.dot_general_p.bind(a, b, **params))(x.x, y) * x.by

    assert vn.implicit(jnp.dot)(Scaled(X), OneHot(jnp.float32(3), 1, 3)) == 6.0


@pytest.mark.parametrize("highest_first", [True, False])
def test_the_default_with_the_highest_precedence_runs(highest_first):
    class Low(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            return self.x + 0

        @staticmethod
        def default(primitive, values, params):
            return jnp.array(1.0)

    class High(Low):
        default_precedence = 1

        @staticmethod
        def default(primitive, values, params):
            return jnp.array(2.0)

    operands = High(jnp.array(0.0)), Low(jnp.array(0.0))
    run = vn.implicit(jax.lax.atan2)
    assert run(*(operands if highest_first else operands[::-1])) == 2


@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton", "tpu"])
def test_importing_pallas_keeps_the_names_of_primitives(backend):
    # In JAX 0.12, Pallas has other attributes named reduce_min_p and reduce_prod_p.
    importlib.import_module(f"jax.experimental.pallas.{backend}")
    found = _find_primitives()
    for name, primitive in PUBLIC_PRIMITIVES.items():
        assert found[name] is primitive
        assert found[primitive.name] is primitive
