"""Graphs of PyTensor in JAX, and a product of ours in its modes."""

import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytensor
import pytest
from support import arrays
from support.array_types import assert_close, lora
from support.policies import without_rule

import veneer as vn

BEFORE = jax.config.jax_enable_x64

import pytensor.tensor as pt  # noqa: E402
from pytensor.compile.builders import OpFromGraph  # noqa: E402
from pytensor.compile.mode import Mode  # noqa: E402
from pytensor.graph.basic import Apply  # noqa: E402
from pytensor.graph.fg import FunctionGraph  # noqa: E402
from pytensor.graph.op import Op  # noqa: E402
from pytensor.scalar import Composite, int8, reciprocal  # noqa: E402
from pytensor.tensor.elemwise import Elemwise  # noqa: E402
from pytensor.tensor.math import Sum  # noqa: E402

from veneer.interop import pytensor as interop  # noqa: E402
from veneer.interop.pytensor import QuantizedDot, quantized_dot  # noqa: E402


def to_jax(graph, inputs=None):
    """Return the function of `to_jax`, which also checks the dtypes of its results."""
    function = interop.to_jax(graph, inputs)
    outputs = graph.outputs if isinstance(graph, FunctionGraph) else graph
    declared = [v.type.dtype for v in (outputs if isinstance(outputs, list) else [outputs])]

    def checked(*args):
        results = function(*args)
        for result, dtype in zip(jax.tree.leaves(results), declared, strict=True):
            assert result.dtype == jax.dtypes.canonicalize_dtype(dtype)
            assert not getattr(result, "weak_type", False)
        return results

    return checked


KEY = arrays.key(0)
W, B = lora(KEY), arrays.linspace(-1.0, 1.0, 6)
X = arrays.array(np.linspace(-1.0, 1.0, 24).reshape(4, 6))


def layer():
    x, w = (pt.matrix(name, dtype="float32") for name in "xw")
    b = pt.vector("b", dtype="float32")
    return pt.special.softmax(pt.tanh(x @ w + b), axis=-1), [x, w, b]


def in_jax(x, w, b):
    return jax.nn.softmax(jnp.tanh(x @ w + b), axis=-1)


LAYER = to_jax(*layer())


def test_importing_does_not_change_x64():
    assert jax.config.jax_enable_x64 == BEFORE
    for state in ("True", "False"):
        program = (
            f"import jax; jax.config.update('jax_enable_x64', {state}); "
            "import veneer.interop.pytensor; print(jax.config.jax_enable_x64)"
        )
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert run.stdout.strip() == state, run.stderr


def test_a_graph_is_a_function_of_jax():
    w = vn.materialise(W)
    expected = in_jax(X, w, B)
    assert_close(jax.jit(LAYER)(X, w, B), expected)
    assert_close(jax.vmap(lambda x: LAYER(x[None], w, B)[0])(X), expected)
    loss = lambda f: jax.grad(lambda w: (f(X, w, B) ** 2).sum())(w)
    assert_close(loss(LAYER), loss(in_jax))


@pytest.mark.parametrize("w", [W, arrays.quantized("int4", 6, 6)], ids=type)
def test_rules_are_in_force_in_it(w):
    report = vn.explain(LAYER)(X, w, B)
    assert not without_rule(report)
    assert report.events
    assert_close(jax.jit(vn.implicit(LAYER))(X, w, B), in_jax(X, vn.materialise(w), B))


def test_a_function_graph_is_converted_and_not_changed():
    out, inputs = layer()
    fgraph = FunctionGraph(inputs, [out, out.sum()], clone=True)
    before = [node.op for node in fgraph.toposort()]
    rows, total = to_jax(fgraph)(X, vn.materialise(W), B)
    assert_close(rows, in_jax(X, vn.materialise(W), B))
    assert_close(total, rows.sum())
    assert [node.op for node in fgraph.toposort()] == before


def test_a_graph_of_float64_is_of_float32_where_jax_is():
    x = pt.vector("x", dtype="float64")
    f = to_jax(pt.exp(x) * 2.0 + pt.arange(3), [x])
    assert f(jnp.zeros(3)).dtype == jnp.zeros(3).dtype
    with jax.enable_x64(True):
        assert f(jnp.zeros(3, jnp.float64)).dtype == jnp.float64


I8, I32 = pt.vector("i8", dtype="int8"), pt.vector("i32", dtype="int32")
F32, C128 = pt.vector("f32", dtype="float32"), pt.vector("c128", dtype="complex128")
HUNDRED = np.array([100, 100], np.int8)
LARGE = np.array([2**24 + 1, 5], np.int32)  # float32 rounds the first
HALVES = np.array([0.5, 1.5], np.float32)
TYPED = {
    "sum of int8": (lambda: I8.sum(dtype="int8"), [I8]),
    "sum of int8 in int32": (lambda: I8.sum(dtype="int32"), [I8]),
    "product": (lambda: I8.prod(dtype="int16"), [I8]),
    "complex sum as real": (lambda: Sum(dtype="float64")(C128), [C128]),
    "half sum that overflows": (lambda: (4e4 * F32).astype("float16").mean(), [F32]),
    "cumsum": (lambda: pt.cumsum(I8), [I8]),
    "alloc": (lambda: pt.alloc(np.int8(100), 2) + pt.alloc(np.int8(100), 2), []),
    "alloc of a constant": (lambda: pt.alloc(np.float32(0.1), 2), []),
    "searchsorted": (lambda: pt.searchsorted(F32, F32), [F32]),
    "reciprocal": (lambda: pt.reciprocal(I8), [I8]),
    "square root": (lambda: pt.sqrt(I8), [I8]),
    "integers and floats": (lambda: I32 + F32, [I32, F32]),
    "comparison": (lambda: pt.eq(I32, (I32 - 1).astype("float32")), [I32]),
    "join": (lambda: pt.join(-1, I32, F32), [I32, F32]),
    "stack": (lambda: pt.stack([I32[0], F32[0]]), [I32, F32]),
    "dot": (lambda: pt.dot(I32, F32), [I32, F32]),
    "wider constants": (lambda: I8 + pt.constant(np.int16(200)), [I8]),
    "double constants": (lambda: F32 + pt.constant(np.array([1 / 3])), [F32]),
    "int8 scalars": (lambda: I8[0] * I8[1], [I8]),
    "int8 constants": (lambda: I8 + pt.constant(HUNDRED).sum(dtype="int8"), [I8]),
    "shape": (lambda: F32.shape, [F32]),
    "size": (lambda: F32.shape[0], [F32]),
    "part that is set": (lambda: pt.set_subtensor(F32[0], I8[0]), [I8, F32]),
    "input": (lambda: I8, [I8]),
    "constant": (lambda: pt.constant(np.int8(3)), []),
    "composite": (
        lambda: Elemwise(Composite([a := int8("a")], [reciprocal(a) * reciprocal(a)]))(I8),
        [I8],
    ),
    "graph in a graph": (
        lambda: OpFromGraph([I8], [I8.sum(dtype="int8") // np.int8(2)])(I8),
        [I8],
    ),
    "loop": (
        lambda: pytensor.scan(
            lambda x: pt.stack([x, x]).sum(dtype="int8") // np.int8(2),
            sequences=[I8],
            return_updates=False,
        ),
        [I8],
    ),
}


@pytest.mark.parametrize("x64", [True, False], ids=["x64", "x32"])
@pytest.mark.parametrize("name", TYPED)
def test_results_have_the_declared_dtype(name, x64):
    build, inputs = TYPED[name]
    graph = build()
    values = {I8: HUNDRED, I32: LARGE, F32: HALVES, C128: np.array([1 + 2j, 3])}
    arguments = [values[x] for x in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of complex numbers as real ones
        expected = pytensor.function(inputs, graph, mode=Mode("py", None))(*arguments)
    expected = expected.astype(graph.type.dtype)  # PyTensor's Python mode sums up int8 in int64
    f = to_jax(graph, inputs)  # with the other setting, because dtypes follow the call
    with jax.enable_x64(x64):
        for result in (f(*arguments), jax.jit(f)(*arguments)):
            if x64 or name != "comparison":  # exact only in float64
                np.testing.assert_allclose(result, expected, rtol=1e-15 if x64 else 1e-6)


def test_the_graphs_within_a_graph_stay_as_they_were():
    total = OpFromGraph([I8], [(I8 + 0 + I8).sum(dtype="int8")])
    before = [node.op for node in total.fgraph.toposort()]
    to_jax(total(I8), [I8])(HUNDRED)
    assert [node.op for node in total.fgraph.toposort()] == before


def test_arguments_are_those_that_the_graph_declares():
    w = vn.materialise(W)
    with pytest.raises(TypeError, match="takes 3 arrays"):
        LAYER(X, w)
    with pytest.raises(TypeError, match=r"input x .*int32\[4, 6\]"):
        LAYER(X.astype(jnp.int32), w, B)
    with pytest.raises(TypeError, match=r"input b .*float32\[1, 6\]"):
        LAYER(X, w, B[None])


@pytest.mark.parametrize(("dtype", "number"), [("int32", 1.7), ("float32", 1j), ("bool", 2)])
def test_no_part_of_a_number_is_dropped(dtype, number):
    x = pt.vector("x", dtype=dtype)
    with pytest.raises(TypeError, match="the graph's input x is"):
        to_jax(x, [x])([number])


def test_missing_inputs_raise():
    x, y = pt.vector("x"), pt.vector("y")
    with pytest.raises(TypeError, match=r"depends on y .* list them in the inputs"):
        to_jax(x * y, [x])
    with pytest.raises(TypeError, match="needs the inputs"):
        to_jax(x * 2)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("how", ["constant", "argument", "shape of another"])
def test_unravel_index_in_any_order_and_of_any_shape(order, shape, how):
    index = np.resize(np.array([5, 23, 0, 7], np.int32), shape)
    i = pt.tensor("i", dtype="int32", shape=(None,) * len(shape))
    dims, more, values = {
        "constant": ((2, 3, 4), [], []),
        "argument": (d := pt.tensor("d", dtype="int32", shape=(3,)), [d], [np.array([2, 3, 4])]),
        "shape of another": ((x := pt.tensor3("x", dtype="float32")).shape, [x], [None]),
    }[how]
    values = [np.zeros((2, 3, 4), np.float32) if v is None else v.astype(np.int32) for v in values]
    f = jax.jit(to_jax(list(pt.unravel_index(i, dims, order=order)), [i, *more]))
    for result, expected in zip(
        f(index, *values), np.unravel_index(index, (2, 3, 4), order=order), strict=True
    ):
        np.testing.assert_array_equal(result, expected)


def test_ignored_arguments_raise():
    x = pt.matrix("x", dtype="float32")
    with pytest.raises(NotImplementedError, match=r"sort argument is ignored"):
        to_jax(list(pt.linalg.schur(x, sort="lhp")), [x])


SIZE = pt.scalar("k", dtype="int32")
MATRIX = pt.matrix("x", dtype="float32")
SIZED = {
    "alloc": pt.zeros((SIZE, 3)) + 1,
    "eye": pt.eye(SIZE),
    "arange": pt.arange(SIZE),
    "reshape": MATRIX.reshape((SIZE, 2)),
    "reshape to a vector": MATRIX.reshape(pt.stack([SIZE, 2 * SIZE]), ndim=2),
    "broadcast": pt.broadcast_to(MATRIX[0], (SIZE, 6)),
    "slice": MATRIX[:SIZE],
    "slice that is set": MATRIX[: SIZE + 1].set(1.0),
}


@pytest.mark.parametrize("static", [[], [0]], ids=["traced", "static"])
@pytest.mark.parametrize("name", SIZED)
def test_an_input_that_decides_a_shape_is_named(name, static):
    with pytest.raises(
        TypeError, match=r"the value of the graph's input k \(.*\) determines a shape"
    ):
        jax.jit(to_jax(SIZED[name], [SIZE, MATRIX]), static_argnums=static)(3, X)


def test_shapes_of_inputs_may_decide_shapes():
    f = to_jax(MATRIX.T.reshape(MATRIX.shape) + pt.zeros_like(MATRIX), [MATRIX])
    assert_close(jax.jit(f)(X), X.T.reshape(X.shape))


def test_an_op_without_an_implementation_is_named():
    class Unknown(Op):
        def make_node(self, x):
            return Apply(self, [x], [x.type()])

        def perform(self, node, inputs, output_storage):
            output_storage[0][0] = inputs[0]

    x = pt.vector("x")
    with pytest.raises(NotImplementedError, match="Unknown"):
        to_jax(Unknown()(x), [x])


# QuantizedDot

K, N = 8, 6
DENSE = arrays.normal(K, N)
QUANTIZED = arrays.OnDemand(
    {
        "int8": lambda: vn.quant.quantize(DENSE, "int8", channelwise_axes=(1,)),
        "int4": lambda: vn.quant.quantize(
            DENSE[:, :5], "int4", channelwise_axes=(1,), tiled_axes={0: 4}
        ),
        "nf4": lambda: vn.quant.quantize(DENSE, "nf4", tiled_axes={0: 4}),
        "int2": lambda: vn.quant.quantize(DENSE, "int2", tiled_axes={0: 2}),
        "uint8": lambda: vn.quant.QArray(
            arrays.array(5 * np.arange(K * N).reshape(K, N), np.uint8),
            arrays.full((2, N), 0.1),
            arrays.full((1, N), 7, jnp.uint8),
            "uint8",
        ),
    }
)
XS = np.linspace(-1, 1, 3 * K, dtype=np.float32).reshape(3, K)


def compiled(q, mode):
    x = pt.matrix("x", dtype="float32")
    return pytensor.function([x], quantized_dot(x, q), mode=mode)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("mode", ["py", "jax"])
def test_the_product_in_python_and_jax(name, mode):
    q = QUANTIZED[name]
    result = compiled(q, {"py": Mode("py", None), "jax": "JAX"}[mode])(XS)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, XS @ vn.materialise(q), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["int4", "uint8"])
def test_the_product_in_numba(name):
    q = QUANTIZED[name]
    result = compiled(q, "NUMBA")(XS)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, XS @ vn.materialise(q), rtol=1e-5, atol=1e-5)


def test_codes_of_a_byte_each_and_sizes_that_do_not_fit():
    x, packed = pt.matrix("x", dtype="float32"), np.full((K, 2), 0x93, np.uint8)
    of = lambda size: QuantizedDot("int4", size)(x, packed, np.ones((1, 1), np.float32))
    run = lambda size, mode: pytensor.function([x], of(size), mode=mode)(XS)
    for mode in (Mode("py", None), "JAX"):
        np.testing.assert_allclose(
            run(None, mode), np.repeat(XS.sum(1)[:, None] * 3, 2, 1), 1e-5, 1e-5
        )
        with pytest.raises(ValueError, match="packed"):
            run(6, mode)


def test_the_product_in_c():
    result = compiled(QUANTIZED["int8"], Mode("cvm", "fast_run"))(XS)
    np.testing.assert_allclose(result, XS @ vn.materialise(QUANTIZED["int8"]), rtol=1e-5, atol=1e-5)


def test_the_weight_stays_packed_in_jax():
    x = pt.matrix("x", dtype="float32")
    f = to_jax(quantized_dot(x, QUANTIZED["nf4"]), [x])
    assert_close(f(XS), XS @ vn.materialise(QUANTIZED["nf4"]))
    packed = QUANTIZED["nf4"].packed
    shapes = {(c.shape, c.dtype) for c in jax.make_jaxpr(f)(XS).consts}
    assert (packed.shape, packed.dtype) in shapes


def test_leaves_may_be_variables():
    x, scale = (pt.matrix(name, dtype="float32") for name in ("x", "scale"))
    packed = pt.matrix("packed", dtype="int8")
    q = QUANTIZED["int8"]
    f = to_jax(QuantizedDot("int8")(x, packed, scale), [x, packed, scale])
    assert_close(f(XS, q.packed, q.scale), XS @ vn.materialise(q))
    assert_close(
        jax.grad(lambda x: f(x, q.packed, q.scale).sum())(XS),
        jnp.broadcast_to(vn.materialise(q).sum(1), XS.shape),
    )


def test_operands_that_do_not_fit_raise():
    x = pt.matrix("x", dtype="float32")
    with pytest.raises(TypeError, match=r"x is .*must be a matrix of float32"):
        quantized_dot(pt.vector("x", dtype="float32"), QUANTIZED["int8"])
    with pytest.raises(TypeError, match="not float8"):
        quantized_dot(x, vn.quant.quantize(DENSE, "float8_e4m3fn"))
    with pytest.raises(TypeError, match="not int3"):
        quantized_dot(x, vn.quant.quantize(DENSE, "int3"))
    with pytest.raises(ValueError, match="QuantizedDot"):
        compiled(QUANTIZED["int8"], Mode("py", None))(XS[:, :4])


@pytest.mark.parametrize("how", [jax.jit, lambda f: lambda x: vn.numba.compile(f, x)(x)])
def test_lapack_and_sparse_products_compile_natively(how):
    from pytensor import sparse
    from scipy.sparse import csr_matrix

    entries = np.array([[0, 1.5, 0], [2, 0, 0.5]], np.float32)
    x = pt.matrix("x", dtype="float32", shape=(3, 4))
    value = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    product = to_jax(sparse.dot(csr_matrix(entries), x), [x])
    assert_close(how(product)(value), entries @ value)
    q, r, order = how(to_jax(pt.linalg.qr(x, pivoting=True), [x]))(value)
    assert_close(q @ r, value[:, order])
    (r_alone, order_alone) = how(to_jax(pt.linalg.qr(x[:2], "r", pivoting=True), [x]))(value)
    assert_close(abs(np.diag(r_alone)), np.sort(abs(np.diag(r_alone)))[::-1])
    assert sorted(order_alone.tolist()) == [0, 1, 2, 3]
    batch = pt.stack([x, 2 * x])
    q, r, order = how(to_jax(pt.linalg.qr(batch, "economic", pivoting=True), [x]))(value)
    assert_close(q[1] @ r[1], 2 * value[:, order[1]])
