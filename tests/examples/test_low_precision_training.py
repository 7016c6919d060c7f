"""The training of a transformer in several formats, quickly."""

import contextlib
import io

import jax
import low_precision_training as example
import numpy as np
import pytest
import row_transformer

import veneer as vn

pytestmark = [pytest.mark.divided(by="file"), pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the results as a dict, the printed text, and the plot. Only two variants run."""
    plot = tmp_path_factory.mktemp("plot") / "losses.png"
    chosen = [v for v in example.VARIANTS if v.gradients in (None, "int4")]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.setattr(example, "VARIANTS", chosen)
        results = example.main(plot, quick=True)
    return {r.variant.name: r for r in results}, text.getvalue(), plot


def test_the_example_prints_rows_and_plots_losses(trained):
    results, printed, plot = trained
    assert list(results) == ["f32", "int8 int8 int4", "int8 int8 int4 stochastic"]
    for result in results.values():
        assert len(result.losses) == 3
        assert np.isfinite(result.losses).all()
        assert f"{result.held_out:.3f}" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_stochastic_rounding_changes_the_losses(trained):
    results, _, _ = trained
    nearest, stochastic = (results["int8 int8 int4" + more].losses for more in ("", " stochastic"))
    assert nearest[:2] == stochastic[:2]  # the rate of the first step is 0
    assert nearest[2] != stochastic[2]


def test_every_matmul_of_a_layer_runs_on_codes():
    params = row_transformer.init(jax.random.key(0))
    params = example.quantize(params, example.FP8)
    images = np.zeros((2, 8, 8), np.float32)
    report = vn.explain(row_transformer.logits)(params, images)
    assert not report.materialised
    assert sum(event.how == "on codes, forward and backward" for event in report.events) >= 6
