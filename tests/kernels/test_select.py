"""The choice of a kernel: by the table, by `use`, and by the libraries of the process."""

import importlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays

import veneer as vn
from veneer import kernels
from veneer.kernels import Codes, select
from veneer.kernels.common.problem import MatmulShape
from veneer.kernels.common.table import FEW_ROWS, MOST_ROWS, TABLE
from veneer.kernels.cpu import build
from veneer.kernels.gpu import hopper

X, W = arrays.normal(2, 128), arrays.quantized("int8", 128, 130)
BY_KERNEL = "CPU kernel rows_int8 (fallback: convert codes of rhs to float, scale the output)"


def shape(**changes):
    sizes = {"contracting": "rows", "activations": "float", "m": 1, "k": 256, "n": 256, "tile": 256}
    return MatmulShape(**sizes | changes)


def find(platform, codes, shape):
    kernel = select.find_kernel(platform, codes, shape)
    return None if kernel is None else f"{kernel.name}_{codes.kind}"


def how():
    return vn.explain(jnp.matmul)(X, W).events[0].how


@pytest.fixture
def warned_of_nothing():
    select._warn.cache_clear()
    yield
    select._warn.cache_clear()


def test_the_table_has_a_kernel_for_each_side_and_dtype():
    assert find("cpu", Codes(8, "int8"), shape()) == "rows_int8"
    assert find("cpu", Codes(8, "int8"), shape(contracting="columns")) == "columns_int8"
    assert find("cpu", Codes(8, "uint8"), shape(activations="int8")) == "integer_rows_uint8"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.platform}-{row.name}-{row.variant}")
def test_each_row_names_a_module_and_its_functions(row):
    module = importlib.import_module(f"veneer.kernels.{row.module}")
    if row.platform == "cpu":
        assert callable(getattr(module, row.function))
    else:
        assert isinstance(module, select.DeviceKernel)


def test_each_cpu_kernel_has_one_row():
    targets = [row.target(kind) for row in TABLE if row.platform == "cpu" for kind in row.kinds]
    assert len(targets) == len(set(targets)) > 80


@pytest.mark.parametrize("m", [1, 8, 64])
def test_every_product_of_floats_on_a_cpu_has_a_kernel(m):
    for contracting in ("rows", "columns"):
        for tile in (1, 8, 96, 256):
            assert find("cpu", Codes(8, "int8"), shape(contracting=contracting, m=m, tile=tile))


@pytest.mark.parametrize(
    ("platform", "codes", "changes"),
    [
        ("tpu", Codes(8, "int8"), {}),
        ("cpu", Codes(8, "int8"), {"k": 8, "n": 8}),
        ("cpu", Codes(8, "int8"), {"k": 8, "n": 8, "batch": 1 << 20}),
        ("cpu", Codes(8, "int8"), {"k": 64, "n": 32, "batch": 127}),
        ("cpu", Codes(8, "float8_e4m3fn"), {"activations": "int8"}),
        ("cpu", Codes(1, values=(0.5, 1.0)), {"activations": "int8"}),
    ],
)
def test_unsupported_products_have_no_kernel(platform, codes, changes):
    assert find(platform, codes, shape(**changes)) is None


INT4 = Codes(4, values=(*map(float, range(8)), *map(float, range(-8, 0))))
LARGE = {"activations": "bfloat16", "k": 4096, "n": 4096, "tile": 128, "scale_columns": 4096}


@pytest.mark.parametrize(
    ("codes", "changes", "target"),
    [
        (INT4, {}, "rows_lookup4"),
        (INT4, {"m": FEW_ROWS}, "rows_lookup4"),
        (INT4, {"m": 1 + MOST_ROWS}, "hopper_rows_lookup4"),
        (INT4, {"m": 512, "contracting": "columns"}, "hopper_columns_lookup4"),
        (Codes(8, "float8_e4m3fn"), {"m": 512}, "hopper_rows_float8_e4m3fn"),
        (INT4, {"activations": "float16"}, "rows_lookup4"),
        (INT4, {"activations": "float16", "m": 512}, None),
        (INT4, {"activations": "float"}, None),
        (INT4, {"k": 256, "n": 256}, None),  # too small
        (INT4, {"m": 512, "n": 4096 + 64}, None),  # no whole blocks
        (INT4, {"m": 512, "tile": 32}, None),
        (INT4, {"m": 512, "batch": 2}, None),
        (Codes(8, "uint8"), {"m": 512}, None),
        (Codes(4, values=tuple(map(float, range(16)))), {"m": 512}, None),
    ],
)
def test_products_on_gpus_have_the_kernel_that_fits(codes, changes, target, monkeypatch):
    monkeypatch.setattr(hopper, "has_jax", lambda: True)
    assert find("gpu", codes, shape(**LARGE | changes)) == target


def test_a_large_batch_of_small_matrices_has_a_kernel():
    assert find("cpu", Codes(8, "int8"), shape(k=64, n=32, batch=128)) == "rows_int8"
    x, w = jnp.ones((128, 1, 64)), jnp.asarray(np.random.default_rng(0).normal(size=(128, 64, 32)))
    q = vn.quant.quantize(w.astype(jnp.float32), "int4", channelwise_axes=[0, 2])
    assert "CPU kernel" in vn.explain(jnp.matmul)(x, q).events[0].how
    found = jax.jit(vn.implicit(jnp.matmul))(x, q)
    np.testing.assert_allclose(found, x @ q.dequantize(), rtol=1e-4, atol=1e-4)


def test_explain_names_the_choice_of_use():
    assert how() == BY_KERNEL
    with kernels.use("xla"):
        assert how() == "convert codes of rhs to float, scale the output"
        with kernels.use("auto"):
            assert how() == BY_KERNEL
    assert how() == BY_KERNEL


def test_a_jitted_function_is_traced_again_for_a_new_choice():
    run = jax.jit(vn.implicit(jnp.matmul))
    programs = {}
    for choice in ("auto", "xla", "auto"):
        with kernels.use(choice):
            programs[choice] = run.lower(X, W).as_text()
            run(X, W)
    assert "veneer_rows_int8" in programs["auto"]
    assert "veneer" not in programs["xla"]


def test_the_environment_variable_applies_outside_of_use(monkeypatch):
    monkeypatch.setenv("VENEER_KERNELS", "xla")
    assert how() == "convert codes of rhs to float, scale the output"
    with kernels.use("auto"):
        assert how() == BY_KERNEL
    monkeypatch.setenv("VENEER_KERNELS", "")
    assert how() == BY_KERNEL


def test_an_unknown_choice_raises(monkeypatch):
    choices = "'auto', 'xla' or 'experimental'"
    with pytest.raises(ValueError, match=f"kernels.use must be {choices}, not 'fast'"):
        kernels.use("fast").__enter__()
    monkeypatch.setenv("VENEER_KERNELS", "numba")
    with pytest.raises(ValueError, match=f"VENEER_KERNELS must be {choices}, not 'numba'"):
        how()


def test_the_old_name_of_a_choice_raises_with_the_new_name():
    with pytest.raises(ValueError, match="not 'pallas', which is now called 'experimental'"):
        kernels.use("pallas").__enter__()


def test_without_numba_xla_multiplies_with_one_warning(monkeypatch, warned_of_nothing):
    monkeypatch.setattr(build, "unavailable_reason", lambda: "kernels need Numba: pip install ...")
    with pytest.warns(UserWarning, match="computed by XLA.*need Numba.*VENEER_KERNELS=xla"):
        y = jax.jit(vn.implicit(jnp.matmul))(X, W)
    np.testing.assert_allclose(y, X @ W.dequantize(), rtol=1e-4, atol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(vn.implicit(lambda x, w: 2 * x @ w))(X, W)


def test_a_kernel_that_cannot_be_built_is_left_to_xla(monkeypatch, warned_of_nothing):
    def fail(name):
        raise OSError("no space left")

    monkeypatch.setattr(build, "register_target", fail)
    with pytest.warns(
        UserWarning, match=r"veneer_rows_int8_few failed: OSError\('no space left'\)"
    ):
        y = jax.jit(vn.implicit(lambda x, w: 3 * x @ w))(X, W)
    np.testing.assert_allclose(y, 3 * X @ W.dequantize(), rtol=1e-4, atol=1e-4)


def test_importing_kernels_imports_no_numba():
    program = "import sys, veneer.quant, veneer.kernels; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
