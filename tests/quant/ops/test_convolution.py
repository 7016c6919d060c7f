"""`conv_general_dilated` of arrays and QArrays, compared with dense convolutions in f64."""

import dataclasses
import functools
import importlib
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from support.array_types import Lora

import veneer as vn
from veneer.quant import FORMATS, QArray, quantize

NHWC = ("NHWC", "HWIO", "NHWC")
SAME = {"window_strides": (1, 1), "padding": "SAME"}
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)
INTEGERS = [name for name, format in FORMATS.items() if format.is_integer]
OTHERS = [name for name, format in FORMATS.items() if not format.is_integer]


def normal(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def spread(leaf, shape):
    """Return a leaf in f64, repeated over its tiles."""
    leaf = np.asarray(leaf).astype(np.float64)
    for axis, (count, size) in enumerate(zip(leaf.shape, shape, strict=True)):
        leaf = np.repeat(leaf, size // max(count, 1), axis)
    return leaf


def dequantized(x):
    """Return the dense array of an operand in f64, computed by NumPy."""
    if not isinstance(x, QArray):
        return np.asarray(x).astype(np.float64)
    codes = np.asarray(x.codes())
    if x.format.codebook is not None:
        values = np.array(x.format.codebook, np.float32).astype(np.float64)[codes]
    else:
        values = codes.astype(np.float64)
    if x.zero_point is not None:
        values = values - spread(x.zero_point, x.shape)
    return values * spread(x.scales(), x.shape)


def in_float64(lhs, rhs, **params):
    """Return the convolution in f64, and the convolution of magnitudes, for tolerances."""
    lhs, rhs = dequantized(lhs), dequantized(rhs)
    with jax.enable_x64(True):
        conv = lambda lhs, rhs: lax.conv_general_dilated(jnp.array(lhs), jnp.array(rhs), **params)
        return np.asarray(conv(lhs, rhs)), np.asarray(conv(abs(lhs), abs(rhs)))


def terms(rhs, layout):
    """Return the number of products in a sum, for a kernel in a layout such as HWIO."""
    return rhs.size // max(rhs.shape[layout.index("O")], 1)


def assert_exact_but_for_the_scale(actual, expected, magnitudes, count):
    """Check that integer sums are exact, and only scaling and the cast round."""
    # Roundings in f32: both scales, their product, the sum, and the scaled sum.
    eps = 6 * float(jnp.finfo(jnp.promote_types(actual.dtype, jnp.float32)).eps)
    eps += float(jnp.finfo(actual.dtype).eps)
    # Subnormal numbers of f16 have fewer bits.
    tiny = float(jnp.finfo(actual.dtype).smallest_subnormal) if actual.dtype == jnp.float16 else 0
    own = count * float(jnp.finfo(jnp.float64).eps) * magnitudes  # of the expected values
    error = abs(np.asarray(actual).astype(np.float64) - expected)
    assert (error <= eps * abs(expected) + own + tiny).all()


def assert_within_rounding(actual, expected, magnitudes, operand_dtype, count):
    """Check that each of `count` terms is rounded to the dtype of operands, and sums to f32."""
    operand_eps = float(jnp.finfo(operand_dtype).eps)
    sum_dtype = actual.dtype if actual.dtype == jnp.float64 else jnp.float32
    bound = (4 * operand_eps + count * float(jnp.finfo(sum_dtype).eps)) * magnitudes
    bound = bound + float(jnp.finfo(actual.dtype).eps) * abs(expected) + 1e-7
    assert (abs(np.asarray(actual).astype(np.float64) - expected) <= bound).all()


# Any convolution.

# Each example compiles a program.
FEW = settings(max_examples=min(10, settings().max_examples))


@dataclasses.dataclass(frozen=True)
class Convolution:
    """Shapes of the operands, and the parameters."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    params: dict[str, Any]


@st.composite
def convolutions(draw):
    rank = draw(st.integers(1, 3))
    space = "HWD"[:rank]
    layouts = [("N" + space + "C", space + "IO", "N" + space + "C")]
    layouts += [("NC" + space, "OI" + space, "NC" + space)]
    if draw(st.booleans()):
        layout = layouts[draw(st.integers(0, 1))]
    else:
        specs = ("NC" + space, "OI" + space, "NC" + space)
        layout = tuple("".join(draw(st.permutations(spec))) for spec in specs)
    groups = draw(st.sampled_from(["none", "features", "batch"]))
    count = 1 if groups == "none" else 2
    features = draw(st.sampled_from([1, 3, 8]))
    sizes = {
        "N": draw(st.integers(1, 2)) * (count if groups == "batch" else 1),
        "C": features * (count if groups == "features" else 1),
        "I": features,
        "O": count * draw(st.integers(1, 3)),
    }
    each = lambda values: tuple(draw(values) for _ in space)
    window = dict(zip(space, each(st.integers(1, 3)), strict=True))
    image = dict(zip(space, each(st.integers(3, 6)), strict=True))
    lhs_dilation = each(st.integers(1, 2))
    pads = st.tuples(st.integers(-1, 3), st.integers(0, 2))
    padding: Any = each(pads)
    if set(lhs_dilation) == {1}:
        padding = draw(st.sampled_from(["SAME", "VALID", padding]))
    params = {
        "window_strides": each(st.integers(1, 2)),
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": each(st.integers(1, 2)),
        "dimension_numbers": layout,
        "feature_group_count": count if groups == "features" else 1,
        "batch_group_count": count if groups == "batch" else 1,
    }
    lhs = tuple((sizes | image)[axis] for axis in layout[0])
    rhs = tuple((sizes | window)[axis] for axis in layout[1])
    return Convolution(lhs, rhs, params)


def quantized(draw, x, qtype, separate, groups=None):
    """Quantize `x` with scales that vary along the axes `separate`, or with one scale."""
    tiled = {}
    if groups is not None and x.shape[groups[0]] % groups[1] == 0 and draw(st.booleans()):
        tiled = {groups[0]: x.shape[groups[0]] // groups[1]}
    return quantize(
        x, qtype, channelwise_axes=[a for a in separate if draw(st.booleans())], tiled_axes=tiled
    )


def untiled(names):
    return st.sampled_from([name for name in names if FORMATS[name].tile_size is None])


@FEW
@given(st.data(), convolutions(), st.sampled_from(FLOATS))
def test_sums_of_integer_codes_are_exact(data, convolution, dtype):
    lhs_layout, rhs_layout, _ = convolution.params["dimension_numbers"]
    with jax.enable_x64(dtype == jnp.float64):
        lhs = 3 + 2 * normal(*convolution.lhs, dtype=dtype, seed=1)
        rhs = normal(*convolution.rhs, dtype=dtype, seed=2)
        groups = lhs_layout.index("C"), convolution.params["feature_group_count"]
        lhs = quantized(
            data.draw, lhs, data.draw(untiled(INTEGERS)), [lhs_layout.index("N")], groups
        )
        rhs = quantized(data.draw, rhs, data.draw(untiled(INTEGERS)), [rhs_layout.index("O")])
        actual = vn.quant.conv_general_dilated(lhs, rhs, **convolution.params)
        assert actual.dtype == dtype
        expected, magnitudes = in_float64(lhs, rhs, **convolution.params)
        assert_exact_but_for_the_scale(actual, expected, magnitudes, terms(rhs, rhs_layout))


@FEW
@given(st.data(), convolutions(), st.sampled_from(FLOATS))
def test_any_operands_agree_with_their_dense_arrays(data, convolution, dtype):
    formats = st.one_of(st.none(), st.sampled_from([*FORMATS]))
    with jax.enable_x64(dtype == jnp.float64):
        operands = []
        for seed, shape in enumerate((convolution.lhs, convolution.rhs)):
            x, qtype = normal(*shape, dtype=dtype, seed=seed), data.draw(formats)
            tile = qtype and FORMATS[qtype].tile_size
            if qtype and (tile is None or shape[-1] % tile == 0):
                x = quantized(data.draw, x, qtype, range(x.ndim))
            operands.append(x)
        actual = vn.quant.conv_general_dilated(*operands, **convolution.params)
        shape = jax.eval_shape(
            lambda *operands: lax.conv_general_dilated(*operands, **convolution.params),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands),
        )
        assert (actual.shape, actual.dtype) == (shape.shape, shape.dtype)
        expected, magnitudes = in_float64(*operands, **convolution.params)
        count = terms(operands[1], convolution.params["dimension_numbers"][1])
        assert_within_rounding(actual, expected, magnitudes, dtype, count)


# Integers.


def codes(*shape, low=-128, high=128, dtype=np.int8, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


def ones_like_scale(x):
    return np.ones((1,) * x.ndim, np.float32)


@pytest.mark.parametrize("lhs_zero", [None, 0, 200])
@pytest.mark.parametrize("rhs_zero", [None, 7, 255])
def test_padding_and_dilation_insert_the_value_zero(lhs_zero, rhs_zero):
    operands = []
    for shape, zero, seed in (((2, 4, 3, 5), lhs_zero, 1), ((2, 3, 5, 3), rhs_zero, 2)):
        x = codes(*shape, low=0, high=256, dtype=np.uint8, seed=seed)
        zero_point = None if zero is None else np.full((1, 1, 1, 1), zero, np.uint8)
        operands.append(QArray(x, ones_like_scale(x), zero_point, "uint8"))
    params = {
        "window_strides": (1, 2),
        "padding": ((3, 2), (0, 4)),
        "lhs_dilation": (2, 3),
        "rhs_dilation": (2, 1),
        "dimension_numbers": NHWC,
    }
    expected, _ = in_float64(*operands, **params)
    actual = vn.quant.conv_general_dilated(*operands, **params)
    np.testing.assert_array_equal(actual, expected)
    assert (expected == 0).any()  # some windows contain only padding


module = importlib.import_module("veneer.quant.ops.convolution")


@pytest.mark.parametrize("arithmetic", ["int8", "floats"])
@pytest.mark.parametrize("zero", [None, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_long_sums_are_exact_in_integers_and_in_floats(arithmetic, groups, zero, monkeypatch):
    in_int8 = arithmetic == "int8" and zero is None  # the int8 convolution takes no zero points
    monkeypatch.setattr(module, "_can_convolve_int8", lambda *_: in_int8)
    module._scale_sums_of_codes.clear_cache()
    features = 4096  # products of up to 2**14 each, and f32 holds sums of 2**10 of them
    x = codes(2, 1, 2, groups * features, low=100)
    w = codes(1, 1, features, 2 * groups, low=100, seed=1)
    by_group = np.split(x.astype(np.int64), groups, -1), np.split(w.astype(np.int64), groups, -1)
    expected = [(x - (zero or 0)) @ w[0, 0] for x, w in zip(*by_group, strict=True)]
    zero_point = None if zero is None else np.full((1, 1, 1, 1), zero, np.int8)
    with jax.enable_x64(True):  # so that the result is not rounded to f32
        one = np.ones((1, 1, 1, 1))
        actual = vn.quant.conv_general_dilated(
            QArray(x, one, zero_point),
            QArray(w, one),
            dimension_numbers=NHWC,
            feature_group_count=groups,
            **SAME,
        )
        np.testing.assert_array_equal(actual, np.concatenate(expected, axis=-1))
    module._scale_sums_of_codes.clear_cache()


@pytest.mark.parametrize("layout", [NHWC, ("CHWN", "OHWI", "HCWN")])
@pytest.mark.parametrize("separate", ["samples", "groups of samples", "features", "all"])
@pytest.mark.parametrize("groups", ["feature_group_count", "batch_group_count"])
def test_samples_and_groups_can_have_separate_scales(groups, separate, layout):
    sizes = {"N": 6, "H": 4, "W": 4, "C": 4, "O": 6, "I": 2 if groups[0] == "f" else 4}
    lhs = normal(*(sizes[axis] for axis in layout[0]))
    lhs = lhs * jnp.arange(1.0, 7.0).reshape([6 if axis == "N" else 1 for axis in layout[0]])
    rhs = normal(*((sizes | {"H": 2, "W": 3})[axis] for axis in layout[1]), seed=1)
    at = layout[0].index
    tiled = {"groups of samples": {at("N"): 3}, "features": {at("C"): 2}}.get(separate, {})
    if separate == "all":
        tiled = {at("N"): 1, at("C"): 2}
    if separate == "samples":
        tiled = {at("N"): 1}
    x = quantize(lhs, "int8", tiled_axes=tiled)
    params = {"dimension_numbers": layout, groups: 2, **SAME}
    for kernel in ({}, {layout[1].index("O"): 1}, {layout[1].index("O"): 2}):
        w = quantize(rhs, "uint4", tiled_axes=kernel)
        expected, magnitudes = in_float64(x, w, **params)
        actual = vn.quant.conv_general_dilated(x, w, **params)
        if separate in ("features", "all") and groups == "batch_group_count":  # contracted
            assert_within_rounding(actual, expected, magnitudes, jnp.float32, 24)
        else:
            assert_exact_but_for_the_scale(actual, expected, magnitudes, 24)


def convolved_dtypes(platform, *operands, **params):
    """Return the element types of the convolution that is compiled for a platform."""
    conv = jax.jit(lambda *operands: vn.quant.conv_general_dilated(*operands, **params))
    text = conv.trace(*operands).lower(lowering_platforms=(platform,)).as_text()
    [line] = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    return re.findall(r"tensor<[\dx]*x(\w+)>", line.split(" : ")[-1])


@pytest.mark.parametrize(
    ("platform", "layout", "expected"),
    [
        ("tpu", "NHWC", ["i8", "i8", "i32"]),
        ("cpu", "NHWC", ["i8", "i8", "i32"]),
        ("cuda", "NHWC", ["f32", "f32", "f32"]),
        ("tpu", "NCHW", ["i8", "i8", "i32"]),
        ("cpu", "NCHW", ["f32", "f32", "f32"]),
    ],
)
def test_codes_are_convolved_in_integers_on_platforms_fast_at_it(platform, layout, expected):
    numbers = NHWC if layout == "NHWC" else ("NCHW", "OIHW", "NCHW")
    lhs = quantize(normal(1, 8, 8, 8), "int8", channelwise_axes=[0])
    rhs = quantize(normal(3, 3, 8, 8), "int4")
    if layout == "NCHW":
        rhs = quantize(normal(8, 8, 3, 3), "int4")
    assert convolved_dtypes(platform, lhs, rhs, dimension_numbers=numbers, **SAME) == expected


@pytest.mark.parametrize("qtype", ["int8", "uint8", "fp8", "int4"])
def test_large_and_small_values_stay_in_range(qtype):
    x = quantize(jnp.full((1, 4, 4, 2), 1e37), qtype)
    w = quantize(jnp.full((2, 2, 2, 1), 1e-35), qtype)
    conv = lambda *operands: vn.quant.conv_general_dilated(
        *operands, (1, 1), "VALID", dimension_numbers=NHWC
    )
    for operands in ((x, w), (x, w.dequantize()), (x.dequantize(), w)):
        np.testing.assert_allclose(conv(*operands), 800.0, rtol=0.2)


# Other properties.


@pytest.mark.parametrize("both", [False, True])
def test_a_nan_affects_only_its_sample_and_feature(both):
    x, w = normal(3, 4, 4, 2), normal(2, 2, 2, 3).at[0, 0, 0, 1].set(jnp.nan)
    w = quantize(w, "int8", channelwise_axes=[3])
    if both:
        x = quantize(x.at[2, 0, 0, 0].set(jnp.inf), "int8", channelwise_axes=[0])
    y = vn.quant.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=NHWC)
    isnan = np.zeros((3, 3, 3, 3), bool)
    isnan[..., 1] = True
    if both:
        isnan[2] = True
    np.testing.assert_array_equal(np.isnan(y), isnan)


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        ((0, 4, 4, 2), (2, 2, 2, 3)),
        ((2, 4, 4, 0), (2, 2, 0, 3)),
        ((2, 4, 4, 2), (2, 2, 2, 0)),
        ((2, 1, 4, 2), (2, 2, 2, 3)),
    ],
    ids=["no samples", "nothing to sum", "no features", "no room for the window"],
)
def test_empty_arrays_agree(lhs, rhs):
    x = quantize(normal(*lhs), "int8", channelwise_axes=[0])
    w = quantize(normal(*rhs), "int4", channelwise_axes=[3])
    actual = vn.quant.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=NHWC)
    expected, _ = in_float64(x, w, window_strides=(1, 1), padding="VALID", dimension_numbers=NHWC)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("preferred", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("both", [False, True])
def test_the_dtype_is_the_same_as_for_dense_arrays(preferred, both):
    x, w = normal(1, 4, 4, 2, dtype=jnp.bfloat16), normal(2, 2, 2, 3, dtype=jnp.bfloat16)
    w = quantize(w, "int8")
    x = quantize(x, "int8") if both else x
    run = lambda conv, *operands: conv(
        *operands, dimension_numbers=NHWC, preferred_element_type=preferred, **SAME
    )
    expected = run(lax.conv_general_dilated, *vn.materialise((x, w)))
    actual = run(vn.quant.conv_general_dilated, x, w)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual.astype(float), expected.astype(float), atol=0.1)


def test_two_qarrays_of_different_dtypes_are_promoted():
    x = quantize(normal(1, 4, 4, 2, dtype=jnp.bfloat16), "int8")
    w = quantize(normal(2, 2, 2, 3), "int8")
    actual = vn.quant.conv_general_dilated(x, w, dimension_numbers=NHWC, **SAME)
    assert actual.dtype == jnp.float32
    expected, magnitudes = in_float64(x, w, dimension_numbers=NHWC, **SAME)
    assert_exact_but_for_the_scale(actual, expected, magnitudes, 8)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    ("shape", "params", "message"),
    [
        ((2, 2, 3, 3), {}, "feature_group_count"),
        ((2, 2, 2, 3), {"preferred_element_type": jnp.int32}, "preferred_element_type"),
        ((2, 2, 2, 3), {"batch_group_count": 2}, "batch_group_count"),
    ],
)
def test_mismatched_shapes_raise_the_errors_of_lax(shape, params, message, both):
    x, w = normal(3, 4, 4, 2), quantize(normal(*shape), "int8")
    x = quantize(x, "int8") if both else x
    for conv, operands in (
        (vn.quant.conv_general_dilated, (x, w)),
        (lax.conv_general_dilated, vn.materialise((x, w))),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            conv(*operands, dimension_numbers=NHWC, **SAME, **params)


@pytest.mark.parametrize("narrower", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("channelwise", [(3,), (2,)], ids=["outside", "dequantized"])
def test_two_qarrays_can_have_a_narrower_result(narrower, channelwise):
    operands = (
        quantize(normal(3, 4, 4, 2), "int8"),
        quantize(normal(2, 2, 2, 3), "int8", channelwise_axes=channelwise),
    )
    run = lambda conv, *operands, dtype: conv(
        *operands, dimension_numbers=NHWC, preferred_element_type=dtype, **SAME
    )
    actual = jax.jit(functools.partial(run, vn.quant.conv_general_dilated, dtype=narrower))(
        *operands
    )
    assert actual.dtype == narrower
    expected = run(lax.conv_general_dilated, *vn.materialise(operands), dtype=None)
    tolerance = float(jnp.finfo(narrower).eps)  # the result is rounded once
    np.testing.assert_allclose(
        actual.astype(float), expected, rtol=tolerance, atol=tolerance * 1e-2
    )
    with pytest.raises(TypeError, match="narrower"):  # as in JAX for two dense arrays
        run(vn.quant.conv_general_dilated, vn.materialise(operands[0]), operands[1], dtype=narrower)


def test_the_arguments_are_the_same_as_in_lax():
    names = lambda function: [*inspect.signature(function).parameters]
    assert names(vn.quant.conv_general_dilated) == names(lax.conv_general_dilated)


@pytest.mark.parametrize("side", [0, 1])
def test_other_implicit_operands_are_materialized(side):
    low_rank = Lora(normal(2, 8, 8, 8), normal(2, 8, 8, 2), normal(2, 8, 2, 8))
    operands = [quantize(normal(2, 8, 8, 8), "int8")] * 2
    operands[side] = low_rank
    conv = lambda *operands: vn.quant.conv_general_dilated(
        *operands, dimension_numbers=NHWC, **SAME
    )
    expected = lax.conv_general_dilated(*vn.materialise(operands), dimension_numbers=NHWC, **SAME)
    np.testing.assert_allclose(conv(*operands), expected, rtol=1e-5, atol=1e-4)
