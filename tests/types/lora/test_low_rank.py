"""Tests of `LowRank`, and of solves with `Diagonal + LowRank`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import arrays
from support.array_types import assert_close
from support.claims import Claim, claims
from support.policies import only_by_rules

import veneer as vn
from veneer.types.lora import LoraArray
from veneer.types.structured import LowRank
from veneer.types.structured.diagonal import Diagonal

KEY = arrays.key(0)

square = lambda d: LowRank(d(d.n, 2), d(2, d.n))
wide = lambda d: LowRank(d(d.n, 1), d(1, 3))
diagonal = lambda d: Diagonal(d.positive(d.n) + 1)
updated = lambda d: LoraArray(diagonal(d), d(d.n, 2) / 2, d(2, d.n) / 2, scale=0.5)
trace = lambda x: jnp.trace(x, axis1=-2, axis2=-1)
# Claims differentiate the sine of the result. In bfloat16, that sine has another derivative.
AT_ANOTHER_POINT = ("grad of implicit", "implicit of grad")
KEPT = {"kept": LowRank, "sizes": (0,)}
SUM = {"kept": LoraArray, "sizes": (1,)}
SOLVED = {"dtypes": ("float64",), "sizes": (1, 5)}

test_under, test_over = claims(
    {
        "x @ y": Claim(lambda x, y: x @ y, (lambda d: d(3, d.n), wide)),
        "y @ x": Claim(lambda y, x: y @ x, (wide, lambda d: d(3, 2)), sizes=()),
        "of two": Claim(lambda x, y: [x @ y, x.mT @ x, y.mT @ x.mT], (square, wide), **KEPT),
        "with a structure": Claim(lambda x, y: [x @ y, y @ x], (square, diagonal), **KEPT),
        "sums of two": Claim(lambda x, y: [x + y, x - 2 * y], (square, square), **KEPT),
        "sums with a structure": Claim(
            lambda x, y: [x + y, y + x, x - y, y - x], (square, diagonal), **SUM
        ),
        "sums with an updated one": Claim(lambda x, y: [x + y, y - x], (square, updated), **SUM),
        "transposes, multiples": Claim(lambda x: [x.mT, 3 * x, -x / 2], (wide,), **KEPT),
        "conversions": Claim(
            lambda x: x.astype(jnp.bfloat16), (wide,), without=AT_ANOTHER_POINT, **KEPT
        ),
        "reductions": Claim(
            lambda x: (x.sum((-1, -2)), x.sum(-1), trace(x)), (square,), sizes=(1,)
        ),
        "a dense sum": Claim(
            lambda x, y: x + y, (square, lambda d: d(d.n, d.n)), made_dense=True, sizes=()
        ),
        "solves": Claim(
            lambda x, y, b: jnp.linalg.solve(x + y, b),
            (square, lambda d: Diagonal(d.positive(d.n) + 2), lambda d: d(d.n, 3)),
            **SOLVED,
        ),
        "determinants": Claim(lambda x: jnp.linalg.det(x), (updated,), **SOLVED),
        "inverses": Claim(lambda x: jnp.linalg.inv(x), (updated,), kept=LoraArray, **SOLVED),
    }
)


def example(m=6, n=5, r=2, key=KEY):
    a, b = jax.random.split(key)
    return LowRank(jax.random.normal(a, (m, r)), jax.random.normal(b, (r, n)))


def test_a_product_of_two_has_the_smaller_rank():
    x, y = example(4, 5, 3), example(5, 6, 1)
    assert (x @ y).a.shape == (x.T.T @ y).a.shape == (4, 1)
    assert (y.T @ x.T).b.shape == (1, 4)


def test_a_factor_may_be_quantized():
    x = example()
    q = vn.quant.quantize(x.a, "int8", channelwise_axes=[1])
    v = jnp.ones((5, 2))
    program = vn.implicit(lambda x, v: (x @ v, v.T @ x.T), on_materialise=only_by_rules)
    assert_close(
        program(LowRank(q, x.b), v), (q.dequantize() @ x.b @ v, v.T @ x.b.T @ q.dequantize().T)
    )


def test_rank_0_times_infinity_is_0():
    x = LowRank(jnp.zeros((2, 0)), jnp.zeros((0, 2)))
    assert (x @ jnp.array([jnp.inf, jnp.nan])).tolist() == [0, 0]


def test_nbytes_counts_both_factors():
    assert example().nbytes == 4 * (6 * 2 + 2 * 5)


@pytest.mark.parametrize(
    ("error", "message", "factors"),
    [
        (ValueError, "axis r of b is 3", (arrays.ones((4, 2)), arrays.ones((3, 4)))),
        (ValueError, "leading axes differ", (arrays.ones((1, 4, 2)), arrays.ones((2, 4)))),
        (TypeError, "an array for b", (arrays.ones((4, 2)), 2.0)),
    ],
)
def test_invalid_factors_raise(error, message, factors):
    with pytest.raises(error, match=message):
        LowRank(*factors)


# The Woodbury identity.


@pytest.fixture
def ill_conditioned():
    """Yield a float64 matrix whose diagonal spans six decades, and right-hand sides."""
    with jax.enable_x64(True):
        n = 40
        keys = jax.random.split(KEY, 3)
        a, b = (
            jax.random.normal(key, shape, "float64")
            for key, shape in zip(keys, ((n, 3), (3, n)), strict=False)
        )
        d = Diagonal(jnp.logspace(-3, 3, n, dtype="float64"))
        yield LoraArray(d, a, b, scale=0.5), jax.random.normal(keys[2], (n, 2), "float64")


def test_a_solve_is_as_exact_as_the_condition_number_allows(ill_conditioned):
    x, v = ill_conditioned
    dense = vn.materialise(x)
    found = vn.implicit(jnp.linalg.solve, on_materialise="error")(x, v)
    condition = max(np.linalg.cond(dense), 1e6)
    error = jnp.linalg.norm(dense @ found - v) / jnp.linalg.norm(v)
    assert error < 10 * condition * np.finfo("float64").eps
    assert_close(found, jnp.linalg.solve(dense, v), 1e-7)


def test_determinants_and_inverses_match_dense(ill_conditioned):
    x, _ = ill_conditioned
    dense = vn.materialise(x)
    sign, logabsdet = vn.implicit(jnp.linalg.slogdet, on_materialise="error")(x)
    expected = np.linalg.slogdet(dense)
    assert sign == expected[0]
    assert logabsdet == pytest.approx(expected[1], rel=1e-9)
    inverse = vn.implicit(jnp.linalg.inv)(x)
    assert isinstance(inverse, LoraArray)
    assert_close(vn.materialise(inverse) @ dense, jnp.eye(40), 1e-6)


def test_a_solve_with_a_dense_weight_materializes():
    x = LoraArray(4 * jnp.eye(3), jnp.ones((3, 1)), jnp.ones((1, 3)))
    report = vn.explain(jnp.linalg.solve)(x, jnp.ones(3))
    assert report.materialised
    out = vn.implicit(jnp.linalg.solve)(x, jnp.ones(3))
    assert_close(out, jnp.full(3, 1 / 7))


# On several devices.


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_factors_are_sharded_like_the_matrix():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = example(8, 8)
    place = lambda x: jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, P("x", "y")))
    out = jax.jit(vn.implicit(place, on_materialise="error"))(x)
    assert_close(out, vn.materialise(x))
    assert out.a.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("x")), 2)
    assert out.b.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(None, "y")), 2)


def test_a_contraction_over_both_axes_matches_dense():
    x = LowRank(jnp.ones((3, 1)), jnp.ones((1, 3)))
    assert vn.implicit(lambda x: jnp.tensordot(x, x, 2))(x) == 9


def test_a_sum_of_integers_is_dense():
    x = LowRank(jnp.ones((3, 1), int), jnp.ones((1, 3), int))
    out = vn.implicit(jnp.add)(x, Diagonal(jnp.array([2, -3, 4])))
    assert out.tolist() == [[3, 1, 1], [1, -2, 1], [1, 1, 5]]
