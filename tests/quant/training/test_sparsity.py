"""N:M sparsity in training: masks, straight-through gradients and saved masks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import arrays
from support.array_types import assert_close

import veneer as vn
from veneer.quant import (
    BackwardProduct,
    FakeQuantized,
    Rule,
    fake_quantize,
    quantize_tree,
    sparsity_masks,
    with_masks,
)
from veneer.types.nm_sparse import NMSparse

KEYS = [arrays.key(seed) for seed in range(3)]
X = arrays.normal(6, 16)
W = arrays.normal(16, 8, seed=1)
LAYERS = arrays.array(np.random.default_rng(2).normal(size=(2, 16, 16)) / 4)


def mask_by_hand(w, n, m, axis=-2):
    """Return the mask of the n largest of each m neighbors."""
    last = jnp.moveaxis(w, axis, -1)
    groups = abs(last).reshape(*last.shape[:-1], -1, m)
    ranks = jnp.argsort(jnp.argsort(-groups, -1, stable=True), -1)
    return jnp.moveaxis((ranks < n).reshape(last.shape), -1, axis)


def pruned(w, n, m, axis=-2):
    """Return the pruned weight with straight-through gradients."""
    return w + jax.lax.stop_gradient(jnp.where(mask_by_hand(w, n, m, axis), w, 0) - w)


@pytest.mark.parametrize("pattern", [(2, 4), (1, 4), (3, 8), (4, 4)], ids=str)
@pytest.mark.parametrize("qtype", [None, "int8", "nf4"])
def test_weights_are_pruned_before_quantization(pattern, qtype):
    of = {"qtype": qtype, "sparsity": pattern}
    quantized = lambda w: w if qtype is None else fake_quantize(w, qtype, channelwise_axes=[1])

    def both(w, x):
        ours = lambda w, x: jnp.sin(vn.implicit(jnp.matmul)(x, FakeQuantized(w, **of))).sum()
        theirs = lambda w, x: jnp.sin(x @ quantized(pruned(w, *pattern))).sum()
        return [jax.value_and_grad(f, (0, 1))(w, x) for f in (ours, theirs)]

    found, wanted = jax.jit(both)(W, X)
    assert_close(found, wanted, 1e-5)
    (_, (by_w, _)), _ = found, wanted
    assert (by_w != 0).all()  # pruned values get gradients, too


def test_masks_equal_nm_sparse():
    tied = jnp.round(W).at[2, 3].set(jnp.nan)
    for axis in (-2, -1):
        for n, m in [(2, 4), (1, 4), (3, 8)]:
            ours = FakeQuantized(tied, sparsity=(n, m), tile_axis=axis).current_mask
            assert (ours == NMSparse.prune(tied, n, m, axis).mask()).all()


def test_masks_equal_qwix():
    import qwix._src.core.sparsity as core

    for axis, order in [(-2, "C"), (-1, "R")]:
        theirs = core.get_sparsity_mask(W, 2, 4, order=order)
        assert (FakeQuantized(W, sparsity=(2, 4), tile_axis=axis).current_mask == theirs).all()


@pytest.mark.parametrize("order", ["C", "R"])
def test_blocks_are_ranked_by_their_absolute_sums(order):
    axis = {"C": -2, "R": -1}[order]
    w = jax.random.normal(KEYS[2], (24, 24))
    weight = FakeQuantized(w, sparsity=(2, 3, 4), tile_axis=axis)
    blocks = jnp.moveaxis(w, axis, -1).reshape(24, 6, 4)
    kept = mask_by_hand(abs(blocks).sum(-1), 2, 3, -1)
    by_hand = jnp.moveaxis(jnp.repeat(kept, 4, -1), -1, axis)
    assert (weight.current_mask == by_hand).all()
    assert (vn.materialise(weight) == jnp.where(by_hand, w, 0)).all()
    assert weight.storage_name == "2 of 3 blocks of 4 kept"
    import qwix._src.core.sparsity as core

    theirs = core.get_sparsity_mask(w, 2, 3, order=order, block_size=4)
    assert (weight.current_mask == theirs).all()


def test_products_on_codes_use_pruned_weights():
    of = {"qtype": "int8", "act_qtype": "int8", "grad_qtype": "int8"}

    def both(w, x):
        ours = lambda w, x: vn.implicit(jnp.matmul)(x, FakeQuantized(w, sparsity=(2, 4), **of))
        theirs = lambda w, x: vn.implicit(jnp.matmul)(x, FakeQuantized(pruned(w, 2, 4), **of))
        return [
            jax.value_and_grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), (0, 1))(w, x)
            for f in (ours, theirs)
        ]

    found, wanted = jax.jit(both)(W, X)
    assert_close(found, wanted, 1e-5)


def test_sparse_products_on_codes_equal_qwix():
    import qwix._src.core.dot_general_qt as core
    import qwix._src.core.sparsity as sparsity

    rule = sparsity.SparsityRule(
        weight_sparsity_n=2, weight_sparsity_m=4, weight_sparsity_order="C"
    )
    names = "lhs_qtype rhs_qtype dlhs_grad_qtype drhs_grad_qtype".split()
    config = core.DotGeneralQtConfig(**dict.fromkeys(names, "int8"), sparsity_rule=rule)
    of = {"qtype": "int8", "act_qtype": "int8", "grad_qtype": "int8", "sparsity": (2, 4)}

    @jax.jit
    def run(x, w, g):
        ours = lambda x, w: vn.implicit(jnp.matmul)(x, FakeQuantized(w, **of))
        theirs = lambda x, w: core.dot_general_qt(x, w, (((1,), (0,)), ((), ())), config)
        pairs = [jax.vjp(f, x, w) for f in (ours, theirs)]
        return [(out, *pull(g)) for out, pull in pairs]

    (out, by_x, by_w), wanted = run(X, W, jax.random.normal(KEYS[2], (6, 8)))
    assert_close((out, by_x), wanted[:2], 1e-5)
    # In qwix, pruned values get no gradient.
    assert_close(jnp.where(mask_by_hand(W, 2, 4), by_w, 0), wanted[2], 1e-5)


def program(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return (x @ params["out"].T).sum()


RULES = [
    Rule("layers", "int4", sparsity=(2, 4)),
    Rule("out", None, tile_axis=-1, sparsity=(1, 4)),
]


@pytest.mark.parametrize("with_saved", [False, True], ids=["computed", "saved"])
def test_stacks_transposes_and_batches_are_supported(with_saved):
    params = {"layers": LAYERS, "out": W.T}

    def ours(params, x):
        params = quantize_tree(params, RULES, train=True)
        if with_saved:
            params = with_masks(params, sparsity_masks(params))
        return vn.implicit(program)(params, x)

    def theirs(params, x):
        for w in params["layers"]:
            dense = fake_quantize(pruned(w, 2, 4), "int4", channelwise_axes=[1])
            x = jnp.tanh(x @ dense)
        return (x @ pruned(params["out"], 1, 4, -1).T).sum()

    xs = jnp.stack([X, 2 * X])
    both = lambda *args: [jax.vmap(jax.grad(f, (0, 1)), (None, 0))(*args) for f in (ours, theirs)]
    found, wanted = jax.jit(both)(params, xs)
    assert_close(found, wanted, 1e-4)


def test_saved_masks_stay_until_recomputed():
    params = quantize_tree(
        {"w": W, "b": jnp.zeros(8)}, [Rule("w", "int8", sparsity=(2, 4))], train=True
    )
    masks = sparsity_masks(params)
    assert masks["b"] is None
    assert (masks["w"] == mask_by_hand(W, 2, 4)).all()
    flipped = jax.tree.map(lambda x: x[::-1], params)
    assert (vn.materialise(with_masks(flipped, masks)["w"])[~masks["w"]] == 0).all()
    assert (sparsity_masks(flipped)["w"] == mask_by_hand(W[::-1], 2, 4)).all()
    assert (sparsity_masks(with_masks(flipped, masks))["w"] == mask_by_hand(W[::-1], 2, 4)).all()
    all_kept = jax.tree.map(jnp.ones_like, masks)
    dense = quantize_tree({"w": W}, [Rule("w", "int8")])["w"]
    assert_close(vn.materialise(with_masks(params, all_kept)["w"]), dense.dequantize(), 0)


def test_masks_can_change_on_a_schedule():
    target = X @ jnp.where(mask_by_hand(W, 2, 4), W, 0)
    rule = Rule("w", "int8", sparsity=(2, 4))
    params = quantize_tree({"w": W + 0.3}, [rule], train=True)
    tx = optax.adam(0.02)

    @jax.jit
    def step(i, params, masks, state):
        masks = jax.lax.cond(i % 10 == 5, lambda: sparsity_masks(params), lambda: masks)

        def loss(params):
            return vn.implicit(lambda p: ((X @ p["w"] - target) ** 2).mean())(
                with_masks(params, masks)
            )

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), masks, state, value

    masks = jax.tree.map(jnp.ones_like, sparsity_masks(params))
    state, values, changes = tx.init(params), [], []
    for i in range(60):
        before = masks["w"]
        params, masks, state, value = step(i, params, masks, state)
        values.append(value)
        changes += [i] if (before != masks["w"]).any() else []
    assert changes[0] == 5
    assert {i % 10 for i in changes} == {5}
    assert masks["w"].sum(0).tolist() == [8] * 8
    assert values[-1] < values[6] / 2


def test_high_types_give_the_same_gradients():
    of = {"qtype": "int8", "act_qtype": "int8", "grad_weight": BackwardProduct("int4")}
    w = FakeQuantized(W, sparsity=(2, 4), **of)
    masks = sparsity_masks(w)
    loss = lambda w, x: jnp.sin(x @ w).sum()
    wanted = jax.jit(jax.value_and_grad(vn.implicit(loss)))(w, X)

    with vn.hijax.enabled():
        found = jax.jit(jax.value_and_grad(loss))(w, X)
        kept = jax.jit(jax.value_and_grad(lambda w, m: loss(with_masks(w, m), X)))(w, masks)

    for value, gradient in (found, kept):
        assert_close((value, gradient.w), (wanted[0], wanted[1].w), 1e-5)


def test_converted_weights_have_the_zeros():
    trained = quantize_tree(
        {"w": W}, [Rule("w", "int4", act_qtype="int8", sparsity=(2, 4))], train=True
    )
    out = vn.quant.convert(trained)["w"]
    assert ((out.array.codes() == 0) >= ~mask_by_hand(W, 2, 4)).all()
    assert (vn.materialise(out) == vn.materialise(trained["w"])).all()


def test_sharding_does_not_split_groups():
    P = jax.sharding.PartitionSpec
    w = FakeQuantized(W, sparsity=(2, 4))
    w = w.with_mask(w.current_mask)
    cut = w.partition(P(None, "x"), (16, 4))
    assert (cut.w, cut.mask) == (P(None, "x"), P(None, "x"))
    tiled = FakeQuantized(W, qtype="int8", tile_size=2, sparsity=(2, 4))
    assert tiled.partition(P("x", None), (8, 8)).w == P("x", None)
    assert tiled.partition(P("x", None), (2, 8)) is None


@pytest.mark.parametrize(
    ("error", "says", "fields"),
    [
        (TypeError, "sparsity must be", {"sparsity": "2:4"}),
        (TypeError, "sparsity must be", {"sparsity": 2}),
        (ValueError, "must have 1 <= n", {"sparsity": (5, 4)}),
        (ValueError, "must have 1 <= n", {"sparsity": (0, 4)}),
        (ValueError, "groups of 3", {"sparsity": (1, 3)}),
        (ValueError, "no code for 0", {"qtype": "int1", "sparsity": (2, 4)}),
        (ValueError, "mask must be", {"mask": arrays.ones((16, 8))}),
        (ValueError, "mask must be", {"mask": arrays.ones((8, 16), bool)}),
    ],
)
def test_wrong_sparsity_raises(error, says, fields):
    with pytest.raises(error, match=says):
        FakeQuantized(W, **fields)


def test_masks_of_other_trees_raise():
    params = quantize_tree({"w": W}, [Rule("w", "int4", sparsity=(2, 4))], train=True)
    masks = sparsity_masks(params)
    with pytest.raises(ValueError, match="mask must be"):
        with_masks(params, jax.tree.map(lambda m: m[:4], masks))
    with pytest.raises(ValueError, match="where params has"):
        with_masks({"w": W}, masks)
    with pytest.raises(ValueError, match="sparsity is for training"):
        quantize_tree({"w": W}, [Rule("w", "int4", sparsity=(2, 4))])
