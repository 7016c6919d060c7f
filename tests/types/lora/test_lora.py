"""Tests of `LoraArray` against the dense weight `w + scale * a @ b`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import arrays, transformer
from support.annotations import unless_checked
from support.array_types import assert_close
from support.claims import Claim, claims
from support.policies import only_by_rules

import veneer as vn
from veneer.types import lora
from veneer.types.lora import LoraArray
from veneer.types.structured.diagonal import Diagonal

KEY = arrays.key(0)


def with_dense(draw, ins=None, outs=(6,), **options):
    """Make a weight `[..., n, 6]`, or one with other input and output axes."""
    ins = (draw.n,) if ins is None else ins
    w, a, b = draw(*ins, *outs), draw(*ins, 2), draw(2, *outs)
    return LoraArray(w, a, b, scale=0.5, in_ndim=len(ins), out_ndim=len(outs), **options)


def with_int8(draw):
    x = with_dense(draw)
    channels = [i for i in range(x.ndim) if i != x.ndim - 2]
    return LoraArray(vn.quant.quantize(x.w, "int8", channelwise_axes=channels), x.a, x.b, scale=2.0)


def with_magnitude(draw):
    return with_dense(draw, magnitude=draw.positive(1, 6))


def with_diagonal(draw):
    w, a, b = draw.positive(draw.n), draw(draw.n, 2), draw(2, draw.n)
    return LoraArray(Diagonal(w + 1), a, b, scale=0.25)


def heads(draw):
    return with_dense(draw, outs=(2, 3))


vectors = lambda draw: draw(3, draw.n)
of_width_6 = lambda draw: draw(3, 6)


def two_with_dense(draw):
    """Make a weight `[..., 2, n, 6]`."""
    return jax.tree.map(lambda *xs: jnp.stack(xs, -3), with_dense(draw), with_dense(draw))


ids = lambda draw: jax.random.randint(draw.key, (*draw.batch, 2, 3), 0, draw.n)
# Claims differentiate the sine of the result. In bfloat16, that sine has another derivative.
AT_ANOTHER_POINT = ("grad of implicit", "implicit of grad")
KEPT = {"kept": LoraArray, "sizes": (), "dtypes": ()}
FACTORIZED = {"dtypes": ("float64",), "sizes": (1, 5)}

test_under, test_over = claims(
    {
        "x @ w": Claim(lambda x, w: x @ w, (vectors, with_dense)),
        "x @ w.T": Claim(lambda x, w: x @ w.mT, (of_width_6, with_dense)),
        "w @ x": Claim(lambda w, x: w @ x.mT, (with_dense, of_width_6), sizes=()),
        "x @ w, of int8": Claim(lambda x, w: x @ w, (vectors, with_int8), sizes=(1, 5)),
        "x @ w, of a structure": Claim(lambda x, w: x @ w, (vectors, with_diagonal), sizes=()),
        "x @ w, with a magnitude": Claim(lambda x, w: x @ w, (vectors, with_magnitude)),
        "x @ w.T, with a magnitude": Claim(
            lambda x, w: x @ w.mT, (of_width_6, with_magnitude), sizes=()
        ),
        "to heads": Claim(
            lambda x, w: jnp.einsum("...sd,...dhk->...shk", x, w.reshape(*w.shape[:-1], 2, 3)),
            (vectors, with_dense),
            sizes=(),
        ),
        "from heads": Claim(
            lambda x, w: jnp.einsum("...shk,...hkd->...sd", x, w),
            (lambda d: d(3, 2, d.n), lambda d: with_dense(d, (2, d.n))),
            sizes=(0,),
        ),
        "free leading axes": Claim(
            lambda x, w: jnp.einsum("sd,ldo->slo", x, w),
            (lambda d: d(3, 4), two_with_dense),
            sizes=(),
            dtypes=(),
        ),
        "contracted leading axes": Claim(
            lambda x, w: jnp.einsum("shk,hkd->sd", x, w),
            (lambda d: d(3, 2, 4), two_with_dense),
            sizes=(),
            dtypes=(),
        ),
        "transposes, reversals": Claim(
            lambda w: [w.mT, jnp.flip(w, -1), jnp.flip(w, -2)], (with_magnitude,), **KEPT
        ),
        "slices of output axes": Claim(
            lambda w: [w[..., 1:4], w[..., ::2], *jnp.split(w, 3, axis=-1)],
            (with_magnitude,),
            **KEPT,
        ),
        "slices of input axes": Claim(lambda w: w[..., 1:, :], (with_dense,), **KEPT),
        "dynamic slices": Claim(
            lambda w: jax.lax.dynamic_slice_in_dim(w, jnp.int32(1), 2, -1),
            (with_magnitude,),
            without=("implicit of vmap",),  # JAX turns it into a gather
            **KEPT,
        ),
        "reshapes": Claim(
            lambda w: [
                w.reshape(*w.shape[:-1], 3, 2),
                w.reshape(*w.shape[:-2], 2, 2, 6).reshape(w.shape),
            ],
            (with_magnitude,),
            **KEPT,
        ),
        "multiples": Claim(lambda w: [2 * w, -w / 3], (with_dense,), **KEPT),
        "a multiple of a magnitude": Claim(lambda w: -2 * w, (with_magnitude,), **KEPT),
        "conversions": Claim(
            lambda w: w.astype(jnp.bfloat16), (with_int8,), without=AT_ANOTHER_POINT, **KEPT
        ),
        "stop_gradient": Claim(jax.lax.stop_gradient, (with_magnitude,), **KEPT),
        "sums": Claim(lambda w: (w.sum((-1, -2)), w.sum(-2), w.sum(-1)), (with_dense,), sizes=()),
        "rows": Claim(lambda w, i: w[i], (with_magnitude, ids), sizes=(1,)),
        "rows of int8": Claim(lambda w, i: w[i], (with_int8, ids), sizes=(1,)),
        "rows, filled": Claim(
            lambda w, i: jnp.take(w, 2 * i, axis=0, mode="fill", fill_value=7),
            (with_dense, ids),
            sizes=(),
        ),
        "convolution": Claim(
            lambda x, w: jax.lax.conv_general_dilated(
                x, w, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            (
                lambda d: d(2, 5, 4, d.n),
                lambda d: with_dense(d, (2, 3, d.n), magnitude=d.positive(1, 1, 1, 6)),
            ),
            sizes=(),
            without=("implicit of vmap",),  # JAX turns it into a grouped convolution
        ),
        "solve": Claim(jnp.linalg.solve, (with_diagonal, lambda d: d(d.n, 3)), **FACTORIZED),
        "det": Claim(jnp.linalg.det, (with_diagonal,), **FACTORIZED),
        "inv": Claim(jnp.linalg.inv, (with_diagonal,), kept=LoraArray, **FACTORIZED),
        "trace": Claim(lambda w: jnp.trace(w, axis1=-2, axis2=-1), (with_dense,), sizes=()),
    }
)


@pytest.mark.parametrize(
    "move",
    [
        lambda w: w.transpose(0, 2, 1),
        lambda w: w.reshape(9, 3),
        lambda w: jnp.exp(w),
        lambda w: w.sum(1),
        lambda w: w @ jnp.ones((3, 3, 2)),
    ],
    ids=["transpose", "reshape", "exp", "sum", "matmul"],
)
@pytest.mark.parametrize("ins", [1, 2])
def test_operations_that_split_an_axis_group_match_dense(move, ins):
    w = example((3, 9)) if ins == 1 else example((9, 3))
    w = vn.implicit(lambda w: w.reshape(3, 3, 3))(w)
    assert w.in_ndim == ins
    assert_close(vn.implicit(move)(w), move(vn.materialise(w)))


# Programs.

X = arrays.normal(5, 3)


def example(shape=(3, 4), rank=2, key=KEY, **options):
    *lead, m, n = shape
    keys = jax.random.split(key, 3)
    shapes = shape, (*lead, m, rank), (*lead, rank, n)
    return LoraArray(*map(jax.random.normal, keys, shapes), **{"scale": 0.5} | options)


def test_a_product_has_the_handwritten_jaxpr():
    by_hand = lambda x, w: x @ w.w + w.scale * (x @ w.a) @ w.b
    ours = jax.make_jaxpr(vn.implicit(lambda x, w: x @ w))(X, example())
    assert str(ours) == str(jax.make_jaxpr(by_hand)(X, example()))


@arrays.once
def dense_parameters():
    return transformer.init(KEY, layers=2, d=8, hidden=12)


IDS = arrays.array(np.arange(8).reshape(2, 4))


def test_a_transformer_has_the_handwritten_jaxpr():
    ours = jax.make_jaxpr(vn.implicit(transformer.forward))(
        transformer.with_low_rank(dense_parameters(), LoraArray), IDS
    )
    by_hand = lambda *args: transformer.forward(*args, matmul=transformer.by_hand)
    assert str(ours) == str(
        jax.make_jaxpr(by_hand)(transformer.with_low_rank(dense_parameters()), IDS)
    )


def int8(w):
    return vn.quant.quantize(w, "int8", channelwise_axes=[1])


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"dropout": 0.5}], ids=str)
def test_training_materializes_no_weight_of_a_transformer(options):
    make = lambda w, a, b: LoraArray.init(int8(w), 2, key=KEY, **options)
    params = transformer.with_low_rank(dense_parameters(), make)
    params = lora.with_dropout(params, KEY)
    is_trained = lambda path, x: isinstance(x, LoraArray)
    trained, rest = vn.tree.partition(params, vn.trainable(params, is_trained))

    def loss(trained):
        params = vn.tree.combine(trained, rest)
        program = vn.implicit(transformer.forward, on_materialise=only_by_rules)
        return jnp.sum(program(params, IDS) ** 2)

    grads = jax.jit(jax.grad(loss))(trained)
    layer = grads["layers"][0]["up"]
    assert layer.w.packed is None
    assert jnp.any(layer.b != 0)
    assert grads["embedding"] is None


def test_a_bf16_weight_with_f32_factors_returns_bf16():
    w = example()
    mixed = LoraArray(w.w.astype(jnp.bfloat16), w.a, w.b, scale=0.5)
    assert mixed.dtype == vn.materialise(mixed).dtype == jnp.bfloat16
    y = X.astype(jnp.bfloat16) @ mixed
    assert y.dtype == jnp.bfloat16
    assert_close(y.astype(jnp.float32), X @ vn.materialise(w), 0.1)


def test_f32_factors_of_a_bf16_weight_are_multiplied_in_f32():
    x = jnp.linspace(1, 2, 15, dtype=jnp.bfloat16).reshape(5, 3)
    w = example().changed(w=jnp.zeros((3, 4), jnp.bfloat16))
    expected = 0.5 * (x.astype(jnp.float32) @ w.a) @ w.b
    assert (x @ w == expected.astype(jnp.bfloat16)).all()


def test_a_weight_may_be_frozen():
    params = LoraArray(vn.freeze(jnp.eye(3)), jnp.ones((3, 1)), jnp.ones((1, 3)))
    grads = jax.grad(lambda w: jnp.sum(X @ w))(params)
    assert not grads.w.x.any()
    assert grads.a.any()


# Constructors.


def test_init_returns_an_update_of_zero():
    w = LoraArray.init(example().w, 2, key=KEY, dora=True)
    assert_close(vn.materialise(w), w.w)
    assert jnp.abs(w.a).max() <= 1 / np.sqrt(3)
    assert w.a.std() > 0.1


@pytest.mark.parametrize(
    ("options", "scale"),
    [({}, 1), ({"alpha": 8}, 2), ({"alpha": 8, "rs_lora": True}, 4), ({"rs_lora": True}, 2)],
    ids=str,
)
def test_the_scale_follows_from_alpha_and_the_rank(options, scale):
    assert LoraArray.init(jnp.ones((6, 5)), 4, key=KEY, **options).scale == scale


def test_only_the_adapter_is_trainable():
    w = LoraArray.init(jnp.ones((6, 5)), 4, key=KEY, dora=True)
    mask = vn.trainable(w)
    assert (mask.w, mask.a, mask.b, mask.magnitude) == (False, True, True, True)


def test_gradients_treat_the_dora_norm_as_constant():
    w = example(magnitude=jnp.ones((1, 4)))
    lengths = jnp.linalg.norm(w.w + 0.5 * w.a @ w.b, axis=0)
    by_hand = lambda a: jnp.sin(X @ ((w.w + 0.5 * a @ w.b) / lengths)).sum()
    ours = lambda a: jnp.sin(X @ w.changed(a=a)).sum()
    assert_close(jax.grad(ours)(w.a), jax.grad(by_hand)(w.a))


def test_a_column_of_zeros_stays_zero_with_dora():
    w = LoraArray.init(jnp.eye(3)[:, :2] * jnp.array([1.0, 0.0]), 1, key=KEY, dora=True)
    assert_close(vn.materialise(w), w.w)
    assert_close(X @ w, X @ w.w)


def test_nbytes_counts_all_leaves():
    w = LoraArray(int8(jnp.ones((64, 32))), jnp.ones((64, 2)), jnp.ones((2, 32)))
    assert w.nbytes == 64 * 32 + 4 * 32 + 4 * 64 * 2 + 4 * 2 * 32


def test_repr_omits_defaults():
    w = LoraArray.init(int8(jnp.ones((4, 4))), 1, key=KEY, dora=True, dropout=0.5)
    assert repr(w) == (
        "LoraArray(w=QArray:f32[4,4], a=f32[4,1], b=f32[1,4], magnitude=f32[1,4], scale=1.0, "
        "dropout=0.5)"
    )


W, A, B = arrays.ones((3, 4)), arrays.ones((3, 2)), arrays.ones((2, 4))
REFUSED = {
    "rank": (ValueError, "axis rank of b is 3", lambda: LoraArray(W, A, jnp.ones((3, 4)))),
    "leading axes": (ValueError, "leading axes differ", lambda: LoraArray(W[None], A, B)),
    "no array": (TypeError, "an array for a", lambda: LoraArray(W, 1.0, B)),
    "integers": (TypeError, "a floating weight", lambda: LoraArray(W.astype(int), A, B)),
    "a traced scale": (TypeError, "static", lambda: LoraArray(W, A, B, scale=jnp.ones(2))),
    "magnitude": (ValueError, "magnitude", lambda: LoraArray(W, A, B, jnp.ones(4))),
    "dropout": (ValueError, r"in \[0, 1\)", lambda: LoraArray(W, A, B, dropout=1.0)),
    "dropped": (ValueError, "'in' or 'out'", lambda: LoraArray(W, A, B, dropped="all")),
    "key": (ValueError, "dropout_key", lambda: LoraArray(W, A, B, None, jax.random.split(KEY, 3))),
    "in_ndim": (ValueError, "at least one input axis", lambda: LoraArray(W, A, B, in_ndim=0)),
    "scale": (TypeError, "must be a Python number, not 'x'", lambda: LoraArray(W, A, B, scale="x")),
    "no dropout": (TypeError, "a Python number in", lambda: LoraArray(W, A, B, dropout="x")),
    "rank 0": (ValueError, "at least 1, not 0", lambda: LoraArray.init(W, 0, key=KEY)),
}


@pytest.mark.parametrize(("error", "message", "make"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_raise(error, message, make):
    with pytest.raises(error, match=message):
        make()


# Dropout.


def dropping(key=KEY, **options):
    return example(dropout=0.5, **options).changed(dropout_key=key)


def test_dropout_applies_only_to_the_update():
    w = dropping(shape=(3, 3)).changed(w=jnp.zeros((3, 3)), a=jnp.eye(3), b=jnp.eye(3), scale=1.0)
    x = jnp.ones((200, 3))
    kept = x @ w
    assert set(np.unique(kept)) == {0.0, 2.0}  # so the mean stays the same
    assert 0.4 < (kept == 0).mean() < 0.6
    assert_close(x @ w.changed(w=jnp.eye(3)) - kept, x)


def test_the_same_key_drops_the_same_entries():
    w = dropping()
    assert_close(X @ w, vn.implicit(jax.jit(jnp.matmul))(X, w))
    assert not jnp.allclose(X @ w, X @ dropping(jax.random.key(1)))


def test_without_a_key_dropout_is_off():
    assert_close(X @ example(dropout=0.5), X @ vn.materialise(example()))


def test_gradients_drop_the_same_entries():
    w = dropping()
    f = lambda x, w: jnp.sum(jnp.sin(x @ w))
    by_rules = jax.grad(vn.implicit(f))(X, w)
    assert_close(vn.implicit(jax.grad(f))(X, w), by_rules)


def test_a_transposed_weight_drops_the_same_entries():
    w, turned = dropping(), dropping().T
    assert turned.dropped == "out"
    assert_close(X @ w, vn.implicit(lambda x, w: x @ w.T)(X, turned))


@pytest.mark.parametrize("raw", [False, True], ids=["typed keys", "raw keys"])
def test_stacked_weights_have_their_own_dropout_keys(raw):
    keys = jax.random.split(KEY, 2)
    w = example((2, 3, 4), dropout=0.5).changed(
        dropout_key=jax.random.key_data(keys) if raw else keys
    )
    x = jnp.stack([X, X])
    each = jax.vmap(vn.implicit(jnp.matmul))(x, w)
    assert_close(vn.implicit(jnp.matmul)(x, w), each)
    _, scanned = jax.lax.scan(lambda c, xw: (c, vn.implicit(jnp.matmul)(*xw)), 0, (x, w))
    assert_close(scanned, each)
    assert not jnp.allclose(each[0] - X @ w.w[0], 0)


def test_with_dropout_gives_each_array_its_own_key():
    tree = {"a": example(dropout=0.5), "b": [example((2, 3, 4), dropout=0.1)], "c": example()}
    keyed = lora.with_dropout(tree, KEY)
    a, b = keyed["a"].dropout_key, keyed["b"][0].dropout_key
    assert (a.shape, b.shape) == ((), (2,))
    assert len({bytes(jax.random.key_data(k)) for k in (a, *b)}) == 3
    assert keyed["c"].dropout_key is None
    assert not any(w.drops for w in vn.tree.leaves(lora.without_dropout(keyed)))


def test_raw_and_typed_keys_drop_the_same_entries():
    tree = [example((2, 3, 4), dropout=0.5)]
    raw, typed = (
        lora.with_dropout(tree, make(0))[0] for make in (jax.random.PRNGKey, jax.random.key)
    )
    x = jnp.stack([X, X])
    assert_close(x @ raw, x @ typed)


def test_a_weight_with_a_dropout_key_cannot_be_materialized():
    with pytest.raises(TypeError, match="without_dropout"):
        vn.materialise(dropping())
    with pytest.raises(TypeError, match="without_dropout"):
        jnp.sum(vn.implicit(jnp.exp)(dropping()))
    assert dropping().shape == (3, 4)


# Trees.


@unless_checked
def test_join_raises_if_its_arguments_are_swapped():
    base, adapters = lora.split({"w": LoraArray(W, A, B)})
    with pytest.raises(TypeError, match=r"adapters must hold LoraArrays and None, .* not f32\["):
        lora.join(adapters, base)


def test_merge_returns_dense_arrays_and_ignores_dropout():
    merged = lora.merge({"w": dropping(), "b": X})
    assert_close(merged, {"w": vn.materialise(example()), "b": X})


def test_split_and_join_are_inverse():
    tree = {"w": example(dropout=0.5), "q": int8(jnp.ones((3, 4))), "b": X}
    base, adapters = lora.split(tree)
    assert {x.shape for x in jax.tree.leaves(adapters)} == {(3, 2), (2, 4)}
    assert not any(isinstance(x, LoraArray) for x in vn.tree.leaves(base))
    joined = lora.join(base, adapters)
    assert jax.tree.structure(joined) == jax.tree.structure(tree)
    assert_close(joined, tree)


def test_join_raises_for_weights_of_another_shape():
    _, adapters = lora.split([example()])
    with pytest.raises(ValueError, match="LoraArray takes w"):
        lora.join([jnp.ones((4, 4))], adapters)


# On several devices.

several = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@several
@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "y"), P("x")], ids=str)
@pytest.mark.parametrize("of", ["dense", "int8"])
def test_leaves_are_sharded_like_the_weight(of, spec):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    w = example((8, 8))
    w = LoraArray(int8(w.w), w.a, w.b) if of == "int8" else w
    place = lambda w: jax.lax.with_sharding_constraint(w, jax.NamedSharding(mesh, spec))
    out = jax.jit(vn.implicit(place, on_materialise="error"))(w)
    assert isinstance(out, LoraArray)
    assert_close(out, vn.materialise(w))
    rows, columns = (*spec, None)[:2]
    assert out.a.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(rows)), 2)
    assert out.b.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(None, columns)), 2)


@several
def test_sharding_a_norm_axis_materializes_a_dora_weight():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    w = example((8, 8), magnitude=jnp.ones((1, 8)))
    for spec, made_dense in ((P(None, "x"), 0), (P("x"), 1)):
        f = jax.shard_map(
            lambda w: jnp.ones((8, w.shape[0])) @ w,
            mesh=mesh,
            in_specs=spec,
            out_specs=P(None, "x"),
        )
        assert len(vn.explain(f)(w).materialised) == made_dense


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x[:, :1].T @ jnp.ones(2),
        lambda x: x.T[1],
        lambda x: x.T[:1],
        lambda x: x.T * 1,
        lambda x: x[:, :1].reshape(1, 2, 1) @ jnp.ones((1, 1)),
    ],
)
def test_dora_finds_its_norm_axes_if_all_axes_have_size_1(run):
    w = jnp.arange(1.0, 7).reshape(2, 3)
    dora = LoraArray(w, jnp.ones((2, 1)), jnp.ones((1, 3)), jnp.ones((1, 3)))
    assert jnp.allclose(vn.materialise(vn.implicit(run)(dora)), run(vn.materialise(dora)))


NESTED_USES = {
    "product": lambda w: jnp.ones((3, 6)) @ w,
    "product, swapped": lambda w: w @ jnp.ones((5, 3)),
    "transpose": lambda w: w.T,
    "rows": lambda w: w[jnp.array([1, 2])],
    "rows, filled": lambda w: jnp.take(w, jnp.array([0, 9]), 0, mode="fill", fill_value=0),
    "slice": lambda w: w[:2, 1:],
    "reshape": lambda w: w.reshape(2, 3, 5),
    "sum": lambda w: w.sum(0),
    "vmap": lambda w: jax.vmap(lambda row: row.sum())(w),
    "scan": lambda w: jax.lax.scan(lambda c, row: (c + row.sum(), 2 * row), 0.0, w)[1],
    "gram": lambda w: w.T @ w,
    "trace": jnp.trace,
    "solve": lambda w: jnp.linalg.solve(w[:5] + vn.types.Identity(5), jnp.ones(5)),
}


@pytest.mark.parametrize("use", NESTED_USES)
@pytest.mark.parametrize("nested", ["a", "b", "both"])
@pytest.mark.parametrize("cls", ["LoraArray", "LoraArray with a magnitude", "LowRank"])
def test_factors_may_be_implicit(cls, nested, use):
    w, a, b = arrays.normal(6, 5), arrays.normal(6, 2, seed=1), arrays.normal(2, 5, seed=2)
    a = vn.quant.quantize(a, "int8", channelwise_axes=[0]) if nested != "b" else a
    b = vn.quant.quantize(b, "int8") if nested != "a" else b
    magnitude = jnp.ones((1, 5)) if "magnitude" in cls else None
    x = vn.types.LowRank(a, b) if cls == "LowRank" else LoraArray(w, a, b, magnitude, scale=0.5)
    dense = dataclasses.replace(x, a=vn.materialise(a), b=vn.materialise(b)).materialise()
    assert_close(vn.implicit(NESTED_USES[use])(x), NESTED_USES[use](dense))


@pytest.mark.parametrize("wrap", [lambda lora: lora.w, vn.types.Frozen], ids=["dense", "frozen"])
def test_split_warns_if_there_is_nothing_to_train(wrap):
    lora = vn.types.LoraArray(jnp.eye(4), jnp.ones((4, 1)), jnp.ones((1, 4)))
    with pytest.warns(UserWarning, match="found no LoraArray"):
        base, adapters = vn.lora.split({"w": wrap(lora)})
    assert adapters == {"w": None}
    assert vn.materialise(base["w"]).shape == (4, 4)


def test_a_dropout_key_must_be_an_array():
    with pytest.raises(TypeError, match="dropout_key"):
        LoraArray(jnp.eye(4), jnp.ones((4, 1)), jnp.ones((1, 4)), dropout_key=3)


@pytest.mark.parametrize("f", [abs, lambda x: x + 1, lambda x: x * x], ids=["abs", "add", "mul"])
def test_operators_on_a_weight_with_a_dropout_key_raise(f):
    lora = LoraArray(
        *(jnp.eye(4), jnp.ones((4, 1)), jnp.ones((1, 4))), dropout=0.5, dropout_key=arrays.key(0)
    )
    with pytest.raises(TypeError, match="has a dropout key, so it has no dense form"):
        f(lora)


@pytest.mark.parametrize("options", [{}, {"magnitude": arrays.ones((1, 4))}], ids=["lora", "dora"])
def test_vmap_of_jvp_of_cond_agrees_with_dense(options):
    w = example(**options)
    f = lambda p, w: jax.lax.cond(p, lambda w: jnp.sin(X @ w), lambda w: X @ w * 2, w)
    pushed = lambda f: jax.vmap(lambda p, w: jax.jvp(lambda w: f(p, w), (w,), (w,)), (0, None))
    predicates = jnp.array([True, False])
    expected = pushed(lambda p, w: f(p, w.materialise()))(predicates, w)
    assert_close(pushed(vn.implicit(f))(predicates, w), expected)
