"""The kernel in docs/architecture.md runs when a row of the table names it."""

import functools
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import veneer as vn
from veneer.kernels import select, use
from veneer.kernels.common import table
from veneer.kernels.common.problem import Codes, MatmulShape
from veneer.kernels.cpu import build

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
MODULE, ROW = re.findall(
    r"```python\n# kernels/(?:cpu/floats/columns_plain|common/table)\.py\n(.*?)```",
    PAGE.read_text("utf-8"),
    re.DOTALL,
)
NAME = "veneer.kernels.cpu.floats.columns_plain"
CODES = Codes(8, "int8")
SIZES = {"contracting": "columns", "activations": "float", "m": 1, "k": 160, "n": 130}


@pytest.fixture
def new_kernel(monkeypatch, tmp_path):
    """Add the module and the row of the page, with an empty cache of compiled kernels."""
    module = types.ModuleType(NAME)
    exec(compile(MODULE, NAME, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, NAME, module)
    names = dict(vars(table))
    exec(ROW.replace("\n_cpu(", "\nrow, = (_cpu(").rstrip() + ")", names)
    row = names["row"]
    for place in (table, select, build):
        monkeypatch.setattr(place, "TABLE", (row, *table.TABLE))
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path))
    build._products.cache_clear()
    yield row
    monkeypatch.undo()
    build._products.cache_clear()


def test_a_new_row_and_module_are_a_new_kernel(new_kernel):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 160)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(130, 160)), jnp.float32)
    quantize = functools.partial(vn.quant.quantize, w, "int8")
    with use("xla"):  # the kernel that quantizes is not in the empty cache
        whole, rows = quantize(), quantize(channelwise_axes=[0])
        asymmetric = quantize(channelwise_axes=[0], calibration_method="minmax")
    multiply = jax.jit(vn.implicit(lambda x, w: x @ w.T))
    for q in (whole, rows, asymmetric):
        assert "veneer_columns_int8_plain" in multiply.lower(x, q).as_text()
        np.testing.assert_allclose(multiply(x, q), x @ q.dequantize().T, rtol=1e-4, atol=1e-4)
    assert select.find_kernel("cpu", CODES, MatmulShape(**SIZES, tile=160)) is new_kernel
    assert select.find_kernel("cpu", CODES, MatmulShape(**SIZES, tile=32)).variant == "one"
