"""Kernels of GPUs and TPUs are lowered without a device, and XLA computes all other products."""

import functools
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice
from support import arrays

import veneer as vn
from veneer import kernels
from veneer.kernels import MatmulOperands, MatmulProblem, select, tpu
from veneer.kernels.common.table import TABLE
from veneer.kernels.gpu import cuda_program, hopper
from veneer.kernels.gpu import matmul as gpu_matmul
from veneer.kernels.lowering import by_kernel
from veneer.quant.ops.by_kernel import ProductByXla, codes_of

FEW_ROWS, MANY_ROWS, TPU = "__gpu$xla.gpu.ptx", "mosaic_gpu", "tpu_custom_call"
DEVICES = {"cuda": ("NVIDIA H100", None, "gpu"), "tpu": ("TPU v5e", 1, "tpu")}
DENSE = np.random.default_rng(1).normal(size=(1024, 512)).astype(jnp.bfloat16)
X = arrays.normal(3, 1024, dtype=jnp.bfloat16)
has_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs JAX 0.11")


@functools.cache
def quantized(qtype="int4", tile=128, transpose=False):
    options = {"calibration_method": "minmax"} if qtype == "uint4" else {}
    if transpose:
        tiles = {} if tile is None else {"tiled_axes": {1: tile}}
        return vn.quant.quantize(jnp.asarray(DENSE.T), qtype, channelwise_axes=[0], **tiles)
    tiles = {} if tile is None else {"tiled_axes": {0: tile}}
    return vn.quant.quantize(jnp.asarray(DENSE), qtype, channelwise_axes=[1], **tiles, **options)


def rows(m, dtype=jnp.bfloat16):
    return jnp.zeros((m, 1024), dtype)


def abstract_device(platform):
    """Lower programs, within this, for a device that is not here."""
    device = AbstractDevice(*DEVICES[platform])
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def lowered(platform, w, choice="auto", f=jnp.matmul, x=X):
    with kernels.use(choice), abstract_device(platform):
        program = jax.jit(vn.implicit(f)).trace(x, w)
        return program.lower(lowering_platforms=(platform,)).as_text()


def has_kernel(text):
    return any(target in text for target in (FEW_ROWS, MANY_ROWS, TPU))


@pytest.fixture
def no_warnings_yet():
    select._warn.cache_clear()
    yield
    select._warn.cache_clear()


@pytest.fixture
def gpu(monkeypatch, no_warnings_yet):
    """A Hopper GPU and NVRTC."""
    cuda_program.ptx.cache_clear()
    monkeypatch.setattr(gpu_matmul, "compute_capability", lambda: 90)
    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    monkeypatch.setattr(cuda_program, "compile_ptx", lambda source, options: ".version 8.1")
    yield
    cuda_program.ptx.cache_clear()


FORMATS = [("int8", None), ("int4", 128), ("float8_e4m3fn", None)]


@pytest.mark.parametrize(("qtype", "tile"), [*FORMATS, ("nf4", 64), ("mxfp4", 32), ("int4", None)])
def test_few_rows_call_the_cuda_kernel(gpu, qtype, tile):
    for m in (1, 32):
        assert FEW_ROWS in lowered("cuda", quantized(qtype, tile), x=rows(m))
    transposed = quantized(qtype, tile, transpose=True)
    text = lowered("cuda", transposed, f=lambda x, w: x @ w.T)
    assert FEW_ROWS in text
    assert "tensor<512x1024xbf16>" not in text


@has_mosaic
@pytest.mark.parametrize(("qtype", "tile"), FORMATS)
def test_many_rows_call_the_hopper_kernel(gpu, qtype, tile):
    for m in (33, 300):
        assert MANY_ROWS in lowered("cuda", quantized(qtype, tile), x=rows(m))
    transposed = quantized(qtype, tile, transpose=True)
    text = lowered("cuda", transposed, f=lambda x, w: x @ w.T, x=rows(256))
    assert MANY_ROWS in text
    assert "tensor<512x1024xbf16>" not in text


@pytest.mark.parametrize(
    ("m", "w", "dtype"),
    [
        (1, ("int4", 128), "float32"),
        (300, ("int8", None), "float16"),
        (300, ("nf4", 64), "bfloat16"),
        (300, ("int4", 32), "bfloat16"),
        (3, ("int3", None), "bfloat16"),
        (3, ("int4", 8), "bfloat16"),
    ],
)
def test_other_products_are_left_to_xla_without_warning(gpu, m, w, dtype):
    w = quantized(*w).astype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = lowered("cuda", w, x=rows(m, dtype))
    assert not has_kernel(text)


def test_a_batch_of_many_rows_is_left_to_xla(gpu):
    w = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), quantized("int8", None))
    f = lambda x, w: jax.vmap(jnp.matmul)(x, w)
    assert MANY_ROWS not in lowered("cuda", w, f=f, x=jnp.zeros((2, 300, 1024), jnp.bfloat16))


@pytest.mark.parametrize("tile", [48, 64])
def test_explain_agrees_with_the_program_for_a_transposed_weight(gpu, tile):
    w = jnp.ones((1024, 20 * tile), jnp.bfloat16)
    w = vn.quant.quantize(w, "int8", channelwise_axes=[0], tiled_axes={1: tile})
    x, f = jnp.ones((2, w.shape[1]), jnp.bfloat16), lambda x, w: x @ w.T
    is_explained = any("GPU" in event.how for event in vn.explain(f)(x, w).events)
    assert is_explained == has_kernel(lowered("cuda", w, f=f, x=x)) == (tile == 64)


def test_gpus_of_several_kinds_use_kernels_that_all_can_run(monkeypatch):
    def is_of(*capabilities):
        gpus = [types.SimpleNamespace(compute_capability=each) for each in capabilities]
        monkeypatch.setattr(jax, "devices", lambda platform: gpus)
        gpu_matmul.compute_capability.cache_clear()
        hopper.is_hopper.cache_clear()
        return gpu_matmul.compute_capability(), hopper.is_hopper()

    assert is_of("9.0", "9.0") == (90, True)
    assert is_of("9.0", "8.0") == (80, False)
    assert is_of("10.0") == (90, False)
    assert is_of("9.0", "gfx90a") == (None, False)
    monkeypatch.undo()
    gpu_matmul.compute_capability.cache_clear()
    hopper.is_hopper.cache_clear()


def test_without_a_gpu_programs_for_one_are_left_to_xla(no_warnings_yet):
    gpu_matmul.compute_capability.cache_clear()
    hopper.is_hopper.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for m in (1, 300):
            assert not has_kernel(lowered("cuda", quantized(), x=rows(m)))
    assert "GPU" not in vn.explain(jnp.matmul)(X, quantized()).events[0].how


def test_on_other_gpus_many_rows_are_left_to_xla(gpu, monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not has_kernel(lowered("cuda", quantized(), x=rows(300)))
        assert "GPU" not in vn.explain(jnp.matmul)(rows(300), quantized()).events[0].how


def test_without_nvrtc_there_is_one_warning(gpu, monkeypatch):
    def fail(source, options):
        raise cuda_program.CompileError("NVRTC is missing: install it\nand more")

    monkeypatch.setattr(cuda_program, "compile_ptx", fail)
    with pytest.warns(UserWarning, match="computed by XLA: no kernel for GPU: .* NVRTC is missing"):
        assert not has_kernel(lowered("cuda", quantized()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "GPU" not in vn.explain(jnp.matmul)(X, quantized()).events[0].how


def test_a_kernel_that_jax_cannot_lower_is_left_to_xla(gpu, monkeypatch):
    def fail(*args):
        raise NotImplementedError("no such primitive\nand more")

    monkeypatch.setattr(hopper, "_compile", fail)
    monkeypatch.setattr(hopper, "LEAST_JAX", (0, 10))
    with pytest.warns(
        UserWarning, match="computed by XLA: no kernel for GPU: .* no such primitive"
    ):
        assert not has_kernel(lowered("cuda", quantized(), x=rows(300)))
    assert "GPU" not in vn.explain(jnp.matmul)(rows(300), quantized()).events[0].how


def test_the_cuda_kernel_serves_up_to_64_rows_elsewhere(gpu, monkeypatch):
    assert FEW_ROWS in lowered("cuda", quantized("nf4", 64), x=rows(64))
    monkeypatch.setattr(hopper, "is_hopper", lambda: False)
    assert FEW_ROWS in lowered("cuda", quantized("int8", None), x=rows(64))
    assert not has_kernel(lowered("cuda", quantized("int8", None), x=rows(65)))


def test_an_older_jax_has_no_kernel_for_many_rows(gpu, monkeypatch):
    monkeypatch.setattr(hopper, "LEAST_JAX", (99, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FEW_ROWS in lowered("cuda", quantized(), x=rows(64))
        assert not has_kernel(lowered("cuda", quantized(), x=rows(300)))
    assert "GPU" not in vn.explain(jnp.matmul)(rows(300), quantized()).events[0].how


def test_explain_names_the_kernel_of_a_gpu(gpu):
    how = vn.explain(jnp.matmul)(X, quantized()).events[0].how
    assert how.startswith("CPU kernel rows_lookup4, GPU kernel rows_lookup4 (fallback: ")


@has_mosaic
def test_explain_names_the_kernel_for_hopper(gpu):
    with abstract_device("cuda"):
        how = vn.explain(jnp.matmul)(rows(300), quantized("int8", None)).events[0].how
    assert "GPU kernel hopper_rows_int8 (fallback: " in how


def test_xla_computes_all_products_if_it_is_chosen(gpu):
    for m in (1, 300):
        assert not has_kernel(lowered("cuda", quantized(), "xla", x=rows(m)))


def test_exported_programs_are_left_to_xla(gpu):
    for platform in DEVICES:
        with kernels.use("experimental"):
            program = jax.jit(vn.implicit(lambda x, w: jnp.sin(x @ w)))
            exported = jax.export.export(program, platforms=(platform,))(X, quantized())
        assert not has_kernel(exported.mlir_module())


def test_a_derivative_by_x_may_be_left_to_xla(gpu):
    # Its scales lie along the axis that it contracts, so XLA computes the product with W.T.
    f = lambda x, w: jax.value_and_grad(lambda x: jnp.sin(x @ w).astype(jnp.float32).sum())(x)
    text = lowered("cuda", quantized("int8", None), f=f)
    assert text.count(FEW_ROWS) == 1


def test_a_derivative_by_x_uses_the_kernel_if_scales_fit(gpu):
    w = vn.quant.quantize(jnp.asarray(DENSE), "int8")  # one scale
    f = lambda x, w: jax.value_and_grad(lambda x: jnp.sin(x @ w).astype(jnp.float32).sum())(x)
    text = lowered("cuda", w, f=f)
    assert text.count(FEW_ROWS) == 2


def test_the_cuda_kernel_subtracts_zero_points(gpu):
    text = lowered("cuda", quantized("uint4", 64))
    assert FEW_ROWS in text
    assert "dot_general" not in text


@pytest.mark.parametrize("choice", ["auto", "experimental"])
def test_the_tpu_kernel_is_experimental(choice):
    for m in (1, 64, 300):
        text = lowered("tpu", quantized(), choice, x=rows(m))
        assert (TPU in text) == (choice == "experimental")


@pytest.mark.parametrize(("qtype", "tile"), [*FORMATS, ("nf4", 64), ("mxfp4", 32), ("int4", None)])
def test_the_tpu_kernel_is_lowered_without_a_device(qtype, tile):
    text = lowered("tpu", quantized(qtype, tile), "experimental")
    assert TPU in text
    assert "tensor<1024x512xbf16>" not in text


def test_a_derivative_on_a_tpu_reads_the_same_bytes():
    f = lambda x, w: jax.grad(lambda x: (x @ w).astype(jnp.float32).sum())(x)
    assert TPU in lowered("tpu", quantized("int8", None), "experimental", f=f)


def test_a_tpu_kernel_that_jax_cannot_lower_warns(monkeypatch, no_warnings_yet):
    def fail(*args):
        raise NotImplementedError("no such primitive\nand more")

    monkeypatch.setattr(tpu, "compile", fail)
    with pytest.warns(
        UserWarning, match="computed by XLA: no kernel for TPU: .* no such primitive"
    ):
        assert not has_kernel(lowered("tpu", quantized(), "experimental"))


def test_experimental_kernels_change_no_program_for_a_cpu():
    w, x = quantized(), X.astype(jnp.float32)
    programs = []
    for choice in ("experimental", "auto"):
        with kernels.use(choice):
            programs.append(jax.jit(vn.implicit(lambda x, w: 2 * x @ w)).lower(x, w).as_text())
    assert programs[0] == programs[1]


def test_the_environment_chooses_experimental_kernels(monkeypatch):
    monkeypatch.setenv("VENEER_KERNELS", "experimental")
    assert "TPU kernel rows_lookup4" in vn.explain(jnp.matmul)(X, quantized()).events[0].how


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("has_minima", [False, True])
def test_zero_points_and_minima_are_added(platform, has_minima, monkeypatch, gpu):
    module = tpu if platform == "tpu" else hopper
    interpreted = functools.partial(tpu.product, interpret=True)
    monkeypatch.setattr(module, "product", interpreted)
    monkeypatch.setattr(module, "compile", lambda *args: None)
    q = vn.quant.quantize(
        jnp.asarray(DENSE, jnp.float32),
        "uint4",
        channelwise_axes=[1],
        tiled_axes={0: 128},
        calibration_method="minmax",
    )
    if has_minima:
        minimum = -q.scale * q.zero_point.astype(jnp.float32)
        q = q.replace(zero_point=None, minimum=minimum)
    codes, offset = codes_of("uint4", not has_minima)
    reference = ProductByXla("uint4", "float32", None)
    problem = MatmulProblem(codes, 512, "rows", "float32", offset, reference, opt_in=True)
    leaves = (X.astype(jnp.float32), q.packed, q.scale, q.zero_point, None, q.minimum)
    operands = MatmulOperands(*(None if leaf is None else leaf[None] for leaf in leaves))
    row = next(row for row in TABLE if module.__name__.endswith(row.module))
    monkeypatch.setattr(select, "find_kernel", lambda *args: row)
    arrays = [leaf for leaf in operands if leaf is not None]
    present = [leaf is not None for leaf in operands]
    actual = by_kernel(*arrays, problem=problem, present=present, platform=platform)
    np.testing.assert_allclose(actual[0], leaves[0] @ q.dequantize(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize(("platform", "choice"), [("cuda", "auto"), ("tpu", "experimental")])
def test_several_devices_each_compute_their_part(gpu, platform, choice):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "d"))
    w = jax.tree.map(lambda leaf: jax.device_put(leaf, columns), quantized())
    for some_choice, x, is_cut in (
        (choice, X, True),
        ("xla", X, False),
        (choice, X.astype(jnp.float32), platform == "tpu"),
    ):
        with kernels.use(some_choice):
            program = jax.jit(vn.implicit(jnp.matmul)).trace(x, w.astype(x.dtype))
            text = program.lower(lowering_platforms=(platform,)).as_text()
        assert ("CustomSPMDPartitioning" in text) == is_cut


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_a_shard_map_calls_the_kernel_on_local_shapes(gpu):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, "d")
    specs = {"in_specs": (jax.sharding.PartitionSpec(), spec), "out_specs": spec}
    multiply = vn.implicit(jax.shard_map(jnp.matmul, mesh=mesh, **specs))
    columns = jax.sharding.NamedSharding(mesh, spec)
    w = jax.tree.map(lambda leaf: jax.device_put(leaf, columns), quantized())
    text = jax.jit(multiply).trace(X, w).lower(lowering_platforms=("cuda",)).as_text()
    assert FEW_ROWS in text
    assert "tensor<1x3x256xbf16>" in text


def test_importing_veneer_imports_no_pallas():
    program = (
        "import sys, jax.numpy as jnp, veneer as vn\n"
        "w = vn.quant.quantize(jnp.ones((1024, 512), jnp.bfloat16), 'int8', channelwise_axes=[1])\n"
        "vn.explain(jnp.matmul)(jnp.ones((300, 1024), jnp.bfloat16), w)\n"
        "assert not [name for name in sys.modules if name.startswith('jax.experimental.pallas')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
