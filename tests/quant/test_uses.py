"""The axes that a program contracts, and the warnings about its weights."""

import jax
import jax.numpy as jnp
import pytest
from support import arrays
from support.annotations import ARE_CHECKED, unless_checked
from support.array_types import assert_close

import veneer as vn
from veneer.quant import Rule
from veneer.quant.models.uses import find_uses

IDS = arrays.arange(3)
X = arrays.ones((3, 64))


def w(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


def contracted(model, weight, *args):
    """Return the axes that each use of a weight contracts, in order."""
    uses = find_uses(model, {"w": weight}, lambda path, leaf: True, args)["w"]
    return [sorted(use.contracted) for use in uses if use.has_axes]


# A program, the shape of its weight, and the axes that each use contracts.
PROGRAMS = {
    "product": (lambda p, x: x @ p["w"], (64, 8), [[-2]]),
    "of a transpose": (lambda p, x: x @ p["w"].T, (8, 64), [[-1]]),
    "the weight first": (lambda p, x: p["w"] @ x.T, (8, 64), [[-1]]),
    "in a jitted function": (lambda p, x: jax.jit(jnp.dot)(x, p["w"]), (64, 8), [[-2]]),
    "einsum": (lambda p, x: jnp.einsum("td,hdk->thk", x, p["w"]), (2, 64, 4), [[-2]]),
    "merged axes": (lambda p, x: x @ p["w"].reshape(64, -1), (64, 2, 4), [[-3]]),
    "merged axes, contracted": (lambda p, x: x @ p["w"].reshape(64, -1), (4, 16, 8), [[-3, -2]]),
    "flat and back": (lambda p, x: x @ p["w"].ravel().reshape(64, 8), (64, 8), [[-2]]),
    "another shape and back": (
        lambda p, x: (
            x @ p["w"].T.reshape(16, 32).T.reshape(4, 128).reshape(32, 16).T.reshape(8, 64).T
        ),
        (64, 8),
        [[-2]],
    ),
    "flat and split unevenly": (
        lambda p, x: x @ p["w"].ravel().reshape(7, 64).T,
        (64, 7),
        [[-2, -1]],
    ),
    "rolled, flat": (
        lambda p, x: x @ jnp.roll(p["w"].ravel(), 8).reshape(64, 8),
        (64, 8),
        [[-2, -1]],
    ),
    "put together again in another order": (
        lambda p, x: (
            x @ jnp.concatenate([p["w"].ravel()[::2], p["w"].ravel()[1::2]]).reshape(64, 8)
        ),
        (64, 8),
        [[-2, -1]],
    ),
    "a part of a flat weight": (
        lambda p, x: x @ p["w"].ravel()[:128].reshape(64, 2),
        (64, 8),
        [[-2, -1]],
    ),
    "split axes": (
        lambda p, x: jnp.einsum("td,dhk->thk", x, p["w"].reshape(64, 2, 4)),
        (64, 8),
        [[-2]],
    ),
    "a batch": (lambda p, x: jnp.einsum("td,edf->etf", x, p["w"]), (2, 64, 8), [[-2]]),
    "vmap": (lambda p, x: jax.vmap(jnp.dot, (None, 0))(x, p["w"]), (2, 64, 8), [[-2]]),
    "scan": (
        lambda p, x: jax.lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0],
        (2, 64, 64),
        [[-2]],
    ),
    "one layer": (lambda p, x: x @ p["w"][1], (2, 64, 8), [[-2]]),
    "a layer of a number": (
        lambda p, x: jax.lax.fori_loop(0, 2, lambda i, x: x @ p["w"][i], x),
        (2, 64, 64),
        [[-2]],
    ),
    "a half": (lambda p, x: x @ p["w"][:, :4], (64, 8), [[-2]]),
    "halves": (lambda p, x: [x @ h for h in jnp.split(p["w"], 2, 1)], (64, 8), [[-2], [-2]]),
    "checkpoint and grad": (
        lambda p, x: jax.grad(lambda x: jax.checkpoint(jnp.dot)(x, p["w"]).sum())(x),
        (64, 8),
        [[-2], [-1]],
    ),
    "looked up": (lambda p, x: p["w"][IDS], (9, 64), [[-1]]),
    "looked up, one by one": (lambda p, x: jax.vmap(lambda i: p["w"][i])(IDS), (9, 64), [[-1]]),
    "looked up, then a product": (lambda p, x: p["w"][IDS] @ x.T, (9, 64), [[-1]]),
    "experts looked up": (
        lambda p, x: jnp.einsum("td,tdf->tf", x, p["w"][IDS % 2]),
        (2, 64, 8),
        [[-2]],
    ),
    "ragged": (
        lambda p, x: jax.lax.ragged_dot(x, p["w"], jnp.array([1, 2])),
        (2, 64, 8),
        [[-2]],
    ),
    "converted": (
        lambda p, x: x.astype("bfloat16") @ p["w"].astype("bfloat16"),
        (64, 8),
        [[-2]],
    ),
    "nothing": (lambda p, x: x + p["w"], (3, 64), []),
    "an outer product": (lambda p, x: jnp.einsum("td,ef->tdef", x, p["w"]), (64, 8), []),
    "entries looked up": (lambda p, x: p["w"][IDS, IDS], (64, 8), []),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_find_uses_returns_the_contracted_axes(name):
    model, shape, axes = PROGRAMS[name]
    found = contracted(model, w(*shape), X)
    assert [list(x) for x in dict.fromkeys(map(tuple, found))] == [
        list(x) for x in dict.fromkeys(map(tuple, axes))
    ]


@pytest.mark.parametrize("rules", [[Rule(".*", "int8")], "int8"])
@pytest.mark.parametrize("name", ["an outer product", "entries looked up"])
@pytest.mark.filterwarnings("ignore:left dense")
def test_a_weight_without_contracted_axes_stays_dense(name, rules):
    model, _, _ = PROGRAMS[name]
    params = {"w": w(128, 64)}
    small = vn.quant.quantize_tree(params, rules, model=model, args=(X,))
    assert small["w"] is params["w"]


def test_each_concatenated_weight_has_a_use():
    params = {"q": w(64, 8), "k": w(64, 4)}
    model = lambda p, x: x @ jnp.concatenate([p["q"], p["k"]], 1)
    uses = find_uses(model, params, lambda path, leaf: True, (X,))
    assert [[*use.contracted] for path in "qk" for use in uses[path]] == [[-2], [-2]]


@pytest.mark.filterwarnings("error")
def test_the_tile_axis_of_a_rule_overrides_the_program():
    rules = [Rule(".*", "int8", tile_axis=-1)]
    model = lambda p, x: x @ p["w"]
    small = vn.quant.quantize_tree({"w": w(64, 64)}, rules, model=model, args=(X,))
    assert small["w"].scale.shape == (64, 1)


def test_training_uses_the_axes_of_the_program():
    model = lambda p, x: jnp.einsum("td,dhk->thk", x, p["w"])
    params, rules = {"w": w(64, 2, 4)}, [Rule(".*", "int8", act_qtype="int8")]
    trained = vn.quant.quantize_tree(params, rules, model=model, args=(X,), train=True)
    assert trained["w"].tile_axis == (-3,)
    small = vn.quant.quantize_tree(params, rules, model=model, args=(X,))
    assert small["w"].contracting == (-3,)
    assert jnp.allclose(vn.implicit(model)(trained, X), vn.implicit(model)(small, X), atol=1e-5)


def test_a_model_can_take_abstract_and_keyword_arguments():
    def model(params, x, *, double):
        return x @ params["w"] * (2 if double else 1)

    args = (jax.ShapeDtypeStruct((3, 64), "float32"),)
    small = vn.quant.quantize_tree(
        {"w": w(64, 8)}, [Rule(".*", "int8")], model=model, args=args, kwargs={"double": True}
    )
    assert small["w"].scale.shape == (1, 8)


def test_conflicting_uses_of_a_weight_warn_with_both_lines():
    def model(params, x):
        y = x @ params["w"]
        return y @ params["w"].T

    with pytest.warns(UserWarning, match=r"w is used in two ways.* axis -2 .*axis -1") as caught:
        vn.quant.quantize_tree({"w": w(64, 32)}, [Rule(".*", "int8")], model=model, args=(X,))
    line = model.__code__.co_firstlineno
    assert f"test_uses.py:{line + 1} " in str(caught[0].message)
    assert f"test_uses.py:{line + 2} " in str(caught[0].message)
    assert (
        ARE_CHECKED or caught[0].filename == __file__
    )  # else a wrapper of the annotation checker is the caller


def test_weights_in_no_product_warn_except_vectors():
    params = {"norms": w(99, 64), "bias": w(3, 64), "positions": w(99, 64), "w": w(99, 64, 64)}

    def model(params, x):
        step = lambda x, layer: (x * layer[0] @ layer[1], None)
        x = x + params["positions"][: len(x)] + params["bias"]
        return jax.lax.scan(step, x, (params["norms"], params["w"]))[0]

    with pytest.warns(UserWarning, match="left dense.* positions .*test_uses.py") as caught:
        small = vn.quant.quantize_tree(params, [Rule(".*", "int8")], model=model, args=(X,))
    assert not any(name in str(caught[0].message) for name in ("norms", "bias"))
    assert [name for name, x in small.items() if isinstance(x, vn.quant.QArray)] == ["w"]


def test_weights_that_the_program_does_not_use_warn():
    params = {"w": w(64, 8)}
    with pytest.warns(UserWarning, match=r"left dense.* w at 32 bits per value \(unused\)"):
        vn.quant.quantize_tree(
            params, [Rule(".*", "int8")], model=lambda _, x: x @ params["w"], args=(X,)
        )


@pytest.mark.parametrize("rules", [[Rule(".*", "nf4")], "nf4"])
def test_a_large_added_weight_warns_with_its_bits(rules):
    params = {"w": w(64, 64), "positions": w(99, 64).astype("bfloat16")}
    model = lambda p, x: (x + p["positions"][:3]) @ p["w"]
    message = r"left dense.* positions at 16 bits per value \((add|convert).*_uses.py.*tile_axis"
    with pytest.warns(UserWarning, match=message):
        small = vn.quant.quantize_tree(params, rules, model=model, args=(X,))
    assert small["positions"] is params["positions"]


def test_a_width_equal_to_an_embedding_length_is_no_vocabulary():
    def model(p, ids):
        x = p["words"][ids] + p["positions"][ids]
        return (x @ p["up"]) @ p["down"] @ p["head"]

    shapes = {"words": (96, 64), "positions": (64, 64), "up": (64, 128), "down": (128, 64)}
    params = {name: w(*shape) for name, shape in (*shapes.items(), ("head", (64, 96)))}
    small = vn.quant.quantize_tree(params, "nf4", model=model, args=(IDS,))
    of_words = dict.fromkeys(("words", "positions", "head"), "int8")
    assert {name: x.qtype for name, x in small.items()} == of_words | {"up": "nf4", "down": "nf4"}


@pytest.mark.parametrize(
    ("rules", "rows", "message"),
    [
        (
            [Rule(".*", "nf4", tile_size=64)],
            96,
            r"w \[96, 64\] has tiles of 48, not 64, at 4.67 bits",
        ),
        ([Rule(".*", "nf4", tile_size=128)], 64, r"w \[64, 64\] has tiles of 64, not 128, at 4.5 "),
        ("nf4", 127, r"w \[127, 64\] has tiles of 127, not 64, at 4.25 bits"),
        ("mxfp4", 72, r"w \[72, 64\] is in int8, not mxfp4, at 8.44 bits per value"),
    ],
)
def test_changed_tiles_warn_with_their_bits(rules, rows, message):
    args = {"model": lambda p, x: x @ p["w"], "args": (w(3, rows),)}
    with pytest.warns(UserWarning, match=rf"does not divide.* {message}.*add a rule"):
        vn.quant.quantize_tree({"w": w(rows, 64)}, rules, **args)


def test_rules_that_match_few_values_warn():
    params = {"attention": w(64, 64), "mlp": w(64, 128)}
    rules = [Rule("att.*", "int8")]
    with pytest.warns(UserWarning, match=r"most values stay dense.* mlp at 32 bits.*'\.\*', None"):
        vn.quant.quantize_tree(params, rules)
    small = vn.quant.quantize_tree(params, [*rules, Rule(".*", None)])
    assert small["mlp"] is params["mlp"]


def test_too_many_scales_warn_without_a_program():
    with pytest.warns(
        UserWarning, match=r"w \[64, 8, 16\] takes 8 bits per value.*tile_axis.*model="
    ):
        vn.quant.quantize_tree({"w": w(64, 8, 16)}, [Rule(".*", "nf4")])


@pytest.mark.parametrize(
    ("rules", "arguments", "error", "message"),
    [
        ("nf4", {}, ValueError, "model=f, args="),
        ("nf5", {"model": lambda p: p}, ValueError, "nf5"),
        ([], {"args": (X,)}, TypeError, "dict cannot be called"),
        pytest.param([], {"args": X}, TypeError, r"such as \(x,\)", marks=unless_checked),
        pytest.param(
            [],
            {"model": "f", "args": ()},
            TypeError,
            "model must be a function",
            marks=unless_checked,
        ),
    ],
)
def test_an_invalid_program_raises(rules, arguments, error, message):
    with pytest.raises(error, match=message):
        vn.quant.quantize_tree({"w": w(64, 8)}, rules, **arguments)


def test_a_near_tile_of_at_least_eight_values_is_chosen():
    rule = Rule(".*", "int4", tile_size=64)
    for size, tile in ((96, 48), (1000, 40), (300, 60), (4304, 16)):
        assert rule.along([-2], (size, 8)).axes((size, 8)) == ((1,), {0: tile})
    assert rule.along([-3, -2], (4, 16, 8)).axes((4, 16, 8)) == ((2,), {})
    assert rule.along([-3, -2], (4, 32, 8)).axes((4, 32, 8)) == ((2,), {0: 2, 1: 32})
    with pytest.raises(ValueError, match=r"no tile of about 64 .* \(101, 8\)"):
        rule.along([-2], (101, 8))


def test_adapters_that_do_not_fit_name_the_weight():
    rules, key = [vn.lora.Rule(".*", rank=2)], jax.random.key(0)
    model = lambda p, x: jnp.einsum("tah,adh->tdh", x, p["w"])
    with pytest.raises(ValueError, match=r"w \[4, 5, 6\].*adjacent"):
        vn.lora.init_tree({"w": w(4, 5, 6)}, rules, key=key, model=model, args=(w(3, 4, 6),))
    with pytest.warns(UserWarning, match=r"as large as its weight: w \[64, 8, 16\].*model="):
        vn.lora.init_tree({"w": w(64, 8, 16)}, [vn.lora.Rule(".*", rank=6)], key=key)


@pytest.mark.parametrize(
    "leaf", [arrays.ones(8, "f4"), arrays.ones((8, 8), "i4")], ids=["vector", "integers"]
)
def test_a_rule_that_gives_no_adapter_warns(leaf):
    rules = [vn.lora.Rule("w", rank=2), vn.lora.Rule("x", rank=2)]
    with pytest.warns(UserWarning, match="the rule 'x' gives nothing an adapter: x. Adapters are"):
        tuned = vn.lora.init_tree({"w": w(64, 8), "x": leaf}, rules, key=jax.random.key(0))
    assert isinstance(tuned["w"], vn.types.LoraArray)
    assert tuned["x"] is leaf


def updates_of(*rules):
    params = {"w": w(64, 4, 16), "bias": w(4, 16), "norm": w(3, 64), "factor": w(4, 16)}
    model = lambda p, x: (
        jnp.einsum("td,dhk->thk", x * p["norm"][0], p["w"]) * p["factor"] + p["bias"]
    )
    key = jax.random.key(0)
    return vn.lora.init_tree(params, rules, key=key, model=model, args=(w(5, 64),))


def test_biases_get_no_adapter_without_a_warning():
    with pytest.warns(UserWarning, match=r"in no product, so they get no adapter: factor$"):
        tuned = updates_of(vn.lora.Rule(".*", 2))
    assert [isinstance(tuned[name], vn.types.LoraArray) for name in ("w", "bias")] == [True, False]


@pytest.mark.parametrize("name", ["bias", "norm"])
def test_a_rule_for_weights_in_no_product_warns(name):
    with pytest.warns(UserWarning, match=rf"in no product, so they get no adapter: {name}$"):
        updates_of(vn.lora.Rule("w", rank=2), vn.lora.Rule(name, rank=2))


@unless_checked
@pytest.mark.parametrize(
    "rules", [vn.lora.Rule("w", rank=2), ".*", None, [".*"], [Rule(".*", "int8")]]
)
def test_other_objects_than_lora_rules_raise(rules):
    with pytest.raises(TypeError, match=r"a list of vn.lora.Rule, such as \[.*\], not"):
        vn.lora.init_tree({"w": w(64, 8)}, rules, key=jax.random.key(0))


@pytest.mark.parametrize("rules", [[Rule(".*", "int8")], "int8"])
def test_a_dense_weight_inside_another_type_warns(rules):
    lora = vn.types.LoraArray.init(w(64, 8), 2, key=jax.random.key(0))
    model = {"model": lambda p, x: x @ p["w"], "args": (X,)}
    with pytest.warns(UserWarning, match=r"not quantized.* w \(LoraArray\)\. Quantize first"):
        vn.quant.quantize_tree({"w": lora}, rules, **model)


@pytest.mark.filterwarnings("error")
def test_a_quantized_weight_inside_another_type_is_fine():
    lora = vn.types.LoraArray.init(w(64, 8), 2, key=jax.random.key(0))
    rules = [Rule("w", None), Rule(".*", "int8")]
    q = vn.quant.quantize_tree({"q": lora.w}, [Rule(".*", "int8")])["q"]
    params = {"w": lora, "of q": lora.changed(w=q), "q": q}
    assert vn.quant.quantize_tree(params, rules) == params


@pytest.mark.parametrize(
    "branch",
    [
        lambda p, w, x: jax.lax.cond(p, lambda x: x @ w, lambda x: x, x),
        lambda p, w, x: jax.lax.cond(p, lambda x, w: x @ w, lambda x, w: x, x, w),
        lambda p, w, x: jax.lax.switch(p.astype(int), [lambda x: x, lambda x: x @ w], x),
        lambda p, w, x: x @ jnp.where(p, w, w),
    ],
    ids=["cond", "operand", "switch", "where"],
)
def test_a_weight_in_a_branch_under_vmap_is_quantized(branch):
    params = {"w": arrays.normal(16, 16)}
    args = jnp.array([True, False, True]), arrays.normal(3, 16)
    model = lambda params, ps, xs: jax.vmap(lambda p, x: branch(p, params["w"], x))(ps, xs)
    rule = vn.quant.Rule("w", "int8")
    q = vn.quant.quantize_tree(params, [rule], model=model, args=args)
    assert q["w"].scale.shape == (1, 16)  # along the contracted axis
    dense = {"w": vn.materialise(q["w"])}
    assert_close(vn.implicit(model)(q, *args), model(dense, *args))
    calibrated = vn.quant.calibrate(model, [rule], params=params)([args])
    assert type(calibrated["w"]) is vn.quant.QArray
