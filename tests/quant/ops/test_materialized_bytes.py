"""The bytes that a plan materializes, compared with the program that XLA compiles."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import arrays
from support.arrays import normal

import veneer as vn
from veneer.kernels import select
from veneer.quant import FORMATS, QArray, quantize
from veneer.quant.ops.by_kernel import plan_kernel
from veneer.quant.ops.by_xla import XLA_STRATEGIES, plan_scaled_matmul, plan_without_minimum
from veneer.quant.ops.dot_general import STRATEGIES
from veneer.quant.ops.product import QuantizedProduct

MATMUL = (([1], [0]), ([], []))
ITEMSIZE = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}


def dense_nbytes(f, *operands):
    """Return the bytes of float arrays that have as many values as a quantized operand."""
    compiled = jax.jit(f).lower(*operands).compile()
    sizes = {x.size: 0 for x in operands if isinstance(x, QArray)}
    for computation in re.split(r"\n(?=\S.*\{\n)", compiled.as_text()):
        if "fused" in computation.partition("(")[0]:
            continue  # results within a fusion are not in memory
        for dtype, shape, op in re.findall(r"= (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", computation):
            size = math.prod(map(int, filter(None, shape.split(","))))
            if size in sizes and op not in ("parameter", "bitcast"):
                sizes[size] = max(sizes[size], size * ITEMSIZE.get(dtype, 0))
    return sum(sizes.values())


def operands_in(qtype, dtype=jnp.float32):
    """Yield pairs of activations, dense or quantized, and a weight in a format."""
    x, w = normal(32, 256, dtype=dtype), normal(256, 96, dtype=dtype)
    tile = FORMATS[qtype].tile_size
    tiled = quantize(w, qtype, channelwise_axes=[1], tiled_axes={0: tile or 128})
    yield x, tiled
    if tile is not None:
        yield quantize(x, qtype, channelwise_axes=[0], tiled_axes={1: tile}), tiled
    else:
        yield x, quantize(w, qtype, channelwise_axes=[1])
        yield quantize(x, qtype, channelwise_axes=[0], tiled_axes={1: 128}), tiled
        rows = quantize(x, qtype, channelwise_axes=[0])
        yield rows, quantize(w, qtype, channelwise_axes=[1])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)
@pytest.mark.parametrize("qtype", FORMATS)
def test_a_plan_counts_the_floats_in_memory(qtype, strategy):
    for lhs, rhs in operands_in(qtype):
        plan = strategy(QuantizedProduct.create(lhs, rhs, MATMUL))
        if plan is not None:
            compute = lambda lhs, rhs: strategy(QuantizedProduct.create(lhs, rhs, MATMUL))()
            nbytes = dense_nbytes(compute, lhs, rhs)
            assert sum(plan.dense) == nbytes, plan.how


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)
def test_a_plan_for_16_bits_counts_the_floats_in_memory(strategy, dtype):
    for lhs, rhs in operands_in("int8", dtype):
        plan = strategy(QuantizedProduct.create(lhs, rhs, MATMUL))
        if plan is not None:  # a CPU may convert them to f32
            compute = lambda lhs, rhs: strategy(QuantizedProduct.create(lhs, rhs, MATMUL))()
            nbytes = dense_nbytes(compute, lhs, rhs)
            assert sum(plan.dense) in (nbytes, nbytes // 2), plan.how


def test_the_operands_above_use_every_strategy():
    # One runs on Blackwell GPUs only. The other needs operands with minima.
    unused = {plan_kernel, *XLA_STRATEGIES} - {plan_scaled_matmul, plan_without_minimum}
    with select.use("auto"):
        for qtype in FORMATS:
            for lhs, rhs in operands_in(qtype):
                product = QuantizedProduct.create(lhs, rhs, MATMUL)
                unused = {strategy for strategy in unused if strategy(product) is None}
            if not unused:
                break
    assert not unused


# Reports.

X = normal(4, 256)
PROGRAMS = arrays.OnDemand(
    {
        "dot_general": lambda: (
            lambda x, w: x @ w,
            X,
            quantize(normal(256, 96), "int3", tiled_axes={0: 32}),
        ),
        "conv_general_dilated": lambda: (
            lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME"),
            normal(1, 8, 9, 9),
            quantize(normal(4, 8, 3, 3), "int8", channelwise_axes=[0]),
        ),
        "ragged_dot_general": lambda: (
            lambda x, w: lax.ragged_dot(w, x, jnp.array([3, 1])),
            normal(2, 8, 5),
            quantize(normal(4, 8), "int8"),
        ),
    }
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_materialized_bytes_are_events(name):
    f, x, w = PROGRAMS[name]
    with select.use("xla"):
        report = vn.explain(f)(x, w)
        [event] = [e for e in report.events if e.primitive == name]
        assert event.rule
        assert event.nbytes == 4 * w.size
        assert event.made_dense
        assert f"{4 * w.size:,} bytes are materialized" in str(event)
        assert report.materialised == (event,)
        assert "1 of them materialized " in report.summary
        assert re.search(r"  [\d,.]+ (B|kB)  ", str(report))
        told = []
        vn.implicit(f, on_materialise=told.append)(x, w)
        assert told == [event]
        with pytest.raises(
            vn.MaterialiseError, match=f"^{name}.*materialized. Allow it with on_mater"
        ):
            vn.implicit(f, on_materialise="error")(x, w)
        with pytest.warns(vn.MaterialiseWarning, match=name):
            jax.jit(vn.implicit(f, on_materialise="warn"))(x, w)


def test_a_loop_reports_each_time_it_is_traced():
    with select.use("xla"):
        stack = quantize(normal(3, 256, 256), "int4", channelwise_axes=[0, 2])
        run = lambda x, ws: lax.scan(lambda x, w: (x @ w, None), x, ws)[0]
        assert sum(e.nbytes for e in vn.explain(run)(X, stack).materialised) == 4 * 256 * 256
        for _ in range(2):
            with pytest.raises(vn.MaterialiseError, match="dot_general"):
                vn.implicit(run, on_materialise="error")(X, stack)


def test_integer_products_materialize_nothing():
    with select.use("xla"):
        x = quantize(X, "int8", channelwise_axes=[0])
        w = quantize(normal(256, 96), "int4", channelwise_axes=[1])
        [event] = vn.explain(jnp.matmul)(x, w).events
        assert not event.made_dense
        vn.implicit(jnp.matmul, on_materialise="error")(x, w)


def test_a_failed_rule_leaves_no_report_for_the_next():
    told = []
    with select.use("xla"):
        wide = quantize(normal(256, 96).astype(jnp.float32), "int3", tiled_axes={0: 32})
        with pytest.raises((TypeError, ValueError)):
            vn.implicit(jnp.matmul, on_materialise=told.append)(normal(4, 7), wide)
        vn.implicit(lambda w: w.T, on_materialise=told.append)(wide)
    assert not told


def test_the_report_of_a_rule_does_not_leak_to_the_next():
    w = quantize(normal(256, 96), "int4", channelwise_axes=[1])
    vn.implicit(jnp.matmul, on_materialise="error")(normal(4, 256), w)
    [event] = vn.explain(lambda w: w.T)(w).events
    assert event.how == ""


def test_a_report_calls_small_weights_expected():
    """Weights that are large enough for a kernel are not expected."""
    size = lambda n: vn.quant.quantize(jnp.ones((n, n)), "nf4")
    report = vn.explain(lambda x, w: x @ w)(jnp.ones((8, 64)), size(64))
    assert report.summary.endswith("All of it is expected: the arrays are too small for a kernel.")
    assert "\nw: 16.4 kB materialized, too small for a kernel\n" in str(report)
    assert "16.4 kB materialized, too small for a kernel" in report.to_html()

    program = lambda x, w, v: jnp.sum(x @ w) + jnp.sum(jnp.sin(v))
    report = vn.explain(program)(jnp.ones((8, 64)), size(64), size(128))
    assert report.summary.endswith(
        " 16.4 kB of it is expected: the arrays are too small for a kernel."
    )
    assert "\nv: 65.5 kB materialized\n" in str(report)

    report = vn.explain(lambda v: jnp.sin(v))(size(64))
    assert "too small" not in str(report)
