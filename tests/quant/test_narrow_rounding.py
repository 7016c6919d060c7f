"""Values are rounded to narrow floats in their own dtype, before a conversion that XLA may remove.

XLA for GPUs removes a conversion to 8 or 16 bits and back (`xla_allow_excess_precision`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

import veneer as vn
from veneer.quant import FORMATS
from veneer.quant.conversion.compute import store_scale
from veneer.quant.formats.format import encode_stochastically, round_to_dtype

FLOAT8 = sorted(name for name in FORMATS if name.startswith("float8"))
NARROW = [*FLOAT8, "float16", "bfloat16"]


def values_to_round(dtype, wide):
    """Return values of a dtype, the ties between them, the neighbors of both, and random ones."""
    bits = 8 * jnp.dtype(dtype).itemsize
    step = 1 if bits == 8 else 37
    codes = np.arange(0, 2**bits, step).astype(f"uint{bits}")
    values = codes.view(jnp.dtype(dtype)).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    ties = values[:-1] + np.diff(values) / 2
    exact = np.concatenate([values, ties, [0.0]]).astype(np.float32)
    beside = [np.nextafter(exact, np.float32(way)) for way in (-np.inf, np.inf)]
    rng = np.random.default_rng(0)
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    spread = rng.normal(size=500) * np.exp(rng.uniform(np.log(smallest), 5, 500))
    x = np.concatenate([exact, *beside, spread]).astype(np.float32)
    x = x[np.abs(x) <= float(jnp.finfo(dtype).max)]
    # XLA on CPU treats subnormal numbers of f32 as 0 in arithmetic, but not in conversions.
    x = x[(np.abs(x) >= float(jnp.finfo(np.float32).tiny)) | (x == 0)]
    x = x.astype(jnp.dtype(wide))
    return x[np.isfinite(x.astype(np.float32))]


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        *((dtype, "float32") for dtype in NARROW),
        *((dtype, wide) for dtype in FLOAT8 for wide in ("bfloat16", "float16")),
    ],
)
def test_rounding_equals_a_conversion(dtype, wide):
    x = values_to_round(dtype, wide)
    # The reference is NumPy. XLA on CPU also keeps the rounding.
    expected = x.astype(jnp.dtype(dtype)).astype(x.dtype).astype(np.float32)
    for function in (round_to_dtype, jax.jit(round_to_dtype, static_argnums=1)):
        actual = function(jnp.asarray(x), dtype)
        assert actual.dtype == wide
        np.testing.assert_array_equal(np.asarray(actual, np.float32), expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_second_rounding_changes_nothing(dtype):
    x = jnp.asarray(values_to_round(dtype, "float32"))
    rounded = round_to_dtype(x, dtype)
    np.testing.assert_array_equal(round_to_dtype(rounded, dtype), rounded)
    np.testing.assert_array_equal(rounded.astype(dtype).astype(x.dtype), rounded)


@pytest.mark.parametrize("dtype", NARROW)
def test_zero_keeps_its_sign_and_others_are_not_finite(dtype):
    x = jnp.array([0.0, -0.0, jnp.nan, jnp.inf, -jnp.inf, 3e38, -3e38], jnp.float32)
    rounded = np.asarray(round_to_dtype(x, dtype))
    np.testing.assert_array_equal(np.signbit(rounded[:2]), [False, True])
    assert np.isnan(rounded[2])
    np.testing.assert_array_equal(rounded[3:5], [np.inf, -np.inf])
    assert np.isinf(rounded[5:]).all() == (dtype != "bfloat16")


@pytest.mark.parametrize("dtype", FLOAT8)
def test_values_beyond_a_float8_round_as_in_a_conversion(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = np.linspace(0.99, 1.3, 400).astype(np.float32) * largest
    expected = x.astype(jnp.dtype(dtype)).astype(np.float32)
    actual = np.asarray(round_to_dtype(jnp.asarray(x), dtype))
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[finite], expected[finite])


def test_a_dtype_of_the_same_width_changes_nothing():
    x = jnp.array([1 / 3, 1e-40, jnp.nan])
    np.testing.assert_array_equal(round_to_dtype(x, "float32"), x)


class Unrounded:
    """Evaluate programs in which conversions to narrow floats and back do not round, as on GPUs."""

    def __init__(self):
        self.removed = 0

    def __call__(self, program, *args):
        closed, shape = jax.make_jaxpr(program, return_shape=True)(*args)
        values = self._evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), [narrow for narrow, _ in values])

    def _evaluate(self, jaxpr, consts, args):
        """Return a pair per output: its value, and the value before conversion or None."""
        pair = lambda x: x if isinstance(x, tuple) else (x, None)
        known = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], map(pair, [*consts, *args]), strict=True)
        )
        read = lambda v: (v.val, None) if isinstance(v, Literal) else known[v]
        for e in jaxpr.eqns:
            outs = self._of_equation(e, [read(v) for v in e.invars])
            known.update(zip(e.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _of_equation(self, e, inputs):
        if e.primitive.name in CALLS:
            inner = e.params.get("jaxpr", e.params.get("call_jaxpr"))
            return self._evaluate(
                getattr(inner, "jaxpr", inner), getattr(inner, "consts", []), inputs
            )
        values, before = zip(*inputs, strict=True) if inputs else ((), ())
        bind = lambda xs: e.primitive.bind(*xs, **e.params)
        if e.primitive.name == "convert_element_type":
            new = e.params["new_dtype"]
            if before[0] is not None and jnp.dtype(new).itemsize > values[0].dtype.itemsize:
                self.removed += 1
                return [(before[0].astype(new), None)]
            is_narrow = (
                new in map(jnp.dtype, (*NARROW, "float8_e8m0fnu"))
                and jnp.result_type(values[0]) == "float32"
            )
            return [(bind(values), values[0] if is_narrow else None)]
        if e.primitive.name in MOVES and before[0] is not None:
            return [(bind(values), bind([before[0], *values[1:]]))]
        if e.primitive.name == "dot_general" and any(x is not None for x in before):
            # XLA converts operands to a wider dtype if cuBLAS does not multiply theirs.
            self.removed += 1
            wide = [x.astype(jnp.float32) if b is None else b for x, b in inputs]
            return [(bind(wide), None)]
        if e.primitive.name == "select_n" and any(x is not None for x in before):
            cases = [
                jnp.asarray(x).astype(jnp.float32) if wide is None else wide
                for x, wide in inputs[1:]
            ]
            return [(bind(values), bind([values[0], *cases]))]
        out = bind(values)
        return [(x, None) for x in (out if e.primitive.multiple_results else [out])]


CALLS = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call", "remat2", "checkpoint")
MOVES = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "copy", "expand_dims")


def assert_rounds_without_conversions(program, *args):
    evaluate = Unrounded()
    actual = evaluate(program, *args)
    assert evaluate.removed > 0
    expected = program(*args)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # The compiled program may divide by multiplying with the reciprocal.
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-6)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_lost_rounding_is_noticed(dtype):
    program = lambda x: x.astype(dtype).astype(x.dtype)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_rounds_without_conversions(program, jnp.linspace(0, 1, 100))


X = np.asarray(np.random.default_rng(0).normal(size=(32, 64)), np.float32)
FLOAT8_CODES = [*FLOAT8, "mxfp8", "mxfp8_e5m2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("qtype", [*FLOAT8_CODES, "nvfp4", "nf4_dq"])
def test_fake_quantization_rounds(qtype, dtype):
    tile = FORMATS[qtype].tile_size or 32
    program = lambda x: vn.quant.fake_quantize(x, qtype, channelwise_axes=[0], tiled_axes={1: tile})
    assert_rounds_without_conversions(program, jnp.asarray(X, dtype))


@pytest.mark.parametrize("qtype", FLOAT8_CODES)
def test_stochastic_rounding_rounds(qtype):
    format, key = FORMATS[qtype], jax.random.key(0)
    program = lambda x: format.decode(encode_stochastically(x, format, key), jnp.float32)
    assert_rounds_without_conversions(program, jnp.asarray(X))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e8m0fnu"])
def test_codes_match_a_scale_of_fewer_bits(dtype):
    def program(scale):
        stored, value = store_scale(scale, dtype, FORMATS["int8"])
        return stored.astype(jnp.float32), value

    scale = jnp.abs(jnp.asarray(X)) * 1e-3
    scale = scale.at[0, :5].set(jnp.array([0, 1e-6, 3e-8, 1e-5, jnp.nan]))
    assert_rounds_without_conversions(program, scale)
    stored, value = program(scale)
    np.testing.assert_array_equal(stored, value)


@pytest.mark.parametrize("method", ["absmax", "mse"])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16"])
def test_fake_quantization_uses_the_stored_scale(scale_dtype, method):
    program = lambda x: vn.quant.fake_quantize(
        x, "int8", channelwise_axes=[0], scale_dtype=scale_dtype, calibration_method=method
    )
    assert_rounds_without_conversions(program, jnp.asarray(X))


def test_products_of_activations_in_float8_round():
    w = vn.quant.quantize(jnp.asarray(X).T, "float8_e4m3fn", channelwise_axes=[1])
    rules = [vn.quant.Rule(".*", None, act_qtype="float8_e4m3fn")]
    model = vn.implicit(lambda w, x: x @ w["w"])
    w = vn.quant.quantize_tree({"w": w}, rules, model=model, args=(jnp.asarray(X),))
    assert_rounds_without_conversions(lambda x: model(w, x), jnp.asarray(X))


def test_training_in_float8_rounds():
    rules = [
        vn.quant.Rule(".*", "float8_e4m3fn", act_qtype="float8_e4m3fn", grad_qtype="float8_e5m2")
    ]
    model = vn.implicit(lambda w, x: jnp.tanh(x @ w["w"]))
    x = jnp.asarray(X)
    w = vn.quant.quantize_tree({"w": x.T}, rules, model=model, args=(x,), train=True)
    loss = lambda w, x: (model(w, x) ** 2).sum()
    step = lambda w, x: jax.tree.leaves(jax.value_and_grad(loss)(w, x))
    assert_rounds_without_conversions(step, w, x)


@pytest.mark.parametrize("qtype", FLOAT8_CODES)
def test_rounding_and_conversion_are_separate_operations(qtype):
    program = jax.jit(lambda x: vn.quant.fake_quantize(x, qtype))
    lowered = program.lower(jnp.asarray(X)).as_text()
    mantissa = jnp.finfo(FORMATS[qtype].code_dtype).nmant
    assert "stablehlo.reduce_precision" in lowered
    assert f"e8m{mantissa}" in lowered


@pytest.mark.parametrize("value", [0.003, 0.33, 500.0])  # subnormal, normal, and too large
def test_the_derivative_equals_the_one_of_a_conversion(value):
    derivative = jax.grad(lambda x: round_to_dtype(x, "float8_e4m3fn"))(jnp.float32(value))
    assert derivative == 1
    assert jax.vmap(jax.grad(lambda x: round_to_dtype(x, "float16")))(jnp.full(2, 1e-7)).min() == 1
