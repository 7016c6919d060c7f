"""Quax's tutorial on rules that redispatch, step by step, with only the import changed."""

import sys
from types import SimpleNamespace
from typing import Union

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, ArrayLike, Int, Shaped
from support import arrays
from support.array_types import assert_close

import veneer as vn
import veneer.interop.quax as quax

MATRIX_VECTOR = (((1,), (0,)), ((), ()))
matmul = lambda x, y: x @ y


def outer_update(w, a, b, y):
    return w @ y + a * jnp.dot(b, y)


@pytest.fixture
def tutorial() -> SimpleNamespace:
    """Return both types of the tutorial, with rules. Each test has new classes."""

    class RankOne(quax.ArrayValue):
        w: Shaped[Array, "m n"]
        a: Shaped[Array, " m"]
        b: Shaped[Array, " n"]

        def aval(self):
            return jax.core.ShapedArray(jnp.shape(self.w), jnp.result_type(self.w))

        def materialise(self):
            raise ValueError("RankOne must not be materialized")

    class OneEntry(quax.ArrayValue):
        index: Int[ArrayLike, ""]
        value: Shaped[ArrayLike, ""]
        length: int = eqx.field(static=True)

        def aval(self):
            return jax.core.ShapedArray((self.length,), jnp.result_type(self.value))

        def materialise(self):
            raise ValueError("OneEntry must not be materialized")

    @quax.register(jax.lax.dot_general_p)
    def _(x: RankOne, y: Union[ArrayLike, quax.ArrayValue], *, dimension_numbers, **params):  # noqa: UP007
        if jnp.ndim(x) != 2 or jnp.ndim(y) != 1:
            raise NotImplementedError("only matrix-vector products")
        if dimension_numbers != MATRIX_VECTOR:
            raise NotImplementedError(f"no product for {dimension_numbers}")
        return quax.quaxify(outer_update)(x.w, x.a, x.b, y)

    def entry_of_product(x, y):
        if x.shape[-1] != y.length:
            raise ValueError(f"a vector of length {y.length} does not fit {x.shape}")
        return x[..., y.index] * y.value

    @quax.register(jax.lax.dot_general_p)
    def _(x: Array, y: OneEntry, *, dimension_numbers, **params):
        return entry_of_product(x, y)

    return SimpleNamespace(
        RankOne=RankOne,
        OneEntry=OneEntry,
        entry_of_product=entry_of_product,
        lora=RankOne(arrays.array([[1.0, 2, 3, 4], [5, 6, 7, 8]]), arrays.ones(2), arrays.ones(4)),
        sparse=OneEntry(index=2, value=5, length=4),
    )


def dense(t: SimpleNamespace):
    return t.lora.w + jnp.outer(t.lora.a, t.lora.b), jnp.zeros(4).at[2].set(5)


def make_ambiguous(t: SimpleNamespace) -> None:
    """Register the rule of the vector for matrices of any type, as the tutorial does."""
    other = Union[ArrayLike, quax.ArrayValue]  # noqa: UP007

    @quax.register(jax.lax.dot_general_p)
    def _(x: other, y: t.OneEntry, *, dimension_numbers, **params):
        return t.entry_of_product(x, y)


def test_a_dense_operand_works_as_before(tutorial):
    y = arrays.arange(4.0)
    assert_close(quax.quaxify(matmul)(tutorial.lora, y), dense(tutorial)[0] @ y)


def test_a_rule_with_dense_annotations_alone_is_found(tutorial):
    w = tutorial.lora.w
    assert_close(quax.quaxify(matmul)(w, tutorial.sparse), w @ dense(tutorial)[1])
    assert_close(quax.quaxify(jnp.dot)(w[0], tutorial.sparse), w[0] @ dense(tutorial)[1])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_types_that_do_not_know_each_other_multiply(tutorial, wrap):
    w, y = dense(tutorial)
    assert_close(wrap(quax.quaxify(matmul))(tutorial.lora, tutorial.sparse), w @ y)


def test_errors_that_a_rule_raises_reach_the_user(tutorial):
    with pytest.raises(NotImplementedError, match="only matrix-vector"):
        quax.quaxify(matmul)(tutorial.lora, jnp.ones((4, 2)))
    with pytest.raises(NotImplementedError, match="no product for"):
        quax.quaxify(jax.lax.dot_general)(tutorial.lora, jnp.ones(2), (((0,), (0,)), ((), ())))
    with pytest.raises(ValueError, match="RankOne must not be materialized"):
        quax.quaxify(jnp.sin)(tutorial.lora)
    with pytest.raises(ValueError, match="OneEntry must not be materialized"):
        quax.quaxify(jnp.sum)(tutorial.sparse)


def ambiguity(t: SimpleNamespace) -> Exception:
    make_ambiguous(t)
    with pytest.raises(Exception, match="is ambiguous among the following") as info:
        quax.quaxify(matmul)(t.lora, t.sparse)
    return info.value


def test_an_ambiguous_product_names_operands_rules_and_remedies(tutorial):
    error = ambiguity(tutorial)
    assert repr(error).startswith("AmbiguousLookupError('dot_general(RankOne, OneEntry) is")
    message = str(error)
    assert "(RankOne, ArrayValue | Dense) at " in message
    assert "(ArrayValue | Dense, OneEntry) at " in message
    assert message.count(f"{__file__}:") == message.count("(precedence 0)") == 2
    for remedy in ("two calls of quaxify", "filter_spec", "a rule for the combination"):
        assert remedy in message


def test_plums_error_catches_an_ambiguous_product(tutorial):
    plum = pytest.importorskip("plum")
    error = ambiguity(tutorial)
    assert isinstance(error, plum.AmbiguousLookupError)
    assert isinstance(error, quax.AmbiguousLookupError)
    assert isinstance(error, vn.AmbiguousLookupError)
    assert error.__traceback__ is not None


def test_without_plum_the_error_is_a_lookup_error(tutorial, monkeypatch):
    monkeypatch.delitem(sys.modules, "plum", raising=False)
    error = ambiguity(tutorial)
    assert type(error) is quax.AmbiguousLookupError
    assert isinstance(error, LookupError)


def test_an_ambiguity_within_a_rule_is_the_same_error(tutorial):
    make_ambiguous(tutorial)

    class Twice(quax.ArrayValue):
        x: quax.ArrayValue

        def aval(self):
            return self.x.aval()

        def materialise(self):
            raise ValueError

    @quax.register(jax.lax.dot_general_p)
    def _(x: Twice, y: tutorial.OneEntry, *, dimension_numbers, **params):
        return 2 * quax.quaxify(matmul)(x.x, y)

    with pytest.raises(quax.AmbiguousLookupError, match="RankOne, OneEntry"):
        quax.quaxify(matmul)(Twice(tutorial.lora), tutorial.sparse)


BY_TYPE = (
    lambda t: lambda v: isinstance(v, t.RankOne),
    lambda t: lambda v: isinstance(v, t.OneEntry),
)
BY_POSITION = (lambda t: (False, (True, False), False), lambda t: (False, (False, True), False))


@pytest.mark.parametrize("filters", [BY_TYPE, BY_POSITION], ids=["type", "position"])
def test_nested_quaxify_resolves_the_ambiguity(tutorial, filters):
    make_ambiguous(tutorial)
    is_lora, is_sparse = (f(tutorial) for f in filters)
    w, y = dense(tutorial)
    f = quax.quaxify(quax.quaxify(matmul, filter_spec=is_lora), filter_spec=is_sparse)
    assert_close(f(tutorial.lora, tutorial.sparse), w @ y)


@pytest.mark.parametrize("filters", [BY_TYPE, BY_POSITION], ids=["type", "position"])
def test_nested_quaxify_in_the_wrong_order_raises(tutorial, filters):
    make_ambiguous(tutorial)
    is_lora, is_sparse = (f(tutorial) for f in filters)
    f = quax.quaxify(quax.quaxify(matmul, filter_spec=is_sparse), filter_spec=is_lora)
    with pytest.raises(ValueError, match="RankOne must not be materialized"):
        jax.eval_shape(f, tutorial.lora, tutorial.sparse)  # when it is traced


def test_a_rule_for_the_combination_resolves_the_ambiguity(tutorial):
    make_ambiguous(tutorial)

    @quax.register(jax.lax.dot_general_p)
    def _(x: tutorial.RankOne, y: tutorial.OneEntry, *, dimension_numbers, **params):
        return outer_update(x.w, x.a, x.b, jnp.zeros(4).at[y.index].set(y.value))

    w, y = dense(tutorial)
    assert_close(quax.quaxify(matmul)(tutorial.lora, tutorial.sparse), w @ y)
