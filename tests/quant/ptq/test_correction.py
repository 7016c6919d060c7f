import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays

import veneer as vn
from veneer.quant import Rule, calibrate, quantize_tree
from veneer.quant.ptq.gptq import low_rank_factors

RNG = np.random.default_rng(0)


def numbers(*shape, scale=None, seed=0):
    values = np.random.default_rng([seed, *shape]).normal(size=shape)
    return (values * (scale or shape[0] ** -0.5)).astype(np.float32)


def array(*shape, **how):
    return arrays.array(numbers(*shape, **how))


MIX = numbers(32, 32, seed=1)
BATCHES = [arrays.array(numbers(96, 32, scale=1, seed=i) @ MIX) for i in range(2)]
HELD = arrays.array(numbers(100, 32, scale=1) @ MIX)


def corrected_in_numpy(lost, gram, rank):
    """Return QERA's solution as in the paper, with the root of the moments and its inverse."""
    values, vectors = np.linalg.eigh(gram)
    root = vectors * np.sqrt(values) @ vectors.T
    left, singular, right = np.linalg.svd(root @ lost, full_matrices=False)
    kept = left[:, :rank] * singular[:rank] @ right[:rank]
    return np.linalg.solve(root, kept), np.square(singular[rank:]).sum()


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (9, 9)])
@pytest.mark.parametrize("rank", [1, 4, 7])
def test_the_correction_equals_a_numpy_reference(shape, rank):
    lost = RNG.normal(size=shape)
    x = RNG.normal(size=(40, shape[0])) @ RNG.normal(size=(shape[0], shape[0]))
    a, b = low_rank_factors(lost, x.T @ x, rank)
    expected, discarded = corrected_in_numpy(lost, x.T @ x, rank)
    np.testing.assert_allclose(a @ b, expected, atol=1e-8)
    np.testing.assert_allclose(np.square(x @ (lost - a @ b)).sum(), discarded, atol=1e-8)
    np.testing.assert_allclose(np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=1))


@pytest.mark.parametrize("shape", [(12, 7), (7, 12)])
def test_singular_and_zero_moments_are_supported(shape):
    lost, x = RNG.normal(size=shape), RNG.normal(size=(3, shape[0]))
    a, b = low_rank_factors(lost, x.T @ x, 3)  # the rank of the activations
    np.testing.assert_allclose(x @ (lost - a @ b), 0, atol=1e-9)
    a, b = low_rank_factors(lost, np.zeros((shape[0], shape[0])), 2)
    singular = np.linalg.svd(lost, compute_uv=False)
    np.testing.assert_allclose(np.square(lost - a @ b).sum(), np.square(singular[2:]).sum())


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (3, 8, 16)])
def test_without_data_the_error_is_the_best_possible(shape):
    w = array(*shape)
    q = quantize_tree({"w": w}, [Rule("w", "int3")])["w"]
    singular = np.linalg.svd(w - q.dequantize(), compute_uv=False)
    for rank in (4, 100):
        small = quantize_tree({"w": w}, [Rule("w", "int3", correction_rank=rank)])["w"]
        assert isinstance(small, vn.types.LoraArray)
        assert small.rank == min(rank, 8)
        np.testing.assert_array_equal(small.w.qvalue, q.qvalue)
        lost = np.square(small.materialise() - w).sum()
        np.testing.assert_allclose(
            lost, np.square(singular[..., rank:]).sum(), rtol=1e-4, atol=1e-9
        )


def loftq_in_numpy(w, qtype, rank, steps):
    low, lost = np.zeros(w.shape), []
    for _ in range(steps):
        q = quantize_tree({"w": w - low}, [Rule("w", qtype)])["w"].dequantize()
        left, singular, right = np.linalg.svd(w - q)
        low = left[:, :rank] * singular[:rank] @ right[:rank]
        lost.append(np.linalg.norm(w - q - low))
    return lost


# Not int2, because the largest value of each of its tiles is a tie.
@pytest.mark.parametrize("qtype", ["nf4", "uint2"])
def test_loftq_keeps_the_best_step(qtype):
    w = array(64, 64)
    each = loftq_in_numpy(w, qtype, 8, 4)
    for steps in (1, 2, 4):
        rule = Rule("w", qtype, correction_rank=8, correction_steps=steps)
        lost = jnp.linalg.norm(quantize_tree({"w": w}, [rule])["w"].materialise() - w)
        np.testing.assert_allclose(lost, min(each[:steps]), rtol=1e-4)
    assert lost < 0.97 * each[0]


def test_a_correction_is_trainable_and_has_a_known_shape():
    w = array(32, 16).astype(jnp.bfloat16)
    rules = [Rule("w", "nf4", tile_size=16, correction_rank=4, correction_steps=2)]
    quantized = lambda params: quantize_tree(params, rules)
    small, abstract = quantized({"w": w}), jax.eval_shape(quantized, {"w": w})
    assert small["w"].nbytes == abstract["w"].nbytes
    assert small["w"].a.dtype == jnp.bfloat16
    trainable = vn.trainable(small)
    assert [leaf.shape for leaf in jax.tree.leaves(vn.tree.partition(small, trainable)[0])] == [
        (32, 4),
        (4, 16),
    ]


def heads(params, x):
    y = jnp.einsum("td,dhk->thk", x, params["q"])
    y = jnp.einsum("thk,hkd->td", y, params["o"]) + x
    return y @ params["t"].T


HEADS = {"q": array(32, 4, 8), "o": array(4, 8, 32), "t": array(16, 32)}


@pytest.mark.parametrize("how", [{}, {"rotate": True}, {"act_qtype": "int8", "rotate": True}])
def test_corrected_weights_stay_packed_in_products(how):
    rules = [Rule(".*", "int3", tile_size=16, correction_rank=6, **how)]
    plain = [Rule(".*", "int3", tile_size=16, **how)]
    params, expected = HEADS, heads(HEADS, HELD)
    lost = lambda small: float(jnp.linalg.norm(vn.implicit(heads)(small, HELD) - expected))
    data_free = quantize_tree(params, rules, model=heads, args=(HELD,))
    calibration = calibrate(heads, rules, params=params)
    small = calibration(BATCHES)
    for tree in (data_free, small):
        assert [tree["q"].a.shape, tree["q"].b.shape] == [(32, 6), (6, 4, 8)]
        assert [tree["o"].a.shape, tree["o"].b.shape] == [(4, 8, 6), (6, 32)]
        assert [tree["t"].a.shape, tree["t"].b.shape] == [(16, 6), (6, 32)]
        dense = vn.explain(heads)(tree, HELD).materialised
        names = [name for event in dense for name in event.operands]
        assert not [name for name in names if name.startswith(("LoraArray", "Rotated"))]
    uncorrected = calibrate(heads, plain, params=params)(BATCHES)
    assert lost(small) < 0.8 * lost(uncorrected)
    assert lost(data_free) < 0.9 * lost(quantize_tree(params, plain, model=heads, args=(HELD,)))
    x = np.concatenate(BATCHES)
    loss = {row.path: row for row in calibration.report.rows}["q"]
    w, q = (np.asarray(vn.materialise(p["q"])).reshape(32, 32) for p in (params, small))
    share = np.linalg.norm(x @ (q - w)) / np.linalg.norm(x @ w)
    np.testing.assert_allclose(loss.after, share, rtol=1e-3)
    assert loss.correction_rank == 6
    assert "gptq, rank 6" in str(calibration.report)


@pytest.mark.parametrize("sequential", [False, True])
def test_layers_of_a_scan_have_separate_corrections(sequential):
    params = {"w": array(2, 32, 32, scale=0.2), "head": array(32, 8)}

    @jax.jit
    def scanned(params, x):
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["w"])
        return x @ params["head"]

    def lost(rank, **options):
        rules = [Rule(".*", "int3", correction_rank=rank)]
        small = calibrate(scanned, rules, params=params, **options)(BATCHES)
        return float(jnp.linalg.norm(vn.implicit(scanned)(small, HELD) - scanned(params, HELD)))

    assert lost(8, sequential=sequential) < 0.75 * lost(None, sequential=sequential)
    with pytest.warns(UserWarning, match="low-rank corrections"):
        assert lost(32, sequential=sequential) < 1e-3


def test_embeddings_and_kernels_are_corrected_without_data():
    params = {"table": array(40, 16, scale=1), "kernel": array(3, 3, 4, 8)}

    def model(params, ids):
        image = params["table"][ids].reshape(-1, 4, 4, 4)
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(image, params["kernel"], (1, 1), "SAME", None, None, dims)

    ids = jnp.arange(32)
    rules = [Rule(".*", "int4", correction_rank=4)]
    small = quantize_tree(params, rules, model=model, args=(ids,))
    assert small["kernel"].a.shape == (3, 3, 4, 4)
    plain = quantize_tree(params, [Rule(".*", "int4")], model=model, args=(ids,))
    lost = lambda small: float(jnp.linalg.norm(vn.implicit(model)(small, ids) - model(params, ids)))
    assert lost(small) < 0.95 * lost(plain)


def test_unused_experts_and_grouped_columns_are_corrected():
    params = {"experts": array(3, 32, 16), "groups": array(4, 8, 2, 8)}

    def model(params, x):
        y = x @ params["experts"][0] - x @ params["experts"][2]
        # The axes are free, contracted, free: each of the four blocks has its own correction.
        return y, jnp.einsum("td,gdek->tgek", x[:, :8], params["groups"])

    rules = [Rule(".*", "int3", correction_rank=4)]
    small = calibrate(model, rules, params=params)(BATCHES)
    assert small["experts"].a.shape == (3, 32, 4)
    assert small["groups"].a.shape == (4, 8, 4)
    lost = np.square(small["experts"].materialise()[1] - params["experts"][1])
    assert (
        lost.sum()
        < 0.8 * np.square(small["experts"].w.dequantize()[1] - params["experts"][1]).sum()
    )
    for expected, y in zip(model(params, HELD), vn.implicit(model)(small, HELD), strict=True):
        assert jnp.linalg.norm(expected - y) < 0.2 * jnp.linalg.norm(expected)


def test_contracted_leading_axes_are_corrected_in_parts():
    params = {"w": array(4, 32, 8)}
    model = lambda params, x: jnp.einsum("thk,hdk->td", x.reshape(-1, 4, 8), params["w"])
    rules = [Rule("w", "int3", correction_rank=3)]
    small = calibrate(model, rules, params=params)(BATCHES)
    assert small["w"].b.shape == (4, 3, 8)
    plain = calibrate(model, [Rule("w", "int3")], params=params)(BATCHES)
    lost = lambda p: float(jnp.linalg.norm(vn.implicit(model)(p, HELD) - model(params, HELD)))
    assert lost(small) < 0.95 * lost(plain)


def test_wrong_corrections_raise():
    for rank in (0, -1):
        with pytest.raises(ValueError, match="correction_rank must be an integer of 1 or more"):
            Rule(".*", "int4", correction_rank=rank)
    with pytest.raises(ValueError, match="qtype=None leaves the weight dense"):
        Rule(".*", None, correction_rank=4)
    with pytest.raises(ValueError, match="needs a correction_rank"):
        Rule(".*", "int4", correction_steps=4)
    rule = Rule(".*", "int4", correction_rank=2, correction_steps=4)
    with pytest.raises(ValueError, match="train=True does not support correction_rank"):
        quantize_tree(HEADS, [rule], train=True)
    with pytest.raises(ValueError, match="calibrate computes the best correction"):
        calibrate(heads, [rule], params=HEADS)
    stacked = {"w": array(8, 3, 16)}  # the stacked axis is between the others
    model = lambda params, x: jnp.einsum("tld,dlk->tlk", x, params["w"])
    with pytest.raises(ValueError, match="w: correction_rank does not support shape"):
        quantize_tree(stacked, [rule], model=model, args=(jnp.ones((2, 3, 8)),))
    with pytest.warns(UserWarning, match=r"low-rank corrections: w \[64, 64\] takes"):
        quantize_tree({"w": array(64, 64)}, [Rule("w", "int8", correction_rank=60)])
