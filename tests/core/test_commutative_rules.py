"""A rule for `(x, y)` of a commutative primitive also applies to `(y, x)`."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from support import arrays

import veneer as vn

X = arrays.arange(3.0)


class Animal(vn.ImplicitArray):
    x: jax.Array

    def materialise(self):
        return self.x


class Dog(Animal):
    pass


class Cat(Animal):
    pass


class Puppy(Dog):
    pass


class Wild(vn.ImplicitArray):
    x: jax.Array
    commute_ops = False

    def materialise(self):
        return self.x


@pytest.fixture
def add():
    """A primitive that goes by the name of a commutative one, without rules of others."""
    return _primitive("add")


def _primitive(name):
    p = Primitive(name)
    p.def_impl(jnp.add)
    return p


def _rule(primitive, left, right, result):
    def function(x, y):
        return result

    function.__annotations__ = {"x": left, "y": right}
    vn.register(primitive)(function)


def _apply(primitive, x, y):
    return vn.implicit(lambda x, y: primitive.bind(x, y))(x, y)


def test_a_rule_also_runs_in_the_other_order(add):
    _rule(add, Dog, vn.ArrayLike, 1)
    assert _apply(add, X, Dog(X)) == 1


def test_a_registered_rule_beats_a_swapped_copy(add):
    _rule(add, vn.ArrayLike, Dog, 2)
    _rule(add, Dog, vn.ArrayLike, 1)
    assert _apply(add, X, Dog(X)) == 2


def test_a_type_can_opt_out_of_swapped_rules(add):
    _rule(add, Wild, vn.ArrayLike, 1)
    assert _apply(add, X, Wild(X)).tolist() == (X + X).tolist()


def test_a_union_annotation_includes_the_type_itself(add):
    _rule(add, Dog, Dog | vn.ArrayLike, 1)
    assert _apply(add, Dog(X), Dog(X)) == _apply(add, X, Dog(X)) == 1


def test_registering_a_rule_again_replaces_its_copy(add):
    _rule(add, Dog, vn.ArrayLike, 1)
    _rule(add, Dog, vn.ArrayLike, 2)
    assert _apply(add, X, Dog(X)) == 2


def test_a_swapped_copy_runs_if_registered_rules_decline(add):
    _rule(add, vn.ArrayLike, Animal, NotImplemented)
    _rule(add, Animal, vn.ArrayLike, 1)
    assert _apply(add, X, Dog(X)) == 1


_SIGNATURES = [
    (Dog, Dog | vn.ArrayLike),
    (Dog | vn.ArrayLike, Dog),
    (Dog, vn.ImplicitArray),
    (vn.ImplicitArray, Cat),
    (Animal, vn.ArrayLike),
    (Puppy, Animal | vn.ArrayLike),
    (Animal, Animal),
]
_OPERANDS = {"dense": X, "Dog": Dog(X), "Cat": Cat(X), "Puppy": Puppy(X)}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_swapped_copies_do_not_change_registered_results(count):
    """Compare with a primitive that is not commutative, for all combinations of rules."""
    for signatures in itertools.combinations(_SIGNATURES, count):
        commutative, plain = _primitive("add"), _primitive("sub")
        for number, signature in enumerate(signatures):
            _rule(commutative, *signature, number)
            _rule(plain, *signature, number)
        for x, y in itertools.product(_OPERANDS.values(), repeat=2):
            if x is y is X:
                continue
            try:
                expected = _apply(plain, x, y)
            except vn.AmbiguousLookupError:
                with pytest.raises(vn.AmbiguousLookupError):
                    _apply(commutative, x, y)
            else:
                if isinstance(expected, int):
                    assert _apply(commutative, x, y) == expected, (signatures, x, y)
