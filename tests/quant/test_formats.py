"""The table of formats, and encoding and decoding in each of them."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from veneer.quant import FORMATS, get_format
from veneer.quant.formats.packing import UNITS
from veneer.quant.formats.table import ALIASES

NF4 = np.array(FORMATS["nf4"].codebook)
OF_FLOATS = [name for name, format in FORMATS.items() if not format.is_integer]


def all_codes(format):
    """Return every code of a format."""
    if format.name == "int1":
        return np.array([-1, 1], np.int8)
    if format.codebook is None and not format.is_integer:
        codes = np.arange(256, dtype=np.uint8).view(format.code_dtype)
        return codes[np.isfinite(codes.astype(np.float32))]
    low, high = format.code_range
    return np.arange(low, high + 1).astype(format.byte_dtype)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_fields_of_a_format_are_consistent(format):
    assert FORMATS[format.name] is format
    assert format.source
    codes = all_codes(format)
    values = np.asarray(format.decode(codes, jnp.float32))
    assert len(codes) <= 2 ** max(8, int(format.bits))
    if format.bits < 8:
        assert len(codes) == {1.6: 3}.get(format.bits, 2**format.bits)
        assert format.bits in UNITS
        assert format.storage_dtype == np.uint8
        fields = format.to_fields(jnp.asarray(codes))
        assert sorted(fields.tolist()) == list(range(len(codes)))
        np.testing.assert_array_equal(format.from_fields(fields), codes)
    else:
        assert format.storage_dtype == format.code_dtype
    if format.codebook is not None:
        assert len(set(format.codebook)) >= len(codes) - 1  # floats have two zeros
        assert format.code_dtype == (ml_dtypes.uint4 if format.bits == 4 else np.uint8)
    # The bound is the largest value. In integer formats, it is half a step more.
    step = format.is_integer and format.signed and format.bits > 1
    # LiteRT scales the largest magnitude to 2**15, a whole step beyond the last code of int16.
    assert format.bound == values.max() + (1.0 if format.bits == 16 else 0.5) * step
    assert (format.tile_size is None) or format.scale_dtype is not None
    if format.scale_tile is not None:
        assert not FORMATS[format.scale_dtype].is_integer


def test_aliases_name_formats_and_hide_none():
    assert set(ALIASES.values()) <= set(FORMATS)
    assert not set(ALIASES) & set(FORMATS)
    assert all(get_format(alias) is FORMATS[name] for alias, name in ALIASES.items())


def test_nf4_ascends_from_minus_one_to_one_and_has_zero():
    assert len(NF4) == 16
    assert (np.diff(NF4) > 0).all()
    assert (NF4[0], NF4[7], NF4[-1]) == (-1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float4_e2m1fn", ml_dtypes.float4_e2m1fn),
        ("float6_e2m3fn", ml_dtypes.float6_e2m3fn),
        ("float6_e3m2fn", ml_dtypes.float6_e3m2fn),
    ],
)
def test_codes_of_small_floats_are_their_bit_patterns(name, dtype):
    codebook = np.array(FORMATS[name].codebook, np.float32)
    np.testing.assert_array_equal(
        codebook, np.arange(len(codebook), dtype=np.uint8).view(dtype).astype(np.float32)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_survives_decoding_and_encoding(name):
    format = FORMATS[name]
    codes = all_codes(format)
    again = np.asarray(format.encode(format.decode(codes, jnp.float32)))
    if format.codebook is not None and 0.0 in format.codebook:
        codes = np.where(np.array(format.codebook) == 0, format.codebook.index(0.0), codes)
    np.testing.assert_array_equal(again, codes)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("int8", 0.5, 0),
        ("int8", 1.5, 2),
        ("int8", -2.5, -2),
        ("int8", 127.5, 127),
        ("int8", -127.5, -128),
        ("int8", 1e9, 127),
        ("int4", 7.5, 7),
        ("int4", -7.5, -8),
        ("int4", -20.0, -8),
        ("int2", -1.5, -2),
        ("int2", 9.0, 1),
        ("int16", 32767.5, 32767),
        ("int16", -32768.5, -32768),
        ("int16", 200.5, 200),
        ("uint2", 9.0, 3),
        ("uint8", -1.0, 0),
        ("uint8", 300.0, 255),
        ("ternary", 0.5, 0),
        ("ternary", -1.5, -1),
        ("ternary", 7.0, 1),
        ("int1", 0.0, -1),
        ("int1", 1e-30, 1),
        ("nf4", 2.0, 15),
        ("nf4", -2.0, 0),
        ("nf4", 0.03, 7),
        ("nf4", 0.05, 8),
        ("mxfp4", np.inf, 7),
        ("mxfp4", -7.0, 15),
        ("mxfp8", np.inf, 448),
    ],
)
def test_encoding_rounds_half_to_even_and_clips(name, value, code):
    assert FORMATS[name].encode(jnp.float32(value)) == code


def near_ties(values, dtype):
    """Return values, the ties between them, and the floats next to these ties."""
    values = np.unique(values)
    middles = ((values[1:] + values[:-1]) / 2).astype(dtype)
    beside = [np.nextafter(middles, dtype(way)) for way in (-np.inf, np.inf)]
    some = np.random.default_rng(0).uniform(1.1 * values[0], 1.1 * values[-1], 999).astype(dtype)
    return np.concatenate([values.astype(dtype), middles, *beside, some])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OF_FLOATS)
def test_encoding_gives_the_nearest_value_and_even_ties(name, dtype):
    format = FORMATS[name]
    with jax.enable_x64(dtype is np.float64):
        codes = all_codes(format)
        book = format.codebook
        values = codes.astype(np.float64) if book is None else np.array(book)
        x = near_ties(values, dtype)
        encoded = np.asarray(format.encode(jnp.asarray(x)))
        assert jnp.asarray(x).dtype == dtype
    chosen = encoded.astype(np.float64) if book is None else values[encoded]
    distances = np.abs(x.astype(np.float64)[:, None] - values)
    np.testing.assert_array_equal(np.abs(chosen - x.astype(np.float64)), distances.min(1))
    # Distances and ties are exact in f64.
    patterns = encoded.view(np.uint8)
    is_tie = (distances == distances.min(1, keepdims=True)).sum(1) > 1
    is_tie &= chosen != 0  # zero has two codes
    assert is_tie.any() or name.startswith(("nf4", "fp4_bnb"))  # their ties are not floats
    assert (patterns[is_tie] % 2 == 0).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float4_e2m1fn", ml_dtypes.float4_e2m1fn),
        ("float6_e2m3fn", ml_dtypes.float6_e2m3fn),
        ("float6_e3m2fn", ml_dtypes.float6_e3m2fn),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
    ],
)
def test_small_floats_equal_ml_dtypes_after_clipping(name, dtype):
    format = FORMATS[name]
    largest = float(ml_dtypes.finfo(dtype).max)
    assert format.bound == largest
    values = np.asarray(format.decode(all_codes(format), jnp.float32), np.float64)
    x = near_ties(values, np.float32)
    ours = format.decode(format.encode(jnp.asarray(x)), jnp.float32)
    np.testing.assert_array_equal(ours, x.clip(-largest, largest).astype(dtype).astype(np.float32))


# iq4_nl has no zero. The value closest to it is 1.
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "int1"])
def test_nan_gets_the_code_of_zero(name):
    format = FORMATS[name]
    code = format.encode(jnp.float32(np.nan))
    assert code == format.encode(jnp.float32(0))
    assert format.decode(code, jnp.float32) == (1 if name == "iq4_nl" else 0)


def test_get_format_takes_names_and_dtypes():
    assert get_format("int4") is get_format(jnp.int4) is FORMATS["int4"]
    assert get_format("fp8") is get_format(jnp.float8_e4m3fn) is FORMATS["float8_e4m3fn"]


def test_an_unknown_format_raises_with_the_known_ones():
    message = r"unknown format 'squeezed'; the formats are int8, .*nvfp4; aliases are fp8, .*b1\.58"
    with pytest.raises(ValueError, match=message):
        get_format("squeezed")


@pytest.mark.parametrize(
    ("name", "meant"), [("q4_0", "'int4'"), ("Q4_1", "'uint4'"), ("Q8_0", "'int8'")]
)
def test_gguf_types_raise_with_the_equal_format(name, meant):
    message = (
        f"unknown format '{name}'; use {meant} with tile_size=32, which is GGUF's {name.upper()}"
    )
    with pytest.raises(ValueError, match=message):
        get_format(name)


@pytest.mark.parametrize("name", FORMATS)
def test_the_value_range_holds_the_values_of_all_codes(name):
    format = FORMATS[name]
    if format.is_integer or format.codebook is not None:
        least, largest = format.code_range
        codes = jnp.arange(least, largest + 1)
    else:
        bits = jnp.arange(2**format.bits, dtype=jnp.uint8)
        codes = jax.lax.bitcast_convert_type(bits, format.code_dtype)
    values = np.asarray(format.decode(codes, jnp.float32))
    values = values[np.isfinite(values)]
    assert format.value_range == (values.min(), values.max())


def test_float_codes_have_no_code_range():
    with pytest.raises(TypeError, match="codes of mxfp8 are float8_e4m3fn"):
        _ = FORMATS["mxfp8"].code_range


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NF4", "nf4"),
        ("int9", "int8"),
        ("e4m3", "float8_e4m3fn"),
        ("fp8_e4m3", "fp8_e4m3fn"),
        ("nf44", "nf4"),
        ("uint16", "int16"),
        ("uint9", "uint8"),
        ("int12", "int16"),
        ("int32", "int16"),
        ("uint1", "int1"),
    ],
)
def test_the_error_suggests_the_closest_format(name, meant):
    message = rf"unknown format '{name}'; did you mean '{meant}'\?"
    with pytest.raises(ValueError, match=message):
        get_format(name)


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("Q4_K", "'uint4' with tile_size=32"),
        ("q4_k_m", "'uint4' with tile_size=32"),
        ("Q6_K", "'int6' with tile_size=16"),
        ("IQ4_XS", "'iq4_nl' with tile_size=32"),
    ],
)
def test_other_gguf_types_raise_with_load_and_a_close_format(name, close):
    message = f"unknown format '{name}', a type of GGUF: vn.load reads .* closest format is {close}"
    with pytest.raises(ValueError, match=message):
        get_format(name)


@pytest.mark.parametrize("dtype", ["float32", "bf16", "fp16", jnp.float32, jnp.bfloat16])
def test_a_dense_dtype_raises_and_suggests_none(dtype):
    with pytest.raises(ValueError, match="a dense dtype: to keep a weight dense, write None as"):
        get_format(dtype)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K"])
def test_the_formats_suggested_for_gguf_types_exist(name):
    with pytest.raises(ValueError, match="closest format is") as raised:
        get_format(name)
    closest = str(raised.value).rpartition("format is ")[2]
    qtype, size = re.fullmatch(r"'(\w+)' with tile_size=(\d+)", closest).groups()
    assert qtype in FORMATS
    assert 256 % int(size) == 0


@pytest.mark.parametrize("wrong", [4, ["nf4"], None])
def test_values_that_are_no_name_raise(wrong):
    with pytest.raises((TypeError, TypeCheckError), match=r"a format is a name|get_format"):
        get_format(wrong)
