"""The planned bytes of splits agree with programs compiled for 8 devices and lowered for 64."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import planned_decoder as program
from support.model_configs import SMALL, config

from veneer.plan import DeviceRates, PlannedStep, Split, model_of, plans
from veneer.plan.splits import abstract_weight

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
def test_a_compiled_program_uses_the_planned_bytes(use, format):
    for plan, (given, peak, received) in program.compared(use, format):
        # Plans leave out tokens, the step counts of Adam, and the maxima of a softmax.
        assert program.held(plan) == pytest.approx(given, rel=2e-3)
        assert sum(plan.received.values()) == pytest.approx(received, rel=5e-3)
        # In fully sharded serving, XLA gathers all layers at the beginning.
        if not (use == "serving" and plan.split.in_parts):
            assert plan.total == pytest.approx(peak, rel=0.2)


@pytest.mark.parametrize("split", [(2, 1, 4, True), (1, 1, 8)])
def test_the_sharded_program_computes_the_loss_of_one_device(split):
    def loss_of(split):
        made = program.Program.of_model(
            model_of(program.SAID), Split(*split), program.STEPS["fine-tuning"], "int4"
        )
        sizes = made.split.data, made.split.tensor
        devices = jax.devices()[: math.prod(sizes)]
        kinds = (jax.sharding.AxisType.Auto,) * 2
        run, args = made.stepped(
            jax.make_mesh(sizes, program.AXES, axis_types=kinds, devices=devices)
        )
        return run(*jax.tree.map(draw, args))[2]

    def draw(x):
        rng, dtype = np.random.default_rng(x.size), np.dtype(x.dtype)
        most = {"uint8": 256, "int8": 127, "int32": 4096}.get(dtype.name)
        scale = 1e-2 if x.ndim < 3 or x.shape[-1] > 16 else 1.0
        values = rng.uniform(0, scale, x.shape) if most is None else rng.integers(0, most, x.shape)
        return jax.device_put(jnp.asarray(values, dtype), x.sharding)

    np.testing.assert_allclose(loss_of(split), loss_of((1, 1, 1)), rtol=1e-5)


# The arguments of one device in the lowered program.
_ARGUMENTS = re.compile(r"sdy\.manual_computation\(.*?manual_axes=\{.*?\} \((.*?)\) \{", re.DOTALL)
_BYTES = {"f32": 4, "bf16": 2, "ui8": 1, "i8": 1, "i32": 4}


@pytest.mark.parametrize("step", [SERVING, TUNING])
@pytest.mark.parametrize("split", [(8, 1, 8), (8, 1, 8, True)])
def test_a_405b_model_lowers_for_64_devices_as_planned(split, step):
    llama = model("llama-3.1-405b")
    made = program.Program.of_model(llama, Split(*split), step, "int4")
    text = made.lowered().as_text()
    given = 0
    for found in re.findall(r"tensor<([^>]*)>", _ARGUMENTS.search(text)[1]):
        *sizes, dtype = found.split("x")
        given += _BYTES[dtype] * math.prod(map(int, sizes))
    plan = plan_of(split, llama, step=step)
    assert program.held(plan) == pytest.approx(given, rel=1e-4)
    if step is SERVING:  # two all-reduces per layer, and one for the embedding
        assert len(re.findall(r"stablehlo\.all_reduce", text)) == 2 * 126 + 1


def test_weight_bytes_follow_the_format():
    one = lambda format, **of: plan_of((1, 1, 1), model("gpt-oss-120b"), format, **of).held[
        "weights"
    ]
    experts = 36 * 128 * 3 * 2880 * 2880
    assert one("bf16") == 2 * 116_829_156_672
    assert one("int4", tile=32) - one("int4", tile=64) == pytest.approx(experts * 2 / 64, rel=0.02)
    assert one("mxfp4") == pytest.approx(experts * 4.25 / 8, rel=0.04)


def test_experts_are_sharded_and_tokens_sent_to_them():
    one, four = (plan_of((4 // n, n, 2), model("gpt-oss-120b"), "bf16") for n in (1, 4))
    experts = 2 * 36 * 128 * (3 * 2880 * 2880 // 2 + 2880 + 2880 * 2 // 2)
    assert one.held["weights"] - four.held["weights"] == experts * 3 // 4
    assert "expert" not in one.received
    sent = 2 * 4 * (64 // 4) * 2880 * 2  # to 4 experts and back, in bf16
    assert four.received["expert"] == 36 * sent * 3 // 4
    assert four.shardings["model.layers.*.mlp.experts.down_proj"] == P("expert", "tensor", None)


def test_a_weight_whose_tiles_would_split_is_not_sharded():
    halves, quarters = (plan_of((1, 1, n), model("gpt-oss-120b"), "mxfp4") for n in (2, 4))
    name = "model.layers.*.mlp.experts.down_proj"
    assert halves.whole == {}
    assert "each of 4 devices would have 720 values, but 32 are stored" in quarters.whole[name]
    assert name not in quarters.shardings
    # Its inputs are gathered, for 4 experts per token.
    inputs = 4 * 64 * 2880 * 2
    sums = 2 * 64 * 2880 * 2  # all-reduces after attention and after the embedding
    assert quarters.received["tensor"] == (36 * inputs + 37 * sums) * 3 // 4


def test_caches_are_sharded_by_heads_or_else_by_tokens():
    of = lambda split: plan_of(split, model("llama-3.1-405b")).held["cache"]
    whole = 126 * 2 * 64 * 8 * 4096 * 128 * 2
    assert (
        of((8, 1, 8)) == of((1, 1, 64)) == whole // 64
    )  # 64 devices cannot share 8 heads, so they share tokens


def test_a_sliding_window_limits_the_cache():
    cache = plan_of((1, 1, 1), model("gpt-oss-120b")).held["cache"]
    assert cache == 18 * 2 * 64 * 8 * 64 * 2 * (4096 + 128)


def test_a_latent_cache_has_no_heads():
    cache = plan_of((1, 1, 1), model("deepseek-v3")).held["cache"]
    assert cache == 61 * 64 * 4096 * 576 * 2


def test_a_quantized_cache_has_one_scale_per_token_and_head():
    dense, int8 = (
        plan_of((1, 1, 1), model_of(SMALL), step=SERVING._replace(cache=cache)).held["cache"]
        for cache in ("f32", "int8")
    )
    assert int8 / dense == (8 + 2) / (4 * 8)  # heads have 8 values, and scales are bf16


def test_all_weights_but_experts_get_lora_updates():
    held = plan_of((1, 1, 1), model_of(SMALL), step=TUNING).held
    widths = (32 + 32) * 2 + (32 + 16) * 2 + (32 + 96) * 3
    assert held["updates"] == 3 * 4 * 16 * widths
    assert held["gradients"] == held["updates"]
    assert held["moments"] == 2 * held["updates"]


def test_scores_need_memory_unless_attention_is_fused():
    of = lambda fused: plan_of((64, 1, 1), model("deepseek-v3"), step=TUNING._replace(fused=fused))
    scores = 2 * 2 * 4 * 4096 * 4096 * 128  # with their softmax and the gradients of both, in f32
    assert of(False).held["activations"] - of(True).held["activations"] == scores


def test_bytes_from_other_nodes_take_longer():
    near, far = (
        plan_of((1, 1, 8), model("llama-3.1-405b"), rates=DeviceRates(1e30, 2e9, 1e9, near))
        for near in (8, 4)
    )
    assert near.seconds == near.received["tensor"] / 2e9
    assert far.seconds == 2 * near.seconds


def test_only_the_experts_that_tokens_choose_are_read():
    rates = DeviceRates(memory=1.0)
    seconds = lambda batch: (
        plan_of(
            (1, 1, 1), model("gpt-oss-120b"), "bf16", PlannedStep(batch, 1), rates=rates
        ).seconds
    )
    bytes_of_expert = 2 * 36 * (3 * 2880 * 2880 + 3 * 2880)
    cache = 36 * 2 * 8 * 64 * 2
    # One token chooses 4 of 128 experts. Each expert of a second token is new with a probability
    # of 124 / 128.
    assert seconds(2) - seconds(1) == pytest.approx(4 * 124 / 128 * bytes_of_expert + cache)


def test_the_fastest_split_is_first():
    found = plans(model("gpt-oss-120b"), "mxfp4", SERVING, 16)
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    few = plans(model("gpt-oss-120b"), "mxfp4", SERVING._replace(batch=2), 16)
    assert {p.split.data * p.split.expert for p in few} == {1, 2}


def test_an_indivisible_batch_raises_with_a_remedy():
    with pytest.raises(ValueError, match=r"48 devices cannot evenly divide .* a multiple of 48"):
        plans(model_of(SMALL), "int4", SERVING._replace(batch=5), 48)


def test_a_format_that_does_not_fit_a_weight_is_replaced():
    weight = next(
        w for w in model_of(SMALL).layers[0].weights if w.path.endswith("down_proj.weight")
    )
    assert abstract_weight(weight, "mxfp4", None, "float32").qtype == "mxfp4"
    odd = weight._replace(shape=(32, 72))
    assert abstract_weight(odd, "mxfp4", None, "float32").qtype == "int8"  # 32 does not divide 72


def test_plans_reject_an_unknown_format():
    with pytest.raises(ValueError, match="unknown format 'int9'"):
        plans(model_of(SMALL), "int9", SERVING, 1)
