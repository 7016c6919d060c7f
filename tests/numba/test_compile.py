"""`vn.numba.compile`: arguments, results, caching, and errors."""

import copy
import importlib
import pickle
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.extend.core import Primitive
from numba.core.codegen import CPUCodeLibrary

import veneer as vn
from veneer.numba import compiler, machine
from veneer.numba.codegen.graph import trace

X = np.arange(6, dtype=np.float32).reshape(2, 3)
W = np.ones(3, jnp.float8_e4m3fn)


@pytest.fixture(scope="module")
def doubled():
    return vn.numba.compile(lambda x: x * 2, X)


def test_a_call_returns_a_new_array(doubled):
    first, second = doubled(X), doubled(X + 1)
    np.testing.assert_array_equal(first, X * 2)
    np.testing.assert_array_equal(second, X * 2 + 2)
    assert type(first) is np.ndarray
    assert first.dtype == np.float32


@pytest.mark.parametrize(
    "given",
    [X.astype(np.float64), np.asfortranarray(X), X[::-1][::-1], jax.device_put(X), X.tolist()],
    ids=["float64", "fortran", "view", "jax", "list"],
)
def test_arguments_are_accepted_as_in_jax(doubled, given):
    if isinstance(given, list):
        given = np.asarray(given)
    before = np.array(given)
    np.testing.assert_array_equal(doubled(given), X * 2)
    np.testing.assert_array_equal(given, before)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((X[:1],), r"float32\[1, 3\].*float32\[2, 3\]"),
        ((X.astype(np.int32),), "int32"),
        ((X, X), "takes 1 array, not 2"),
        ((), "not 0"),
    ],
    ids=["shape", "dtype", "too many", "none"],
)
def test_arguments_of_other_shapes_or_dtypes_raise(doubled, given, told):
    with pytest.raises(TypeError, match=told):
        doubled(*given)


def test_keyword_arguments_raise(doubled):
    with pytest.raises(TypeError, match=r"called with the keyword 'x'.*by position"):
        doubled(x=X)


def test_a_compiled_function_cannot_be_pickled(doubled):
    assert copy.deepcopy([doubled])[0] is copy.copy(doubled) is doubled
    with pytest.raises(TypeError, match=r"cannot be pickled.*in the process that calls it"):
        pickle.dumps(doubled)


def test_arguments_and_results_can_be_pytrees():
    def f(tree, more):
        w, (b, none) = tree["w"], tree["b"]
        assert none is None
        return {"sum": w + b, "rest": [more[0] * 2.0, None, (w > 0,)]}

    args = ({"b": (np.float32(1), None), "w": X}, [np.ones(2, np.float32)])
    compiled = vn.numba.compile(f, *args)
    result, expected = compiled(*args), f(*args)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    for wrong in ({"b": (np.float32(1), None)}, {"b": (np.float32(1), 2.0), "w": X}, (X,)):
        with pytest.raises(TypeError, match="structure"):
            compiled(wrong, args[1])


def test_implicit_arrays_can_be_arguments_and_results():
    weight = vn.quant.quantize(jnp.asarray(X), "int8", channelwise_axes=(1,))
    compiled = vn.numba.compile(lambda q, x: (x @ q, q), weight, X[:, :2])
    product, same = compiled(weight, X[:, :2])
    np.testing.assert_allclose(product, X[:, :2] @ weight.materialise(), rtol=1e-5)
    assert type(same) is type(weight)


def test_python_scalars_are_arrays_without_axes():
    compiled = vn.numba.compile(lambda x, n: x + n, 1.0, 2)
    for args in [(1.0, 2), (np.float32(1), np.int32(2)), (np.ones((), np.float32), 2)]:
        assert compiled(*args) == 3.0
    assert compiled(1.0, 2).shape == ()


@pytest.mark.parametrize("qtype", ["int8", "int4"])
@pytest.mark.parametrize("wrap", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_a_captured_quantized_weight_stays_packed(qtype, wrap):
    weight = jax.random.normal(jax.random.key(0), (16, 8))
    weight = jax.tree.map(wrap, vn.quant.quantize(weight, qtype, channelwise_axes=(1,)))
    f = lambda x: x @ weight
    graph, _, _ = trace(f, (np.ones((2, 16), np.float32),))
    source = compiler.source_of(graph)
    assert sum(array.nbytes for array in source.constants) == weight.nbytes


def test_captured_arrays_keep_their_values():
    weight = X.copy()
    compiled = vn.numba.compile(lambda x: x + weight, X)
    weight[:] = 0
    np.testing.assert_array_equal(compiled(X), X + X)


def test_equal_layers_share_their_kernels():
    def f(x, weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    weights = [np.eye(3, dtype=np.float32)] * 4
    graph, _, _ = trace(f, (X, weights))
    text = compiler.source_of(graph).text
    assert re.findall(r"^def (\w+)", text, re.M) == ["dot_general_0", "tanh_0", "program"]
    assert __file__ in text  # a comment at each call names its line


def test_a_program_is_compiled_once_for_all_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path))
    f = lambda x: x * 5
    vn.numba.compile(f, X)
    monkeypatch.setattr(machine, "object_code", lambda source: pytest.fail("compiled again"))
    np.testing.assert_array_equal(vn.numba.compile(f, X)(X), X * 5)


def test_each_shape_has_its_own_program():
    f = lambda x: x * 7
    compiled = [vn.numba.compile(f, X.reshape(shape)) for shape in [(2, 3), (3, 2), (6,)]]
    for program, shape in zip(compiled, [(2, 3), (3, 2), (6,)], strict=True):
        np.testing.assert_array_equal(program(X.reshape(shape)), X.reshape(shape) * 7)


def test_numba_code_calls_a_program():
    from numba import njit

    def f(x, scale):
        return jnp.sum(x) * scale, x - 1

    raw = vn.numba.compile(f, X, 1.0).raw

    @njit
    def loop(x, n):
        total = 0.0
        for i in range(n):
            value, less = raw(x, i)
            total += value + less[0, 0]
        return total

    assert loop(X, 4) == sum(15 * i - 1 for i in range(4))
    with pytest.raises(ValueError, match="shape"):
        raw(X[:1], 1.0)


def test_symbolic_shapes_raise():
    example = jax.ShapeDtypeStruct(export.symbolic_shape("n, 3"), np.float32)
    with pytest.raises(NotImplementedError, match=r"Argument 1 .*, 3\).* Compile once for each"):
        vn.numba.compile(lambda x, y: x + y.sum(), X, example)


def test_jax_rejects_shapes_that_depend_on_values():
    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"size argument of jnp\.nonzero"):
        vn.numba.compile(jnp.nonzero, X)
    found = vn.numba.compile(lambda x: jnp.nonzero(x, size=5), X)(X)
    np.testing.assert_array_equal(found, np.nonzero(X))


def test_the_error_for_an_unknown_primitive_names_its_line():
    line = sys._getframe().f_lineno + 1
    f = lambda x: jax.pure_callback(lambda x: x, x, x)
    with pytest.raises(NotImplementedError, match="'pure_callback'") as error:
        vn.numba.compile(f, X)
    assert f"{__file__}:{line}" in str(error.value)
    assert "funcify.register('pure_callback')" in str(error.value)


def test_the_error_names_the_line_that_calls_a_jax_function():
    f = lambda x: jax.scipy.linalg.hessenberg(x @ x.T)
    line = f"{f.__code__.co_filename}:{f.__code__.co_firstlineno}"
    with pytest.raises(NotImplementedError, match=f"'hessenberg', from {re.escape(line)}"):
        vn.numba.compile(f, X)


@pytest.mark.parametrize("f", [lambda x: (x, W), lambda x: x.astype("int4")], ids=["f8", "int4"])
def test_dtypes_that_numba_lacks_raise(f):
    with pytest.raises(NotImplementedError, match=r"vn.numba has no arrays of dtype (int4|float8)"):
        vn.numba.compile(f, X)


def test_the_error_names_an_unsupported_parameter():
    f = lambda x: jax.lax.approx_max_k(x, 1, aggregate_to_topk=False)
    with pytest.raises(NotImplementedError, match=r"'approx_top_k' .*aggregate_to_topk"):
        vn.numba.compile(f, X)


def test_users_can_register_their_own_primitives():
    twice = Primitive("twice_for_a_test")
    twice.def_abstract_eval(lambda x: x)
    with pytest.raises(NotImplementedError, match="twice_for_a_test"):
        vn.numba.compile(lambda x: twice.bind(x), X)

    @vn.numba.funcify.register("twice_for_a_test")
    def _(b, x):
        return b.lazy(lambda k, index: k.let(f"{k.read(x, index)} * np.float32(2)"), x)

    vn.numba.perform.register("twice_for_a_test")(lambda x: x * 2)
    vn.numba.compare_numba_and_py(lambda x: twice.bind(x), [X])


def test_a_rule_whose_code_can_raise_is_rejected():
    """Native code would stop at the error and leave results uninitialized."""
    inverse = Primitive("inverse_of_complex")
    inverse.def_abstract_eval(lambda x: x)
    write = lambda b, x: b.lazy(lambda k, i: k.let(f"np.complex64(1) / {k.read(x, i)}"), x)
    vn.numba.funcify.register("inverse_of_complex")(write)
    with pytest.raises(NotImplementedError, match="must not raise"):
        vn.numba.compile(lambda x: inverse.bind(x), X.astype(np.complex64))


def test_numba_does_not_optimize_the_functions_of_a_program(monkeypatch, tmp_path):
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path))
    optimized = []
    for name in ("_optimize_functions", "_optimize_final_module", "_finalize_final_module"):
        original = getattr(CPUCodeLibrary, name)

        def record(library, *args, original=original):
            optimized.append(library.name)
            return original(library, *args)

        monkeypatch.setattr(CPUCodeLibrary, name, record)
    x = np.linspace(-1, 1, 7, dtype=np.float32)
    f = lambda x: jnp.tanh(x) * 1.0625 + jnp.sort(x)[::-1]
    np.testing.assert_allclose(vn.numba.compile(f, x)(x), f(x), rtol=1e-6)
    # Numba's own functions, such as `min`, are shared by all its users.
    assert {name for name in optimized if not name.startswith("ol_")} <= {"nrt"}


def test_without_numba_the_error_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError, match=r"vn\.numba needs Numba.*pip install '\.\[numba\]'"):
        importlib.reload(vn.numba)
