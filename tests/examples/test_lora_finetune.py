"""The fine-tuning of a small random encoder, quickly."""

import contextlib
import io

import jax
import jax.numpy as jnp
import lora_finetune
import numpy as np
import pytest

import veneer as vn

pytestmark = [pytest.mark.divided(by="file"), pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(bert, tmp_path_factory):
    """Return the runs as a dict, the printed text, and the plot."""
    plot = tmp_path_factory.mktemp("plot") / "losses.png"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runs = lora_finetune.main(bert, plot, steps=3, quick=True)
    return {run.name: run for run in runs}, printed.getvalue(), plot


def test_the_example_prints_rows_and_plots_losses(trained):
    runs, printed, plot = trained
    for name, run in runs.items():
        [row] = [line.split() for line in printed.splitlines() if line.split()[:1] == [name]]
        assert row[1:3] == [f"{run.accuracy:.1%}", f"{run.trained_count:,}"]
        assert len(run.losses) == 3
        assert all(np.isfinite(run.losses))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_all_variants_begin_at_the_same_loss(trained, bert):
    runs, _, _ = trained
    assert {round(run.losses[0], 5) for run in runs.values()} == {round(float(np.log(3)), 5)}


def test_the_sizes_count_the_trained_parameters(trained, bert):
    runs, _, _ = trained
    full, lora, qlora = runs["full"], runs["LoRA"], runs["QLoRA"]
    head = 32 * 3 + 3
    assert full.trained_count == sum(w.size for w in bert.params.values()) + head
    linear = [w.shape for name, w in bert.params.items() if lora_finetune.is_linear(name)]
    assert len(linear) == 12
    rank = lora_finetune.RANK
    assert lora.trained_count == sum(rank * (m + n) for m, n in linear) + head
    assert lora.trained_count == qlora.trained_count
    for run in runs.values():
        assert run.gradient == 4 * run.trained_count
        assert 2 * run.gradient <= run.optimizer <= 2 * run.gradient + 16  # and counts of steps
    assert qlora.stored < 0.8 * lora.stored


def test_training_changes_only_the_trained_parameters(trained, bert):
    runs, _, _ = trained
    encoder = runs["QLoRA"].params["encoder"]
    begun = lora_finetune.add_lora(lora_finetune.quantize(bert))
    for name, w in begun.items():
        if lora_finetune.is_linear(name):
            assert (encoder[name].w.packed == w.w.packed).all()
            assert (encoder[name].b != w.b).any()
            assert runs["QLoRA"].trained["encoder"][name].w.packed is None
        else:
            for one, other in zip(*map(jax.tree.leaves, (encoder[name], w)), strict=True):
                assert (one == other).all()


def test_qlora_keeps_one_dense_weight_alive_at_a_time(trained):
    runs, _, _ = trained
    dense = runs["QLoRA"].dense
    assert dense.dequantized["gather"] > 12  # in the forward pass, and again in the backward one
    assert (dense.alive, dense.nbytes) == (1, 32 * 64 * 4)
    assert dense.others.total() == 0
    assert runs["full"].dense.others.total() > 0


def test_the_compiled_step_keeps_less_than_three_dense_weights():
    """Count by XLA's memory analysis, for twelve weights that are larger than all else."""
    n, count = 128, 12
    w = vn.quant.quantize(jnp.ones((n, n)), "nf4", channelwise_axes=[1], tiled_axes={0: 64})
    scales = [jnp.ones(n)] * count

    @vn.implicit
    def loss(scales, weights, x):
        for scale, w in zip(scales, weights, strict=True):
            x = jnp.tanh(x * scale @ w)
        return x.sum()

    grad = jax.jit(jax.grad(loss)).lower(scales, [w] * count, jnp.ones((2, n)))
    options = lora_finetune.SAVE_MEMORY if jax.default_backend() == "cpu" else None
    assert grad.compile(options).memory_analysis().temp_size_in_bytes < 3 * 4 * n * n


def test_the_task_holds_out_sentences_of_one_topic(bert):
    task = lora_finetune.make_task(bert, count=3, most=20, length=32)
    assert [len(part.topic) for part in (task.train, task.held_out)] == [42, 18]
    assert (np.bincount(task.train.topic) == 14).all()
    assert len(lora_finetune.split_sentences(lora_finetune.topics[task.names[0]])) > 20


def test_batches_use_each_sentence_once_per_epoch(bert):
    task = lora_finetune.make_task(bert, count=3, most=20, length=32)
    numbered = task.train._replace(topic=np.arange(42))
    seen = [i for batch in lora_finetune.sample(numbered, steps=21, batch=4) for i in batch.topic]
    assert sorted(seen[:42]) == sorted(seen[42:]) == list(range(42))
