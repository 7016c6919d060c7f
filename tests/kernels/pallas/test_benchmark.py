"""The benchmark of GPUs runs here, small: every form of every format is found right."""

import gc
import re

import gpu
import pytest


@pytest.fixture(scope="module")
def tables():
    # A benchmark collects garbage before each timing, and would look through all of a long run.
    gc.collect()
    gc.freeze()
    return "\n".join(gpu.tables(gpu.SMALL, gpu.FORMATS, rounds=1))


def test_every_form_is_right_and_has_its_figures(tables):
    for format in gpu.FORMATS:
        for by in (gpu.BY_XLA, gpu.BY_KERNEL):
            assert len(re.findall(rf"^\| {format}: {by} \|", tables, re.M)) == 2
    for form in ("scale inside, int4", "scale outside", "convert in the dot"):
        assert f"int8: {form} |" in tables or f"int4: {form} |" in tables
    assert "Error" not in tables
    assert "–" not in tables
    assert "| int4, by kernels |" in tables


def test_a_wrong_form_has_no_figures_and_is_named(monkeypatch):
    right = gpu.forms

    def wrong(dense, format):
        form = next(right(dense, format))
        yield form._replace(compute=lambda x, w: 1.1 * form.compute(x, w))

    monkeypatch.setattr(gpu, "forms", wrong)
    table = gpu.products(256, 128, gpu.SMALL, [gpu.Format("int8")], 1)
    assert "| int8: ours, by XLA | – | – |" in table
    assert "int8: ours, by XLA, M = 1: AssertionError: wrong by 0.1" in table
