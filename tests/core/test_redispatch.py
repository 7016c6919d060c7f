"""Rules that redispatch: two types that do not know each other in one product.

The program is from Quax's tutorial "Rules that redispatch back to Quax".
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive, primitives
from support import arrays

import veneer as vn
from veneer._core import rules

W, A, B = arrays.ones((3, 4)), arrays.ones(3), arrays.ones(4)
Y = arrays.arange(4.0)
DIMENSIONS = {"dimension_numbers": (((1,), (0,)), ((), ()))}


def matmul(x, y):
    return x @ y


@pytest.fixture
def dot(monkeypatch):
    """Remove the rules that a test registers."""
    table = {p: list(of_primitive) for p, of_primitive in rules._rules.items()}
    monkeypatch.setattr(rules, "_rules", table)
    for clear in rules._clear_caches:
        clear()
    yield
    for clear in rules._clear_caches:
        clear()


class RankOne(vn.ImplicitArray):
    """A matrix and an update of rank one, which refuses to be dense."""

    w: jax.Array  # [M, N]
    a: jax.Array  # [M]
    b: jax.Array  # [N]

    def aval(self):
        return jax.core.ShapedArray(jnp.shape(self.w), jnp.result_type(self.w))

    def materialise(self):
        raise ValueError("RankOne refuses to be dense")


class OneEntry(vn.ImplicitArray):
    """A vector with one entry that is not zero, which refuses to store the others."""

    index: int | jax.Array  # []
    value: float | jax.Array  # []
    length: int = vn.static()

    def aval(self):
        return jax.core.ShapedArray((self.length,), jnp.result_type(self.value))

    def materialise(self):
        raise ValueError("OneEntry refuses to be dense")


def rank_one_matmul(w, a, b, y):
    return w @ y + a * jnp.dot(b, y)


def register_rank_one():
    @vn.register(jax.lax.dot_general_p)
    def _(x: RankOne, y: vn.ArrayLike | vn.ImplicitArray, *, dimension_numbers, **params):
        if dimension_numbers != DIMENSIONS["dimension_numbers"]:
            return NotImplemented
        return vn.implicit(rank_one_matmul)(x.w, x.a, x.b, y)  # dispatches on the type of y


def take(x, y):
    return (x[..., y.index] * y.value).astype(x.dtype)


def register_one_entry():
    @vn.register(jax.lax.dot_general_p)
    def _(x: vn.ArrayLike, y: OneEntry, *, dimension_numbers, **params):
        return take(x, y)


def register_greedy_one_entry():
    @vn.register(jax.lax.dot_general_p)
    def _(x: vn.ArrayLike | vn.ImplicitArray, y: OneEntry, *, dimension_numbers, **params):
        return take(x, y)


LORA = RankOne(W, A, B)
SPARSE = OneEntry(2, 5.0, 4)
is_lora = lambda x: isinstance(x, RankOne)
is_sparse = lambda x: isinstance(x, OneEntry)


def test_a_rule_runs_on_a_dense_operand(dot):
    register_rank_one()
    assert vn.implicit(matmul)(LORA, Y).tolist() == [12.0, 12.0, 12.0]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_rule_runs_on_a_type_it_does_not_know(dot, wrap):
    register_rank_one()
    register_one_entry()
    assert wrap(vn.implicit(wrap(matmul)))(LORA, SPARSE).tolist() == [10.0, 10.0, 10.0]


@pytest.fixture
def ambiguous(dot):
    register_rank_one()
    register_greedy_one_entry()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_two_rules_that_fit_equally_are_named_with_file_and_line(ambiguous, wrap):
    with pytest.raises(vn.AmbiguousLookupError) as error:
        vn.implicit(wrap(matmul))(LORA, SPARSE)
    message = str(error.value)
    assert message.startswith(
        "dot_general(RankOne, OneEntry) is ambiguous among the following rules"
    )
    places = re.findall(r"test_redispatch\.py:(\d+) \(precedence 0\)", message)
    expected = [f.__code__.co_firstlineno for f in (register_rank_one, register_greedy_one_entry)]
    assert [int(place) - 1 for place in sorted(places, key=int)] == expected
    for way_out in ("filter_spec", "rule for the combination", "precedence"):
        assert way_out in message


INNER_FIRST = {
    "by predicate": (is_lora, is_sparse),
    "by position": ((False, (True, False), False), (False, (False, True), False)),
    "by a predicate at a position": (
        (False, (is_lora, False), False),
        (False, (False, True), False),
    ),
}


@pytest.mark.parametrize(("inner", "outer"), INNER_FIRST.values(), ids=INNER_FIRST)
def test_nested_implicit_determines_the_first_rule(ambiguous, inner, outer):
    nested = vn.implicit(vn.implicit(matmul, filter_spec=inner), filter_spec=outer)
    assert nested(LORA, SPARSE).tolist() == [10.0, 10.0, 10.0]


def test_the_error_of_the_other_order_names_the_operation(ambiguous):
    nested = vn.implicit(vn.implicit(matmul, filter_spec=is_sparse), filter_spec=is_lora)
    for wrong in (nested, lambda *args: jax.eval_shape(nested, *args)):  # found by tracing alone
        with pytest.raises(ValueError, match="RankOne refuses to be dense") as error:
            wrong(LORA, SPARSE)
        notes = " ".join(getattr(error.value, "__notes__", ()))
        assert re.search(
            r"(gather|dynamic_slice|slice|dynamic_index)\w*\(RankOne:f32\[3,4\]", notes
        )


def test_a_rule_for_the_pair_resolves_an_ambiguity(ambiguous):
    @vn.register(jax.lax.dot_general_p)
    def _(x: RankOne, y: OneEntry, *, dimension_numbers, **params):
        return vn.implicit(rank_one_matmul)(x.w, x.a, x.b, y)

    assert vn.implicit(matmul)(LORA, SPARSE).tolist() == [10.0, 10.0, 10.0]


def test_precedence_resolves_an_ambiguity(ambiguous):
    @vn.register("dot_general", precedence=1)
    def _(x: RankOne, y: vn.ArrayLike | vn.ImplicitArray, **params):
        return vn.implicit(rank_one_matmul)(x.w, x.a, x.b, y)

    assert vn.implicit(matmul)(LORA, SPARSE).tolist() == [10.0, 10.0, 10.0]


def test_a_primitive_can_be_named_in_three_ways(dot):
    def rule(result):
        def function(x: RankOne, **params):
            return jnp.full(x.shape, result, x.dtype)

        return function

    for result, primitive in enumerate(["neg", jax.lax.neg_p, ["neg", "sin"], (primitives.neg_p,)]):
        vn.register(primitive)(rule(result))
        assert (vn.implicit(jnp.negative)(LORA) == result).all()


def test_a_rule_registered_late_takes_effect_in_a_jitted_program(dot):
    register_rank_one()
    program = vn.implicit(jax.jit(matmul))
    assert program(LORA, Y).tolist() == [12.0, 12.0, 12.0]

    @vn.register("dot_general")
    def _(x: RankOne, y: vn.ArrayLike, **params):
        return x.a * 7

    assert program(LORA, Y).tolist() == [7.0, 7.0, 7.0]


OPERANDS = {
    "Python int": 2,
    "Python float": 2.0,
    "Python bool": True,
    "NumPy array": np.full((3, 4), 2.0, np.float32),
    "NumPy scalar": np.float32(2),
    "JAX array": arrays.full((3, 4), 2.0),
    "literal in a jaxpr": None,
}


@pytest.mark.parametrize("other", OPERANDS.values(), ids=OPERANDS)
@pytest.mark.parametrize("swap", [False, True], ids=["on the left", "on the right"])
def test_dense_operands_use_the_dense_rule(dot, other, swap):
    @vn.register("mul")
    def _(x: RankOne, y: vn.ArrayLike, **params):
        return jnp.full(x.shape, 1.0)

    @vn.register("mul")
    def _(x: vn.ArrayLike, y: RankOne, **params):
        return jnp.full(y.shape, 2.0)

    product = lambda x, y: y * x if swap else x * y
    program = jax.jit(lambda x: product(x, 2.0)) if other is None else lambda x: product(x, other)
    assert (vn.implicit(program)(LORA) == 1 + swap).all()


def test_a_python_literal_counts_as_a_dense_operand(dot):
    p = Primitive("scaled")
    p.def_impl(lambda x, by: x * by)
    p.def_abstract_eval(lambda x, by: x)

    @vn.register(p)
    def _(x: RankOne, by: float):
        return jnp.full(x.shape, by)

    assert (vn.implicit(lambda x: p.bind(x, 3.0))(LORA) == 3.0).all()
