import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.annotations import unless_checked

import veneer as vn
from veneer.quant import Rule, allocate_bits, calibrate, quantize_tree
from veneer.quant.ptq.allocate_bits import Choice, solve_knapsack

RNG = np.random.default_rng(0)


def numbers(*shape, scale=None, seed=0):
    values = np.random.default_rng([seed, *shape]).normal(size=shape)
    return (values * (scale or shape[0] ** -0.5)).astype(np.float32)


def array(*shape, **how):
    return arrays.array(numbers(*shape, **how))


BITS = 2, 3, 4, 8
CHOICES = [
    *(Rule(".*", f"int{n}", tile_size=16, scale_dtype="bfloat16") for n in (3, 4, 5, 6)),
    Rule(".*", "int8"),
]
PARAMS = {
    "up": array(32, 32),
    "gate": arrays.array(0.01 * numbers(32, 32, seed=1)),
    "down": array(32, 16),
}
MIX = numbers(32, 32, seed=1)
BATCHES = [arrays.array(numbers(64, 32, scale=1, seed=i) @ MIX) for i in range(2)]


def model(params, x):
    return (jnp.tanh(x @ params["up"]) + x @ params["gate"]) @ params["down"]


def lost(params, x=BATCHES[0]):
    expected = model(PARAMS, x)
    return float(jnp.linalg.norm(vn.implicit(model)(params, x) - expected))


def least_by_brute_force(choices, budget):
    rows = itertools.product(*choices.values())
    return min(sum(x.loss for x in row) for row in rows if sum(x.bits for x in row) <= budget)


@pytest.mark.parametrize("seed", range(8))
def test_no_choices_within_the_budget_have_less_loss(seed):
    rng = np.random.default_rng(seed)
    choices = {
        path: [
            Choice(i, int(bits * size), float(weight * 4.0**-bits)) for i, bits in enumerate(BITS)
        ]
        for path, size, weight in zip(
            "abc", rng.integers(1, 9, 3), rng.exponential(size=3), strict=True
        )
    }
    least = {path: of[0] for path, of in choices.items()}
    for budget in range(sum(x.bits for x in least.values()), 8 * 24, 3):
        found = solve_knapsack(choices, budget)
        assert sum(x.bits for x in found.values()) <= budget
        best = least_by_brute_force(choices, budget)
        np.testing.assert_allclose(sum(x.loss for x in found.values()), best)


def test_many_weights_are_allocated_within_two_percent():
    rng = np.random.default_rng(0)
    choices = {
        str(path): [Choice(i, int(bits * size), weight * 4.0**-bits) for i, bits in enumerate(BITS)]
        for path, (size, weight) in enumerate(
            zip(rng.integers(1000, 10**6, 60), rng.exponential(size=60), strict=True)
        )
    }
    budget = sum(of[1].bits for of in choices.values())
    found = solve_knapsack(choices, budget)
    assert sum(x.bits for x in found.values()) <= budget
    # The Lagrange dual with any price per bit is a lower bound of the loss.
    prices = np.geomspace(1e-12, 1e-3, 400)
    least = max(
        sum(min(x.loss + price * x.bits for x in of) for of in choices.values()) - price * budget
        for price in prices
    )
    assert least * 0.999 <= sum(x.loss for x in found.values()) <= least * 1.02


def test_sensitive_weights_get_more_bits():
    allocation = allocate_bits(model, CHOICES, 5.0, params=PARAMS)
    rules = allocation(BATCHES)
    report = {row.path: row for row in allocation.report.rows}
    small = quantize_tree(PARAMS, rules, model=model, args=(BATCHES[0],))
    assert sum(8 * q.nbytes for q in small.values()) == sum(row.bits for row in report.values())
    assert allocation.report.bits <= 5.0
    assert report["gate"].qtype == "int3"  # it hardly affects the output
    same = quantize_tree(PARAMS, CHOICES[1:2], model=model, args=(BATCHES[0],))
    assert lost(small) < lost(same)
    calibrated = calibrate(model, rules, params=PARAMS)(BATCHES)
    assert calibrated["up"].qtype == report["up"].qtype
    table = str(allocation.report)
    assert "total" in table
    assert "bits" in table
    # The error of the model if only this weight is rounded, to the fewest bits.
    alone = PARAMS | {"gate": small["gate"]}
    share = lost(alone) / float(jnp.linalg.norm(model(PARAMS, BATCHES[0])))
    # The allocator measures another choice, and scales its error.
    np.testing.assert_allclose(report["gate"].model_loses, share, rtol=0.1)


@pytest.mark.parametrize("bits", [4.0, 6.5, 40.0])
def test_the_budget_is_not_exceeded(bits):
    allocation = allocate_bits(jax.jit(model), CHOICES, bits, params=PARAMS)
    allocation(BATCHES)
    assert allocation.report.bits <= bits
    if bits > 9:
        assert {row.qtype for row in allocation.report.rows} == {"int8"}


def test_corrections_and_rotations_can_be_choices():
    params = {
        "table": array(40, 32, scale=1),
        "layers": array(2, 32, 32, scale=0.2),
        "norm": jnp.ones(32),
    }

    def stacked(params, ids):
        step = lambda x, w: (x + jnp.tanh(x @ w), None)
        return jax.lax.scan(step, params["table"][ids] * params["norm"], params["layers"])[0]

    choices = [
        Rule("table", "int4", tile_size=16),
        Rule("table|layers", "int8"),
        Rule("layers", "int3", tile_size=16, rotate=True, correction_rank=2),
    ]
    allocation = allocate_bits(stacked, choices, 9.5, params=params)
    rules = allocation([jnp.arange(32)])
    assert [rule.path_regex for rule in rules] == ["layers", "table"]
    small = quantize_tree(params, rules, model=stacked, args=(jnp.arange(32),))
    taken = sum(8 * small[path].nbytes for path in ("table", "layers"))
    assert taken == sum(row.bits for row in allocation.report.rows)
    assert taken <= 9.5 * (40 * 32 + 2 * 32 * 32)


def test_special_characters_in_paths_are_escaped():
    params = {"a.b": PARAMS["up"], "a+b": PARAMS["down"]}
    run = lambda params, x: x @ params["a.b"] @ params["a+b"]
    rules = allocate_bits(run, CHOICES[1:], 6.0, params=params)(BATCHES)
    for path in params:
        assert [rule.matches(path) for rule in rules].count(True) == 1


def test_wrong_arguments_of_allocate_bits_raise():
    with pytest.raises(TypeError, match=r"holds no parameters.*params=params"):
        allocate_bits(lambda x: model(PARAMS, x), CHOICES, 5.0)
    with pytest.raises(ValueError, match="there are no batches"):
        allocate_bits(model, CHOICES, 5.0, params=PARAMS)([])
    with pytest.raises(ValueError, match=r"2.0 bits per value is below the 4"):
        allocate_bits(model, CHOICES, 2.0, params=PARAMS)(BATCHES)
    with pytest.raises(ValueError, match="no choice has a format for a weight"):
        allocate_bits(model, [Rule(".*", None)], 5.0, params=PARAMS)(BATCHES)
    with (
        pytest.warns(UserWarning, match="'other' matches no parameter"),
        pytest.raises(ValueError, match="no choice has a format for a weight"),
    ):
        allocate_bits(model, [Rule("other", "int4")], 5.0, params=PARAMS)(BATCHES)
    for bits in (float("nan"), 0, -1.0):
        with pytest.raises(ValueError, match="bits must be a number of bits per value above 0"):
            allocate_bits(model, CHOICES, bits, params=PARAMS)
    for budget in (30, float("nan")):
        with pytest.raises(ValueError, match="at least 40 bits, and the budget"):
            solve_knapsack({"a": [Choice(0, 40, 1.0)]}, budget)
    with pytest.raises(ValueError, match=r"\w+: .* activations are not finite"):
        allocate_bits(model, CHOICES, 5.0, params=PARAMS)([BATCHES[0].at[1, 2].set(jnp.nan)])


@pytest.mark.parametrize("size", [0.0, 1e-25])
def test_vanishing_activations_raise_or_warn(size):
    allocation = allocate_bits(model, CHOICES, 5.0, params=PARAMS)
    with pytest.raises(ValueError, match=r"the activations of .* are too small"):
        allocation([size * BATCHES[0]])
    other = lambda params, x: model(params, x) + (size * x) @ params["other"]
    params = {**PARAMS, "other": array(32, 16)}
    with pytest.warns(UserWarning, match="the activations of other"):
        allocate_bits(other, CHOICES, 5.0, params=params)(BATCHES)


@unless_checked
def test_choices_must_be_a_list():
    with pytest.raises(TypeError, match="rules must be a list"):
        allocate_bits(model, CHOICES[0], 5.0, params=PARAMS)
