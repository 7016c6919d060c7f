"""Quantization-aware training of the network for digits, quickly."""

import contextlib
import io

import digits_network
import jax
import numpy as np
import pytest
import qat_digits

import veneer as vn

pytestmark = [pytest.mark.divided(by="file"), pytest.mark.slow]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return the results by format and method, the printed text, and the plot."""
    plot = tmp_path_factory.mktemp("plot") / "digits.png"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        results = qat_digits.main(plot, quick=True)
    return {(r.format, r.method): r for r in results}, printed.getvalue(), plot


def test_the_example_prints_rows_and_plots_them(compared):
    results, printed, plot = compared
    rows = [line.split() for line in printed.splitlines()]
    for (format, method), r in results.items():
        assert [format, *method.split(), f"{r.accuracy:.1%}", f"{r.nbytes:,}"] in [
            row[:-1] for row in rows
        ]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_bytes_match_the_format(compared):
    results, _, _ = compared
    kernels = [np.prod(shape) for shape in digits_network.SHAPES.values()]
    channels = sum(shape[-1] for shape in digits_network.SHAPES.values())
    assert results["f32", ""].nbytes == 4 * (sum(kernels) + channels)
    scales_and_biases = 8 * channels
    for format, bits in (("int8", 8), ("int4", 4)):
        assert (
            results[format, "after training"].nbytes == sum(kernels) * bits // 8 + scales_and_biases
        )
    for format in ("int4", "int2"):
        assert results[format, "QAT"].nbytes == results[format, "after training"].nbytes


def test_training_changes_the_quantized_kernels(compared):
    results, _, _ = compared
    kernel = results["int4", "QAT"].params["conv1"]["kernel"]
    assert isinstance(kernel, vn.quant.QArray)
    assert kernel.scale.shape == (1, 1, 1, 32)
    before = results["int4", "after training"].params["conv1"]["kernel"]
    assert (kernel.packed != before.packed).any()


def test_fake_quantized_kernels_are_not_materialized():
    params = digits_network.init(jax.random.key(0))
    params = vn.quant.quantize_tree(params, qat_digits.rules("int4"), train=True)
    images = np.zeros((2, 8, 8), np.float32)
    assert not vn.explain(digits_network.logits)(params, images).materialised


def test_the_held_out_digits_are_not_in_training():
    train, held_out = qat_digits.load()
    assert (len(train.labels), len(held_out.labels)) == (1348, 449)
    assert 0 <= train.images.min() < train.images.max() == 1
    seen = {image.tobytes() for image in train.images}
    assert sum(image.tobytes() in seen for image in held_out.images) == 0
