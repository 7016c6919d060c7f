"""`veneer.interop.qwix`: each name and argument, compared with dense programs and Qwix."""

import functools
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import annotations, arrays, optional
from support.operations import DENSE, OPERATIONS

import veneer as vn
import veneer.interop.qwix as qwix

REASON = optional.reason_to_skip(["qwix"])
needs_qwix = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# The arguments of the documented functions, in their order; those after "*" are keyword-only.
ARGUMENTS = {
    "quantize": "array qtype * channelwise_axes tiled_axes calibration_method scale_dtype",
    "dequantize": "array",
    "dot": "a b precision preferred_element_type out_sharding * _qwix_dot_general",
    "dot_general": "lhs rhs dimension_numbers precision preferred_element_type kwargs",
    "einsum": "args * _qwix_dot_general preferred_element_type kwargs",
    "conv_general_dilated": "lhs rhs window_strides padding lhs_dilation rhs_dilation "
    "dimension_numbers feature_group_count batch_group_count precision preferred_element_type "
    "out_sharding",
    "ragged_dot": "lhs rhs group_sizes precision preferred_element_type group_offset",
    "ragged_dot_general": "lhs rhs group_sizes dimension_numbers precision preferred_element_type "
    "group_offset",
}
CONTRACT = (((1,), (0,)), ((), ()))
RAGGED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
NHWC = ("NHWC", "HWIO", "NHWC")
SIZES = arrays.array([3, 0, 5], np.int32)
both_ways = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


def theirs():
    """Return Qwix, which this file imports only on demand."""
    return pytest.importorskip("qwix")


def represented(x):
    return vn.materialise(x) if isinstance(x, qwix.QArray) else x


def assert_near(actual, expected, tolerance=1e-5):
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


# Names and arguments.


def test_every_documented_name_is_offered():
    assert {*qwix.__all__} == {"QArray", *ARGUMENTS}
    assert qwix.QArray is vn.quant.QArray


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_match_the_documentation(name):
    parameters = inspect.signature(getattr(qwix, name)).parameters
    before, _, after = ARGUMENTS[name].partition(" * ")
    assert " ".join(parameters) == f"{before} {after}".strip()
    keywords = {n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords == {*after.split()} - {"kwargs"}


@needs_qwix
@pytest.mark.parametrize("name", ARGUMENTS)
def test_signatures_match_the_installed_qwix(name):
    def described(library):
        parameters = inspect.signature(getattr(library, name)).parameters.values()
        named = lambda x: getattr(x, "__name__", x) if callable(x) else x
        return [(p.name, p.kind, named(p.default)) for p in parameters]

    # Qwix has `{}` or None for `tiled_axes` by version.
    assert described(qwix) == described(theirs())


def test_module_imports_without_qwix():
    program = (
        "import sys; sys.modules['qwix'] = None; import veneer.interop.qwix as q\n"
        "import jax.numpy as jnp; q.quantize(jnp.ones(2), 'int8'); assert 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# The operations, beside the dense ones and Qwix's.


def operands(op, quantized, qtype=jnp.int8, library=qwix):
    made = []
    for side, shape in enumerate((op.lhs, op.rhs)):
        x = arrays.normal(*shape, seed=side)
        tiling = op.tiling(side, "channel", None)
        made.append(library.quantize(x, qtype, **tiling) if side in quantized else x)
    return made


@both_ways
@pytest.mark.parametrize("quantized", [(), (1,), (0,), (0, 1)], ids=str)
@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_operations_agree_with_dense_ones(op, quantized, transform):
    pair = operands(op, quantized)
    actual = transform(lambda *pair: op.call(qwix, *pair))(*pair)
    assert_near(actual, op.call(DENSE, *map(represented, pair)))


@needs_qwix
@both_ways
@pytest.mark.parametrize("quantized", [(1,), (0, 1)], ids=str)
@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_operations_agree_with_qwix(op, quantized, transform):
    actual = transform(lambda *pair: op.call(qwix, *pair))(*operands(op, quantized))
    expected = op.call(theirs(), *operands(op, quantized, library=theirs()))
    # A scale that differs in its last bit moves a value that lies half-way between two codes.
    assert_near(actual, expected, tolerance=3e-3)


# Arguments of the products.


def weight(*shape, axes, qtype=jnp.int8):
    return qwix.quantize(arrays.normal(*shape, seed=3), qtype, channelwise_axes=axes)


X = arrays.normal(8, 16, seed=4)
IMAGES = arrays.normal(2, 6, 6, 4, seed=5)


@arrays.once
def W():
    return weight(16, 4, axes=[1])


@arrays.once
def kernel():
    return weight(3, 3, 4, 8, axes=[3])


@arrays.once
def experts():
    return weight(3, 16, 4, axes=[0, 2])


# Per name, the arguments of a call and the dense function.
CALLS = arrays.OnDemand(
    {
        "dot": lambda: ((X, W()), jnp.dot),
        "dot_general": lambda: ((X, W(), CONTRACT), lax.dot_general),
        "einsum": lambda: (("ij,jk->ik", X, W()), jnp.einsum),
        "conv_general_dilated": lambda: (
            (IMAGES, kernel(), (1, 1), "SAME", None, None, NHWC),
            lax.conv_general_dilated,
        ),
        "ragged_dot": lambda: ((X, experts(), SIZES), lax.ragged_dot),
        "ragged_dot_general": lambda: (
            (X, experts().mT, SIZES, RAGGED),
            lax.ragged_dot_general,
        ),
    }
)


def apply(function, args, options=None, transform=lambda f: f):
    """Call a function with its arrays as arguments of `transform`, and the rest captured."""
    is_array = [isinstance(x, jax.Array | qwix.QArray) for x in args]

    def of_arrays(*given):
        given = iter(given)
        taken = [next(given) if a else x for a, x in zip(is_array, args, strict=True)]
        return function(*taken, **options or {})

    return transform(of_arrays)(*(x for a, x in zip(is_array, args, strict=True) if a))


def check(name, transform, tolerance=1e-5, **options):
    args, dense = CALLS[name]
    actual = apply(getattr(qwix, name), args, options, transform)
    assert_near(actual, dense(*map(represented, args), **options), tolerance)


@both_ways
@pytest.mark.parametrize("name", CALLS)
def test_precision_is_passed_on(name, transform):
    check(name, transform, precision="highest")
    precision = lax.Precision.HIGHEST
    args, _ = CALLS[name]
    product = functools.partial(getattr(qwix, name), precision=precision)
    assert "HIGHEST" in str(jax.make_jaxpr(lambda: product(*args))())


@both_ways
@pytest.mark.parametrize("name", CALLS)
def test_preferred_element_type_is_the_dtype(name, transform):
    check(name, transform, preferred_element_type="float32")
    if name != "conv_general_dilated":
        check(name, transform, tolerance=2e-2, preferred_element_type=jnp.bfloat16)


@both_ways
def test_convolutions_of_codes_take_a_narrower_type(transform):
    images = qwix.quantize(IMAGES, jnp.int8, channelwise_axes=[0])
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}
    call = lambda x, k: qwix.conv_general_dilated(
        x, k, **options, preferred_element_type=jnp.bfloat16
    )
    dense = lax.conv_general_dilated(represented(images), represented(kernel()), **options)
    assert_near(transform(call)(images, kernel()), dense.astype(jnp.bfloat16), tolerance=1e-2)
    with pytest.raises(TypeError, match="must not be narrower"):  # as JAX and Qwix do
        call(IMAGES, kernel())


@pytest.mark.parametrize("name", ["dot", "ragged_dot", "dot_general", "ragged_dot_general"])
def test_precision_and_type_are_positional_in_order(name):
    args, _ = CALLS[name]
    y = getattr(qwix, name)(*args, "highest", jnp.bfloat16)
    assert y.dtype == jnp.bfloat16


def test_all_arguments_of_a_convolution_are_positional():
    more = (None, None, NHWC, 1, 1, "highest", jnp.float32, None)
    y = qwix.conv_general_dilated(IMAGES, kernel(), (1, 1), "SAME", *more)
    assert (y.shape, y.dtype) == ((2, 6, 6, 8), jnp.float32)


@pytest.mark.parametrize("name", ["dot", "dot_general", "einsum", "conv_general_dilated"])
def test_out_sharding_is_passed_on(name):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    spec = P("x", *[None] * 3) if name == "conv_general_dilated" else P("x", None)
    sharding = NamedSharding(mesh, spec)
    (args, dense) = CALLS[name]
    with jax.set_mesh(mesh):
        y = apply(getattr(qwix, name), args, {"out_sharding": sharding}, jax.jit)
    assert y.sharding.spec == spec
    assert_near(y, dense(*map(represented, args)))


CONVOLUTIONS = {
    "window_strides": {"window_strides": (2, 1)},
    "padding by name": {"padding": "VALID"},
    "padding by pairs": {"padding": [(1, 2), (0, 1)]},
    "lhs_dilation": {"lhs_dilation": (2, 1), "padding": [(1, 1), (1, 1)]},
    "rhs_dilation": {"rhs_dilation": (1, 2)},
    "dimension_numbers": {"dimension_numbers": lax.ConvDimensionNumbers(*[(0, 3, 1, 2)] * 3)},
    "feature_group_count": {"feature_group_count": 2},
    "batch_group_count": {"batch_group_count": 2},
}


@both_ways
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_arguments_of_convolutions_are_passed_on(case, transform):
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}
    options |= CONVOLUTIONS[case]
    weights = kernel()
    if case == "feature_group_count":
        weights = weight(3, 3, 2, 8, axes=[3])
    elif case == "dimension_numbers":
        weights = weight(8, 3, 3, 4, axes=[0])
    call = lambda x, k: qwix.conv_general_dilated(x, k, **options)
    expected = lax.conv_general_dilated(IMAGES, represented(weights), **options)
    assert_near(transform(call)(IMAGES, weights), expected)


@pytest.mark.parametrize("name", ["ragged_dot", "ragged_dot_general"])
def test_group_offset_is_passed_on(name, monkeypatch):
    # JAX does not compute it on CPUs.
    offsets, product = [], lax.ragged_dot_general

    def without_offset(*args, group_offset=None, **kwargs):
        offsets.append(group_offset)
        return product(*args, **kwargs)

    monkeypatch.setattr(lax, "ragged_dot_general", without_offset)
    args, _ = CALLS[name]
    offset = arrays.array([0])
    for call in (
        lambda: getattr(qwix, name)(*args, group_offset=offset),
        lambda: getattr(qwix, name)(*args, None, None, offset),
    ):
        offsets.clear()
        call()
        assert any(x is offset for x in offsets)


@pytest.mark.parametrize(("a", "b"), [((), (16, 4)), ((16,), (16, 4)), ((8, 16), (16,))])
@both_ways
def test_dot_takes_every_rank_that_numpy_takes(a, b, transform):
    x, w = arrays.normal(*a, seed=1), qwix.quantize(arrays.normal(*b, seed=2), jnp.int8)
    assert_near(transform(qwix.dot)(x, w), jnp.dot(x, represented(w)))


def test_operands_may_be_arrays_of_numpy():
    x = np.asarray(X)
    for y in (
        qwix.dot(x, W()),
        qwix.dot_general(x, W(), CONTRACT),
        qwix.einsum("ij,jk->ik", x, W()),
    ):
        assert_near(y, jnp.dot(X, represented(W())))


# `_qwix_dot_general`.


class Recorded:
    """A `dot_general` that records the arguments of its calls."""

    def __init__(self, library=qwix):
        self.calls, self.library = [], library

    def __call__(self, *args, **kwargs):
        shown = [getattr(x, "shape", x) for x in args]
        self.calls.append(([type(x).__name__ for x in args[:2]], shown, kwargs))
        return self.library.dot_general(*args, **kwargs)


@both_ways
def test_dot_calls_the_given_dot_general(transform):
    recorded = Recorded()
    product = functools.partial(
        qwix.dot,
        precision="highest",
        preferred_element_type=jnp.bfloat16,
        _qwix_dot_general=recorded,
    )
    y = transform(product)(X, W())
    assert_near(y, qwix.dot(X, W(), "highest", jnp.bfloat16))
    ((types, _, options),) = recorded.calls
    assert types[1] == "QArray"
    assert options == {
        "dimension_numbers": CONTRACT,
        "precision": "highest",
        "preferred_element_type": jnp.bfloat16,
        "out_sharding": None,
    }


EINSUMS = {
    "ij,jk->ik": [(8, 16), (16, 4)],
    "ij,jk": [(8, 16), (16, 4)],
    "bij,bkj->kbi": [(2, 8, 16), (2, 4, 16)],
    "...k,kn->n...": [(2, 8, 16), (16, 4)],
    "ij,jk,kl->il": [(8, 16), (16, 4), (4, 8)],
    "ii,ij->j": [(8, 8), (8, 4)],
    "i,j->ij": [(8,), (4,)],
}


@both_ways
@pytest.mark.parametrize("subscripts", EINSUMS)
def test_einsum_calls_the_given_dot_general(subscripts, transform):
    recorded = Recorded()
    x, *weights = (arrays.normal(*shape, seed=i) for i, shape in enumerate(EINSUMS[subscripts]))
    weights = [qwix.quantize(w, jnp.int8) for w in weights]
    call = lambda *xs: qwix.einsum(subscripts, *xs, precision="highest", _qwix_dot_general=recorded)
    y = transform(call)(x, *weights)
    assert_near(y, jnp.einsum(subscripts, x, *map(represented, weights)))
    assert len(recorded.calls) == len(weights)
    for types, _, options in recorded.calls:
        assert "QArray" in types
        assert options == {"precision": "highest", "preferred_element_type": jnp.float32}


def test_einsum_sums_an_axis_of_one_operand_first():
    recorded = Recorded()
    y = qwix.einsum("ij,kl->lj", X, W(), _qwix_dot_general=recorded)
    assert_near(y, jnp.einsum("ij,kl->lj", X, represented(W())))
    assert sorted(recorded.calls[0][1][:2]) == [(4,), (16,)]


@needs_qwix
@pytest.mark.parametrize("subscripts", ["ij,jk->ik", "bij,bkj->kbi", "ij,jk,kl->il"])
def test_einsum_calls_dot_general_as_qwix_does(subscripts):
    shapes = EINSUMS[subscripts]
    calls = []
    for library in (qwix, theirs()):
        x, *weights = (arrays.normal(*shape, seed=i) for i, shape in enumerate(shapes))
        recorded = Recorded(library)
        quantized = [library.quantize(w, jnp.int8) for w in weights]
        library.einsum(subscripts, x, *quantized, _qwix_dot_general=recorded)
        calls.append(recorded.calls)
    assert calls[0] == calls[1]


def test_einsum_with_a_dot_general_takes_lists_of_axes():
    recorded = Recorded()
    y = qwix.einsum(W(), [1, 2], X, [0, 1], [2, 0], optimize=False, _qwix_dot_general=recorded)
    assert_near(y, jnp.einsum("jk,ij->ki", represented(W()), X))
    assert len(recorded.calls) == 1


def test_einsum_of_one_operand_calls_no_dot_general():
    recorded = Recorded()
    assert_near(
        qwix.einsum("jk->k", W(), _qwix_dot_general=recorded),
        represented(W()).sum(0),
        tolerance=1e-5,
    )
    assert recorded.calls == []


GROUPS = {
    "bqhd,bkhd->bhqk": [(2, 5, 8, 16), (2, 7, 2, 16)],
    "bqhd,bkhd->bqhk": [(2, 5, 8, 16), (1, 7, 8, 16)],
    "qhd,hd->qh": [(5, 8, 16), (8, 1)],
    "ij,jk->ijk": [(4, 8), (16, 4)],
}


@both_ways
@pytest.mark.parametrize("subscripts", GROUPS)
def test_einsum_repeats_an_axis_of_groups(subscripts, transform):
    recorded = Recorded()
    x, k = (arrays.normal(*shape, seed=2) for shape in GROUPS[subscripts])
    q = qwix.quantize(k, jnp.int4)
    call = functools.partial(qwix.einsum, subscripts)
    y = transform(functools.partial(call, _qwix_dot_general=recorded))(x, q)
    assert_near(y, transform(call)(x, q))
    assert "QArray" in recorded.calls[0][0]


def test_einsum_takes_symbolic_sizes_with_a_dot_general():
    (batch,) = jax.export.symbolic_shape("b")
    call = lambda x: qwix.einsum("bj,jk->kb", x, W(), _qwix_dot_general=Recorded())
    shape = jax.ShapeDtypeStruct((batch, 16), jnp.float32)
    assert jax.export.export(jax.jit(call))(shape).out_avals[0].shape == (4, batch)


@pytest.mark.parametrize(
    ("subscripts", "columns", "words"),
    [
        ("ij,jk->ik", 8, "is summed over"),
        ("ij,jk->ik", 3, "is summed over"),
        ("ij,jk->ijk", 3, "cannot be repeated"),
    ],
)
def test_einsum_rejects_sizes_that_do_not_fit(subscripts, columns, words):
    call = functools.partial(qwix.einsum, subscripts, arrays.normal(4, columns), W())
    with pytest.raises(ValueError, match=words):
        call(_qwix_dot_general=Recorded())
    with pytest.raises(ValueError, match=r"does not match previous|Cannot broadcast axis 'j'"):
        call()


# Dtypes of results.


@needs_qwix
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("float8_e4m3fn", "float8_e4m3fn")], ids=str)
def test_dense_bytes_give_the_dtype_of_qwix(name, dtypes):
    args, _ = CALLS[name]
    dtypes = iter(dtypes)
    is_operand = lambda x: isinstance(x, qwix.QArray | jax.Array) and x.dtype != jnp.int32
    args = [jnp.ones(x.shape, next(dtypes)) if is_operand(x) else x for x in args]
    actual, expected = (getattr(library, name)(*args) for library in (qwix, theirs()))
    assert_near(actual, expected)


@pytest.mark.parametrize("name", ["dot", "dot_general", "einsum", "ragged_dot"])
def test_dense_floats_of_a_byte_meet_codes(name):
    args, dense = CALLS[name]
    small = X.astype(jnp.float8_e5m2)
    args = [small if x is X else x for x in args]
    actual = getattr(qwix, name)(*args)
    wide = [x.astype(jnp.float32) if x is small else represented(x) for x in args]
    assert_near(actual, dense(*wide))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "dot"])
def test_programs_equal_vn_quant(name):
    args, _ = CALLS[name]
    programs = [
        str(jax.make_jaxpr(functools.partial(getattr(library, name), *args))())
        for library in (qwix, vn.quant)
    ]
    assert programs[0] == programs[1]


# `quantize` and `dequantize`.

METHODS = ["absmax", "absmax,0.9", "minmax", "minmax,0.9", "rms,3", "fixed,-1,1", "fixed,-1,3"]
TILINGS = {
    "none": {},
    "channelwise": {"channelwise_axes": [0]},
    "channelwise by a set": {"channelwise_axes": {1}},
    "tiled": {"channelwise_axes": (1,), "tiled_axes": {0: 4}},
    "tiled by share": {"tiled_axes": {1: 0.5}},
    "no tiles": {"channelwise_axes": (1,), "tiled_axes": {}},
}
FORMATS = [jnp.int8, jnp.int4, "int3", "nf4", jnp.float8_e4m3fn, jnp.float8_e5m2]


def compare_with_qwix(x, qtype, **options):
    from support.qwix_arrays import from_qwix

    # A program: Qwix divides by its bounds otherwise where it runs one operation at a time.
    other = jax.jit(functools.partial(theirs().quantize, qtype=qtype, **options))(x)
    q = qwix.quantize(x, qtype, **options)
    assert (q.shape, q.dtype) == (other.shape, other.dtype)
    expected = from_qwix(other)
    scale = jnp.broadcast_to(expected.scales(), q.scale.shape)  # of a fixed range there is one
    np.testing.assert_allclose(q.scales(), scale, rtol=1e-6)
    assert (q.zero_point is None) == (expected.zero_point is None)
    assert (q.codes() != expected.codes()).mean() < 0.02
    y, z = qwix.dequantize(q), theirs().dequantize(other)
    assert (y.shape, y.dtype) == (z.shape, z.dtype)


@needs_qwix
@pytest.mark.parametrize("tiling", TILINGS)
def test_tilings_agree_with_qwix(tiling):
    compare_with_qwix(arrays.normal(8, 12), jnp.int8, **TILINGS[tiling])


@needs_qwix
@pytest.mark.parametrize("qtype", FORMATS)
def test_formats_agree_with_qwix(qtype):
    compare_with_qwix(arrays.normal(8, 12), qtype, channelwise_axes=[1])


@needs_qwix
@pytest.mark.parametrize("method", METHODS)
def test_calibration_methods_agree_with_qwix(method):
    compare_with_qwix(arrays.normal(8, 12), jnp.int8, calibration_method=method)


@needs_qwix
@pytest.mark.parametrize(("dtype", "scale_dtype"), [("float32", "bfloat16"), ("bfloat16", None)])
def test_scale_dtype_is_the_dense_dtype(dtype, scale_dtype):
    x = arrays.normal(8, 12).astype(dtype)
    q = qwix.quantize(x, jnp.int8, scale_dtype=scale_dtype)
    other = theirs().quantize(x, jnp.int8, scale_dtype=scale_dtype)
    assert q.dtype == other.dtype == jnp.bfloat16
    assert q.scale.dtype == other.scale.dtype
    assert_near(qwix.dequantize(q), theirs().dequantize(other), tolerance=2e-2)


@both_ways
@pytest.mark.parametrize("method", METHODS)
def test_quantized_values_are_near_the_dense_ones(method, transform):
    x = arrays.normal(8, 12) / 4
    quantize = functools.partial(qwix.quantize, qtype="int8", calibration_method=method)
    y = transform(lambda x: qwix.dequantize(quantize(x)))(x)
    clip = 0.11 if method.endswith("0.9") else 0.02
    assert np.abs(y - x).max() <= clip * np.abs(x).max()


def test_scale_of_powers_of_two_keeps_the_dense_dtype():
    q = qwix.quantize(
        arrays.normal(2, 64), "mxfp4", tiled_axes={1: 32}, scale_dtype=jnp.float8_e8m0fnu
    )
    assert (q.dtype, q.scale.dtype) == (jnp.float32, jnp.float8_e8m0fnu)


def test_a_qarray_is_made_of_its_parts():
    q = qwix.QArray(W().qvalue, W().scale, None, jnp.int8)
    np.testing.assert_array_equal(qwix.dequantize(q), qwix.dequantize(W()))


# Bad input.


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "array has dtype int32", lambda: qwix.quantize(jnp.arange(4), jnp.int8)),
        (ValueError, "unknown format 'int9'", lambda: qwix.quantize(X, "int9")),
        (ValueError, "named twice", lambda: qwix.quantize(
            X, jnp.int8, channelwise_axes=[1], tiled_axes={1: 4})),
        (ValueError, "a tile of 5 does not", lambda: qwix.quantize(X, "int8", tiled_axes={1: 5})),
        (ValueError, "nearest|method", lambda: qwix.quantize(
            X, jnp.int8, calibration_method="nearest")),
        pytest.param(
            *(TypeError, "takes a QArray", lambda: qwix.dequantize(X)),
            marks=annotations.unless_checked,
        ),
        (TypeError, "contracting dimensions", lambda: qwix.dot(X, W().T)),
        (TypeError, "contracting dimensions", lambda: qwix.dot_general(X, W().T, CONTRACT)),
        (TypeError, "unexpected keyword argument 'axes'", lambda: qwix.dot_general(
            X, W(), CONTRACT, axes=1)),
        (TypeError, "unexpected keyword argument 'axes'", lambda: qwix.einsum(
            "ij,jk", X, W(), axes=1)),
        (TypeError, "unexpected keyword argument 'axes'", lambda: qwix.einsum(
            "ij,jk", X, W(), axes=1, _qwix_dot_general=lambda *a, **k: qwix.dot_general(*a, **k))),
        (TypeError, "group dimension size", lambda: qwix.ragged_dot(X, W(), SIZES)),
    ],
)  # fmt: skip
def test_bad_input_raises(error, words, call):
    with pytest.raises(error, match=words):
        call()


# Names of Qwix's main branch.


def test_mxfp8_in_tiles_of_16_has_the_biased_scales_of_qwix():
    x = jnp.concatenate([jnp.full((1, 16), 460.0), jnp.full((1, 16), 465.0)])
    q = qwix.quantize(x, "mxfp8_16", channelwise_axes=[0], tiled_axes={1: 16})
    np.testing.assert_array_equal(q.scales(), [[1], [2]])


@pytest.mark.parametrize("qtype", [jnp.int16, "int16"])
def test_products_of_int16_activations_agree_with_dense(qtype):
    x = qwix.quantize(arrays.normal(4, 33), qtype, channelwise_axes=[0])
    assert x.qvalue.dtype == jnp.int16
    w = qwix.quantize(arrays.normal(33, 3, seed=1), jnp.int4, channelwise_axes=[1])
    assert_near(qwix.dot(x, w), represented(x) @ represented(w))


@pytest.mark.parametrize("name", ["PtqProvider", "QuantizationRule", "quantize_model"])
def test_names_of_providers_point_to_their_replacement(name):
    with pytest.raises(AttributeError, match=rf"'{name}': use vn\.quant\."):
        getattr(qwix, name)


def test_unknown_names_have_no_hint():
    with pytest.raises(AttributeError, match=r"has no attribute 'unknown'$"):
        _ = qwix.unknown
