"""Statistics of activations in Boxes: the same as on the host, in programs that run anyway."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn

pytestmark = pytest.mark.usefixtures("mode_off")

RULES = [vn.quant.Rule(".*", "int8", act_qtype="int8", act_range="mean")]


def params():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"first": (3, 4), "layers": (2, 4, 4), "last": (4, 2)}
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: jax.random.normal(key, shape) for key, (name, shape) in pairs}


def model(params, x):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    h, _ = lax.scan(jax.checkpoint(layer), x @ params["first"], params["layers"])
    return h @ params["last"]


def batches():
    return list(jax.random.normal(jax.random.key(1), (3, 5, 3)))


def loss(f):
    return lambda params, x: jnp.sum(f(params, x) ** 2)


PROGRAMS = {
    "eager": lambda f: f,
    "jit": lambda f: jax.jit(f),
    "grad": lambda f: jax.grad(loss(f)),
    "jit of grad": lambda f: jax.jit(jax.grad(loss(f))),
    "grad of jit": lambda f: jax.grad(jax.jit(loss(f))),
    "vn.jit of grad": lambda f: vn.jit(jax.grad(loss(f))),
    "mode on": lambda f: in_mode(jax.jit(jax.grad(loss(f)))),
}


def in_mode(f):
    def run(*args):
        with vn.hijax.enabled():
            return f(*args)

    return run


def close(one, other):
    """Check equality up to rounding, because XLA fuses a recording program differently."""
    np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def agree(found, expected):
    assert found.keys() == expected.keys()
    for path in found:
        for one, other in zip(
            jax.tree.leaves(found[path]), jax.tree.leaves(expected[path]), strict=True
        ):
            close(one, other)


@pytest.fixture(scope="module")
def on_the_host():
    return vn.quant.observe(model, RULES, params=params(), gram=True)(batches())


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_box_and_the_host_record_the_same_statistics(program, on_the_host):
    observed = vn.quant.observe(model, RULES, params=params(), gram=True, box=vn.hijax.Box)
    run, plain = program(observed), program(model)
    for batch in batches():
        found = run(params(), batch)
    jax.tree.map(close, found, plain(params(), batch))
    agree(observed.statistics(), on_the_host)


def test_a_scan_over_batches_is_recorded(on_the_host):
    observed = vn.quant.observe(model, RULES, params=params(), gram=True, box=vn.hijax.Box)
    jax.jit(lambda p, xs: lax.map(lambda x: observed(p, x), xs))(params(), jnp.stack(batches()))
    agree(observed.statistics(), on_the_host)


def test_a_partial_can_be_observed_in_a_box(on_the_host):
    own = jax.tree_util.Partial(model, params())
    observed = vn.quant.observe(own, RULES, gram=True, box=vn.hijax.Box)
    run = jax.jit(observed)
    for batch in batches():
        run(batch)
    agree(observed.statistics(), on_the_host)


def test_keyword_arguments_reach_the_model():
    def of_keywords(params, x, *, shift):
        return (x + shift) @ params["w"]

    own = {"w": jnp.ones((2, 2))}
    given = vn.quant.observe(of_keywords, RULES, params=own, box=vn.hijax.Box)
    held = vn.quant.observe(
        functools.partial(of_keywords, params=own, shift=0.0), RULES, box=vn.hijax.Box
    )
    x = jnp.ones((1, 2))
    for run in (functools.partial(given, own), held):
        np.testing.assert_allclose(run(x=x, shift=2.0), [[6.0, 6.0]])
    for observed in (given, held):
        (found,) = observed.statistics().values()
        np.testing.assert_allclose(found.absmax.ravel(), [3.0, 3.0])
    with pytest.raises(TypeError, match="first positional argument"):
        given(params=own, x=x, shift=2.0)


def test_nan_and_infinity_are_recorded():
    def product(params, x):
        return x @ params["w"]

    own, rows = {"w": jnp.ones((2, 2))}, [[jnp.inf, jnp.inf], [-jnp.inf, 1.0], [jnp.nan, 0.0]]
    observe = functools.partial(vn.quant.observe, product, RULES, params=own)
    for row in rows:
        x = jnp.array([row])
        observed = observe(box=vn.hijax.Box)
        observed(own, x)
        agree(observed.statistics(), observe()([x]))


def test_statistics_of_a_box_quantize_a_model():
    observed = vn.quant.observe(model, RULES, params=params(), box=vn.hijax.Box)
    with pytest.raises(ValueError, match="no activations were recorded for first"):
        observed.statistics()
    x = batches()[0]
    y = observed(params(), x)
    quantized = vn.quant.quantize_tree(params(), RULES, statistics=observed.statistics())
    np.testing.assert_allclose(vn.implicit(model)(quantized, x), y, atol=0.2)


def test_parameters_of_another_tree_raise():
    observed = vn.quant.observe(model, RULES, params=params(), box=vn.hijax.Box)
    with pytest.raises(ValueError, match="have weights at first, and the parameters given"):
        observed({"first": jnp.ones((3, 4))}, batches()[0])
