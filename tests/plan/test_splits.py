"""Bytes of each split: as compiled programs take them on 8 devices, and lowered ones on 64."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import planned_decoder as program
from support.model_configs import SMALL, config

from veneer.plan import DeviceRates, PlannedStep, Split, model_of, placing, plans

SERVING = PlannedStep(batch=64, length=4096)
TUNING = PlannedStep(batch=64, length=4096, rank=16)


def model(name):
    return model_of(config(name))


def plan_of(split, model, format="int4", step=SERVING, **options):
    devices = math.prod(split[:3])
    found = {plan.split: plan for plan in plans(model, format, step, devices, **options)}
    return found[Split(*split)]


@pytest.mark.parametrize("format", ["f32", "int4"])
@pytest.mark.parametrize("use", program.STEPS)
def test_a_compiled_program_is_given_needs_and_receives_what_is_planned(use, format):
    for plan, (given, peak, received) in program.compared(use, format):
        assert program.held(plan) == pytest.approx(given, rel=2e-3)  # tokens, and counts of Adam
        assert sum(plan.received.values()) == pytest.approx(received, rel=5e-3)  # and maxima
        if not (use == "serving" and plan.split.in_parts):  # XLA gathers all layers before any
            assert plan.total == pytest.approx(peak, rel=0.2)


@pytest.mark.parametrize("split", [(2, 1, 4, True), (1, 1, 8)])
def test_the_program_that_is_measured_is_that_of_one_device(split):
    def loss(split):
        made = program.Program.of_model(
            model_of(program.SAID), Split(*split), program.STEPS["fine-tuning"], "int4"
        )
        sizes = made.split.data, made.split.tensor
        devices = jax.devices()[: math.prod(sizes)]
        kinds = (jax.sharding.AxisType.Auto,) * 2
        run, args = made.stepped(
            jax.make_mesh(sizes, program.AXES, axis_types=kinds, devices=devices)
        )
        return run(*jax.tree.map(drawn, args))[2]

    def drawn(x):
        rng, dtype = np.random.default_rng(x.size), np.dtype(x.dtype)
        most = {"uint8": 256, "int8": 127, "int32": 4096}.get(dtype.name)
        scale = 1e-2 if x.ndim < 3 or x.shape[-1] > 16 else 1.0
        values = rng.uniform(0, scale, x.shape) if most is None else rng.integers(0, most, x.shape)
        return jax.device_put(jnp.asarray(values, dtype), x.sharding)

    np.testing.assert_allclose(loss(split), loss((1, 1, 1)), rtol=1e-5)


# What a device has of arguments in the program of all, as it is lowered.
_ARGUMENTS = re.compile(r"sdy\.manual_computation\(.*?manual_axes=\{.*?\} \((.*?)\) \{", re.DOTALL)
_BYTES = {"f32": 4, "bf16": 2, "ui8": 1, "i8": 1, "i32": 4}


@pytest.mark.parametrize("step", [SERVING, TUNING])
@pytest.mark.parametrize("split", [(8, 1, 8), (8, 1, 8, True)])
def test_405b_are_lowered_for_64_devices_without_any(split, step):
    llama = model("llama-3.1-405b")
    made = program.Program.of_model(llama, Split(*split), step, "int4")
    text = made.lowered().as_text()
    given = 0
    for found in re.findall(r"tensor<([^>]*)>", _ARGUMENTS.search(text)[1]):
        *sizes, dtype = found.split("x")
        given += _BYTES[dtype] * math.prod(map(int, sizes))
    plan = plan_of(split, llama, step=step)
    assert program.held(plan) == pytest.approx(given, rel=1e-4)
    if step is SERVING:  # layers are written out: a sum for each of two products, and of embeddings
        assert len(re.findall(r"stablehlo\.all_reduce", text)) == 2 * 126 + 1


def test_bytes_are_those_of_the_format():
    one = lambda format, **of: plan_of((1, 1, 1), model("gpt-oss-120b"), format, **of).held[
        "weights"
    ]
    experts = 36 * 128 * 3 * 2880 * 2880
    assert one("bf16") == 2 * 116_829_156_672
    assert one("int4", tile=32) - one("int4", tile=64) == pytest.approx(experts * 2 / 64, rel=0.02)
    assert one("mxfp4") == pytest.approx(experts * 4.25 / 8, rel=0.04)


def test_experts_are_cut_among_devices_and_tokens_sent_to_them():
    one, four = (plan_of((4 // n, n, 2), model("gpt-oss-120b"), "bf16") for n in (1, 4))
    experts = 2 * 36 * 128 * (3 * 2880 * 2880 // 2 + 2880 + 2880 * 2 // 2)
    assert one.held["weights"] - four.held["weights"] == experts * 3 // 4
    assert "expert" not in one.received
    sent = 2 * 4 * (64 // 4) * 2880 * 2  # there and back, to 4 experts, in bf16
    assert four.received["expert"] == 36 * sent * 3 // 4
    assert four.shardings["model.layers.*.mlp.experts.down_proj"] == P("expert", "tensor", None)


def test_a_tile_that_would_be_cut_stays_whole_and_is_told():
    halves, quarters = (plan_of((1, 1, n), model("gpt-oss-120b"), "mxfp4") for n in (2, 4))
    name = "model.layers.*.mlp.experts.down_proj"
    assert halves.whole == {}
    assert "each of 4 devices would have 720 values, but 32 are stored" in quarters.whole[name]
    assert name not in quarters.shardings
    # What it takes is gathered: of 4 experts a token.
    given = 4 * 64 * 2880 * 2
    sums = 2 * 64 * 2880 * 2  # of what attention gives, and of embeddings
    assert quarters.received["tensor"] == (36 * given + 37 * sums) * 3 // 4


def test_caches_are_cut_by_heads_or_else_by_tokens():
    of = lambda split: plan_of(split, model("llama-3.1-405b")).held["cache"]
    whole = 126 * 2 * 64 * 8 * 4096 * 128 * 2
    assert of((8, 1, 8)) == of((1, 1, 64)) == whole // 64  # 8 heads among 64 devices: tokens are


def test_a_window_bounds_what_is_kept():
    cache = plan_of((1, 1, 1), model("gpt-oss-120b")).held["cache"]
    assert cache == 18 * 2 * 64 * 8 * 64 * 2 * (4096 + 128)


def test_a_latent_cache_is_of_no_heads():
    cache = plan_of((1, 1, 1), model("deepseek-v3")).held["cache"]
    assert cache == 61 * 64 * 4096 * 576 * 2


def test_a_quantised_cache_has_a_scale_for_each_token_of_each_head():
    dense, int8 = (
        plan_of((1, 1, 1), model_of(SMALL), step=SERVING._replace(cache=cache)).held["cache"]
        for cache in ("f32", "int8")
    )
    assert int8 / dense == (8 + 2) / (4 * 8)  # of heads of 8 values; scales are of bf16


def test_updates_are_of_all_products_but_experts_with_gradients_and_moments():
    held = plan_of((1, 1, 1), model_of(SMALL), step=TUNING).held
    widths = (32 + 32) * 2 + (32 + 16) * 2 + (32 + 96) * 3
    assert held["updates"] == 3 * 4 * 16 * widths
    assert held["gradients"] == held["updates"]
    assert held["moments"] == 2 * held["updates"]


def test_scores_take_room_where_attention_is_not_fused():
    of = lambda fused: plan_of((64, 1, 1), model("deepseek-v3"), step=TUNING._replace(fused=fused))
    scores = 2 * 2 * 4 * 4096 * 4096 * 128  # with what they become, and gradients, in f32
    assert of(False).held["activations"] - of(True).held["activations"] == scores


def test_what_is_sent_to_devices_far_away_takes_longer():
    near, far = (
        plan_of((1, 1, 8), model("llama-3.1-405b"), rates=DeviceRates(1e30, 2e9, 1e9, near))
        for near in (8, 4)
    )
    assert near.seconds == near.received["tensor"] / 2e9
    assert far.seconds == 2 * near.seconds


def test_of_experts_those_are_read_that_tokens_take():
    rates = DeviceRates(memory=1.0)
    seconds = lambda batch: (
        plan_of(
            (1, 1, 1), model("gpt-oss-120b"), "bf16", PlannedStep(batch, 1), rates=rates
        ).seconds
    )
    bytes_of_expert = 2 * 36 * (3 * 2880 * 2880 + 3 * 2880)
    cache = 36 * 2 * 8 * 64 * 2
    # Of 128 experts one token takes 4, and a second token 4 others with a chance of 124 / 128.
    assert seconds(2) - seconds(1) == pytest.approx(4 * 124 / 128 * bytes_of_expert + cache)


def test_the_fastest_is_first_and_texts_are_as_many_on_each_device():
    found = plans(model("gpt-oss-120b"), "mxfp4", SERVING, 16)
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    few = plans(model("gpt-oss-120b"), "mxfp4", SERVING._replace(batch=2), 16)
    assert {p.split.data * p.split.expert for p in few} == {1, 2}


def test_no_split_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match=r"48 devices cannot evenly divide .* a multiple of 48"):
        plans(model_of(SMALL), "int4", SERVING._replace(batch=5), 48)


def test_formats_that_do_not_fit_a_width_are_others():
    weight = next(
        w for w in model_of(SMALL).layers[0].weights if w.path.endswith("down_proj.weight")
    )
    assert placing.stored_as(weight, "mxfp4", None, "float32").qtype == "mxfp4"
    odd = weight._replace(shape=(32, 72))
    assert placing.stored_as(odd, "mxfp4", None, "float32").qtype == "int8"  # of tiles of 32


def test_an_unknown_format_is_told():
    with pytest.raises(ValueError, match="unknown format 'int9'"):
        plans(model_of(SMALL), "int9", SERVING, 1)
