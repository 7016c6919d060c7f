"""Products by kernels, compared with dense products in float64 and with products by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.arrays import normal

import veneer as vn
from veneer import kernels
from veneer.kernels import BYTES
from veneer.quant import FORMATS, QArray, quantize
from veneer.quant.ops.by_kernel import codes_of

# N is odd, so that rows end within a byte and within a vector. Tiles divide K.
K, N = 192, 131
NOT_SERVED = {
    *("int16", "ternary", "dynamic8", "float8_e4m3", "float8_e3m4"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"),
}
SERVED = [name for name in FORMATS if name not in NOT_SERVED]


def how(f, *args):
    """Return the strategies of the products of a function, as `explain` reports them."""
    events = vn.explain(f)(*args).events
    return [event.how for event in events if event.primitive == "dot_general"]


def assert_accurate(actual, x, w, tolerance=1e-5):
    """Check that `actual` is `x @ w`, by the norm of the error in float64."""
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert actual.shape == exact.shape
    error = np.linalg.norm(np.asarray(actual, np.float64) - exact) / np.linalg.norm(exact)
    assert error <= tolerance, error


PRODUCTS_BY_SIDE = {"rows": jnp.matmul, "columns": lambda x, w: jnp.einsum("mk,nk->mn", x, w)}


def weights(qtype, side):
    """Yield weights of each granularity: `[K, N]` to contract rows, or `[N, K]` for columns."""
    tile = FORMATS[qtype].tile_size or 32
    tilings = {"tiles": ([1], {0: tile})}
    if FORMATS[qtype].tile_size is None:
        tilings |= {"channels": ([1], {}), "one scale": ([], {}), "tiles of both": ([], {0: 64})}
    w = normal(K, N, seed=2)
    for name, (channelwise, tiled) in tilings.items():
        if side == "rows":
            yield name, quantize(w, qtype, channelwise_axes=channelwise, tiled_axes=tiled)
        else:
            transposed = {1 - axis: size for axis, size in tiled.items()}
            across = [1 - axis for axis in channelwise]
            yield name, quantize(w.T, qtype, channelwise_axes=across, tiled_axes=transposed)


@pytest.mark.parametrize("side", PRODUCTS_BY_SIDE)
@pytest.mark.parametrize("qtype", [*SERVED, "ternary"])  # repacked to 2 bits
def test_every_format_granularity_and_side_agrees(qtype, side):
    x, cases = normal(3, K, seed=1), dict(weights(qtype, side))

    @jax.jit
    @vn.implicit
    def run(x, cases):
        return {case: PRODUCTS_BY_SIDE[side](x, q) for case, q in cases.items()}

    hows = how(run, x, cases)
    assert len(hows) == len(cases)
    assert all(reported.startswith("CPU kernel") for reported in hows)
    for case, actual in run(x, cases).items():
        dense = cases[case].dequantize()
        assert_accurate(actual, x, dense if side == "rows" else dense.T)


def test_ternary_rows_can_end_within_a_byte():
    sizes = (
        128,
        129,
        131,
        132,
        135,
        138,
        145,
    )  # all remainders of 4 and 5
    x, y = normal(3, max(sizes), seed=1), normal(3, 200, seed=2)
    ws = {n: quantize(normal(200, n, seed=n), "ternary", channelwise_axes=[0]) for n in sizes}

    @jax.jit
    @vn.implicit
    def run(x, y, ws):
        return {n: (x[:, :n] @ w.T, y @ w) for n, w in ws.items()}

    assert all(reported.startswith("CPU kernel") for reported in how(run, x, y, ws))
    for n, (over_columns, over_rows) in run(x, y, ws).items():
        dense = ws[n].dequantize()
        assert_accurate(over_columns, x[:, :n], dense.T)
        assert_accurate(over_rows, y, dense)


@pytest.mark.parametrize("qtype", ["int4", "ternary"])
def test_a_stack_agrees_in_a_scan_and_as_a_batch(qtype):
    x, w = normal(3, 4, 192, seed=1), normal(3, 192, 192, seed=2)
    q = quantize(w, qtype, channelwise_axes=[0, 2])
    batch = lambda x, w: jnp.einsum("ebk,ekn->ebn", x, w)
    scanned = lambda x, w: jax.lax.scan(lambda c, xw: (c, xw[0] @ xw[1]), 0, (x, w))[1]
    for f in (batch, scanned, jax.vmap(jnp.matmul)):
        assert all(reported.startswith("CPU kernel") for reported in how(f, x, q))
        actual = jax.jit(vn.implicit(f))(x, q)
        assert_accurate(actual, x, q.dequantize())


def test_kernel_codes_have_the_values_of_the_format():
    for qtype in SERVED:
        format = FORMATS[qtype]
        codes, centre = codes_of(qtype, has_zero_point=False)
        assert centre == 0
        if format.bits == 8:
            assert codes.dtype == format.code_dtype.name
            continue
        if codes.dtype:  # floats of 6 bits
            assert FORMATS[codes.dtype].codebook == format.codebook
            continue
        fields = jnp.arange(2**format.bits, dtype=jnp.uint8)
        worth = format.decode(format.from_fields(fields), jnp.float32)
        assert codes.values == tuple(worth.tolist())
    assert not any(codes_of(name, has_zero_point=False) for name in NOT_SERVED)
    assert all(FORMATS[n].bits not in (1, 2, 4) for n in NOT_SERVED)
    bytes_ = {n for n in NOT_SERVED if FORMATS[n].bits == 8 and FORMATS[n].codebook is None}
    assert not {FORMATS[n].code_dtype.name for n in bytes_} & {*BYTES}


@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_products_are_summed_in_f32_and_rounded_once(dtype, preferred):
    x = normal(3, K, seed=1, dtype=dtype)
    q = quantize(normal(K, N, seed=2, dtype=dtype), "int4", tiled_axes={0: 32}).replace(
        dense_dtype=dtype
    )
    f = lambda x, q: jnp.matmul(x, q, preferred_element_type=preferred)
    assert how(f, x, q)[0].startswith("CPU kernel")
    actual = jax.jit(vn.implicit(f))(x, q)
    assert actual.dtype == (preferred or dtype)
    eps = float(jnp.finfo(actual.dtype).eps)
    # The weight is not rounded to 16 bits.
    assert_accurate(actual, x, q.replace(dense_dtype="float32").dequantize(), max(eps / 2, 1e-5))


# The product, the shapes of the operands, the channelwise axes, and the contracted side.
PRODUCTS = {
    "a vector": (jnp.matmul, (192,), (192, 130), [1], "rows"),
    "rows of a batch": (jnp.matmul, (2, 3, 192), (192, 130), [1], "rows"),
    "of the right": (lambda x, w: w @ x, (130, 3), (192, 130), [0], "columns"),
    "of the right, by rows": (lambda x, w: w.T @ x, (192, 3), (192, 130), [1], "rows"),
    "transposed": (lambda x, w: x @ w.T, (3, 130), (192, 130), [0], "columns"),
    "transposed twice": (lambda x, w: x @ w.T.T, (3, 192), (192, 130), [1], "rows"),
    "to heads": (
        lambda x, w: jnp.einsum("btd,dhk->bthk", x, w),
        (2, 3, 96),
        (96, 4, 66),
        [1, 2],
        "rows",
    ),
    "of heads": (
        lambda x, w: jnp.einsum("bthk,hkd->btd", x, w),
        (2, 3, 4, 66),
        (4, 66, 96),
        [2],
        "rows",
    ),
    "of heads, transposed": (
        lambda x, w: jnp.einsum("bthk,dhk->btd", x, w),
        (2, 3, 4, 66),
        (96, 4, 66),
        [0],
        "columns",
    ),
    "a batch": (jnp.matmul, (2, 3, 192), (2, 192, 130), [0, 2], "rows"),
    "batches out of order": (
        lambda x, w: jnp.einsum("kabm,bakn->mabn", x, w),
        (192, 2, 3, 5),
        (3, 2, 192, 130),
        [0, 1, 3],
        "rows",
    ),
    "sums in another order": (
        lambda x, w: lax.dot_general(x, w, (((2, 1), (0, 1)), ((), ()))),
        (3, 16, 12),
        (12, 16, 130),
        [2],
        "rows",
    ),
}


@pytest.mark.parametrize("qtype", ["int4", "int8"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_contractions_that_move_no_codes_use_kernels(name, qtype):
    f, x_shape, w_shape, channelwise, side = PRODUCTS[name]
    x, q = (
        normal(*x_shape, seed=1),
        quantize(normal(*w_shape, seed=2), qtype, channelwise_axes=channelwise),
    )
    reported = how(f, x, q)[-1]
    assert reported.startswith("CPU kernel")
    if qtype == "int4":
        assert reported.startswith(f"CPU kernel {side}")
    actual = jax.jit(vn.implicit(f))(x, q)
    with jax.enable_x64(True):
        exact = f(*(jnp.asarray(np.asarray(y), jnp.float64) for y in (x, q.dequantize())))
    np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


# Axes that are swapped and then joined with others: the stored array is no transposed matrix.
SWAPPED = {
    "left": (lambda x, w: jnp.einsum("td,dkh->tkh", x, w.swapaxes(1, 2)), (3, 256), [1, 2]),
    "summed": (lambda x, w: jnp.einsum("tdh,dhk->tk", x, w.swapaxes(1, 2)), (3, 256, 64), [0, 2]),
    "in the batch": (
        lambda x, w: jnp.einsum("tdh,dhk->tdk", x, w.swapaxes(1, 2)),
        (3, 256, 64),
        [0, 2],
    ),
}


@pytest.mark.parametrize("qtype", ["int4", "int8", "ternary"])
@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_and_joined_axes_agree(name, qtype):
    f, x_shape, channelwise = SWAPPED[name]
    x = normal(*x_shape, seed=1)
    q = quantize(normal(256, 4, 64, seed=2), qtype, channelwise_axes=channelwise)
    actual = jax.jit(vn.implicit(f))(x, q)
    with jax.enable_x64(True):
        exact = f(*(jnp.asarray(np.asarray(y), jnp.float64) for y in (x, q.dequantize())))
    np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("qtype", ["int4", "int8"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_codes_are_not_moved_for_a_transposed_weight(qtype, batch):
    x, w = normal(*batch, 3, 130), normal(*batch, 192, 130)
    q = quantize(w, qtype, channelwise_axes=range(len(batch) + 1))
    compiled = jax.jit(vn.implicit(lambda x, w: x @ w.swapaxes(-1, -2))).lower(x, q).compile()
    program = compiled.as_text()
    assert "veneer_columns" in program
    assert not any(" transpose(" in line for line in program.splitlines())
    expected = x @ q.dequantize().swapaxes(-1, -2)
    np.testing.assert_allclose(compiled(x, q), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("counts", [(3, 4), (5, 2), (2, 160)])  # as many matrices as rows
@pytest.mark.parametrize("act_qtype", [None, "int8"])
def test_matrices_with_two_batch_axes_agree(counts, side, act_qtype):
    """They are not reshaped before the kernel, unless their layout would be ambiguous."""
    axis = 2 if side == "columns" else 3
    q = quantize(normal(*counts, 160, 128), "int4", channelwise_axes=[0, 1, axis])
    x = normal(*counts, 2, 128 if side == "columns" else 160, seed=1)
    if act_qtype is not None:
        x = quantize(x, act_qtype, channelwise_axes=[0, 1, 2])
    program = lambda x, w: x @ (w.swapaxes(2, 3) if side == "columns" else w)
    assert all(reported.startswith("CPU kernel") for reported in how(program, x, q))
    compiled = jax.jit(vn.implicit(program))
    (call,) = [x for x in compiled.lower(x, q).as_text().splitlines() if f"{side}_lookup4" in x]
    stored = "x".join(map(str, (*counts, 160, 64)))
    assert (f"tensor<{stored}xui8>" in call) == (counts[1] != 160)
    expected = program(vn.materialise(x), q.dequantize())
    np.testing.assert_allclose(compiled(x, q), expected, rtol=1e-4, atol=1e-3)


def test_matrices_of_a_batch_can_share_scales():
    x, w = normal(4, 3, 256), normal(4, 256, 128)
    for axes in ((), (2,), (1, 2)):
        q = quantize(w, "int8", channelwise_axes=axes)
        found = vn.implicit(jnp.matmul)(x, q)
        np.testing.assert_allclose(found, x @ q.dequantize(), rtol=1e-4, atol=1e-3)


EXCLUDED = {
    "an algorithm": lambda x, w: jnp.matmul(x, w, precision="BF16_BF16_F32"),
    "another dtype": lambda x, w: lax.dot_general(
        x.astype(jnp.bfloat16), w, (((1,), (0,)), ((), ()))
    ),
    "few entries": lambda x, w: x[:, :8] @ w[:8],
}


@pytest.mark.parametrize("f", EXCLUDED.values(), ids=EXCLUDED)
def test_products_without_a_kernel_are_left_to_xla(f):
    x, q = normal(3, K, seed=1), quantize(normal(K, N, seed=2), "int4", channelwise_axes=[1])
    reported = how(f, x, q)
    assert reported
    assert "kernel" not in reported[-1]


def test_formats_without_kernels_are_left_to_xla():
    x = normal(3, K, seed=1)
    for qtype in ("float8_e4m3", "float8_e3m4"):
        q = quantize(normal(K, N, seed=2), qtype, channelwise_axes=[1], tiled_axes=None)
        assert "kernel" not in how(jnp.matmul, x, q)[0]


def test_float64_is_left_to_xla():
    with jax.enable_x64(True):
        x, q = normal(3, K, dtype=np.float64), quantize(normal(K, N, dtype=np.float64), "int4")
        assert "kernel" not in how(jnp.matmul, x, q)[0]


@pytest.mark.parametrize("qtype", ["int8", "int4", "nf4", "uint4"])
def test_nan_and_infinity_stay_in_their_row(qtype):
    x = normal(6, K).at[0, 3].set(jnp.inf).at[1, 4].set(-jnp.inf).at[2, 5].set(jnp.nan)
    q = quantize(normal(K, N, seed=2), qtype, channelwise_axes=[1], tiled_axes={0: 32})
    actual = jax.jit(vn.implicit(jnp.matmul))(x, q)
    assert not np.isfinite(actual[:3]).any()
    assert_accurate(actual[3:], x[3:], q.dequantize())
    if qtype != "uint4":  # zero points make it inf - inf
        assert (actual[0] == x[0] @ q.dequantize())[np.isinf(actual[0])].all()


def test_a_nan_scale_affects_only_its_tile():
    q = quantize(normal(K, N), "int4", channelwise_axes=[1], tiled_axes={0: 32})
    q = q.replace(scale=q.scale.at[2, 5].set(jnp.nan))
    y = jax.jit(vn.implicit(jnp.matmul))(normal(3, K), q)
    assert np.isnan(y).all(axis=0).tolist() == [i == 5 for i in range(N)]


@pytest.mark.parametrize("shape", [(0, K), (2, 0, K)])
def test_activations_can_have_no_rows(shape):
    q = quantize(normal(K, N), "int4", channelwise_axes=[1])
    assert jax.jit(vn.implicit(jnp.matmul))(jnp.zeros(shape), q).shape == (*shape[:-1], N)


# Activations in int8.

INTEGER = {"int8": None, "uint8": 64, "int4": 32, "uint4": None, "int2": 32, "int1": None}


@pytest.mark.parametrize("side", PRODUCTS_BY_SIDE)
@pytest.mark.parametrize("qtype", INTEGER)
def test_integer_sums_are_exact_before_scaling(qtype, side):
    x = quantize(normal(3, K, seed=1), "int8", channelwise_axes=[0])
    summed, shape = (0, (K, N)) if side == "rows" else (1, (N, K))
    tiles = {summed: INTEGER[qtype]} if INTEGER[qtype] else {}
    w = quantize(normal(*shape, seed=2), qtype, channelwise_axes=[1 - summed], tiled_axes=tiles)
    run = vn.implicit(PRODUCTS_BY_SIDE[side])
    assert [reported.split("_")[0] for reported in how(run, x, w)] == ["CPU kernel integer"]
    dense = w.dequantize()
    actual = jax.jit(run)(x, w)
    assert_accurate(actual, x.dequantize(), dense if side == "rows" else dense.T, 1e-6)


@pytest.mark.parametrize("qtype", ["nf4", "int8", "uint4", "ternary"])
def test_activations_quantized_in_the_product_agree(qtype):
    w = vn.quant.ActivationQuantized(
        quantize(normal(K, N, seed=2), qtype, channelwise_axes=[1], tiled_axes={0: 32}),
        qtype="int8",
    )
    x = normal(2, 3, K, seed=1)
    f = lambda x, w: jnp.sum(jnp.sin(x @ w))
    by_kernel = jax.jit(jax.value_and_grad(vn.implicit(f)))(x, w)
    with kernels.use("xla"):
        by_xla = jax.jit(jax.value_and_grad(vn.implicit(f)))(x, w)
    for a, b in zip(by_kernel, by_xla, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
    kernel = "rows" if qtype == "nf4" else "integer_rows"
    assert any(reported.startswith(f"CPU kernel {kernel}") for reported in how(jnp.matmul, x, w))


@pytest.mark.parametrize("qtype", ["int4", "int8"])
@pytest.mark.parametrize("rows", [3, 1000])
def test_the_stored_weight_is_read_without_a_copy(qtype, rows):
    x, q = normal(rows, 192), quantize(normal(130, 192), qtype, channelwise_axes=[0])
    w = vn.quant.ActivationQuantized(q, qtype="int8", contracting=(-1,))
    with_activations = vn.implicit(lambda x, w: x @ w.T)
    compiled = jax.jit(with_activations).lower(x, w).compile()
    lines = compiled.as_text().splitlines()
    (call,) = (line for line in lines if "veneer_integer_" in line)
    assert "veneer_integer_columns" in call
    assert f"f32[1,{rows},130]" in call
    assert not any(" transpose(" in line for line in lines)
    exact = with_activations(x, w)
    with kernels.use("xla"):
        np.testing.assert_allclose(compiled(x, w), with_activations(x, w), rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(compiled(x, w), exact, rtol=1e-6, atol=1e-4)
    twice = jax.jit(vn.implicit(lambda x, w: x @ w.T.T)).lower(x[:, :130], w)
    assert "veneer_integer" not in twice.as_text()  # the derivative contracts the other axis


# Transformations.

PROGRAMS = {
    "jit": jax.jit(lambda x, w: jnp.sin(x @ w[0])),
    "vmap": jax.vmap(lambda x, w: x @ w),
    "vmap of activations": jax.vmap(lambda x, w: x @ w[0], in_axes=(1, None), out_axes=2),
    "vmap of weights": jax.vmap(lambda x, w: x[1] @ w, in_axes=(None, 0), out_axes=1),
    "vmap of vmap": jax.vmap(jax.vmap(jnp.dot, in_axes=(0, None)), in_axes=(0, 0)),
    "scan": lambda x, w: lax.scan(lambda c, xw: (c + jnp.sum(xw[0] @ xw[1]), None), 0.0, (x, w))[0],
    "loop": lambda x, w: lax.fori_loop(
        0, 2, lambda _, c: c + jnp.tanh(x[0] @ w[1]), 0.0 * x[0] @ w[0]
    ),
    "cond": lambda x, w: lax.cond(x[0, 0, 0] > 0, lambda: x[0] @ w[1], lambda: x[1] @ w[0]),
    "checkpoint": jax.checkpoint(lambda x, w: jnp.sin(x @ w)),
    "second order": lambda x, w: jax.jvp(
        jax.grad(lambda x: jnp.sum(jnp.sin(x @ w[0]))), (x,), (jnp.cos(x),)
    )[1],
}


@pytest.mark.parametrize("qtype", ["int4", "uint8"])
def test_programs_and_their_derivatives_agree(qtype):
    x = normal(2, 3, K, seed=1)
    w = 0.05 * normal(2, K, 130, seed=2)
    w = quantize(w, qtype, channelwise_axes=[0, 2], tiled_axes={1: 32})

    def run(x, w):
        programs = {name: vn.implicit(f) for name, f in PROGRAMS.items()}
        total = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w)))
        return {name: (f(x, w), jax.grad(total(f))(x, w)) for name, f in programs.items()}

    by_kernel = jax.jit(run)(x, w)
    with kernels.use("xla"):
        by_xla = jax.jit(run)(x, w)
    for name in PROGRAMS:
        for a, b in zip(by_kernel[name], by_xla[name], strict=True):
            # Sums of hundreds of terms in another order, through a few sines.
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)


def test_derivatives_by_scales_agree_with_xla():
    x = normal(3, K, seed=1)
    for qtype in ("int4", "uint4"):
        q = quantize(normal(K, 130, seed=2), qtype, channelwise_axes=[1], tiled_axes={0: 32})
        loss = lambda x, scale, q=q: jnp.sum(
            jnp.sin(vn.implicit(jnp.matmul)(x, q.replace(scale=scale)))
        )

        def run(x, scale, loss=loss):
            tangents = jnp.cos(x), jnp.cos(scale)
            return jax.grad(loss, (0, 1))(x, scale), jax.jvp(
                jax.grad(loss, (0, 1)), (x, scale), tangents
            )

        by_kernel = jax.jit(run)(x, q.scale)
        with kernels.use("xla"):
            by_xla = jax.jit(run)(x, q.scale)
        for a, b in zip(*map(jax.tree.leaves, (by_kernel, by_xla)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize("qtype", ["int4", "int8", "ternary"])
def test_gradients_materialize_no_weight(qtype):
    x, q = normal(3, K, seed=1), quantize(normal(K, 136), qtype, channelwise_axes=[1])
    loss = vn.implicit(lambda x, w: jnp.sum(jnp.sin(x @ w)))
    program = jax.jit(jax.grad(loss)).lower(x, q).compile().as_text()
    assert "veneer_rows" in program
    assert "veneer_columns" in program
    for dtype in ("f32", "s32", "bf16"):
        assert not any(f"{dtype}[{shape}" in program for shape in ("192,136", "1,192,136"))


# Exported programs.


def test_an_exported_program_needs_no_kernel():
    x, q = normal(3, K, seed=1), quantize(normal(K, N, seed=2), "int4", channelwise_axes=[1])
    run = jax.jit(vn.implicit(jnp.matmul))
    for platforms in (None, ("cpu", "tpu")):
        exported = jax.export.export(run, platforms=platforms)(x, q)
        assert "veneer" not in exported.mlir_module()
        again = jax.export.deserialize(exported.serialize())
        assert_accurate(again.call(x, q), x, q.dequantize())


def test_an_exported_program_can_have_symbolic_rows():
    q = quantize(normal(K, N, seed=2), "int4", channelwise_axes=[1])
    (m,) = jax.export.symbolic_shape("m")
    exported = jax.export.export(jax.jit(vn.implicit(jnp.matmul)))(
        jax.ShapeDtypeStruct((m, K), jnp.float32), q
    )
    for rows in (1, 4):
        x = normal(rows, K, seed=1)
        assert_accurate(exported.call(x, q), x, q.dequantize())


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_compute_by_xla(platform):
    x, q = normal(3, K), quantize(normal(K, N), "int4", channelwise_axes=[1])
    text = (
        jax.jit(vn.implicit(jnp.matmul)).trace(x, q).lower(lowering_platforms=(platform,)).as_text()
    )
    assert "veneer" not in text
    assert "stablehlo.dot_general" in text


def test_eager_products_agree():
    x, q = normal(3, K, seed=1), quantize(normal(K, N, seed=2), "int4", channelwise_axes=[1])
    for y in (x @ q, vn.implicit(jnp.matmul)(x, q), vn.quant.dot(x, q)):
        assert_accurate(y, x, q.dequantize())
    assert isinstance(q.T, QArray)
    assert_accurate(q.T @ x.T, q.dequantize().T, x.T)
