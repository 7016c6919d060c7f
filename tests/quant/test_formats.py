import jax.numpy as jnp
import numpy as np
import pytest

from veneer.quant import FORMATS, get_format

NF4 = np.array(FORMATS["nf4"].codebook)


def test_nf4_has_sixteen_ascending_values_that_end_at_one_and_contain_zero():
    assert len(NF4) == 16
    assert (np.diff(NF4) > 0).all()
    assert (NF4[0], NF4[7], NF4[-1]) == (-1.0, 0.0, 1.0)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_to_a_value_that_encodes_to_it(name):
    format = FORMATS[name]
    codes = np.arange(2**format.bits) - (2 ** (format.bits - 1) if format.signed else 0)
    codes = codes.astype(np.int8 if format.signed else np.uint8)
    np.testing.assert_array_equal(format.encode(format.decode(codes, jnp.float32)), codes)


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
        ("nf4", 2.0, 15),
        ("nf4", -2.0, 0),
        ("nf4", 0.03, 7),
        ("nf4", 0.05, 8),
    ],
)
def test_rounds_half_to_even_and_clips(name, value, code):
    assert FORMATS[name].encode(jnp.float32(value)) == code


def test_nf4_gives_the_nearest_value():
    x = np.linspace(-1.1, 1.1, 1001).astype(np.float32)
    distance = np.abs(x[:, None] - NF4)
    chosen = np.take_along_axis(
        distance, np.asarray(FORMATS["nf4"].encode(jnp.array(x)))[:, None], 1
    )[:, 0]
    # Where two values are equally near, either will do.
    np.testing.assert_allclose(chosen, distance.min(axis=1), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_nan_takes_the_code_of_zero(name):
    assert FORMATS[name].decode(FORMATS[name].encode(jnp.float32(np.nan)), jnp.float32) == 0


def test_a_format_is_found_by_name_and_by_dtype():
    assert get_format("int4") is get_format(jnp.int4) is FORMATS["int4"]


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown format 'int9'; the formats are int8, int4, nf4"):
        get_format("int9")
