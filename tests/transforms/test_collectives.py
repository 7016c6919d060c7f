"""Collectives send the packed leaves of a type that declares its leaf axes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import arrays
from support.every_type import EVERY_TYPE, plain, value
from support.policies import only_by_rules, without_rule

import veneer as vn

if jax.device_count() < 4:
    pytest.skip("needs 4 devices", allow_module_level=True)

MESH = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
KEY = arrays.key(0)
ROUND = [(i, (i + 1) % 4) for i in range(4)]
ON = [(i, i + 1) for i in range(3)]  # and nothing to the first


def normal(*shape):
    return jax.random.normal(KEY, shape)


def quantized(qtype, axis=-1, tile=None):
    tiles = {} if tile is None else {0: tile}
    return vn.quant.quantize(normal(64, 64), qtype, channelwise_axes=(axis,), tiled_axes=tiles)


SENT = {
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "all_gather, tiled": lambda x: lax.all_gather(x, "i", tiled=True),
    "all_gather of columns": lambda x: lax.all_gather(x, "i", axis=-1, tiled=True),
    "all_gather between": lambda x: lax.all_gather(x, "i", axis=1),
    "all_gather, the same everywhere": lambda x: lax.all_gather(x, "i", to="invarying"),
    "ppermute": lambda x: lax.ppermute(x, "i", ROUND),
    "ppermute to some": lambda x: lax.ppermute(x, "i", ON),
}


def over_rows(f, check_vma=True):
    """A function of blocks of rows, and what each device has, one after the other."""
    body = lambda x: jax.tree.map(lambda f: f(x)[None], f)
    return jax.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma)


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_collectives_of_every_type(name):
    """Over an axis of `vmap`, any leaf may vary."""
    values = value(name, (3,))
    goes = lambda x: (
        lax.all_gather(x, "i"),
        lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)]),
    )
    run = jax.vmap(goes, axis_name="i")
    found = jax.jit(lambda x: plain(vn.implicit(run)(x)))(values)
    for one, other in zip(found, jax.jit(run)(plain(values)), strict=True):
        if name == "PRNGKey":
            one, other = map(jax.random.key_data, (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


FORMATS = arrays.OnDemand(
    {
        "int8 by rows": lambda: quantized("int8", 0),
        "int8 by columns": lambda: quantized("int8"),
        "int4 in tiles": lambda: quantized("int4", -1, 8),
        "uint3": lambda: quantized("uint3", -1, 8),
        "nf4_dq": lambda: vn.quant.quantize(
            normal(8, 64), "nf4_dq", channelwise_axes=(0,), tiled_axes={1: 8}
        ),
        "mxfp8": lambda: vn.quant.quantize(normal(8, 64), "mxfp8", channelwise_axes=(0,)),
    }
)


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_arrays_are_sent_packed(name, check_vma):
    sent = SENT if check_vma else {k: f for k, f in SENT.items() if "same" not in k}
    if name == "mxfp8":  # a scale that is a power of 2 is never 0
        sent = {k: f for k, f in sent.items() if k != "ppermute to some"}
    run = over_rows(sent, check_vma)
    found = jax.jit(vn.implicit(run, on_materialise=only_by_rules))(FORMATS[name])
    for program, expected in jax.jit(run)(vn.materialise(FORMATS[name])).items():
        assert isinstance(found[program], vn.quant.QArray)
        np.testing.assert_array_equal(found[program].dequantize(), expected)


def test_ppermute_to_some_devices_with_power_of_2_scales():
    run = over_rows(SENT["ppermute to some"])
    found = jax.jit(vn.implicit(run))(FORMATS["mxfp8"])
    np.testing.assert_array_equal(found, run(vn.materialise(FORMATS["mxfp8"])))


@pytest.mark.parametrize("program", ["all_gather, tiled", "ppermute"])
def test_collectives_send_the_packed_bytes(program):
    q = quantized("int4", -1, 8)
    run = jax.jit(vn.implicit(over_rows(SENT[program])))
    text = run.lower(q).compile().as_text()
    sent = re.findall(
        r"= (\w+)\[([\d,]*)\]\S* (?:all-gather|collective-permute)(?:-start)?\(", text
    )
    counts = [np.dtype(_DTYPES[t]).itemsize * np.prod([*map(int, n.split(","))]) for t, n in sent]
    assert len(counts) == 2  # codes and scales
    dense = 64 * 64 * 4 / (1 if "gather" in program else 4)
    assert sum(counts) < 0.26 * dense


_DTYPES = {"u8": "uint8", "f32": "float32"}


def test_a_replicated_leaf_is_not_gathered():
    """A LoRA update is gathered by rows: every device has all of `b`."""
    lora = vn.types.LoraArray(quantized("int8", 0), normal(64, 4), normal(4, 64))
    gather = over_rows(SENT["all_gather, tiled"])
    found = jax.jit(vn.implicit(gather, on_materialise=only_by_rules))(lora)
    np.testing.assert_allclose(vn.materialise(found)[2], vn.materialise(lora), rtol=1e-5, atol=1e-4)
    assert found.b.shape == (4, 4, 64)
    # Without check_vma, the leaf might vary.
    unchecked = over_rows(SENT["all_gather, tiled"], check_vma=False)
    (event,) = without_rule(vn.explain(unchecked)(lora))
    assert event.primitive == "all_gather"


def test_derivatives_through_collectives_agree():
    w = vn.types.LoraArray(*(0.2 * normal(*shape) for shape in ((8, 8), (8, 2), (2, 8))))
    gather = lambda x: lax.all_gather(x, "i", tiled=True)
    body = lambda w: jnp.sum(jnp.sin(gather(w) @ lax.ppermute(w, "i", ROUND).T))[None]
    blocks = jax.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    loss = lambda w: blocks(w).sum()
    found = jax.jit(jax.grad(vn.implicit(loss)))(w)
    expected = jax.jit(jax.grad(lambda w: loss(vn.materialise(w))))(w)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
