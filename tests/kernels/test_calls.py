"""Products of the same x become one call of a kernel, and keep their values."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays

import veneer as vn
from veneer.kernels import Codes, MatmulOperands, MatmulProblem, matmul

K = 256
X = arrays.normal(2, K)


def stored(n, qtype="int4", seed=0, tiles=None, **options):
    dense = jax.random.normal(jax.random.key(seed), (K, n)) / K**0.5
    tiled = {0: tiles or 32}
    return vn.quant.quantize(dense, qtype, channelwise_axes=[1], tiled_axes=tiled, **options)


def calls(function, *args):
    """Return the number of products of each call of a kernel in the lowered program."""
    text = jax.jit(function).lower(*args).as_text()
    found = re.findall(r"%\w+(?::(\d+))? = stablehlo.custom_call @veneer_(?!quantize)", text)
    return [int(count or 1) for count in found]


def check(function, x, *weights, joined, **tolerance):
    """Compare a program with the dense one. `joined` are the products of each call."""
    assert calls(vn.implicit(function), x, *weights) == joined
    actual = jax.jit(vn.implicit(function))(x, *weights)
    expected = function(x, *jax.tree.map(vn.materialise, weights, is_leaf=is_array))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **{"rtol": 1e-4, "atol": 1e-4} | tolerance)


def is_array(x):
    return isinstance(x, vn.ImplicitArray)


def each(x, *weights):
    """Return the sine of each product, so that each is read before the next is computed."""
    return [jnp.sin(x @ w) for w in weights]


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qtype": "nf4", "tiles": 64},
        {"qtype": "int8", "tiles": K},
        {"qtype": "uint4", "calibration_method": "minmax"},
        {"qtype": "float8_e4m3fn", "tiles": K},
        {"scale_dtype": "float16"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "int4",
)
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_products_of_the_same_x_are_one_call(side, options, rows):
    weights = [stored(n, seed=n, **options) for n in (256, 64, 1000)]
    if side == "columns":
        turned = [vn.implicit(jnp.swapaxes)(w, 0, 1) for w in weights]
        check(
            lambda x, *ws: each(x, *(w.T for w in ws)), X[:1].repeat(rows, 0), *turned, joined=[3]
        )
    else:
        check(each, X[:1].repeat(rows, 0), *weights, joined=[3])


def test_each_part_of_a_joined_call_is_computed_once():
    weights = [stored(n, seed=n) for n in (4096, 64, 2048, 4096, 576)]
    for _ in range(20):  # as threads may take them in any order
        check(each, X[:1], *weights, joined=[5])


def test_equal_products_share_one_result():
    w = stored(128)
    check(lambda x, w: (x @ w, jnp.cos(x @ w)), X, w, joined=[1])


def test_earlier_results_stay_usable_after_a_join():
    weights = stored(128), stored(64, seed=1)
    x = X[:, None]  # whose products are of the shape that the kernel gives
    check(
        lambda x, a, b: ((p := x @ a), (q := x @ b), p * 2, q.sum() + p.sum()),
        x,
        *weights,
        joined=[2],
    )


def test_products_of_different_activations_do_not_join():
    weights = stored(128), stored(64, seed=1)
    check(lambda x, a, b: (x @ a, (x + 1) @ b), X, *weights, joined=[1, 1])
    check(lambda x, a, b: (x[:1] @ a, x[1:] @ b), X, *weights, joined=[1, 1])


def test_products_by_different_kernels_do_not_join():
    weights = stored(128), stored(64, "int8", seed=1), stored(64, "nf4", seed=2)
    check(each, X, *weights, joined=[2, 1])  # int4 and nf4 are one kernel, by their tables


def test_a_weight_that_depends_on_a_product_does_not_join_it():
    a, b, c = (stored(128, seed=i) for i in range(3))

    def program(product, x, *scales):
        first = product(x, a)
        factor = 1 + jnp.tanh(first.sum())
        later = (w.replace(scale=scale * factor) for w, scale in zip((b, c), scales, strict=True))
        return first, *(product(x, w) for w in later)

    scales = b.scale, c.scale
    by_kernels = functools.partial(program, vn.implicit(jnp.matmul))
    assert calls(by_kernels, X, *scales) == [1, 2]
    dense = program(lambda x, w: x @ vn.materialise(w), X, *scales)
    for got, want in zip(jax.jit(by_kernels)(X, *scales), dense, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_weight_of_many_operations_does_not_join():
    a, b = stored(128), stored(128, seed=1)

    def program(x, scale):
        first, product = vn.implicit(jnp.matmul)(x, a), vn.implicit(jnp.matmul)
        for _ in range(500):
            scale = scale * 1.001
        return first, product(x, b.replace(scale=scale))

    assert calls(program, X, b.scale) == [1, 1]


def test_a_call_joins_at_most_16_products():
    weights = [stored(64, seed=i) for i in range(20)]
    check(each, X, *weights, joined=[16, 4])


def test_the_same_bytes_of_two_widths_are_two_products():
    codes = Codes(4, values=tuple(map(float, range(16))))
    packed, scale = jnp.full((1, K, 501), 0x37, jnp.uint8), jnp.ones((1, 8, 1))
    operands = MatmulOperands(X[None], packed, scale)
    of = lambda width: MatmulProblem(codes, width, "rows", "float32", 0, print)
    both = lambda operands: [matmul(operands, of(width)) for width in (1001, 1002)]
    assert calls(both, operands) == [2]
    assert [x.shape[2] for x in jax.jit(both)(operands)] == [1001, 1002]


def test_products_of_many_rows_do_not_join():
    weights = stored(128), stored(64, seed=1)
    check(each, jnp.ones((64, K)), *weights, joined=[1, 1])


def test_products_in_branches_do_not_join():
    a, b = stored(128), stored(128, seed=1)

    def program(x, a, b):
        return x @ a + jax.lax.cond(x[0, 0] > 0, lambda x, b: x @ b, lambda x, b: -(x @ b), x, b)

    check(program, X, a, b, joined=[1, 1, 1])


def test_layers_of_a_scan_join_in_place():
    stacks = [jax.tree.map(lambda x: jnp.stack([x, x * 1, x]), stored(K, seed=i)) for i in range(3)]

    def program(x, *stacks):
        def layer(x, weights):
            q, k, v = each(x, *weights)
            return q * k + v, None

        return jax.lax.scan(layer, x, stacks)[0]

    check(program, X, *stacks, joined=[3])


def test_activations_are_rounded_once_in_a_loop():
    weights = [
        vn.quant.ActivationQuantized(stored(K, seed=i, tiles=K), qtype="int8", contracting=(-2,))
        for i in range(3)
    ]

    def program(x, *weights):
        def step(i, x):
            q, k, v = each(x, *weights)
            return q * k + v

        return jax.lax.fori_loop(0, 3, step, x)

    assert calls(vn.implicit(program), X, *weights) == [3]
    alone = lambda x, *weights: program(x, *map(jax.lax.optimization_barrier, weights))
    rounded = jax.jit(vn.implicit(program))(X, *weights)
    np.testing.assert_allclose(rounded, vn.implicit(alone)(X, *weights), rtol=1e-5, atol=1e-6)


def test_derivatives_and_batches_of_joined_calls_are_right():
    weights = stored(128), stored(64, seed=1)
    dense = list(map(vn.materialise, weights))
    loss = lambda x, *ws: sum((y**2).sum() for y in each(x, *ws))
    for of in (jax.grad, lambda f: jax.vmap(f, (0, None, None))):
        actual = jax.jit(vn.implicit(of(loss)))(X, *weights)
        np.testing.assert_allclose(actual, of(loss)(X, *dense), rtol=1e-3, atol=1e-3)


def test_results_of_two_callbacks_are_not_taken_for_equal():
    a, b = stored(128), stored(64, seed=1)

    def program(x, a, b):
        draw = jax.jit(lambda x: jax.pure_callback(lambda x: np.asarray(x), x, x))
        return draw(x) @ a, draw(x) @ b

    assert calls(vn.implicit(program), X, a, b) == [1, 1]
