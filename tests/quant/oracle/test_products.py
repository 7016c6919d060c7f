"""Products of the same quantized operands, compared with Qwix 0.1.8."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from support.operations import DENSE, OPERATIONS
from support.qwix_arrays import QWIX_NAMES, from_qwix

import veneer as vn
from veneer.quant import FORMATS

OURS = OPERATIONS
PAIRS = {"weight": (False, True), "activation": (True, False), "both": (True, True)}


def operands(op, quantized, qtype, granularity, dtype=jnp.float32, method="absmax"):
    """Return the operands of an operation, quantized by Qwix if `quantized` is True for them."""
    rng = np.random.default_rng(0)
    made = []
    for side, shape in enumerate((op.lhs, op.rhs)):
        x = jnp.asarray(rng.normal(size=shape) + 0.2, dtype)
        if quantized[side]:
            kind, _, tile = granularity.partition(" ")
            tiling = op.tiling(side, kind, int(tile or 0))
            x = qwix.quantize(x, QWIX_NAMES[qtype], calibration_method=method, **tiling)
        made.append(x)
    return made


def ours(x):
    return from_qwix(x) if isinstance(x, qwix.QArray) else x


def agree(actual, expected, tolerance):
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    actual, expected = (np.asarray(x.astype(jnp.float32)) for x in (actual, expected))
    return np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


# If both operands are nf4, Qwix multiplies the codes, which are indices of the codebook.
CODES_OF_QWIX = ("ragged_dot", "ragged_dot_general")


def compare(arguments, tolerance=2e-6, with_rules=False, wrong=()):
    """Assert that Qwix's operations and ours agree, except for those in `wrong`.

    And so do JAX's own under `implicit`, where `with_rules` says so.

    Qwix's run outside `jit`, where XLA on CPU takes more of them. Returns the names of those that
    Qwix has for these operands.
    """
    expected = {}
    for op in OURS:
        # Operations that Qwix does not support raise errors of many types, some of them from XLA.
        # benchmarks/qwix_comparison.py lists them.
        with contextlib.suppress(Exception):
            expected[op.name] = jax.block_until_ready(op.call(qwix, *arguments[op.name]))

    @jax.jit  # one program, because compiling takes longer than running
    def results(arguments):
        calls = [lambda op: functools.partial(op.call, vn.quant)]
        if with_rules:
            calls.append(lambda op: vn.implicit(functools.partial(op.call, DENSE)))
        return {op.name: [call(op)(*arguments[op.name]) for call in calls] for op in OURS}

    for name, found in results(jax.tree.map(ours, arguments, is_leaf=is_theirs)).items():
        for result in found if name in expected else ():
            assert agree(result, expected[name], tolerance) != (name in wrong), name
    return set(expected)


def is_theirs(x):
    return isinstance(x, qwix.QArray)


# Products that XLA does not compile for CPU in these versions of JAX.
FOUR_BITS = {"int4", "int3", "int2", "float4_e2m1fn", "mxfp4", "nvfp4", "nf4"}


def expected_of_qwix(qtype, pair):
    """Return operations that Qwix must support, so that the comparison is not empty."""
    if pair != "both":
        return {op.name for op in OURS}
    ragged = {"ragged_dot", "ragged_dot_general"}
    return ragged if qtype in FOUR_BITS else ragged | {"dot", "dot_general", "einsum"}


# Compiling every operation with every operand and granularity would take minutes. These cover the
# strategies for products: of integers and floats, with scales applied to results or operands.
CASES = [
    ("int8", "both", "channel"),
    ("int8", "both", "tile 128"),
    ("int8", "weight", "tile 32"),
    ("int4", "both", "tile 32"),
    ("int3", "activation", "channel"),
    ("nf4", "weight", "tile 32"),
    ("nf4", "both", "tile 32"),
    ("float8_e4m3fn", "both", "channel"),
    ("mxfp4", "both", "tile 32"),
    ("nvfp4", "weight", "tile 16"),
]


@pytest.mark.parametrize(("qtype", "pair", "granularity"), CASES)
def test_operations_give_the_results_of_qwix(qtype, pair, granularity):
    arguments = {op.name: operands(op, PAIRS[pair], qtype, granularity) for op in OURS}
    found = compare(
        arguments,
        with_rules=(qtype, granularity) == ("int8", "channel"),
        wrong=CODES_OF_QWIX if (qtype, pair) == ("nf4", "both") else (),
    )
    assert expected_of_qwix(qtype, pair) <= found


@pytest.mark.parametrize("pair", PAIRS)
def test_every_format_gives_the_results_of_qwix(pair):
    op = OPERATIONS[0]
    arguments = {}
    for qtype in QWIX_NAMES:
        granularity = f"tile {FORMATS[qtype].tile_size or 32}"
        arguments[qtype] = operands(op, PAIRS[pair], qtype, granularity)
    expected = {qtype: op.call(qwix, *pair) for qtype, pair in arguments.items()}
    converted = jax.tree.map(ours, arguments, is_leaf=is_theirs)
    call = functools.partial(op.call, vn.quant)
    results = jax.jit(lambda arguments: {q: call(*pair) for q, pair in arguments.items()})(
        converted
    )
    wrong = {q for q in QWIX_NAMES if not agree(results[q], expected[q], 2e-6)}
    assert wrong == set()


@pytest.mark.parametrize(("pair", "granularity"), [("activation", "channel"), ("both", "tile 128")])
def test_zero_points_are_subtracted_as_in_qwix(pair, granularity):
    arguments = {
        op.name: operands(op, PAIRS[pair], "int8", granularity, method="minmax") for op in OURS
    }
    found = compare(arguments)
    # Qwix accepts two zero points only if it dequantizes.
    both = {"ragged_dot", "ragged_dot_general"}
    assert (both if pair == "both" else expected_of_qwix("int8", pair)) <= found


@pytest.mark.parametrize(
    ("qtype", "pair", "dtype"), [("int8", "both", "bfloat16"), ("nf4", "weight", "float16")]
)
def test_16_bit_operands_agree_with_qwix_up_to_rounding(qtype, pair, dtype):
    arguments = {op.name: operands(op, PAIRS[pair], qtype, "tile 32", dtype=dtype) for op in OURS}
    # Qwix rounds sums, scales and dequantized operands to 16 bits.
    found = compare(arguments, tolerance=8 * float(jnp.finfo(dtype).eps))
    assert expected_of_qwix(qtype, pair) <= found
