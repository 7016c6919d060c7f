"""Programs of JAX functions on implicit arrays, compared with the same on dense arrays."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import veneer as vn

PROGRAMS = {
    "operator": lambda x, w: x @ w,
    "reflected operator": lambda x, w: (2.0 * w).T + w.T / 2,
    "dot": lambda x, w: jnp.dot(x, w),
    "einsum": lambda x, w: jnp.einsum("ij,jk->ki", x, w),
    "lax": lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
    "elementwise": lambda x, w: jnp.sin(w) * jnp.exp(-w),
    "reduction": lambda x, w: jnp.sum(w, axis=0) + jnp.max(w),
    "layout": lambda x, w: jnp.swapaxes(w, 0, 1)[1:, ::2],
    "where": lambda x, w: jnp.where(w > 0, w, 0.0),
    "several results": lambda x, w: lax.top_k(w, 2),
    "pieces": lambda x, w: jnp.split(w, 2, axis=1),
    "stack": lambda x, w: jnp.stack([w, w]),
    "softmax": lambda x, w: jax.nn.softmax(w),
    "nested jit": lambda x, w: jax.jit(jnp.dot)(x, jnp.transpose(jnp.transpose(w))),
    "linear algebra": lambda x, w: jnp.linalg.qr(w.T)[1],
    "shape and dtype": lambda x, w: jnp.zeros(w.shape, w.dtype) + w.ndim + w.size,
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_agree_with_dense_arrays(name, jit, x, weight, agree):
    program = PROGRAMS[name]
    agree((jax.jit(program) if jit else program)(x, weight.value), program(x, weight.dense))


def test_a_weight_can_be_closed_over(x, weight, high, agree):
    agree(jax.jit(lambda x: jnp.dot(x, high(weight.value)))(x), x @ weight.dense)


def test_a_jitted_function_returns_implicit_arrays(weight):
    out = jax.jit(lambda w: {"t": jnp.transpose(w)})(weight.value)
    assert type(out["t"]) is type(weight.value)
    assert out["t"].shape == (6, 4)


def test_a_jitted_result_is_accepted_by_another_jit(x, weight, agree):
    transposed = jax.jit(jnp.transpose)(weight.value)
    agree(jax.jit(lambda x, w: jnp.dot(x, w.T))(x, transposed), x @ weight.dense)


def test_products_of_nested_arrays_agree(x, agree):
    q = vn.quant.quantize(jax.random.normal(jax.random.key(0), (4, 6)), "int8")
    w = vn.types.LoraArray(q, jnp.ones((4, 2)), jnp.ones((2, 6)))
    agree(jax.jit(jnp.dot)(x, w), x @ vn.materialise(w))


def test_the_compiled_product_comes_from_the_rule(x, weight):
    """The weight is not materialized: a hand-written product has the same dot products."""
    w = weight.value
    if weight.dense_tangent:
        by_hand = lambda x, w: (x @ w.qvalue.astype(x.dtype)) * w.scale
    else:
        by_hand = lambda x, w: x @ w.w + w.scale * ((x @ w.a) @ w.b)
    lowered = jax.jit(lambda x, w: jnp.dot(x, w)).lower(x, w).as_text()
    dots = lambda text: sorted(
        line.split(" : ")[-1] for line in text.splitlines() if "dot_general" in line
    )
    assert dots(lowered) == dots(jax.jit(by_hand).lower(x, w).as_text())


def test_the_lowered_program_equals_the_one_of_implicit(x, weight):
    lowered = lambda f: jax.jit(f).lower(x, weight.value).as_text()
    program = lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ())))
    strip = lambda text: "\n".join(text.splitlines()[1:])
    assert strip(lowered(program)) == strip(lowered(vn.implicit(program)))


def test_the_results_of_rules_are_typed(x, weight):
    text = str(jax.make_jaxpr(lambda x, w: lax.dot(x, lax.transpose(w, (1, 0)).T))(x, weight.value))
    name = "q8" if weight.dense_tangent else "lora"
    assert f"{name}[4,6] = pack" in text
    assert f"{name}[6,4] = transpose[permutation=(1, 0)]" in text
    assert text.count("dot_general[") == 1


def test_a_rule_registered_after_tracing_is_used(x):
    class Late(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            return self.x

    value = Late(jnp.ones((4, 6)))
    program = lambda x, w: lax.dot(x, w)
    assert jax.make_jaxpr(program)(x, value).out_avals[0].dtype == jnp.float32
    ran = []

    @vn.register("dot_general")
    def _(x: vn.ArrayLike, w: Late, *, dimension_numbers, **params):
        ran.append(w)
        return lax.dot_general(x, w.x, dimension_numbers, **params)

    jax.jit(program)(x, value)
    assert ran


def test_an_error_in_materialise_notes_that_no_rule_fits(x):
    class Failing(vn.ImplicitArray):
        x: jax.Array

        def aval(self):
            return jax.typeof(self.x)

        def materialise(self):
            raise ValueError("never dense")

    with pytest.raises(ValueError, match="never dense") as error:
        jax.jit(jnp.dot)(x, Failing(jnp.ones((4, 6))))
    assert any("no rule fits" in note for note in error.value.__notes__)


def test_operators_combine_a_tree_with_a_typed_value(agree):
    """`x - y` calls the operator of the class. Its rules see the typed `y` as implicit."""
    x = vn.types.Masked(jnp.arange(6.0).reshape(2, 3), jnp.arange(6).reshape(2, 3) > 1)
    for program in (
        lambda x: x - jnp.max(x, 1, keepdims=True),
        lambda x: jnp.max(x, 1, keepdims=True) * x,
        lambda x: jax.nn.softmax(x, 1),
    ):
        out, expected = jax.jit(program)(x), vn.implicit(program)(x)
        assert jax.tree.structure(out) == jax.tree.structure(expected)
        agree(out.filled(0.0), expected.filled(0.0))
        assert (out.mask == expected.mask).all()
