"""Pallas kernels are lowered where they are asked for, for devices that are not here; else XLA."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice

import veneer as vn
from veneer import kernels
from veneer.kernels import Codes, MatmulOperands, MatmulProblem, select
from veneer.kernels.lowering import by_kernel
from veneer.kernels.pallas import call
from veneer.quant.ops.by_kernel import codes_of
from veneer.quant.ops.kernel_references import ProductByXla

TARGETS = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}
DEVICES = {"cuda": ("NVIDIA H100", None, "gpu"), "tpu": ("TPU v5e", 1, "tpu")}
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 256)), jnp.bfloat16)
DENSE = jnp.asarray(np.random.default_rng(1).normal(size=(256, 128)), jnp.bfloat16)

# The backend is deprecated since JAX 0.11, which does not say when it goes.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def quantised(qtype="int4", tile=128):
    tiles = {} if tile is None else {"tiled_axes": {0: tile}}
    return vn.quant.quantize(DENSE, qtype, channelwise_axes=[1], **tiles)


def abstract_device(platform):
    """Within this, programs are lowered for a device that is not here."""
    device = AbstractDevice(*DEVICES[platform])
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def lowered(platform, w, choice="pallas", f=jnp.matmul, x=X):
    with kernels.use(choice), abstract_device(platform):
        program = jax.jit(vn.implicit(f)).trace(x, w)
        return program.lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def warned_of_nothing():
    select._warn.cache_clear()
    yield
    select._warn.cache_clear()


FORMATS = [
    ("int8", None),
    ("int4", 128),
    ("int4", 64),
    ("int4", None),
    ("nf4", 64),
    ("float8_e4m3fn", None),
    ("mxfp4", 32),
]


@pytest.mark.parametrize("platform", TARGETS)
@pytest.mark.parametrize(("qtype", "tile"), FORMATS)
@pytest.mark.parametrize("m", [1, 64, 300])
def test_the_kernel_is_lowered_without_a_device(platform, qtype, tile, m):
    x = jnp.zeros((m, 256), jnp.bfloat16)
    for f in (jnp.matmul, lambda x, w: x[:, :128] @ w.T):
        text = lowered(platform, quantised(qtype, tile), f=f, x=x)
        assert TARGETS[platform] in text
        assert "tensor<256x128xbf16>" not in text


@pytest.mark.parametrize("platform", TARGETS)
def test_it_is_opt_in(platform):
    for choice in ("auto", "xla"):
        assert TARGETS[platform] not in lowered(platform, quantised(), choice)


def test_programs_for_a_cpu_are_as_ever():
    w, x = quantised(), X.astype(jnp.float32)
    run = jax.jit(vn.implicit(lambda x, w: 2 * x @ w))
    programs = []
    for choice in ("pallas", "auto"):
        with kernels.use(choice):
            programs.append(run.lower(x, w).as_text())
    assert programs[0] == programs[1]
    with kernels.use("pallas"):
        y = run(x, w)
    np.testing.assert_array_equal(y, run(x, w))


def test_explain_names_the_platforms():
    with kernels.use("pallas"):
        how = vn.explain(jnp.matmul)(X, quantised()).events[0].how
    assert how.startswith("CPU kernel rows_lookup4, GPU kernel rows_lookup4, TPU kernel")


def test_the_environment_chooses_it(monkeypatch):
    monkeypatch.setenv("VENEER_KERNELS", "pallas")
    assert "GPU kernel" in vn.explain(jnp.matmul)(X, quantised()).events[0].how


@pytest.mark.parametrize("platform", TARGETS)
def test_a_derivative_by_x_reads_the_same_bytes(platform):
    grad = lambda x, w: jax.grad(lambda x: (x @ w).astype(jnp.float32).sum())(x)
    assert TARGETS[platform] in lowered(platform, quantised("int8", None), f=grad)


@pytest.mark.parametrize(
    ("platform", "w"),
    [
        ("cuda", vn.quant.quantize(DENSE, "int3", channelwise_axes=[1])),  # bit planes
        ("tpu", vn.quant.quantize(DENSE, "int3", channelwise_axes=[1])),
        ("cuda", vn.quant.quantize(DENSE[:240], "int4", channelwise_axes=[1], tiled_axes={0: 24})),
    ],
)
def test_what_has_no_kernel_is_left_to_xla(platform, w):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = lowered(platform, w, x=X[:, : w.shape[0]])
    assert text == lowered(platform, w, "auto", x=X[:, : w.shape[0]])


@pytest.mark.parametrize("platform", TARGETS)
def test_a_kernel_that_jax_cannot_lower_is_left_to_xla(platform, monkeypatch, warned_of_nothing):
    def fail(*args):
        raise NotImplementedError("no such primitive\nand more")

    w = quantised("int8", None)
    expected = lowered(platform, w, "auto")
    monkeypatch.setattr(call, "lower", fail)
    with pytest.warns(UserWarning, match="left to XLA: no kernel for .* no such primitive"):
        assert lowered(platform, w) == expected


def test_arrays_that_offsets_do_not_reach_are_left_to_xla(warned_of_nothing):
    typed = jax.ShapeDtypeStruct
    operands = MatmulOperands(
        typed((1, 1, 2**16), jnp.bfloat16),
        typed((1, 2**16, 2**15), jnp.int8),
        typed((1, 1, 2**15), jnp.float32),
    )
    problem = MatmulProblem(Codes(8, "int8"), 2**15, "rows", "float32", 0, print, opt_in=True)
    with pytest.warns(UserWarning, match="left to XLA: no kernel for GPU: ValueError: .* offsets"):
        assert not select.lowers("gpu", operands, problem)


@pytest.mark.parametrize("platform", TARGETS)
def test_exported_programs_do_as_xla_does(platform):
    w = quantised()
    with kernels.use("pallas"):
        program = jax.jit(vn.implicit(lambda x, w: jnp.sin(x @ w)))
        exported = jax.export.export(program, platforms=(platform,))(X, w)
    assert TARGETS[platform] not in exported.mlir_module()


@pytest.mark.parametrize("platform", call.MODULES)
@pytest.mark.parametrize("has_minima", [False, True])
def test_zero_points_and_minima_are_added_to_what_a_kernel_gives(platform, has_minima, monkeypatch):
    product = call.product
    monkeypatch.setattr(call, "product", functools.partial(product, interpret=True))
    monkeypatch.setattr(call, "lower", lambda *args: None)
    q = vn.quant.quantize(
        DENSE.astype(jnp.float32),
        "uint4",
        channelwise_axes=[1],
        tiled_axes={0: 32},
        calibration_method="minmax",
    )
    if has_minima:
        minimum = -q.scale * q.zero_point.astype(jnp.float32)
        q = q.replace(zero_point=None, minimum=minimum)
    codes, offset = codes_of("uint4", not has_minima)
    reference = ProductByXla("uint4", "float32", None)
    problem = MatmulProblem(codes, 128, "rows", "float32", offset, reference, opt_in=True)
    leaves = (X.astype(jnp.float32), q.packed, q.scale, q.zero_point, None, q.minimum)
    operands = MatmulOperands(*(None if leaf is None else leaf[None] for leaf in leaves))
    present = [leaf is not None for leaf in operands]
    arrays = [leaf for leaf in operands if leaf is not None]
    actual = by_kernel(*arrays, problem=problem, present=present, platform=platform)
    np.testing.assert_allclose(actual[0], leaves[0] @ q.dequantize(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_of_several_devices_each_is_to_compute_its_own_part():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "d"))
    w = jax.tree.map(lambda leaf: jax.device_put(leaf, columns), quantised())
    for choice, calls in (("auto", False), ("pallas", True)):
        with kernels.use(choice):
            program = jax.jit(vn.implicit(jnp.matmul)).trace(X, w)
            text = program.lower(lowering_platforms=("cuda",)).as_text()
        assert ("CustomSPMDPartitioning" in text) == calls
