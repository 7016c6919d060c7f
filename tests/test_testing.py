"""`vn.testing.check_rules` accepts a correct type and reports each mistake of a wrong one."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jaxtyping import TypeCheckError

import veneer as vn
from veneer.testing import check_rules


class Diagonal(vn.ImplicitArray):
    diagonal: jax.Array  # [..., n]

    def materialise(self):
        return self.diagonal[..., None] * jnp.eye(self.diagonal.shape[-1], dtype=self.dtype)

    def aval(self):
        n = self.diagonal.shape[-1]
        return jax.core.ShapedArray((*self.diagonal.shape, n), self.diagonal.dtype)


def example(**methods):
    """Return a value of a new type, so that a test can register rules for it."""
    return type("Odd", (Diagonal,), methods)(jnp.array([1.0, 2.0, 3.0]))


def test_a_correct_type_passes():
    w = example()

    @vn.register(["neg", "sin"])
    def _(x: type(w), **params):
        return type(w)(-x.diagonal) if "accuracy" not in params else type(w)(jnp.sin(x.diagonal))

    @vn.register("dot_general")
    def _(x: vn.ArrayLike, y: type(w), *, dimension_numbers, **params):
        if y.ndim > 2 or dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
            return NotImplemented
        return x * y.diagonal

    checked = check_rules(type(w), w)
    assert {"neg", "sin", "dot_general"} <= set(checked.rules)
    assert all("test_testing.py" in at for at in checked.rules["neg"])
    assert "exp" in checked.made_dense
    assert len(checked.agree) > 100
    assert checked.refused == {}
    assert "Rules ran for" in str(checked)
    assert "dot_general, " in str(checked)


# Each mistake: the primitive, its rule, and the message.
WRONG = {
    "values": ("exp", lambda w, **_: w.like(jnp.exp(w.diagonal)), "exp: 6 of 9 values differ, by"),
    "a shape": (
        "neg",
        lambda w, **_: -w.diagonal,
        r"neg: TypeError: the rule at .* returns f32\[3\]",
    ),
    "an error": ("neg", lambda w, **_: 1 / 0, "neg: ZeroDivisionError"),
    "a batch": (
        "sin",
        lambda w, **_: w.like(jnp.sin(w.diagonal) * (w.ndim == 2)),
        "sin, vmap (within|outside): 6 of 18 values differ",
    ),
    "a derivative": (
        "sin",
        lambda w, **_: w.like(lax.stop_gradient(jnp.sin(w.diagonal))),
        "sin, grad: 3 of 3 values differ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_reported(name):
    primitive, rule, message = WRONG[name]
    w = example(like=lambda self, diagonal: type(self)(diagonal))

    @vn.register(primitive)
    def _(x: type(w), **params):
        return rule(x)

    with pytest.raises(
        AssertionError, match=rf"(?s)Odd\(.*\) differs from its dense array.*{message}"
    ):
        check_rules(type(w), w, transformations=name in ("a batch", "a derivative"))


def test_the_constructor_checks_results():
    def check(self):
        if self.diagonal.shape[-1] != 3:
            raise ValueError("three entries")

    w = example(__post_init__=check)

    @vn.register("exp")
    def _(x: type(w), **params):
        out = type(w)(x.diagonal)
        object.__setattr__(out, "diagonal", x.diagonal[:2])
        return out

    with pytest.raises(AssertionError, match=r"exp: (TypeError|ValueError)"):
        check_rules(type(w), w, transformations=False)


def test_an_unused_rule_is_reported():
    w = example()

    @vn.register("conv_general_dilated")
    def _(x: vn.ArrayLike, y: type(w), **params):
        return lax.conv_general_dilated_p.bind(x, vn.materialise(y), **params)

    message = (
        r"These rules of Odd ran in no program.*untested=.*\nconv_general_dilated: .*test_testing"
    )
    with pytest.raises(AssertionError, match=message):
        check_rules(type(w), w, transformations=False)
    check_rules(type(w), w, untested=["conv_general_dilated"], transformations=False)

    def conv(w, d):
        x = d[None, :, :]  # [1, 3, 3], by a kernel of 3 inputs, 3 outputs and size 1
        return lax.conv_general_dilated(x, w[:, :, None], (1,), "VALID")

    def conv_of_itself(w, d):
        return lax.conv_general_dilated(d, w, (), "VALID", dimension_numbers=("NC", "OI", "NC"))

    checked = check_rules(
        type(w), w, programs={"conv": conv, "of itself": conv_of_itself}, transformations=False
    )
    assert "conv_general_dilated" in checked.rules
    assert "of itself" in checked.agree


class Metres(vn.ImplicitArray):
    """A length. It cannot be materialized, because that would lose the unit."""

    x: jax.Array

    def aval(self):
        return jax.typeof(self.x)

    def materialise(self):
        raise TypeError("Metres are no bare numbers")


@vn.register("neg")
def _(x: Metres, **params):
    return Metres(-x.x)


def test_a_type_without_a_dense_array_can_be_checked():
    bare = lambda tree: jax.tree.map(
        lambda x: x.x if isinstance(x, Metres) else x, tree, is_leaf=lambda x: isinstance(x, Metres)
    )
    w = Metres(jnp.arange(1.0, 7).reshape(2, 3))
    checked = check_rules(Metres, w, dense=bare, may_refuse=True)
    assert "neg" in checked.agree
    assert "Metres are no bare numbers" in checked.refused["exp"]
    with pytest.raises(AssertionError, match="exp: TypeError: Metres are no bare numbers"):
        check_rules(Metres, w, dense=bare, transformations=False)


class Bare(vn.ImplicitArray):
    x: jax.Array

    def materialise(self):
        return self.x + self.x.dtype.type(0)


EXAMPLES = [((), "int8"), ((3,), "complex64"), ((0, 2), "float32"), ((1, 1), "bool")]


@pytest.mark.parametrize(("shape", "dtype"), [*EXAMPLES, ((2, 3, 4), "float32")], ids=str)
def test_examples_can_have_any_shape_and_dtype(shape, dtype):
    checked = check_rules(Bare, Bare(jnp.ones(shape, dtype)), transformations=False)
    assert len(checked.agree) > 20


def test_a_wrong_argument_is_rejected():
    with pytest.raises((TypeError, TypeCheckError)):
        check_rules(3, example())
    with pytest.raises(
        (TypeError, TypeCheckError), match=r"The example must be a Diagonal, not |check_rules"
    ):
        check_rules(Diagonal, jnp.ones(3))
