"""Example arguments for every public function of JAX that takes arrays."""

import inspect
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NAMESPACES = {
    "lax": jax.lax,
    "lax.linalg": jax.lax.linalg,
    "numpy": jnp,
    "numpy.linalg": jnp.linalg,
    "numpy.fft": jnp.fft,
    "nn": jax.nn,
}
FUNCTIONS = {
    f"{space}.{name}": function
    for space, module in NAMESPACES.items()
    for name, function in sorted(vars(module).items())
    if not name.startswith("_") and callable(function) and not inspect.isclass(function)
}


class Example(NamedTuple):
    args: tuple
    kwargs: dict[str, Any]
    make: Callable = lambda function: function  # returns a callable from the public function


def ex(*args, **kwargs):
    """Return an example with its NumPy arrays moved to JAX, which compiles nothing."""
    moved = lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x
    return Example(*jax.tree.map(moved, (args, kwargs)))


def over_axis(*args, **kwargs):
    """Return an example of a collective over an axis of size 3."""
    named = lambda f: jax.vmap(lambda x: f(x, "i", *args, **kwargs), axis_name="i")
    return ex(X[None] + X[:, None])._replace(make=named)


X = np.array([[0.3, 0.5, 0.2], [0.6, 0.1, 0.4], [0.25, 0.7, 0.8]], np.float32)
Y = X[::-1] + 0.05
V = X[0]
S = X @ X.T + np.eye(3, dtype=np.float32)  # positive definite
C = X + 1j * Y
I = np.array([[1, 2, 0], [3, 1, 2], [0, 4, 1]], np.int32)
U = I.astype("uint8")
B = I > 1
IMAGES = X.reshape(1, 1, 3, 3)
INDEX = np.array([2, 0])
FIRST, LAST = INDEX[1, ...], INDEX[0, ...]  # arrays without axes

# Functions that cannot be called with X, or with X and Y if they require two arguments.
EXAMPLES: dict[str, Example] = {}


def examples(space: str, **table: Example) -> None:
    EXAMPLES.update({f"{space}.{name}": example for name, example in table.items()})


def alike(space: str, names: str, example: Example) -> None:
    examples(space, **dict.fromkeys(names.split(), example))


alike("lax", "bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic", ex(I, I + 1))
alike("lax", "shift_right_logical mulhi", ex(I, I + 1))
alike("lax", "bitwise_not population_count clz", ex(I))
alike("lax", "argmax argmin", ex(X, 1, "int32"))
alike("lax", "real imag conj", ex(C))
alike("lax", "reduce_and reduce_or", ex(B, (0,)))
alike("lax", "reduce_max reduce_min reduce_prod reduce_sum", ex(X, (0,)))
alike("lax", "index_in_dim dynamic_index_in_dim", ex(X, 1))
alike("lax", "conv conv_transpose", ex(IMAGES, IMAGES, (1, 1), "SAME"))
alike(
    "lax",
    "scatter scatter_add scatter_max scatter_min scatter_mul scatter_sub",
    ex(V, INDEX[:, None], V[:2], lax.ScatterDimensionNumbers((), (0,), (0,))),
)
alike("lax", "igamma igammac igamma_grad_a random_gamma_grad zeta", ex(X + 1, Y + 1))
alike("lax", "psum pmean pmax pmin all_gather psum_scatter", over_axis())
alike("lax", "ppermute", over_axis([(0, 1), (1, 2), (2, 0)]))
alike("lax", "pshuffle", over_axis([1, 2, 0]))
alike("lax", "pswapaxes", over_axis(0))
alike("lax", "all_to_all", over_axis(0, 0))
alike("lax", "approx_max_k approx_min_k top_k", ex(X, 2))
examples(
    "lax",
    associative_scan=ex(jnp.add, X),
    batch_matmul=ex(X[None], Y[None]),
    betainc=ex(X, Y, X),
    bitcast_convert_type=ex(X, "int32"),
    broadcast=ex(X, (2,)),
    broadcast_in_dim=ex(V, (2, 3), (1,)),
    broadcast_like=ex(V, X),
    broadcast_to_rank=ex(V, 2),
    clamp=ex(X, Y, X + 1),
    collapse=ex(X, 0),
    composite=ex(X)._replace(make=lambda f: f(lambda x: x * 2, "veneer.double")),
    concatenate=ex([X, Y], 0),
    cond=ex(True, lambda x: x * 2, lambda x: x, X),
    conv_general_dilated=ex(IMAGES, IMAGES, (1, 1), "SAME"),
    conv_general_dilated_local=ex(
        IMAGES, np.ones((1, 4, 2, 2), np.float32), (1, 1), "VALID", (2, 2)
    ),
    conv_general_dilated_patches=ex(IMAGES, (2, 2), (1, 1), "VALID"),
    conv_with_general_padding=ex(IMAGES, IMAGES, (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1)),
    convert_element_type=ex(X, "float16"),
    custom_linear_solve=ex(lambda x: x * 2, V, lambda matvec, b: b / 2, symmetric=True),
    custom_root=ex(lambda x: x - 1, X, lambda f, x: x * 0 + 1, lambda g, y: y),
    dot_general=ex(X, Y, (((1,), (0,)), ((), ()))),
    dynamic_index_in_dim=ex(X, LAST),
    dynamic_slice=ex(X, (LAST, FIRST), (2, 2)),
    dynamic_slice_in_dim=ex(X, LAST, 2),
    dynamic_update_index_in_dim=ex(X, V, LAST, 0),
    dynamic_update_slice=ex(X, Y[:2], (LAST, FIRST)),
    dynamic_update_slice_in_dim=ex(X, Y[:2], LAST, 0),
    expand_dims=ex(X, (0,)),
    fft=ex(C, "fft", (3,)),
    fori_loop=ex(0, 2, lambda i, x: x * 2, X),
    full_like=ex(X, 2.0),
    gather=ex(V, INDEX[:, None], lax.GatherDimensionNumbers((), (0,), (0,)), (1,)),
    index_take=ex(X, (INDEX,), (0,)),
    integer_pow=ex(X, 3),
    map=ex(lambda x: x * 2, X),
    optimization_barrier=ex((X, Y)),
    pad=ex(X, V[0, ...], ((1, 0, 0), (0, 1, 0))),
    platform_dependent=ex(X, default=lambda x: x * 2),
    polygamma=ex(np.ones_like(X), Y),
    polynomial=ex(X, [1.0, 2.0]),
    ragged_dot=ex(X, np.stack([X, Y]), np.array([1, 2], np.int32)),
    ragged_dot_general=ex(
        X,
        np.stack([X, Y]),
        np.array([1, 2], np.int32),
        lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
    ),
    reduce=ex(X, np.float32(0), lax.add, (0,)),
    reduce_precision=ex(X, 5, 4),
    reduce_window=ex(X, np.float32(0), lax.add, (2, 2), (1, 1), "VALID"),
    reduce_xor=ex(I, (0,)),
    reshape=ex(X, (9,)),
    rev=ex(X, (0,)),
    rng_bit_generator=ex(np.arange(4, dtype="uint32"), (3,)),
    round=ex(X),
    scan=ex(lambda c, x: (c + x, c * x), V, X),
    scatter_apply=ex(
        V,
        INDEX[:, None],
        jnp.sin,
        lax.ScatterDimensionNumbers((), (0,), (0,)),
        update_shape=(2,),
    ),
    select=ex(B, X, Y),
    select_n=ex(B, X, Y),
    slice=ex(X, (0, 1), (2, 3)),
    slice_in_dim=ex(X, 0, 2),
    sort_key_val=ex(V, V[::-1]),
    split=ex(X, (1, 2)),
    squeeze=ex(X[None], (0,)),
    stack=ex([X, Y]),
    switch=ex(1, [lambda x: x, lambda x: x * 2], X),
    tile=ex(X, (2, 1)),
    transpose=ex(X, (1, 0)),
    with_sharding_constraint=ex(X, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    while_loop=ex(lambda s: s[1] < 2, lambda s: (s[0] * 2, s[1] + 1), (X, 0)),
)
alike("lax.linalg", "cholesky eigh svd qr lu schur hessenberg eig", ex(S))
examples(
    "lax.linalg",
    cholesky_update=ex(np.linalg.cholesky(S), V),
    householder_product=ex(X, V),
    symmetric_product=ex(X, Y, symmetrize_output=True),
    triangular_solve=ex(np.triu(S), X, left_side=True),
    tridiagonal=ex(S),
    tridiagonal_solve=ex(V, V + 3, V, X),
    lu_pivots_to_permutation=ex(np.array([1, 2, 2], "int32"), 3),
    ormqr=ex(X, V, X),
)
alike("numpy", "add subtract multiply logaddexp logaddexp2 maximum minimum", ex(X, Y))
alike("numpy", "imag iscomplex isreal", ex(C))
alike("numpy", "logical_and logical_or logical_xor", ex(B, X))
alike("numpy", "cumulative_prod cumulative_sum", ex(X, axis=0))
alike("numpy", "bitwise_and bitwise_or bitwise_xor gcd lcm", ex(I, I + 1))
alike("numpy", "left_shift right_shift bitwise_left_shift bitwise_right_shift", ex(I, I + 1))
alike("numpy", "bitwise_not bitwise_invert invert bitwise_count", ex(I))
alike("numpy", "concatenate concat stack vstack hstack dstack column_stack", ex([X, Y]))
alike("numpy", "array_split split vsplit hsplit", ex(X, 3))
alike("numpy", "percentile nanpercentile quantile nanquantile", ex(X, np.array(0.4, np.float32)))
alike("numpy", "cross convolve correlate vdot", ex(V, V[::-1]))
alike("numpy", "polyadd polymul polysub polydiv", ex(V, V[::-1]))
alike("numpy", "union1d setxor1d setdiff1d intersect1d", ex(V, V[::-1], size=3))
alike("numpy", "nonzero argwhere flatnonzero unique", ex(V, size=3))
alike("numpy", "broadcast_to", ex(V, (2, 3)))
alike("numpy", "argpartition partition", ex(X, 1))
alike("numpy", "put_along_axis", ex(X, I % 3, Y, 1, inplace=False))
examples(
    "numpy",
    append=ex(X, Y),
    array=ex(X),
    apply_along_axis=ex(lambda x: x * 2, 0, X),
    apply_over_axes=ex(jnp.sum, X, [0]),
    astype=ex(X, "float16"),
    average=ex(X, weights=Y),
    bincount=ex(I.ravel(), length=5),
    block=ex([[X, Y], [Y, X]]),
    broadcast_arrays=ex(X, V),
    choose=ex(I % 2, [X, Y], mode="wrap"),
    clip=ex(X, 0.2, 0.6),
    compress=ex(np.array([True, False, True]), X, 0, size=2),
    corrcoef=ex(X),
    cov=ex(X),
    delete=ex(V, 1),
    diag=ex(X),
    digitize=ex(X, np.sort(V)),
    dsplit=ex(np.stack([X, X], -1), 2),
    einsum=ex("ij,jk->ki", X, Y),
    expand_dims=ex(X, 0),
    extract=ex(B, X, size=3),
    fill_diagonal=ex(X, V, inplace=False),
    frompyfunc=ex(X, Y)._replace(make=lambda f: f(lambda x, y: x * y, nin=2, nout=1)),
    full_like=ex(X, 2.0),
    kaiser=ex(5, V[0, ...]),
    gradient=ex(X),
    histogram=ex(X, 4, (0, 1)),
    histogram2d=ex(V, V[::-1], 2, [[0, 1], [0, 1]]),
    histogram_bin_edges=ex(X, 4),
    histogramdd=ex(X, 2, [(0, 1)] * 3),
    insert=ex(V, 1, X[0, 0, ...]),
    interp=ex(X, np.sort(V), V),
    isin=ex(X, V),
    ix_=ex(INDEX, INDEX),
    ldexp=ex(X, I),
    lexsort=ex((V, V[::-1])),
    linspace=ex(V, V + 1, 4),
    logspace=ex(V, V + 1, 4),
    geomspace=ex(V, V + 1, 4),
    matmul=ex(X, Y),
    meshgrid=ex(V, V[::-1]),
    moveaxis=ex(X, 0, 1),
    pad=ex(X, 1),
    packbits=ex(U > 1),
    permute_dims=ex(X, (1, 0)),
    piecewise=ex(X, [B], [jnp.sin, jnp.cos]),
    place=ex(X, B, V, inplace=False),
    polyder=ex(V),
    polyfit=ex(V, V[::-1], 1),
    polyint=ex(V),
    put=ex(V, INDEX, V[:2], inplace=False),
    ravel_multi_index=ex((INDEX, INDEX), (3, 3), mode="clip"),
    repeat=ex(X, 2),
    reshape=ex(X, (9,)),
    resize=ex(X, (2, 2)),
    roll=ex(X, 1),
    rollaxis=ex(X, 1),
    roots=ex(V, strip_zeros=False),
    searchsorted=ex(np.sort(V), X),
    select=ex([B, ~B], [X, Y]),
    setdiff1d=ex(V, V[:2], size=1),
    swapaxes=ex(X, 0, 1),
    take=ex(X, INDEX, 0),
    take_along_axis=ex(X, I % 3, 1),
    tensordot=ex(X, Y),
    tile=ex(X, (2, 1)),
    top_k=ex(X, 2),
    trapezoid=ex(X, V),
    trim_zeros=ex(V),
    unique_all=ex(V, size=3),
    unique_counts=ex(V, size=3),
    unique_inverse=ex(V, size=3),
    unique_values=ex(V, size=3),
    unpackbits=ex(U),
    unravel_index=ex(INDEX, (3, 3)),
    unwrap=ex(X),
    vander=ex(V),
    vectorize=ex(X)._replace(make=lambda f: f(lambda x: x * 2)),
    where=ex(B, X, Y),
)
alike(
    "numpy.linalg",
    "cond det eig eigh eigvals eigvalsh inv pinv cholesky slogdet matrix_rank",
    ex(S),
)
alike("numpy.linalg", "svd svdvals qr", ex(S))
examples(
    "numpy.linalg",
    cross=ex(V, V[::-1]),
    outer=ex(V, V[::-1]),
    lstsq=ex(S, V),
    matrix_power=ex(X, 3),
    multi_dot=ex([X, Y, X]),
    solve=ex(S, V),
    tensorinv=ex(S.reshape(3, 3), ind=1),
    tensorsolve=ex(S, V),
)
alike("numpy.fft", "fft ifft hfft fft2 ifft2 fftn ifftn irfft irfft2 irfftn", ex(C))
QKV = np.stack([X, Y])[None]  # [1, T, heads, H]
examples(
    "nn",
    dot_product_attention=ex(QKV, QKV + 1, QKV * 2),
    glu=ex(X[:, :2]),
    one_hot=ex(I, 5),
    scaled_dot_general=ex(X[None], Y[None], (((2,), (2,)), ((0,), (0,)))),
)

# Functions whose results depend only on shapes and dtypes, so the results are not implicit.
STATIC = """
    lax.dce_sink lax.dtype lax.full_like numpy.diag_indices_from numpy.empty_like
    numpy.full_like numpy.iscomplexobj numpy.isrealobj numpy.isscalar numpy.iterable numpy.ndim
    numpy.ones_like numpy.result_type numpy.shape numpy.size numpy.tril_indices_from
    numpy.triu_indices_from numpy.zeros_like
""".split()

# Functions that the tests do not call, with the reason.
LISTED: dict[str, str] = {}


def listed(reason: str, space: str, names: str) -> None:
    LISTED.update({f"{space}.{name}": reason for name in names.split()})


listed("a type", "lax", "ConvGeneralDilatedDimensionNumbers DotDimensionNumbers PrecisionLike")
listed("takes tokens", "lax", "after_all create_token")
listed("takes an axis's name alone", "lax", "axis_index axis_size")
listed(
    "takes shapes",
    "lax",
    """broadcast_shapes broadcasted_iota conv_dimension_numbers conv_general_permutations
    conv_general_shape_tuple conv_shape_tuple conv_transpose_shape_tuple empty full iota
    padtype_to_pads reduce_window_shape_tuple shape_as_value""",
)
listed("for shard_map, and tested with it", "lax", "pbroadcast pcast")
listed("JAX has it on no CPU", "lax", "precv psend psum_scatter_start ragged_all_to_all")
listed("its result is random", "lax", "rng_uniform")
listed(
    "takes shapes",
    "numpy",
    """arange bartlett blackman broadcast_shapes diag_indices empty eye fromfunction full hamming
    hanning identity indices mask_indices ones tri tril_indices triu_indices zeros""",
)
listed("looks at shapes", "numpy", "einsum_path")
listed("takes dtypes", "numpy", "can_cast isdtype issubdtype promote_types")
listed("takes files or buffers", "numpy", "frombuffer fromfile fromiter fromstring load")
listed("takes options", "numpy", "get_printoptions printoptions set_printoptions")
listed("takes shapes", "numpy.fft", "fftfreq rfftfreq")
listed("takes options", "nn", "get_scaled_dot_general_config")
listed("JAX has it on no CPU", "nn", "scaled_matmul")

# Functions that need the values in Python. They raise for a type that cannot be materialized.
NEEDS_VALUES = {
    "numpy.array_repr": ex(X),
    "numpy.array_str": ex(X),
    "numpy.from_dlpack": ex(X),
    "numpy.save": ex(io.BytesIO(), X),
    "numpy.savez": ex(io.BytesIO(), X),
    "numpy.trim_zeros": ex(V),
}


def example_of(name: str) -> Example:
    if name in EXAMPLES:
        return EXAMPLES[name]
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return ex(*(X, Y)[: max(1, len(required))])
