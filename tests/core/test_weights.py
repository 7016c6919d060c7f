"""Reports and policies distinguish weights from intermediate implicit arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import arrays

import veneer as vn

PARAMS = {
    "table": vn.quant.QArray(arrays.ones((20, 8), np.int8), arrays.ones((20, 1)), qtype="int8"),
    "stack": arrays.quantized("int8", 3, 8, 8),
    "w": arrays.quantized("int8", 8, 8),
    "lora": vn.types.LoraArray(
        arrays.quantized("int8", 8, 8), arrays.ones((8, 2)), arrays.ones((2, 8))
    ),
}
IDS = arrays.arange(3)
X = arrays.ones((2, 8))


@jax.custom_jvp
def custom(w):
    return jnp.sin(w)


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))


@jax.custom_vjp
def custom_vjp(w):
    return jnp.sin(w)


custom_vjp.defvjp(lambda w: (custom_vjp(w), None), lambda _, ct: (ct,))


def in_loop(w, x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1], jnp.sin(c[1])), (0, w, x))


def sharded(w):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x"))(w)


# A program, and the weights that it makes dense.
WEIGHTS = {
    "as it is": (lambda p: jnp.sin(p["w"]), {"params.w"}),
    "transposed": (lambda p: jnp.sin(p["w"].T), {"params.w"}),
    "a matrix of a stack": (lambda p: jnp.sin(p["stack"][1]), {"params.stack"}),
    "a matrix that is looked up": (lambda p: jnp.sin(p["stack"][IDS[1]]), {"params.stack"}),
    "matrices that are looked up": (lambda p: jnp.sin(p["stack"][IDS]), {"params.stack"}),
    "a half": (lambda p: jnp.sin(p["w"][:4]), {"params.w"}),
    "in another dtype": (lambda p: jnp.sin(p["lora"].astype("bfloat16")), {"params.lora"}),
    "in jit": (lambda p: jax.jit(lambda w: jnp.sin(w.T))(p["w"]), {"params.w"}),
    "from jit": (lambda p: jnp.sin(jax.jit(lambda w: w.T)(p["w"])), {"params.w"}),
    "in remat": (lambda p: jax.checkpoint(jnp.sin)(p["w"]), {"params.w"}),
    "slices of a scan": (
        lambda p: lax.scan(lambda c, w: (c, jnp.sin(w)), 0, p["stack"]),
        {"params.stack"},
    ),
    "carried": (lambda p: in_loop(p["w"], jnp.zeros((8, 8))), {"params.w"}),
    "from a loop": (
        lambda p: jnp.sin(lax.fori_loop(0, 2, lambda i, w: w, p["w"])),
        {"params.w"},
    ),
    "from one of two branches": (
        lambda p: jnp.sin(lax.cond(X[0, 0] > 0, lambda: p["table"][:8], lambda: p["table"][8:16])),
        {"params.table"},
    ),
    "in a branch": (
        lambda p: lax.cond(X[0, 0] > 0, jnp.sin, jnp.cos, p["w"]),
        {"params.w"},
    ),
    "in custom_jvp": (lambda p: custom(p["w"]), {"params.w"}),
    "in custom_vjp": (lambda p: custom_vjp(p["w"]), {"params.w"}),
    "in shard_map": (lambda p: sharded(p["w"]), {"params.w"}),
    "in vmap": (lambda p: jax.vmap(jnp.sin)(p["stack"]), {"params.stack"}),
    "scaled": (lambda p: jnp.sin(2 * p["lora"]), {"params.lora"}),
    "side by side": (
        lambda p: jnp.sin(jnp.concatenate([p["w"], p["stack"][0]], 1)),
        {"params.w", "params.stack"},
    ),
    "in an inner implicit": (lambda p: vn.implicit(jnp.sin)(p["w"]), {"params.w"}),
}
IN_PASSING = {
    "rows": lambda p: 8.0 * p["table"][IDS],
    "a row": lambda p: jnp.sin(p["table"][IDS[0]]),
    "a row by a number that is known": lambda p: jnp.sin(p["table"][3]),
    "a batch of rows": lambda p: jnp.sin(jnp.take(p["table"], IDS[None], axis=0)),
    "rows through jit": lambda p: jnp.sin(jax.jit(lambda t: t[IDS])(p["table"])),
    "rows in jit": lambda p: jax.jit(jnp.sin)(p["table"][IDS]),
    "rows in a scan": lambda p: lax.scan(lambda c, t: (c, jnp.sin(t)), 0, p["table"][IDS])[1],
    "rows in custom_jvp": lambda p: custom(p["table"][IDS]),
    "quantized there": lambda p: vn.implicit(jnp.sin)(vn.quant.quantize(X, "int8")),
    "an operator on what is quantized there": lambda p: 2 + vn.quant.quantize(X, "int8"),
}


def dense_weights(program, *args):
    made = vn.explain(program)(*args).materialised
    return {path for event in made for path in event.weights if event.weight_nbytes}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_is_recognized_after_every_operation(name, jit):
    program, weights = WEIGHTS[name]
    named = lambda params: program(params)
    assert dense_weights(jax.jit(named) if jit else named, PARAMS) == weights
    run = vn.implicit(named, on_materialise="error_weights")
    with pytest.raises(vn.MaterialiseError) as error:
        (jax.jit(run) if jit else run)(PARAMS)
    assert any(weight in str(error.value) for weight in weights)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", IN_PASSING)
def test_intermediates_are_not_weights(name, jit):
    program = lambda params: IN_PASSING[name](params)
    assert vn.explain(program)(PARAMS).materialised
    assert dense_weights(program, PARAMS) == set()
    run = vn.implicit(program, on_materialise="error_weights")
    (jax.jit(run) if jit else run)(PARAMS)
    with pytest.raises(vn.MaterialiseError):
        vn.implicit(program, on_materialise="error")(PARAMS)


def test_warn_weights_ignores_activations():
    program = lambda params: jnp.sin(params["w"]).sum() + jnp.sin(params["table"][IDS]).sum()
    with pytest.warns(vn.MaterialiseWarning, match=r"of params\.w") as caught:
        vn.implicit(program, on_materialise="warn_weights")(PARAMS)
    assert len(caught) == 1


def test_one_trace_reports_the_path_of_each_weight():
    square = jax.jit(lambda w: w**2.0)
    model = lambda layers, *more, last: [square(w) for w in (*layers, *more, last)]
    w = PARAMS["w"]
    report = vn.explain(model)([w, w], w, last=w)
    paths = [event.weights for event in report.materialised]
    assert paths == [("layers.0",), ("layers.1",), ("more.0",), ("last",)]


def test_captured_weights_have_the_names_of_variables():
    w, params = PARAMS["w"], PARAMS
    program = lambda x: x @ jnp.sin(w) + x @ jnp.cos(params["w"])
    assert dense_weights(program, X) == {"w", "params.w"}
    bound = partial(lambda params, x: x @ jnp.sin(params["w"]), PARAMS)
    assert dense_weights(bound, X) == {"args.0.w"}


@pytest.mark.parametrize("filter_spec", [True, False], ids=["wrapped", "typed"])
@pytest.mark.parametrize("where", ["around jit", "in jit", "eager"])
def test_high_types_distinguish_weights(filter_spec, where):
    wraps = {
        "around jit": lambda f, choice: vn.implicit(jax.jit(f), filter_spec, on_materialise=choice),
        "in jit": lambda f, choice: jax.jit(vn.implicit(f, filter_spec, on_materialise=choice)),
        "eager": lambda f, choice: vn.implicit(f, filter_spec, on_materialise=choice),
    }
    of_weight = lambda w, x: x @ jnp.sin(w)
    of_rows = lambda w, ids: 8.0 * w[ids]
    with vn.hijax.enabled():
        jax.jit(of_weight)(PARAMS["w"], X)  # fills the caches of high types
        for _ in range(2):
            with pytest.raises(vn.MaterialiseError):
                wraps[where](of_weight, "error_weights")(PARAMS["w"], X)
            with pytest.raises(vn.MaterialiseError):
                wraps[where](of_weight, "error")(PARAMS["w"], X)
        wraps[where](of_rows, "error_weights")(PARAMS["w"], IDS)
        assert dense_weights(of_weight, PARAMS["w"], X) == {"w"}


def test_high_types_report_events_once_per_call():
    events = []
    with vn.hijax.enabled():
        program = jax.jit(lambda w: jnp.sin(w))
        for _ in range(2):
            vn.implicit(program, False, on_materialise=events.append)(PARAMS["w"])
    assert [event.primitive for event in events] == ["sin"] * 2


def test_a_product_reports_the_bytes_of_its_weight():
    w = vn.quant.quantize(jnp.ones((8, 8)), "nf4")
    *_, event = vn.explain(lambda table, w: table[IDS] @ w)(w, w).events
    assert (event.primitive, event.weights) == ("dot_general", ("w",))
    assert (event.nbytes, event.weight_nbytes) == (4 * (24 + 64), 4 * 64)
    assert event.rule is not None


def test_materialized_activations_add_no_weight_bytes():
    plan = vn.Event("dot_general", ("x", "w"), "rule.py:1", 64, "f.py:1", "", ((), ("w",)), (64, 0))
    assert plan.made_dense
    assert plan.weight_nbytes == 0


def test_the_arrays_of_the_caller_are_unchanged():
    w = arrays.quantized("int8", 8, 8)
    before = dict(vars(w))
    vn.implicit(lambda w: jnp.sin(w.T), on_materialise=lambda event: None)(w)
    assert {k: v for k, v in vars(w).items() if k != "_aval"}.keys() == before.keys() - {"_aval"}


def test_a_policy_does_not_change_results():
    program = lambda params, x: x @ params["w"] + params["table"][IDS][0] + x @ params["lora"]
    told = vn.implicit(program, on_materialise=lambda event: None)(PARAMS, X)
    np.testing.assert_array_equal(told, vn.implicit(program)(PARAMS, X))


def test_high_types_do_not_report_discarded_attempts():
    program = lambda w: jax.lax.fori_loop(0, 3, lambda i, w: 0.5 * jnp.sin(w), w)
    with vn.hijax.enabled():
        for wrap in (lambda f: f, jax.jit):
            events = []
            vn.implicit(wrap(program), False, on_materialise=events.append)(PARAMS["w"])
            assert [event.primitive for event in events] == ["scan"]
