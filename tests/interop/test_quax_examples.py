"""The array types of Quax's documentation agree with the dense program."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays
from support.array_types import assert_close

import veneer as vn
import veneer.interop.quax as quax
from veneer.interop.quax.examples import lora, named, prng, sparse, structured_matrices, zero
from veneer.interop.quax.examples.unitful import Dimension, Unitful, kilograms, meters, seconds

NAMES = {
    "lora": ["LoraArray", "loraify"],
    "named": ["Axis", "NamedArray", "trace"],
    "prng": ["PRNG", "ThreeFry", "normal", "split", "uniform"],
    "sparse": ["BCOO"],
    "structured_matrices": ["TridiagonalMatrix"],
    "unitful": ["Dimension", "Unitful", "kilograms", "meters", "seconds"],
    "zero": ["Zero"],
}


def test_every_name_of_quax_is_there():
    assert set(quax.examples.__all__) == set(NAMES) <= set(dir(quax.examples))
    for module, names in NAMES.items():
        found = importlib.import_module(f"veneer.interop.quax.examples.{module}")
        assert getattr(quax.examples, module) is found
        assert found.__all__ == names
    assert quax.lora is quax.examples.lora
    assert quax.zero is quax.examples.zero
    with pytest.raises(AttributeError, match="no attribute 'interval'"):
        quax.examples.interval  # noqa: B018


@pytest.fixture
def modules() -> Iterator[None]:
    """Remove all modules of Quax from `sys.modules` during a test."""
    is_quax = lambda name: name.partition(".")[0] == "quax"
    before = {name: sys.modules.pop(name) for name in [*filter(is_quax, sys.modules)]}
    yield
    for name in [*filter(is_quax, sys.modules)]:
        del sys.modules[name]
    sys.modules.update(before)


def test_replace_quax_serves_all_its_modules(modules):
    for _ in range(2):  # again, it changes nothing
        quax.replace_quax()
    assert importlib.import_module("quax") is quax
    assert importlib.import_module("quax.examples.lora") is lora
    experimental = importlib.import_module("quax.experimental.hijax")
    assert issubclass(experimental.HiValue, quax.ArrayValue)


def test_replace_quax_is_refused_after_quax_is_imported(modules):
    sys.modules["quax"] = ModuleType("quax")
    with pytest.raises(RuntimeError, match="before the first `import quax`"):
        quax.replace_quax()


# LoRA.


def lora_array(shape=(3, 4), **settings):
    w = lora.LoraArray(arrays.normal(*shape), rank=2, key=jax.random.key(0), **settings)
    return eqx.tree_at(lambda w: w.b, w, arrays.normal(*w.b.shape, seed=1))


def test_a_lora_array_has_quaxs_fields():
    w = lora.LoraArray(jnp.ones((5, 3, 4)), rank=2, scale=0.5, key=jax.random.key(0))
    assert (w.a.shape, w.b.shape) == ((5, 3, 2), (5, 2, 4))
    assert_close(w.a, 0.5 * jax.random.normal(jax.random.key(0), (5, 3, 2)))
    assert not w.b.any()
    assert (w.stop_gradient, w.allow_materialise, w.shape) == (True, False, (5, 3, 4))
    assert w.w is not None


PRODUCTS = {
    "w @ x": ((3, 4), (4,), (((1,), (0,)), ((), ()))),
    "x @ w": ((3, 4), (3, 2), (((0,), (0,)), ((), ()))),
    "batches": ((3, 2, 1, 4, 5), (8, 1, 5, 7, 3, 2), (((4,), (2,)), ((2, 0), (1, 4)))),
}


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_lora_products_agree_with_dense_ones_and_stay_low_rank(name, swap):
    shape, x_shape, numbers = PRODUCTS[name]
    w, x = lora_array(shape), arrays.normal(*x_shape, seed=2)
    dense = vn.materialise(lora_array(shape, allow_materialise=True))
    f = lambda w, x: lax.dot_general(w, x, numbers)
    if swap:
        swapped = tuple(pair[::-1] for pair in numbers)
        f = lambda w, x: lax.dot_general(x, w, swapped)
    assert_close(quax.quaxify(f)(w, x), f(dense, x))  # it cannot be materialized


def test_lora_multiplies_types_that_it_does_not_know():
    w, z = lora_array(), zero.Zero((4,), jnp.float32)
    out = quax.quaxify(lambda w, z: w @ z)(w, z)
    assert_close(vn.materialise(out), jnp.zeros(3))
    a = structured_matrices.TridiagonalMatrix(*map(arrays.ones, (3, 4, 3)))
    with pytest.raises(quax.AmbiguousLookupError):
        quax.quaxify(jnp.matmul)(w, a)
    nested = quax.quaxify(
        quax.quaxify(jnp.matmul, lambda v: isinstance(v, lora.LoraArray)),
        lambda v: not isinstance(v, lora.LoraArray),
    )
    dense = vn.materialise(lora_array(allow_materialise=True))
    assert_close(nested(w, a), dense @ vn.materialise(allowing(a)))
    d = vn.types.Diagonal(arrays.arange(4.0))
    assert_close(vn.materialise(quax.quaxify(jnp.matmul)(w, d)), dense @ vn.materialise(d))


def allowing(a):
    diagonals = a.lower_diag, a.main_diag, a.upper_diag
    return structured_matrices.TridiagonalMatrix(*diagonals, allow_materialise=True)


def test_lora_refuses_to_be_dense_unless_allowed():
    with pytest.raises(RuntimeError, match="materialise `LoraArray` with `allow_materialise=F"):
        quax.quaxify(jax.nn.relu)(lora_array())
    w = lora_array(allow_materialise=True)
    assert_close(quax.quaxify(jax.nn.relu)(w), jax.nn.relu(w.w + w.a @ w.b))


@pytest.mark.parametrize("stop", [True, False])
def test_stop_gradient_is_for_the_weight_alone(stop):
    w, x = lora_array(stop_gradient=stop), arrays.normal(4, seed=2)
    g = jax.grad(lambda w: jnp.sum(jnp.sin(quax.quaxify(jnp.matmul)(w, x))))(w)
    dense = lambda w: jnp.sum(jnp.sin((w._w + w.a @ w.b) @ x))
    expected = jax.grad(dense)(w)
    assert_close(g._w, expected._w * (not stop))
    assert_close(g.a, expected.a)
    assert_close(g.b, expected.b)


def test_loraify_replaces_the_weights_of_linear_layers():
    mlp = eqx.nn.MLP(2, 3, 8, depth=2, key=jax.random.key(0))
    new = lora.loraify(mlp, rank=2, scale=0.1, key=jax.random.key(1), allow_materialise=True)
    weights = [layer.weight for layer in new.layers]
    assert all(type(w) is lora.LoraArray and w.allow_materialise for w in weights)
    assert not jnp.array_equal(weights[1].a[:3, 0], weights[2].a[:, 0])  # a key each
    x = arrays.normal(2)
    assert_close(eqx.filter_jit(quax.quaxify(new))(x), mlp(x))  # b is zero


# Zeros.


Z = zero.Zero((2, 3), jnp.float32)
X = arrays.normal(2, 3)
IS_ZERO = {
    "mul": lambda z, x: z * x,
    "rmul": lambda z, x: x * z,
    "mul by itself": lambda z, x: z * z,
    "mul by a number": lambda z, x: 2 * z,
    "matmul": lambda z, x: z @ x.T,
    "rmatmul": lambda z, x: x @ z.T,
    "broadcast": lambda z, x: jnp.broadcast_to(z, (4, 2, 3)),
    "astype": lambda z, x: z.astype(jnp.float16),
    "slice": lambda z, x: z[1:, ::2],
    "dynamic_slice": lambda z, x: lax.dynamic_slice(z, (0, 1), (2, 2)),
    "dynamic_update_slice": lambda z, x: lax.dynamic_update_slice(z, z[:1], (1, 0)),
    "integer_pow": lambda z, x: z**2,
    "sin": lambda z, x: jnp.sin(z),
    "neg": lambda z, x: -z,
    "sum": lambda z, x: z.sum(0),
    "add itself": lambda z, x: z + z,
}
IS_DENSE = {
    "add": lambda z, x: z + x,
    "radd": lambda z, x: x + z,
    "add integers": lambda z, x: z + jnp.arange(3),
    "sub": lambda z, x: x - z,
    "rsub": lambda z, x: z - x,
    "power 0": lambda z, x: lax.integer_pow(z, 0),
    "power -1": lambda z, x: lax.integer_pow(z, -1),
    "dynamic_update_slice": lambda z, x: lax.dynamic_update_slice(z, x[:1], (1, 0)),
    "cos": lambda z, x: jnp.cos(z),
}


@pytest.mark.parametrize("name", IS_ZERO)
def test_zeros_stay_zeros(name):
    f = IS_ZERO[name]
    out, expected = quax.quaxify(f)(Z, X), jax.eval_shape(f, jnp.zeros((2, 3)), X)
    assert type(out) is zero.Zero
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("name", IS_DENSE)
def test_zeros_beside_others_agree_with_the_dense_program(name):
    f = IS_DENSE[name]
    out, expected = quax.quaxify(f)(Z, X), f(jnp.zeros((2, 3)), X)
    assert out.dtype == expected.dtype
    assert_close(out, expected)


def test_a_sum_with_zeros_computes_nothing():
    assert not jax.make_jaxpr(lambda x: quax.quaxify(lax.add)(Z, x))(X).eqns


def test_bad_slices_and_shapes_raise_as_in_jax():
    with pytest.raises((TypeError, ValueError)):
        quax.quaxify(lambda z: lax.slice(z, (0,), (5,)))(Z)
    with pytest.raises(TypeError):
        quax.quaxify(lax.mul)(Z, jnp.ones((2, 4)))


# Named axes.


A, B, C = named.Axis(2), named.Axis(3), named.Axis(None)


def test_names_are_carried_through_products_and_sums():
    x, y = named.NamedArray(X, (A, B)), named.NamedArray(X.T, (B, C))
    product = quax.quaxify(jnp.matmul)(x, y)
    assert product.axes == (A, C)
    assert_close(product.array, X @ X.T)
    for op in (jnp.add, jnp.multiply, jnp.subtract):
        out = quax.quaxify(op)(x, x)
        assert out.axes == (A, B)
        assert_close(out.array, op(X, X))
        assert_close(quax.quaxify(op)(x, 2.0).array, op(X, 2.0))
        assert_close(quax.quaxify(op)(2.0, x).array, op(2.0, X))
    batched = quax.quaxify(lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))))
    assert batched(x, x).axes == (A,)


def test_names_that_differ_are_refused():
    x, y = named.NamedArray(X, (A, B)), named.NamedArray(X, (A, C))
    with pytest.raises(ValueError, match="Cannot broadcast named axes"):
        quax.quaxify(jnp.add)(x, y)
    with pytest.raises(ValueError, match="array of shape"):
        quax.quaxify(lax.add)(x, X)
    with pytest.raises(TypeError, match=r"Cannot contract mismatched dimensions: axis 1 of"):
        quax.quaxify(lambda x, y: jnp.tensordot(x, y, (1, 1)))(x, y)
    with pytest.raises(TypeError, match="Cannot batch mismatched dimensions"):
        quax.quaxify(lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((1,), (1,)))))(x, y)


@pytest.mark.parametrize("axes", [(A, A), (A,), (B, A)], ids=["twice", "too few", "size"])
def test_a_named_array_checks_its_axes(axes):
    with pytest.raises(ValueError, match="Axis"):
        named.NamedArray(X, axes)


def test_a_named_array_refuses_to_lose_its_names():
    x = named.NamedArray(X, (A, B))
    with pytest.raises(RuntimeError, match="materialise `NamedArray`"):
        quax.quaxify(jnp.sin)(x)
    with pytest.raises(RuntimeError, match="shape of a `NamedArray`"):
        x.shape  # noqa: B018
    allowed = x.enable_materialise()
    assert allowed.shape == (2, 3)
    assert_close(quax.quaxify(jnp.sin)(allowed), jnp.sin(X))


def test_trace_takes_names():
    x = arrays.normal(2, 3, 4)
    a, c = named.Axis(2), named.Axis(4)
    out = named.trace(named.NamedArray(x, (a, B, c)), axis1=a, axis2=c, offset=1, dtype=jnp.float16)
    assert out.axes == (B,)
    assert out.array.dtype == jnp.float16
    assert_close(out.array, jnp.trace(x, 1, 0, 2, jnp.float16))
    with pytest.raises(ValueError, match="twice"):
        named.trace(out, axis1=B, axis2=B)


# Sparse arrays.


def coo(**settings):
    indices = arrays.array(np.array([[[0, 1], [2, 0], [2, 0]], [[1, 1], [0, 0], [2, 1]]]))
    return sparse.BCOO(arrays.normal(2, 3), indices, (2, 3, 2), **settings)


DENSE = 3 * np.ones((2, 3, 2), np.float32)
OF_SPARSE = {
    "add": lambda x, y: x + x,
    "sub": lambda x, y: x - 2 * x,
    "mul": lambda x, y: x * y,
    "rmul": lambda x, y: y * x,
    "mul by a number": lambda x, y: x * 3,
    "broadcast": lambda x, y: jnp.broadcast_to(x, (4, 2, 3, 2)),
    "squeeze": lambda x, y: jnp.squeeze(jnp.broadcast_to(x, (1, 2, 3, 2)), 0),
    "transpose": lambda x, y: jnp.swapaxes(x, 1, 2),
    "reshape": lambda x, y: jnp.reshape(x, (2, 6)),
    "sum": lambda x, y: x.sum(2),
    "mul by itself": lambda x, y: x * x,
}
OF_SPARSE_DENSE = {
    "add dense": lambda x, y: x + y,
    "radd dense": lambda x, y: y[0] + x,
    "add a number": lambda x, y: x + 1,
    "product": lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))),
}


@pytest.mark.parametrize("name", [*OF_SPARSE, *OF_SPARSE_DENSE])
def test_sparse_arrays_agree_with_dense_ones(name):
    f = {**OF_SPARSE, **OF_SPARSE_DENSE}[name]
    out, expected = (
        quax.quaxify(f)(coo(), DENSE),
        f(vn.materialise(coo(allow_materialise=True)), DENSE),
    )
    if name in OF_SPARSE:
        assert type(out) is sparse.BCOO
        assert not out.allow_materialise
        out = out.enable_materialise().materialise()
    assert_close(out, expected)


def test_a_sparse_array_refuses_to_be_dense_unless_allowed():
    with pytest.raises(RuntimeError, match="materialise `BCOO` with"):
        quax.quaxify(jnp.cos)(coo())
    x = coo(allow_materialise=True)
    assert_close(quax.quaxify(jnp.cos)(x), jnp.cos(x.materialise()))


def test_a_sparse_array_checks_its_shapes():
    with pytest.raises(ValueError, match="batch axes"):
        sparse.BCOO(jnp.ones((2, 3)), jnp.zeros((2, 3, 2), int), (3, 3, 2))
    with pytest.raises(ValueError, match="indices"):
        sparse.BCOO(jnp.ones((2, 3)), jnp.zeros((2, 4, 2), int), (2, 3, 2))


# Tridiagonal matrices.


def tridiagonal(*batch, **settings):
    parts = [arrays.normal(*batch, n, seed=n) for n in (3, 4)]
    return structured_matrices.TridiagonalMatrix(*parts, parts[0] + 1, **settings)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("swap", [False, True])
def test_tridiagonal_products_agree_with_dense_ones(batch, swap):
    a = tridiagonal(*batch)
    dense = tridiagonal(*batch, allow_materialise=True).materialise()
    x = arrays.normal(*batch[:1], 4, 5)
    lead = (tuple(range(len(batch[:1]))),) * 2
    numbers = ((a.ndim - 1,), (x.ndim - 2,))
    pairs = (numbers, lead) if not swap else (numbers[::-1], lead)
    f = lambda a, x: lax.dot_general(*((x, a) if swap else (a, x)), pairs)
    assert_close(quax.quaxify(f)(a, x), f(dense, x))


def test_tridiagonal_matrices_add_and_multiply():
    a = tridiagonal()
    dense = tridiagonal(allow_materialise=True).materialise()
    total = quax.quaxify(lambda a: 2 * a + a.T)(a)
    assert type(total) is structured_matrices.TridiagonalMatrix
    assert_close(allowing(total).materialise(), 2 * dense + dense.T)
    assert_close(vn.materialise(quax.quaxify(jnp.matmul)(a, a)), dense @ dense)
    with pytest.raises(RuntimeError, match="materialise `TridiagonalMatrix` with"):
        quax.quaxify(jnp.cos)(a)


def test_a_tridiagonal_matrix_checks_its_diagonals():
    with pytest.raises(ValueError, match="one entry fewer"):
        structured_matrices.TridiagonalMatrix(jnp.ones(2), jnp.ones(2), jnp.ones(2))
    with pytest.raises(ValueError, match="one dtype"):
        structured_matrices.TridiagonalMatrix(jnp.ones(1), jnp.ones(2, int), jnp.ones(1))


@pytest.mark.parametrize("make", [coo, tridiagonal, lora_array])
@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_derivatives_by_leaves_agree_with_the_dense_program(make, wrap):
    v, loss = make(allow_materialise=True), lambda v, x: jnp.sum(jnp.sin(v @ x))
    x = arrays.normal(v.shape[-1], seed=3)
    g = wrap(eqx.filter_grad(quax.quaxify(loss)))(make(), x)
    expected = eqx.filter_grad(lambda v, x: loss(vn.materialise(v), x))(v, x)
    for leaf, wanted in zip(jax.tree.leaves(g), jax.tree.leaves(expected), strict=True):
        assert_close(leaf, wanted)


# Units.


def test_units_follow_the_arithmetic():
    x = Unitful(arrays.array([2.0, 3.0]), meters)
    speed = Unitful(arrays.array(2.0), {meters: 1, seconds: -1})
    energy = quax.quaxify(lambda m, v: 0.5 * m * v**2)(Unitful(3.0, kilograms), speed)
    assert energy.units == {kilograms: 1, meters: 2, seconds: -2}
    assert_close(energy.array, 6.0)
    assert quax.quaxify(lambda x, v: x * v)(x, speed).units == {meters: 2, seconds: -1}
    assert_close(quax.quaxify(jnp.add)(x, x).array, 2 * x.array)
    assert quax.quaxify(lambda x: x < x + x)(x).all()
    assert repr(x.units) == "{m: 1}"
    out = jax.jit(quax.quaxify(lambda x, v: x * v))(x, speed)  # units are hashable metadata
    assert out.units == {meters: 2, seconds: -1}


def test_units_that_cancel_are_dropped():
    x, inverse = Unitful(arrays.array(2.0), meters), Unitful(arrays.array(3.0), {meters: -1})
    product = quax.quaxify(lambda x, y: x * y)(x, inverse)
    assert repr(product.units) == repr(quax.quaxify(lambda x: x**0)(x).units) == "{}"
    assert_close(quax.quaxify(jnp.add)(product, Unitful(1.0, {})).array, 7.0)


def test_units_that_differ_are_refused():
    x, t = Unitful(1.0, meters), Unitful(1.0, seconds)
    with pytest.raises(ValueError, match="Cannot add two arrays with units"):
        quax.quaxify(jnp.add)(x, t)
    with pytest.raises(ValueError, match="Cannot compare two arrays with units"):
        quax.quaxify(jnp.less)(x, t)
    with pytest.raises(ValueError, match="Refusing to materialise"):
        quax.quaxify(jnp.sin)(x)
    with pytest.raises(ValueError, match="Cannot add"):
        quax.quaxify(jnp.add)(x, Unitful(1.0, Dimension("m")))  # another of that name


# Random keys.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.complex64])
def test_a_threefry_key_draws_as_jax_does(dtype):
    key, jax_key = prng.ThreeFry(7), jax.random.key(7, impl="threefry2x32")
    assert_close(prng.normal(key, (3,), dtype), jax.random.normal(jax_key, (3,), dtype))
    if dtype != jnp.complex64:
        expected = jax.random.uniform(jax_key, (3,), dtype, -1, jnp.arange(3))
        assert_close(prng.uniform(key, (3,), dtype, -1, jnp.arange(3)), expected)
    splits = jax.random.key_data(jax.random.split(jax_key, 3))
    assert [k.value.tolist() for k in prng.split(key, 3)] == splits.tolist()


def test_a_key_of_ones_own_draws_by_its_bits():
    class Counter(prng.PRNG):
        start: jax.Array

        def aval(self):
            return jax.core.ShapedArray((), jnp.uint32)

        def random_bits(self, bit_width, shape):
            return jnp.full(shape, self.start, f"uint{bit_width}")

        def split(self, num):
            return [Counter(self.start + i) for i in range(num)]

    key = Counter(jnp.uint32(2**31))
    assert_close(prng.uniform(key, (2,)), jnp.full(2, 0.5))
    assert [int(k.start) - 2**31 for k in prng.split(key, 3)] == [0, 1, 2]
    with pytest.raises(TypeError, match="a Counter is a random key"):
        quax.quaxify(jnp.sin)(key)


def test_keys_may_be_chosen_and_carried():
    keys = prng.ThreeFry(0), prng.ThreeFry(1)
    choose = jax.jit(quax.quaxify(jnp.where))
    assert choose(jnp.array(True), *keys) == keys[0]
    assert choose(jnp.array(False), *keys) == keys[1]

    def step(carry, _):
        key, own = prng.split(carry)
        return key, prng.normal(own)

    assert len(set(lax.scan(step, keys[0], length=3)[1].tolist())) == 3


def test_bad_dtypes_of_draws_are_refused():
    for draw in (prng.normal, prng.uniform):
        with pytest.raises(ValueError, match="dtype"):
            draw(prng.ThreeFry(0), (2,), jnp.int32)


def test_select_works_on_batched_keys():
    keys = [jax.vmap(quax.examples.prng.ThreeFry)(jnp.arange(n, n + 3)) for n in (0, 10)]
    mask = jnp.array([True, False, True])
    chosen = quax.quaxify(jnp.where)(mask, *keys)
    expected = jnp.where(mask[:, None], keys[0].value, keys[1].value)
    assert jnp.array_equal(chosen.value, expected)
