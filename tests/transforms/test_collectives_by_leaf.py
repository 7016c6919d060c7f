"""Collectives of every type over 8 devices: agreement with dense arrays, and bytes sent."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import arrays
from support.every_type import EVERY_TYPE, T, plain, value
from support.policies import only_by_rules, without_rule

import veneer as vn

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
LINE = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
KEY = arrays.key(0)
PAIRS = [[0, 1], [2, 3]]
ROUND = [(i, (i + 1) % 4) for i in range(4)]


def exchange(cut, join, **how):
    return lambda x: lax.all_to_all(x, "y", cut, join, **({"tiled": True} | how))


def own(axis, size):
    """The part of an axis with the number of the device, by an index that is a multiple."""
    return lambda x: lax.dynamic_slice_in_dim(x, lax.axis_index("y") * size, size, axis)


#: Collectives of blocks [4, 4, 4] along the batch axis, which every leaf of every type has.
OF_A_BATCH = {
    "all_gather": lambda x: lax.all_gather(x, "y"),
    "all_gather, tiled": lambda x: lax.all_gather(x, "y", tiled=True),
    "all_gather, in pairs": lambda x: lax.all_gather(x, "y", tiled=True, axis_index_groups=PAIRS),
    "all_to_all": exchange(0, 0),
    "all_to_all, in pairs": exchange(0, 0, axis_index_groups=PAIRS),
    "ppermute": lambda x: lax.ppermute(x, "y", ROUND),
    "a slice by axis_index": own(0, 1),
}
OF_MATRICES = {
    "all_gather of columns": lambda x: lax.all_gather(x, "y", axis=-1, tiled=True),
    "all_gather of rows": lambda x: lax.all_gather(x, "y", axis=-2, tiled=True),
    "all_gather, a new axis between": lambda x: lax.all_gather(x, "y", axis=1),
    "all_gather over both axes": lambda x: lax.all_gather(x, ("x", "y"), axis=1, tiled=True),
    "all_to_all, batch to rows": exchange(0, 1),
    "all_to_all, batch to columns": exchange(0, 2),
    "all_to_all, rows to the batch": exchange(1, 0),
    "all_to_all, columns to the batch": exchange(2, 0),
    "all_to_all, columns to rows": exchange(2, 1),
    "all_to_all, rows to columns": exchange(1, 2),
    "all_to_all, not tiled": exchange(0, 1, tiled=False),
    "all_to_all, of rows, not tiled": exchange(1, 0, tiled=False),
    "a row by axis_index": own(1, 1),
    "a column by axis_index": own(2, 1),
    "two rows by axis_index": lambda x: lax.dynamic_slice_in_dim(
        x, lax.axis_index("y") // 2 * 2, 2, 1
    ),
    "psum_scatter": lambda x: lax.psum_scatter(x, "y", tiled=True),
    "psum": lambda x: lax.psum(x, ("x", "y")),
}
EACH = OF_A_BATCH | OF_MATRICES


#: Types to test without check_vma, which also allows groups of devices.
UNCHECKED = ["LoraArray", "QArray, nf4 in tiles", "SparseArray", "Scaled", "Masked"]


def over_blocks(programs, check_vma):
    """Return the results of 8 devices for their blocks, stacked."""
    body = lambda x: {name: f(x)[None] for name, f in programs.items()}
    spec = P(("x", "y"))
    return jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=check_vma)


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [*((name, True) for name in EVERY_TYPE), *((name, False) for name in UNCHECKED)],
)
def test_every_type_agrees_with_the_dense_array(name, check_vma):
    values = value(name, (32,))
    dense = plain(values)
    programs = dict(OF_A_BATCH) if name == "PRNGKey" else dict(EACH)
    if check_vma:  # groups are not supported then, of an all_gather
        programs = {k: f for k, f in programs.items() if "pairs" not in k}
    if name == "PRNGKey":
        del programs["all_gather"]  # keys have no axis for it: JAX
    if isinstance(values, T.Masked):  # it cannot be materialized
        programs = {k: f for k, f in programs.items() if "psum" not in k}
    run = over_blocks(programs, check_vma)
    found = jax.jit(lambda x: plain(vn.implicit(run)(x)))(values)
    expected = jax.jit(run)(dense)
    for program in programs:
        one, other = found[program], expected[program]
        if name == "PRNGKey":
            one, other = map(jax.random.key_data, (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=program)


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_collectives_along_batch_axes_keep_the_type(name):
    values = value(name, (32,))
    if isinstance(values, T.Frozen | T.Lazy):
        pytest.skip("its results have no batch axes")
    programs = {k: f for k, f in OF_A_BATCH.items() if name != "PRNGKey" or k != "all_gather"}
    run = vn.implicit(over_blocks(programs, False), on_materialise=only_by_rules)
    for program, out in jax.eval_shape(run, values).items():
        assert type(out) is type(values), program


def quantized(*shape, tile=128):
    w = jax.random.normal(KEY, shape)
    return vn.quant.quantize(w, "int4", channelwise_axes=(-1,), tiled_axes={0: tile})


def stacked(count):
    w = jax.random.normal(KEY, (count, 64, 64))
    return vn.quant.quantize(w, "int4", channelwise_axes=(0, 2), tiled_axes={1: 8})


SENT = {
    "all_gather": lambda x: lax.all_gather(x, "i", tiled=True),
    "all_gather, a new axis": lambda x: lax.all_gather(x, "i"),
    "all_gather of columns": lambda x: lax.all_gather(x, "i", axis=1, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True),
    "all_to_all, of rows": lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "i", [(i, (i + 1) % 8) for i in range(8)]),
    "a part by axis_index": lambda x: lax.dynamic_slice_in_dim(
        lax.all_gather(x, "i", tiled=True), lax.axis_index("i") * 256, 256
    ),
}
_BYTES = {"f32": 4, "u8": 1, "s32": 4, "pred": 1}
_COLLECTIVE = r"= (.*?) (?:all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\("


def bytes_sent(run, *operands):
    """The bytes of what collectives give, in the compiled program."""
    results = re.findall(_COLLECTIVE, run.lower(*operands).compile().as_text())
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", " ".join(results))
    return sum(
        _BYTES[t] * int(np.prod([int(n) for n in shape.split(",") if n])) for t, shape in arrays
    )


@pytest.mark.parametrize("program", SENT)
def test_bytes_of_int4_in_tiles_of_128(program):
    q = quantized(8192, 64)
    f = jax.shard_map(SENT[program], mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    run = jax.jit(vn.implicit(f, on_materialise="error"))
    np.testing.assert_array_equal(run(q).dequantize(), jax.jit(f)(q.dequantize()))
    assert 0 < bytes_sent(run, q) <= 0.16 * bytes_sent(jax.jit(f), q.dequantize())


def test_all_to_all_moves_a_lora_from_rows_to_columns():
    """Each device takes its part of the replicated `b`, and gathers `a`."""
    w = T.LoraArray(quantized(64, 64, tile=4), jnp.ones((64, 2)), jax.random.normal(KEY, (2, 64)))
    f = jax.shard_map(SENT["all_to_all"], mesh=LINE, in_specs=P("i"), out_specs=P(None, "i"))
    run = jax.jit(vn.implicit(f, on_materialise=only_by_rules))
    np.testing.assert_allclose(vn.materialise(run(w)), vn.materialise(w), rtol=1e-5)
    of_codes, of_scales, of_a = 64 * 64 // 2 // 8, 16 * 64 * 4 // 8, 64 * 2 * 4
    assert bytes_sent(run, w) == of_codes + of_scales + of_a


# Transformations.


def gathered_product(x, w):
    return jnp.tanh(x @ lax.all_gather(w, "i", tiled=True))


def sum_of_squares(x, w):
    return lax.psum(jnp.sum(gathered_product(x, w) ** 2), "i")


def over_rows(f, in_specs, out_specs):
    return jax.shard_map(f, mesh=LINE, in_specs=in_specs, out_specs=out_specs)


def test_scanned_layers_are_gathered_again_in_backward():
    layers, x = stacked(3), jax.random.normal(KEY, (16, 64))

    def loss(w, x):
        step = jax.checkpoint(lambda x, w: (gathered_product(x, w), None))
        return lax.psum(jnp.sum(lax.scan(step, x, w)[0] ** 2), "i")

    f = over_rows(jax.grad(loss, 1), (P(None, "i"), P("i")), P("i"))
    run = jax.jit(vn.implicit(f, on_materialise=only_by_rules))
    expected = jax.jit(f)(layers.dequantize(), x)
    np.testing.assert_allclose(run(layers, x), expected, rtol=1e-4, atol=1e-4)
    program = str(jax.make_jaxpr(run)(layers, x))
    gathers = re.findall(r":(\w+)\[[\d,]*\]\S* = all_gather\[", program)
    assert sorted(gathers) == ["f32", "f32", "u8", "u8"]  # codes and scales, forward and backward


def test_dense_and_packed_arrays_are_gathered_in_one_scan():
    layers, updates = stacked(2), jax.random.normal(KEY, (2, 64, 64))

    def body(w, u):
        whole = lambda x: lax.all_gather(x, "i", tiled=True)
        return lax.scan(lambda x, p: (x @ (whole(p[0]) + whole(p[1])), None), u[0, :1], (w, u))[0]

    f = over_rows(body, (P(None, "i"), P(None, "i")), P("i"))
    found = jax.jit(vn.implicit(f))(layers, updates)
    np.testing.assert_allclose(
        found, jax.jit(f)(layers.dequantize(), updates), rtol=1e-4, atol=1e-3
    )


def test_the_transpose_of_a_gather_is_a_psum_scatter():
    """Differentiate by `a` and `b` of a LoRA. `b` is not gathered, so its gradient is a sum."""
    q, x = quantized(64, 64, tile=8), jax.random.normal(KEY, (8, 64))
    a, b = jnp.ones((64, 2)), jax.random.normal(KEY, (2, 64))

    def grads(w, a, b, x):
        loss = lambda ab: vn.implicit(sum_of_squares)(x, T.LoraArray(w, *ab))
        return jax.grad(loss)((a, b))

    def of_dense(w, a, b, x):
        return jax.grad(lambda ab: sum_of_squares(x, w + ab[0] @ ab[1]))((a, b))

    specs = (P("i"), P("i"), P(), P("i")), (P("i"), P())
    run = vn.implicit(over_rows(grads, *specs), on_materialise=only_by_rules)
    expected = jax.jit(over_rows(of_dense, *specs))(q.dequantize(), a, b, x)
    for one, other in zip(jax.jit(run)(q, a, b, x), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
    program = str(jax.make_jaxpr(run)(q, a, b, x))
    assert len(re.findall(r"f32\[8,2\]\S* = reduce_scatter\[", program)) == 1


def test_a_quantized_weight_has_a_gradient_only_inside():
    q, x = quantized(64, 64, tile=8), jax.random.normal(KEY, (8, 64))
    grad = over_rows(jax.grad(sum_of_squares, 1), (P("i"), P("i")), P("i"))
    found = jax.jit(vn.implicit(grad, on_materialise=only_by_rules))(x, q)
    np.testing.assert_allclose(found, jax.jit(grad)(x, q.dequantize()), rtol=1e-3, atol=1e-3)
    loss = over_rows(sum_of_squares, (P("i"), P("i")), P())
    with pytest.raises(TypeError, match="real- or complex-valued"):
        jax.grad(vn.implicit(loss), 1)(x, q)


@pytest.mark.parametrize("outside", [True, False], ids=["vmap outside", "vmap inside"])
def test_vmap_of_collectives_agrees_with_dense(outside):
    q = stacked(2)
    f = over_rows(
        lambda w: lax.all_to_all(SENT["all_gather"](w), "i", 1, 0, tiled=True), P("i"), P("i")
    )
    run = jax.vmap(vn.implicit(f)) if outside else vn.implicit(jax.vmap(f))
    out = jax.jit(run)(q)
    assert isinstance(out, vn.quant.QArray)
    np.testing.assert_array_equal(out.dequantize(), jax.jit(jax.vmap(f))(q.dequantize()))


def test_pbroadcast_sends_each_leaf():
    on_devices = over_rows(lambda x: lax.pbroadcast(x, "i", 2), P("i"), P("i"))
    run = jax.jit(vn.implicit(on_devices, on_materialise="error"))
    text = run.trace(quantized(64, 64, tile=8)).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall("collective_broadcast", text)) == 2


# Collectives that materialize their operand, and their reports.


def events(f, *operands):
    return [event.primitive for event in without_rule(vn.explain(f)(*operands))]


@pytest.mark.parametrize(
    ("primitive", "program"),
    [
        ("reduce_scatter", lambda x: lax.psum_scatter(x, "i", tiled=True)),
        ("psum_invariant", lambda x: lax.psum(x, "i")[None]),
        ("all_to_all", lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True)),  # of one row each
        ("dynamic_slice", lambda x: lax.dynamic_slice_in_dim(x, lax.axis_index("i") * 2, 4)),
    ],
)
def test_materializing_collectives_are_reported(primitive, program):
    q = quantized(64, 64, tile=4)
    f = over_rows(program, P("i"), P("i"))
    assert events(f, q) == [primitive]
    expected = jax.jit(f)(q.dequantize())
    np.testing.assert_allclose(jax.jit(vn.implicit(f))(q), expected, rtol=1e-5, atol=1e-5)


def test_errors_name_a_tile_that_spans_devices():
    w = {"up": quantized(64, 64, tile=32)}
    gather = over_rows(lambda w: SENT["all_gather"](w["up"]), P("i"), P("i"))
    run = vn.implicit(lambda w: gather(w), on_materialise="error")
    each = "axis 0: each of 8 devices would have 8 values, but 32 are stored together"
    with pytest.raises(vn.MaterialiseError, match=rf"shard_map.* of w\.up: no rule fits: {each}"):
        run(w)
    update = T.LoraArray(w["up"], jnp.ones((64, 2)), jnp.ones((2, 64)))
    with pytest.raises(vn.MaterialiseError, match=each):
        run({"up": update})


def test_errors_name_an_axis_that_cannot_be_split():
    w = {"up": T.Rotated(jnp.ones((8, 8)))}
    gather = over_rows(lambda w: SENT["all_gather"](w["up"]), P("i"), P("i"))
    with pytest.raises(vn.MaterialiseError, match="axis 0 is stored as a whole"):
        vn.implicit(gather, on_materialise="error")(w)


def test_a_result_without_leaves_keeps_varying_axes():
    """The dense array of an identity is constant, but its leading axis is sharded."""
    eye = T.Identity(4, leading=(8,))
    f = over_rows(lambda w: lax.psum(w + 0.0, "i"), P("i"), P())
    found = jax.jit(vn.implicit(f))(eye)
    np.testing.assert_array_equal(found, 8 * jnp.eye(4)[None])


@pytest.mark.parametrize("how", [{"tiled": True}, {"axis": 1, "tiled": True}], ids=str)
def test_gathering_a_built_value_outside_implicit_raises(how):
    w, a, b = jnp.ones((64, 64)), jnp.ones((64, 2)), jnp.ones((2, 64))

    def body(w, a, b, gather=lambda x: lax.all_gather(x, "i", **how)):
        return jnp.sum(gather(T.LoraArray(w, a, b)) ** 2)[None]

    specs = {"mesh": LINE, "in_specs": (P("i"), P("i"), P()), "out_specs": P("i")}
    told = r"LoraArray takes w.*lax\.all_gather .* separately\. .* vn\.implicit\(function\)"
    with pytest.raises(ValueError, match=told):
        vn.implicit(jax.shard_map(body, check_vma=False, **specs))(w, a, b)
    said = vn.implicit(lambda x: lax.all_gather(x, "i", **how))
    run = jax.shard_map(lambda *x: body(*x, said), check_vma=False, **specs)
    dense = jax.shard_map(lambda *x: body(*x, lambda y: said(vn.materialise(y))), **specs)
    np.testing.assert_allclose(vn.implicit(run)(w, a, b), dense(w, a, b), rtol=1e-5)
