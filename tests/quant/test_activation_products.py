"""Products of two activations: quantize_products equals the program with rounded operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from support.annotations import unless_checked

import veneer as vn
from veneer.quant import Rule, quantize_products

HEAD = 8
# With this factor, no value is half-way between two codes, where rounding is not reproducible.
METHOD = "absmax,1.1"
RULES = [Rule("(.*/)?attention(/.*)?", None, act_qtype="int8", act_calibration_method=METHOD)]
RULES_ALL = [Rule(".*", None, act_qtype="int8", act_calibration_method=METHOD)]


def arrays(*shapes, seed=0):
    random = np.random.default_rng(seed)
    return jax.device_put([random.standard_normal(shape, np.float32) for shape in shapes])


def rounded(x, axis, qtype="int8"):
    """Round an operand along its contracted axis, with a straight-through derivative."""
    how = {"channelwise_axes": [i for i in range(x.ndim) if i != axis % x.ndim]}
    if qtype.startswith("int"):
        how["calibration_method"] = METHOD
    return vn.ste(lambda x: vn.quant.quantize(x, qtype, **how).dequantize())(x)


def attention(q, k, v, rounded=lambda x, axis: x):
    """Compute attention of `q`, `k` and `v`, each `[b, t, h, d]`."""
    with jax.named_scope("attention"):
        scores = jnp.einsum("bqhd,bkhd->bhqk", rounded(q, -1), rounded(k, -1))
        p = jax.nn.softmax(scores / np.sqrt(q.shape[-1]))
        return jnp.einsum("bhqk,bkhd->bqhd", rounded(p, -1), rounded(v, 1))


reference = functools.partial(attention, rounded=rounded)
QKV = arrays(*[(2, 6, 3, HEAD)] * 3)


def loss(f):
    return lambda *args: (f(*args) ** 2).sum()


def mapped(f):
    return lambda *args: jax.vmap(f)(*(x[:, None] for x in args))


def in_a_loop(f):
    """Call `f` in a scan, whose carry starts as a constant instead of an activation."""

    def run(q, k, v):
        def step(total, q):
            out = f(q[None], k[:1], v[:1])
            return total + out * jnp.cos(total), out

        total, out = lax.scan(step, jnp.ones((1, *q.shape[1:])), q)
        return total + out.sum(0)

    return run


def in_a_while(f):
    def run(q, k, v):
        step = lambda state: (state[0] + 1, f(state[1], k, v))
        return lax.while_loop(lambda state: state[0] < 2, step, (0, q))[1]

    return run


def in_a_branch(f):
    """Call `f` in a branch. The predicate is an activation, too."""
    return lambda q, k, v: lax.cond(q.sum() > -1e9, f, lambda q, k, v: q, q, k, v)


def custom_jvp(f):
    @jax.custom_jvp
    def call(q, k, v):
        return f(q, k, v)

    call.defjvp(lambda primals, tangents: (f(*primals), jax.jvp(attention, primals, tangents)[1]))
    return call


def custom_vjp(f):
    @jax.custom_vjp
    def call(q, k, v):
        return f(q, k, v)

    call.defvjp(lambda *args: (f(*args), args), lambda args, g: jax.vjp(attention, *args)[1](g))
    return call


def on_blocks(f):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec("x")}
    return lambda *args: jax.shard_map(f, mesh=mesh, **specs)(*args)


PROGRAMS = {
    "as it is": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": mapped,
    "scan": in_a_loop,
    "while": in_a_while,
    "cond": in_a_branch,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "shard_map": on_blocks,
    "jit in scan": lambda f: in_a_loop(jax.jit(f)),
    "checkpoint in scan": lambda f: in_a_loop(jax.checkpoint(f)),
}
TRANSFORMATIONS = {
    "none": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(loss(f), (0, 1, 2)),
    "jit of grad": lambda f: jax.jit(jax.grad(loss(f), (0, 1, 2))),
    "grad of jit": lambda f: jax.grad(jax.jit(loss(f)), (0, 1, 2)),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f)), (0, 1, 2)),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args[::-1]),
    "vmap": lambda f: lambda *args: jax.vmap(f)(*(jnp.stack([x, x[::-1]]) for x in args)),
    "scan": lambda f: (
        lambda *args: lax.scan(lambda c, x: (c, f(x, *args[1:])), 0, args[0][None])[1]
    ),
}


def assert_close(out, expected, tolerance=2e-5):
    for one, other in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def differs(out, other):
    return max(float(jnp.abs(a - b).max()) for a, b in zip(out, other, strict=True)) > 1e-4


CELLS = [("as it is", name) for name in TRANSFORMATIONS]
CELLS += [(p, t) for p in PROGRAMS for t in ("none", "jit of grad", "vmap") if p != "as it is"]


@pytest.mark.parametrize(("program", "transformation"), CELLS)
def test_products_equal_products_of_rounded_operands(program, transformation):
    wrap, transform = PROGRAMS[program], TRANSFORMATIONS[transformation]
    if program == "while" and "grad" in transformation:
        pytest.skip("JAX has no reverse-mode derivative of a while loop")
    out = transform(quantize_products(wrap(attention), RULES))(*QKV)
    assert_close(out, transform(wrap(reference))(*QKV))
    assert differs(jax.tree.leaves(out), jax.tree.leaves(transform(wrap(attention))(*QKV)))


def quantized_products(f, *args):
    report = vn.explain(f)(*args)
    return [e for e in report.events if "activations in" in e.how]


def test_every_product_uses_codes():
    text = str(jax.make_jaxpr(quantize_products(attention, RULES))(*QKV))
    assert text.count("preferred_element_type=int32") == 2


def test_backward_products_inside_the_function_stay_dense():
    for f in (loss(attention), jax.checkpoint(loss(attention))):
        program = jax.value_and_grad(f)
        value, gradient = quantize_products(program, RULES)(*QKV)
        assert_close(value, loss(reference)(*QKV))
        assert_close(gradient, jax.grad(loss(attention))(*QKV), 0.2)


def test_a_function_called_at_two_places_is_traced_for_each():
    inner = jax.jit(lambda q, k: q @ k.T)

    def f(q, k):
        with jax.named_scope("first"):
            a = inner(q, k)
        with jax.named_scope("second"):
            return a, inner(q, k)

    q, k = arrays((4, 8), (5, 8))
    for transform in (lambda f: f, jax.jit):
        one, other = transform(
            quantize_products(
                f, [Rule("first", None, act_qtype="int8", act_calibration_method=METHOD)]
            )
        )(q, k)
        np.testing.assert_allclose(one, rounded(q, -1) @ rounded(k, -1).T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(other, q @ k.T, rtol=1e-5, atol=1e-5)


def test_a_place_names_jitted_functions_but_not_inlined_ones():
    @jax.jit
    def scores(q, k):
        return q @ k.T

    q, k = arrays((4, 8), (5, 8))
    expected = rounded(q, -1) @ rounded(k, -1).T
    for f in (scores, lambda q, k: lax.map(lambda q: scores(q[None], k)[0], q)):
        out = quantize_products(
            f, [Rule("scores", None, act_qtype="int8", act_calibration_method=METHOD)]
        )(q, k)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_products_with_weights_are_unchanged():
    # Two bits change the result more than a code that is rounded differently.
    rules = [Rule(".*", None, act_qtype="int2", act_calibration_method=METHOD)]
    (w,) = arrays((HEAD, HEAD), seed=1)
    q, k = arrays((4, HEAD), (5, HEAD))

    def model(w, q, k):
        return (q @ w) @ (k @ w).T

    for weight in (w, vn.quant.quantize(w, "int4", channelwise_axes=[1])):
        x, y = (vn.implicit(jnp.matmul)(z, weight) for z in (q, k))
        expected = rounded(x, -1, "int2") @ rounded(y, -1, "int2").T
        holding = functools.partial(model, weight)
        for of in (
            quantize_products(vn.implicit(holding), rules),
            vn.implicit(quantize_products(holding, rules)),
            jax.jit(vn.implicit(quantize_products(holding, rules))),
        ):
            assert len(quantized_products(of, q, k)) == 1
            np.testing.assert_allclose(of(q, k), expected, rtol=1e-4, atol=1e-4)


def test_quantized_arguments_keep_their_type():
    (w,) = arrays((HEAD, HEAD), seed=1)
    q, k = arrays((4, HEAD), (5, HEAD))
    weight = vn.quant.quantize(w, "int4", channelwise_axes=[1])
    f = quantize_products(lambda w, q, k: (q @ w) @ k.T, RULES_ALL)
    expected = rounded(vn.implicit(jnp.matmul)(q, weight), -1) @ rounded(k, -1).T
    np.testing.assert_allclose(f(weight, q, k), expected, rtol=1e-4, atol=1e-4)
    assert isinstance(quantize_products(lambda w: w, [])(weight), vn.quant.QArray)


def test_embedded_tokens_are_activations():
    (table,) = arrays((10, HEAD))
    f = lambda tokens: table[tokens] @ table[tokens].T
    tokens = jnp.array([3, 1, 4])
    x = rounded(table[tokens], -1)
    out = quantize_products(f, RULES_ALL)(tokens)
    np.testing.assert_allclose(out, x @ x.T, rtol=1e-5, atol=1e-5)


def test_the_first_matching_rule_applies():
    q, k, v = QKV
    rules = [Rule(r".*bqhd,bkhd.*", None), Rule(".*", None, act_qtype="float8_e4m3fn")]
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(HEAD))
    fp8 = functools.partial(rounded, qtype="float8_e4m3fn")
    expected = jnp.einsum("bhqk,bkhd->bqhd", fp8(p, -1), fp8(v, 1))
    assert_close(quantize_products(attention, rules)(q, k, v), expected)


def test_op_names_choose_products():
    (x,), (kernel,) = arrays((2, 3, 8)), arrays((4, 3, 3), seed=1)

    def f(x, kernel):
        y = lax.conv_general_dilated(x, kernel, (1,), "SAME")  # [b, c, t]
        return y, jnp.einsum("bct,bdt->bcd", x, x)

    dense = f(x, kernel)
    how = {"act_qtype": "int8", "act_calibration_method": METHOD}
    rules = lambda *ops: [Rule(".*", None, op_names=ops, **how)]
    of_conv = quantize_products(f, rules("conv_general_dilated"))(x, kernel)
    of_dot = quantize_products(f, rules("dot_general"))(x, kernel)
    of_both = quantize_products(f, rules())(x, kernel)
    how = {"channelwise_axes": [0], "calibration_method": METHOD}
    per = lambda x: vn.quant.quantize(x, "int8", **how).dequantize()
    convolved = lax.conv_general_dilated(per(x), per(kernel), (1,), "SAME")
    product = jnp.einsum("bct,bdt->bcd", rounded(x, -1), rounded(x, -1))
    assert_close(of_conv, (convolved, dense[1]))
    assert_close(of_dot, (dense[0], product))
    assert_close(of_both, (convolved, product))


def test_ragged_dot_quantizes_activations():
    x, w = arrays((6, 8), (2, 8, 3))
    sizes = jnp.array([2, 3])
    out = quantize_products(lax.ragged_dot, RULES_ALL)(x, w, sizes)
    expected = lax.ragged_dot(rounded(x, -1), rounded(w, 1), sizes)
    assert_close(out, expected)


@pytest.mark.parametrize(("qtype", "tile"), [("int8", 4), ("int8", 0.5), ("mxfp8", None)])
def test_tiles_are_along_the_contracted_axis(qtype, tile):
    q, k = arrays((4, 64), (5, 64))
    rule = Rule(".*", None, act_qtype=qtype, act_tile_size=tile)
    size = {4: 4, 0.5: 32, None: 32}[tile]
    of = lambda x: vn.quant.quantize(x, qtype, channelwise_axes=[0], tiled_axes={1: size})
    out = quantize_products(lambda q, k: q @ k.T, [rule])(q, k)
    assert_close(out, of(q).dequantize() @ of(k).dequantize().T)


def test_grouped_heads_are_batch_axes():
    q, k = arrays((2, 4, 2, 3, 8), (2, 5, 2, 8))  # three queries share a key
    f = lambda q, k: jnp.einsum("btkgd,bskd->bkgts", q, k)
    assert_close(quantize_products(f, RULES_ALL)(q, k), f(rounded(q, -1), rounded(k, -1)))


def test_callbacks_receive_plain_arrays():
    seen = []

    def f(q, k):
        jax.debug.callback(lambda x: seen.append(type(x)), q)
        jax.debug.print("{}", k.sum())
        q = jax.pure_callback(
            lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(q.shape, q.dtype), q
        )
        return vn.materialise(q) @ k.T

    q, k = arrays((4, 8), (5, 8))
    out = quantize_products(f, RULES_ALL)(q, k)
    jax.effects_barrier()
    assert not issubclass(seen[0], vn.Value)
    assert_close(out, rounded(2 * q, -1) @ rounded(k, -1).T)


def test_calls_nest_and_the_inner_rules_come_first():
    q, k = arrays((4, 8), (5, 8))
    f = lambda q, k: q @ k.T
    inner = quantize_products(f, [Rule(".*", None, act_qtype="float8_e4m3fn")])
    fp8 = functools.partial(rounded, qtype="float8_e4m3fn")
    with pytest.warns(
        UserWarning, match="matches no product"
    ):  # because the inner rules match all products
        out = quantize_products(inner, RULES_ALL)(q, k)
    assert_close(out, fp8(q, -1) @ fp8(k, -1).T)
    unmatched = quantize_products(f, [Rule("elsewhere", None)])
    with pytest.warns(UserWarning, match="elsewhere"):
        out = quantize_products(unmatched, RULES_ALL)(q, k)
    assert_close(out, f(rounded(q, -1), rounded(k, -1)))
    g = lambda q, k: inner(q, k) @ (q @ q.T @ q @ k.T).T
    expected = inner(q, k)
    qq = rounded(rounded(q, -1) @ rounded(q, -1).T, -1) @ rounded(q, 0)
    other = rounded(qq, -1) @ rounded(k, -1).T
    assert_close(
        quantize_products(g, RULES_ALL)(q, k), rounded(expected, -1) @ rounded(other, -1).T
    )


def test_arguments_can_be_trees_keywords_and_objects():
    q, k = arrays((4, 8), (5, 8))

    def f(tree, *, k, name, flag=True):
        assert (name, flag) == ("a", True)
        return {"out": tree["q"] @ k.T, "n": tree["n"]}

    out = quantize_products(f, RULES_ALL)({"q": q, "n": 3}, k=k, name="a")
    assert out["n"] == 3
    assert_close(out["out"], rounded(q, -1) @ rounded(k, -1).T)


def test_outputs_keep_the_dtype_of_the_function():
    for dtype in (jnp.bfloat16, jnp.float16):
        q, k = (x.astype(dtype) for x in arrays((4, 8), (5, 8)))
        out = quantize_products(lambda q, k: q @ k.T, RULES_ALL)(q, k)
        assert out.dtype == dtype
        expected = rounded(q, -1).astype(jnp.float32) @ rounded(k, -1).astype(jnp.float32).T
        np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=2e-2, atol=2e-2)
    n = jnp.arange(4)
    assert quantize_products(lambda x: x @ x, RULES_ALL[:0])(n) == 14


def test_explain_names_the_place():
    (event, _) = quantized_products(quantize_products(attention, RULES), *QKV)
    assert event.how == "activations in int8 at 'attention/bqhd,bkhd->bhqk'"


def test_a_rule_that_matches_nothing_warns_with_the_places():
    f = quantize_products(attention, [Rule("mlp", None, act_qtype="int6")])
    with pytest.warns(UserWarning, match=r"'mlp' matches no product.*'attention/bqhd,bkhd->bhqk'"):
        f(*QKV)
    # The same rules matched products of another function.
    quantize_products(attention, RULES)(*QKV)
    other = quantize_products(lambda q, k: jnp.vdot(q, k), RULES)
    with pytest.warns(UserWarning, match="matches no product"):
        other(*QKV[:2])


@pytest.mark.parametrize(
    "rule",
    [
        Rule(".*", "int8", act_qtype="int8"),
        Rule(".*", None, act_qtype="int8", act_range="mean"),
        Rule(".*", None, grad_qtype="int8"),
        Rule(".*", None, act_qtype="int8", tile_axis=-1),
    ],
)
def test_a_rule_with_other_options_raises(rule):
    with pytest.raises(ValueError, match="can set only act_qtype"):
        quantize_products(attention, [rule])


def test_errors_name_the_place():
    q, k = arrays((4, 9), (5, 9))
    f = quantize_products(
        lambda q, k: q @ k.T, [Rule(".*", None, act_qtype="int8", act_tile_size=4)]
    )
    with pytest.raises(ValueError, match="tile of 4") as error:
        f(q, k)
    assert any("quantizing an activation of shape (4, 9)" in note for note in error.value.__notes__)


@unless_checked
def test_other_objects_than_rules_raise():
    with pytest.raises(TypeError, match="must be a Rule"):
        quantize_products(attention, [".*"])
    with pytest.raises(TypeError, match=r"rules must be a list: \[Rule\("):
        quantize_products(attention, Rule(".*", None, act_qtype="int8"))


@pytest.mark.parametrize("name", ["einsum", "ragged_dot", "matmul"])
def test_op_names_must_be_primitives(name):
    with pytest.raises(ValueError, match="unknown product"):
        Rule(".*", None, act_qtype="int8", op_names=(name,))
    with pytest.raises(TypeError, match="list of names"):
        Rule(".*", None, op_names="dot_general")


def test_op_names_choose_products_of_a_weight():
    (kernel,), (x,) = arrays((1, 8, 4)), arrays((2, 3, 8), seed=1)

    def f(kernel, x):
        spec = ("NWC", "WIO", "NWC")
        convolved = lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=spec)
        return convolved, x @ kernel[0]

    out = {}
    for ops in ((), ("dot_general",), ("conv_general_dilated",)):
        rule = Rule(".*", "int8", act_qtype="int8", op_names=ops)
        out[ops] = vn.implicit(f)(vn.quant.quantize_tree(kernel, [rule]), x)
    weight = vn.quant.quantize(kernel, "int8", channelwise_axes=[0, 2]).dequantize()
    dense = f(weight, x)
    assert_close(out["dot_general",], (dense[0], out[()][1]))
    assert_close(out["conv_general_dilated",], (out[()][0], dense[1]))
    assert differs(out[()], dense)
    with pytest.raises(ValueError, match="does not support op_names"):
        vn.quant.quantize_tree(kernel, [rule], train=True)


def test_high_types_are_supported():
    q, k, v = QKV
    with vn.hijax.enabled():
        out = jax.jit(quantize_products(attention, RULES))(q, k, v)
        gradient = jax.grad(loss(quantize_products(attention, RULES)))(q, k, v)
    assert_close(out, reference(q, k, v))
    assert_close(gradient, jax.grad(loss(reference))(q, k, v))


def test_modules_of_flax_and_equinox_name_places():
    import equinox
    from flax import linen

    (x,) = arrays((2, 5, 16))

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.MultiHeadDotProductAttention(num_heads=4, name="attention")(x, x)

    block = Block()
    params = block.init(jax.random.key(0), x)
    module = equinox.nn.MultiheadAttention(4, 16, key=jax.random.key(0))
    models = {
        r"Block/attention/.*": functools.partial(block.apply, params),
        r"eqx\.nn\.MultiheadAttention/.*": jax.vmap(lambda x: module(x, x, x)),
    }
    for place, model in models.items():
        run = quantize_products(model, [Rule(place, None, act_qtype="int8")])
        assert len(quantized_products(run, x)) == 2  # products with weights do not count
        assert differs([run(x)], [model(x)])
        np.testing.assert_allclose(run(x), model(x), atol=0.05)
