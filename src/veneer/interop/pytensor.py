"""Convert graphs of PyTensor (https://github.com/pymc-devs/pytensor) to JAX, and extend its modes.

`to_jax` converts a graph to a JAX function, which `vn.implicit` can transform.
`register_in_pytensor` adds operations to PyTensor's JAX mode. `QuantizedDot` is a product with a
quantized matrix as an `Op`, in Python, JAX and Numba. `jax_funcify` and `numba_funcify` register
implementations of an `Op`, and `compare_jax_and_py` and `compare_numba_and_py` test them.

Importing PyTensor's dispatch for JAX sets `jax_enable_x64`. If this module is imported first, the
setting does not change.
"""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from .._core.errors import install_command

_x64 = jax.config.values["jax_enable_x64"]  # the setting of the program, in every context
try:
    from pytensor import function as compile_graph
    from pytensor.compile.mode import Mode
    from pytensor.compile.ops import DeepCopyOp
    from pytensor.compile.sharedvalue import SharedVariable
    from pytensor.graph.basic import Constant, Variable
    from pytensor.graph.fg import FunctionGraph
    from pytensor.graph.replace import graph_replace
    from pytensor.graph.traversal import graph_inputs
    from pytensor.link.jax import dispatch as jax_dispatch
    from pytensor.link.numba.dispatch import basic as numba_dispatch
    from pytensor.tensor.random.type import RandomType
    from scipy.sparse import csc_matrix, csr_matrix, issparse

    from .pytensor_graph import (
        convert_argument,
        dtype_of,
        implement_graph,
        implement_op,
        name_deciding_inputs,
        rewrite_for_jax,
    )
    from .pytensor_ops import IMPLEMENTATIONS
    from .pytensor_quantized_dot import QuantizedDot, quantized_dot
except ImportError as error:
    raise ImportError(
        f"veneer.interop.pytensor needs pytensor: {install_command('pytensor')}"
    ) from error
finally:
    jax.config.update("jax_enable_x64", _x64)

__all__ = [
    "QuantizedDot",
    "compare_jax_and_py",
    "compare_numba_and_py",
    "jax_funcify",
    "numba_funcify",
    "quantized_dot",
    "register_in_pytensor",
    "to_jax",
]

# An assignment, so that the site documents the name where PyTensor is not installed.
jax_funcify = jax_dispatch.jax_funcify
"""PyTensor's `jax_funcify`: `@jax_funcify.register(Op)` registers an implementation for JAX."""


def to_jax(graph: Any, inputs: Any = None) -> Callable[..., Any]:
    """Convert a PyTensor graph to a JAX function, which JAX and `vn.implicit` can transform.

    A copy of the graph is rewritten as in PyTensor's JAX mode. Each result within the graph has
    the dtype that the graph declares. If `jax_enable_x64` is not set, float64 becomes float32, as
    everywhere in JAX.

    **Arguments:**

    - `graph`: a `FunctionGraph`, a variable, or a sequence of variables.
    - `inputs`: the variables that are the arguments of the function, in order. Omit it for a
      `FunctionGraph`, which has its own. Other shared variables keep their current values.

    The order of `pytensor.function`, `to_jax(inputs, graph)`, is also accepted, unless the results
    of the graph are inputs.

    **Returns:** a function of arrays with the dtypes and ranks of `inputs`. If `graph` is a
    variable, it returns an array, else a tuple of arrays. Sparse matrices are passed and returned
    as `BCOO` of `jax.experimental.sparse`. A random generator is passed as a JAX key, or as a NumPy
    `Generator` outside `jax.jit`, and returned as a key.

    **Raises:**

    - `TypeError` if the graph depends on a variable that is not an input, if an input is computed
      or constant, or if the arguments of the function do not have the types of `inputs`.
    - `TypeError`, here or in the call, if the value of an input determines a shape.
    - `NotImplementedError` if an `Op` has no implementation in JAX, or one that ignores a
      parameter.

    >>> import jax.numpy as jnp, pytensor.tensor as pt, veneer as vn
    >>> from veneer.interop.pytensor import to_jax
    >>> x, w = pt.matrix("x", dtype="float32"), pt.matrix("w", dtype="float32")
    >>> f = to_jax(pt.tanh(x @ w), [x, w])
    >>> q = vn.quant.quantize(jnp.eye(4), "int8")
    >>> vn.implicit(f)(jnp.zeros((2, 4)), q).shape
    (2, 4)
    """
    graph, inputs = _sort_outputs_and_inputs(graph, inputs)
    fgraph = _copy_graph(graph, inputs)
    types = [variable.type for variable in fgraph.inputs]
    names = [str(variable) for variable in fgraph.inputs]
    rewrite_for_jax(fgraph)
    # `jax_enable_x64` decides the dtypes of constants and sums, and may change before a call.
    run_for = functools.cache(lambda float_dtype: implement_graph(fgraph))
    with name_deciding_inputs(fgraph):
        run_for(jax.dtypes.canonicalize_dtype("float64"))
    is_single = isinstance(graph, Variable)

    def of_graph(*args: Any) -> Any:
        if len(args) != len(types):
            raise TypeError(f"the graph takes {len(types)} arrays, {names}, but got {len(args)}")
        arguments = [convert_argument(*x) for x in zip(args, types, names, strict=True)]
        with (
            warnings.catch_warnings(),
            np.errstate(all="ignore"),  # NumPy would warn while it computes constants
            name_deciding_inputs(fgraph),
        ):
            # PyTensor adds up float32 in float64.
            warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)
            results = run_for(jax.dtypes.canonicalize_dtype("float64"))(*arguments)
        arrays = []
        for x, variable in zip(results, fgraph.outputs, strict=True):
            if isinstance(variable.type, RandomType):
                arrays.append(x["jax_state"])
            else:
                is_array = isinstance(x, jax.Array | BCOO)
                arrays.append(x if is_array else jnp.asarray(x, dtype_of(variable)))
        return arrays[0] if is_single else tuple(arrays)

    return of_graph


def _sort_outputs_and_inputs(graph: Any, inputs: Any) -> tuple[Any, Any]:
    """Return the outputs and the inputs of a graph, which may be passed in the reverse order.

    `to_jax` takes the outputs first, and `pytensor.function` the inputs. Variables that nothing
    computes are inputs.
    """
    if isinstance(graph, FunctionGraph) or inputs is None:
        return graph, inputs
    inputs_are_roots, graph_is_roots = (
        all(x.owner is None and not isinstance(x, Constant) for x in _as_list(variables))
        for variables in (inputs, graph)
    )
    if inputs_are_roots:
        return graph, _as_list(inputs)
    if graph_is_roots:
        return inputs, _as_list(graph)
    computed = [str(x) for x in _as_list(inputs) if x.owner is not None or isinstance(x, Constant)]
    raise TypeError(
        f"to_jax(graph, inputs) needs input variables, but these are computed or constant: "
        f"{', '.join(computed)}. List the variables that they are computed from instead"
    )


def _as_list(variables: Any) -> list[Any]:
    return [variables] if isinstance(variables, Variable) else list(variables)


class _NumbaFuncify:
    """PyTensor's `numba_funcify`, with a `register` that can replace implementations of PyTensor.

    In PyTensor 3, the `register` of PyTensor does not replace the implementation of an `Op` that
    has a cache key.

    >>> import numba, pytensor.tensor as pt
    >>> from pytensor.graph.basic import Apply
    >>> from pytensor.graph.fg import FunctionGraph
    >>> from pytensor.graph.op import Op
    >>> from veneer.interop.pytensor import compare_numba_and_py, numba_funcify
    >>> class Twice(Op):
    ...     def make_node(self, x):
    ...         return Apply(self, [x], [x.type()])
    ...     def perform(self, node, inputs, output_storage):
    ...         output_storage[0][0] = 2 * inputs[0]
    >>> @numba_funcify.register(Twice)
    ... def numba_funcify_Twice(op, node, **kwargs):
    ...     @numba.njit
    ...     def twice(x):
    ...         return x + x
    ...     return twice
    >>> x = pt.vector("x", dtype="float64")
    >>> _, results = compare_numba_and_py(FunctionGraph([x], [Twice()(x)]), [np.ones(2)])
    >>> results
    [array([2., 2.])]
    """

    def __call__(self, op: Any, node: Any = None, **kwargs: Any) -> Any:
        return numba_dispatch.numba_funcify(op, node=node, **kwargs)

    def register(
        self, op_class: type, implementation: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Register a function that returns the Numba implementation of an `Op`.

        **Arguments:**

        - `op_class`: a subclass of `Op`.
        - `implementation`: a function of the `Op`, `node` and other keywords. It returns an
          `@numba.njit` function, or a Python function that Numba can compile. If it is missing,
          `register` returns a decorator.

        **Returns:** the function.
        """
        if implementation is None:
            return functools.partial(self.register, op_class)

        # Without a cache key, PyTensor compiles each graph with this `Op` again in each process.
        @numba_dispatch.register_funcify_and_cache_key(op_class)
        def without_key(op: Any, **kwargs: Any) -> tuple[Callable[..., Any], None]:
            function = implementation(op, **kwargs)
            if isinstance(function, FunctionType):
                function = numba_dispatch.numba_njit(inspect.unwrap(function))
            return function, None

        return implementation


numba_funcify = _NumbaFuncify()


def compare_jax_and_py(
    fgraph: Any,
    inputs: Any,
    test_inputs: Sequence[Any] | None = None,
    *,
    assert_fn: Callable[[Any, Any], Any] | None = None,
) -> tuple[Callable[..., Any], list[Any]]:
    """Check that the JAX function of a graph gives the same results as `Op.perform`.

    Call it as `compare_jax_and_py(fgraph, values)`, or like PyTensor's own function as
    `compare_jax_and_py(inputs, outputs, values)`.

    **Arguments:**

    - `fgraph`: a `FunctionGraph`, or the input variables of a graph.
    - `inputs`: the values of the inputs, or the output variables of the graph.
    - `test_inputs`: the values of the inputs, if the graph is given by its variables.
    - `assert_fn`: a function that compares a result with the expected one. The default is
      `numpy.testing.assert_allclose` with a relative tolerance of 1e-4.

    **Returns:** the function of `to_jax` under `jax.jit`, and its results.

    **Raises:** `AssertionError` if values, dtypes or shapes differ, and the errors of `to_jax`. If
    `jax_enable_x64` is not set, float32 is expected in place of float64.

    >>> import numpy as np, pytensor.tensor as pt
    >>> from pytensor.graph.fg import FunctionGraph
    >>> from veneer.interop.pytensor import compare_jax_and_py
    >>> x = pt.matrix("x", dtype="float32")
    >>> fgraph = FunctionGraph([x], [pt.cumsum(x, axis=0)])
    >>> _, results = compare_jax_and_py(fgraph, [np.ones((3, 1), np.float32)])
    """
    graph, values = _sort_graph_and_values(fgraph, inputs, test_inputs)
    in_jax = jax.jit(to_jax(graph))
    results = list(in_jax(*(BCOO.from_scipy_sparse(x) if issparse(x) else x for x in values)))
    _check_against_perform(graph, values, results, jax.dtypes.canonicalize_dtype, assert_fn)
    return in_jax, results


def compare_numba_and_py(
    fgraph: Any,
    inputs: Any,
    test_inputs: Sequence[Any] | None = None,
    *,
    assert_fn: Callable[[Any, Any], Any] | None = None,
) -> tuple[Callable[..., Any], list[Any]]:
    """Check that a graph gives the same results in PyTensor's Numba mode as with `Op.perform`.

    **Arguments:** as for `compare_jax_and_py`.

    **Returns:** the compiled function, and its results.

    **Raises:** `AssertionError` if values, dtypes or shapes differ.

    >>> import numpy as np, pytensor.tensor as pt
    >>> from pytensor.graph.fg import FunctionGraph
    >>> from veneer.interop.pytensor import compare_numba_and_py
    >>> x = pt.matrix("x", dtype="float32")
    >>> fgraph = FunctionGraph([x], [pt.cumsum(x, axis=0)])
    >>> _, results = compare_numba_and_py(fgraph, [np.ones((3, 1), np.float32)])
    """
    graph, values = _sort_graph_and_values(fgraph, inputs, test_inputs)
    own = graph.clone()
    compiled = compile_graph(own.inputs, own.outputs, mode="NUMBA")
    results = list(compiled(*values))
    _check_against_perform(graph, values, results, np.dtype, assert_fn)
    return compiled, results


def register_in_pytensor() -> list[type]:
    """Add implementations of missing operations to PyTensor's `mode="JAX"`.

    They are sparse operations, `Print`, `QZ` and tridiagonal LU factors. Functions under `jax.jit`
    then also take sparse matrices of SciPy, as `BCOO`. PyTensor's own implementations for dense
    operands are kept. `mode="NUMBA"` needs no such function: it runs missing operations with
    `Op.perform`.

    **Returns:** the classes of the operations that now use an implementation of Veneer.

    >>> import numpy as np, pytensor, pytensor.tensor as pt, scipy.sparse
    >>> from pytensor import sparse
    >>> from veneer.interop.pytensor import register_in_pytensor
    >>> classes = register_in_pytensor()
    >>> x = sparse.csr_matrix("x", dtype="float32")
    >>> f = pytensor.function([x], sparse.dense_from_sparse(x + x), mode="JAX")
    >>> f(scipy.sparse.csr_matrix(np.eye(2, dtype=np.float32))).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    missing = jax_funcify.dispatch(object)
    classes = [
        cls
        for cls in IMPLEMENTATIONS
        if "sparse" in cls.__module__
        or cls is DeepCopyOp  # PyTensor copies results, also sparse ones
        or jax_funcify.dispatch(cls) in (missing, implement_op)
    ]
    for cls in classes:
        jax_funcify.register(cls, implement_op)
    for matrix in (csr_matrix, csc_matrix):
        with contextlib.suppress(ValueError):  # it is registered already
            jax.tree_util.register_pytree_node(
                matrix, _flatten_matrix, lambda shape, leaves: BCOO(leaves, shape=shape)
            )
    return classes


def _flatten_matrix(x: Any) -> tuple[Any, Any]:
    x = BCOO.from_scipy_sparse(x)
    return (x.data, x.indices), x.shape


def _sort_graph_and_values(
    fgraph: Any, inputs: Any, test_inputs: Sequence[Any] | None
) -> tuple[Any, Sequence[Any]]:
    if isinstance(fgraph, FunctionGraph):
        if test_inputs is not None:
            raise TypeError("a FunctionGraph already lists its inputs: give only their values")
        return fgraph, inputs
    if test_inputs is None:
        raise TypeError("without a FunctionGraph, give the inputs, the outputs and the values")
    outputs = [inputs] if isinstance(inputs, Variable) else inputs
    return _copy_graph(outputs, fgraph), test_inputs


def _check_against_perform(
    graph: Any,
    values: Sequence[Any],
    results: Sequence[Any],
    dtype_of: Callable[[Any], Any],
    assert_fn: Callable[[Any, Any], Any] | None,
) -> None:
    own = graph.clone()
    performed = compile_graph(own.inputs, own.outputs, mode=Mode(linker="py", optimizer=None))
    assert_fn = assert_fn or functools.partial(np.testing.assert_allclose, rtol=1e-4)
    for number, (result, expected) in enumerate(zip(results, performed(*values), strict=True)):
        if issparse(expected):
            result, expected = np.asarray(result.todense()), expected.toarray()
        actual = np.asarray(result)
        layouts = (actual.dtype, actual.shape), (dtype_of(expected.dtype), expected.shape)
        assert layouts[0] == layouts[1], f"output {number} is {layouts[0]}, not {layouts[1]}"
        assert_fn(result, expected)


def _copy_graph(graph: Any, inputs: Sequence[Any] | None) -> Any:
    """Return a copy of a graph as a `FunctionGraph`. Shared variables become constants."""
    if isinstance(graph, FunctionGraph):
        if inputs is not None:
            raise TypeError("a FunctionGraph already lists its inputs: omit the argument inputs")
        return graph.clone()
    if inputs is None:
        raise TypeError("to_jax needs the inputs of the graph: to_jax(outputs, [x, y])")
    outputs = _as_list(graph)
    roots = set(graph_inputs(outputs, blockers=inputs)) - set(inputs)
    shared = {}
    for x in roots:
        if isinstance(x, SharedVariable):
            # The type of a random generator has no class of constants.
            constant = getattr(x.type, "constant_type", Constant)
            shared[x] = constant(x.type, x.get_value(borrow=False), name=x.name)
    missing = sorted(f"{x} ({x.type})" for x in roots - {*shared} if not isinstance(x, Constant))
    if missing:
        listed = ", ".join(missing)
        raise TypeError(f"the graph depends on {listed}: list them in the inputs of to_jax.")
    if shared:
        outputs = graph_replace(outputs, list(shared.items()), strict=False)
    return FunctionGraph(list(inputs), outputs, clone=True)
