"""Convert graphs of PyTensor (https://github.com/pymc-devs/pytensor) to JAX, and extend its modes.

`to_jax` converts a graph to a JAX function, which `vn.implicit` can transform.
`register_in_pytensor` adds operations to PyTensor's JAX mode. `QuantizedDot` is a product with a
quantized matrix as an `Op`, in Python, JAX and Numba. `jax_funcify` and `numba_funcify` register
implementations of an `Op`, and `compare_jax_and_py` and `compare_numba_and_py` test them.

Importing PyTensor's dispatch for JAX sets `jax_enable_x64`. If this module is imported first, the
setting does not change.
"""

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from .._core.errors import install_command
from .._core.transform import redispatch
from ..quant.arrays.qarray import QArray
from ..quant.formats import get_format
from ..quant.formats.packing import Packing
from ..quant.formats.tiles import can_tile
from .pytensor_sparse import check_patterns

_x64 = jax.config.values["jax_enable_x64"]  # that of the program, whatever context this is in
try:
    import pytensor.tensor as pt
    from pytensor import function as compile_graph
    from pytensor.compile.mode import Mode, get_mode
    from pytensor.compile.ops import DeepCopyOp
    from pytensor.compile.sharedvalue import SharedVariable
    from pytensor.graph.basic import Apply, Constant, Variable
    from pytensor.graph.fg import FunctionGraph
    from pytensor.graph.op import HasInnerGraph, Op
    from pytensor.graph.replace import graph_replace
    from pytensor.graph.traversal import ancestors, graph_inputs
    from pytensor.link.jax import dispatch as jax_dispatch
    from pytensor.link.jax.dispatch.basic import jax_typify
    from pytensor.link.numba.dispatch import basic as numba_dispatch
    from pytensor.link.utils import fgraph_to_python
    from pytensor.scalar import ScalarOp, ScalarType, upcast
    from pytensor.sparse.basic import CSMProperties
    from pytensor.sparse.type import SparseTensorType
    from pytensor.tensor.basic import Join, MakeVector, ScalarFromTensor, Split, TensorFromScalar
    from pytensor.tensor.blockwise import Blockwise
    from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
    from pytensor.tensor.extra_ops import CumOp, UnravelIndex
    from pytensor.tensor.linalg import QR
    from pytensor.tensor.linalg.solvers.general import Solve
    from pytensor.tensor.math import Dot
    from pytensor.tensor.random.type import RandomType
    from pytensor.tensor.shape import Reshape, Shape, Shape_i
    from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor
    from scipy.sparse import csc_matrix, csr_matrix, issparse

    from .pytensor_ops import IMPLEMENTATIONS, SIZE_OPERANDS, is_known
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
    graph, inputs = _outputs_and_inputs(graph, inputs)
    fgraph = _own_graph(graph, inputs)
    types = [variable.type for variable in fgraph.inputs]
    names = [str(variable) for variable in fgraph.inputs]
    _check_inputs(fgraph.inputs)
    _write_out_unravel_index(fgraph)
    _replace_pivoted_qr(fgraph)
    _read_the_lower_triangle(fgraph)
    get_mode("JAX").optimizer.rewrite(fgraph)
    check_patterns(fgraph)
    # `jax_enable_x64` decides the dtypes of constants and sums, and may change before a call.
    run_for = functools.cache(lambda float_dtype: _in_jax(fgraph))
    with _name_what_decides_shapes(fgraph):
        run_for(jax.dtypes.canonicalize_dtype("float64"))
    is_one = isinstance(graph, Variable)

    def of_graph(*args: Any) -> Any:
        if len(args) != len(types):
            raise TypeError(f"the graph takes {len(types)} arrays, {names}, but got {len(args)}")
        given = [_as_declared(*x) for x in zip(args, types, names, strict=True)]
        with (
            warnings.catch_warnings(),
            np.errstate(all="ignore"),  # NumPy computes constants, and would warn
            _name_what_decides_shapes(fgraph),
        ):
            # PyTensor adds up float32 in float64.
            warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)
            results = run_for(jax.dtypes.canonicalize_dtype("float64"))(*given)
        arrays = [_result(*x) for x in zip(results, fgraph.outputs, strict=True)]
        return arrays[0] if is_one else tuple(arrays)

    return of_graph


def _result(x: Any, variable: Any) -> Any:
    if isinstance(variable.type, RandomType):
        return x["jax_state"]
    return x if isinstance(x, jax.Array | BCOO) else jnp.asarray(x, _dtype_of(variable))


def _outputs_and_inputs(graph: Any, inputs: Any) -> tuple[Any, Any]:
    """Return the outputs and the inputs of a graph, which may be in either order."""
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
    graph, values = _graph_and_values(fgraph, inputs, test_inputs)
    in_jax = jax.jit(to_jax(graph))
    results = list(in_jax(*(BCOO.from_scipy_sparse(x) if issparse(x) else x for x in values)))
    _assert_as_performed(graph, values, results, jax.dtypes.canonicalize_dtype, assert_fn)
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
    graph, values = _graph_and_values(fgraph, inputs, test_inputs)
    own = graph.clone()
    compiled = compile_graph(own.inputs, own.outputs, mode="NUMBA")
    results = list(compiled(*values))
    _assert_as_performed(graph, values, results, np.dtype, assert_fn)
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
    lacking = jax_funcify.dispatch(object)
    is_ours = lambda cls: getattr(jax_funcify.dispatch(cls), "__module__", "") == __name__
    classes = [
        cls
        for cls in IMPLEMENTATIONS
        if "sparse" in cls.__module__
        or cls is DeepCopyOp  # of a sparse matrix that is a result
        or jax_funcify.dispatch(cls) is lacking
        or is_ours(cls)
    ]
    for cls in classes:
        jax_funcify.register(cls, _funcify)
    for matrix in (csr_matrix, csc_matrix):
        with contextlib.suppress(ValueError):  # it is registered already
            jax.tree_util.register_pytree_node(matrix, _flatten_matrix, _as_bcoo)
    return classes


def _flatten_matrix(x: Any) -> tuple[Any, Any]:
    x = BCOO.from_scipy_sparse(x)
    return (x.data, x.indices), x.shape


def _as_bcoo(shape: Any, leaves: Any) -> BCOO:
    return BCOO(leaves, shape=shape)


def _graph_and_values(
    fgraph: Any, inputs: Any, test_inputs: Sequence[Any] | None
) -> tuple[Any, Sequence[Any]]:
    if isinstance(fgraph, FunctionGraph):
        if test_inputs is not None:
            raise TypeError("a FunctionGraph already lists its inputs: give only their values")
        return fgraph, inputs
    if test_inputs is None:
        raise TypeError("without a FunctionGraph, give the inputs, the outputs and the values")
    outputs = [inputs] if isinstance(inputs, Variable) else inputs
    return _own_graph(outputs, fgraph), test_inputs


def _assert_as_performed(
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
            result, expected = _as_dense(result), expected.toarray()
        actual = np.asarray(result)
        layouts = (actual.dtype, actual.shape), (dtype_of(expected.dtype), expected.shape)
        assert layouts[0] == layouts[1], f"output {number} is {layouts[0]}, not {layouts[1]}"
        assert_fn(result, expected)


def _as_dense(x: Any) -> Any:
    return np.asarray(x.todense())


def _own_graph(graph: Any, inputs: Sequence[Any] | None) -> Any:
    """Return a `FunctionGraph` that may be rewritten, with the values of shared variables."""
    if isinstance(graph, FunctionGraph):
        if inputs is not None:
            raise TypeError("a FunctionGraph already lists its inputs: omit the argument inputs")
        return graph.clone()
    if inputs is None:
        raise TypeError("to_jax needs the inputs of the graph: to_jax(outputs, [x, y])")
    outputs = _as_list(graph)
    roots = set(graph_inputs(outputs, blockers=inputs)) - set(inputs)
    shared = {x: _value_of(x) for x in roots if isinstance(x, SharedVariable)}
    missing = sorted(f"{x} ({x.type})" for x in roots - {*shared} if not isinstance(x, Constant))
    if missing:
        listed = ", ".join(missing)
        raise TypeError(f"the graph depends on {listed}: list them in the inputs of to_jax.")
    if shared:
        outputs = graph_replace(outputs, list(shared.items()), strict=False)
    return FunctionGraph(list(inputs), outputs, clone=True)


def _value_of(shared: Any) -> Any:
    constant = getattr(shared.type, "constant_type", Constant)  # a generator has none of its own
    return constant(shared.type, shared.get_value(borrow=False), name=shared.name)


def _check_inputs(inputs: Sequence[Any]) -> None:
    for variable in inputs:
        if not isinstance(variable.type, RandomType) and not hasattr(variable.type, "dtype"):
            raise TypeError(
                f"the graph's input {variable} is {variable.type}: to_jax supports arrays, sparse "
                "matrices and random generators"
            )


def _in_jax(fgraph: Any) -> Callable[..., Any]:
    """PyTensor's function in JAX, refused where PyTensor warns that it ignores a parameter."""
    # The constants are arrays, also where the function is first called under `jax.jit`.
    with warnings.catch_warnings(), jax.ensure_compile_time_eval():
        warnings.filterwarnings("error", ".*(ignores the|is ignored)", UserWarning)
        try:
            return _funcify_graph(fgraph)
        except UserWarning as error:
            raise NotImplementedError(
                f"PyTensor would compute another graph in JAX: {error}"
            ) from error


class _TypedGraph(FunctionGraph):
    """The graph within an `Op`, each of whose results has its declared dtype."""


@jax_funcify.register(_TypedGraph)
def _funcify_graph(fgraph: Any, node: Any = None, **kwargs: Any) -> Callable[..., Any]:
    return fgraph_to_python(
        fgraph,
        _funcify,
        type_conversion_fn=_constant,
        **{"fgraph_name": "to_jax", **kwargs},
    )


def _constant(data: Any, variable: Any = None, **kwargs: Any) -> Any:
    """Convert a constant. If it is small, it stays in NumPy: it may decide a shape."""
    if isinstance(data, np.ndarray):
        is_small = data.ndim == 0 or (data.ndim == 1 and data.size <= _MAX_KNOWN)
        return data[()] if is_small else jnp.asarray(data, _dtype_of(variable))
    return jax_typify(data, variable=variable, **kwargs)


# The largest vector whose values are kept in NumPy. Shapes are shorter.
_MAX_KNOWN = 64


# Operations that compute shapes from shapes. If the operands are small, so are the results.
_SHAPE_OPS = (
    CAReduce, CumOp, DimShuffle, Elemwise, IncSubtensor, Join, MakeVector, Reshape,
    ScalarFromTensor, ScalarOp, Split, Subtensor, TensorFromScalar,
)  # fmt: skip


def _perform(op: Any, node: Any, inputs: Sequence[Any]) -> Any:
    """Compute a result in NumPy from operands that are known, as PyTensor's Python mode does."""
    operands = [
        np.asarray(x, variable.type.dtype)[() if isinstance(variable.type, ScalarType) else ...]
        for x, variable in zip(inputs, node.inputs, strict=True)
    ]
    op.prepare_node(node, None, None, "py")
    storage: list[list[Any]] = [[None] for _ in node.outputs]
    op.perform(node, operands, storage)
    results = [
        np.asarray(cell[0]).astype(v.type.dtype)[()]
        for cell, v in zip(storage, node.outputs, strict=True)
    ]
    return results[0] if len(results) == 1 else tuple(results)


def _funcify(op: Any, node: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return PyTensor's implementation of an `Op`, with inputs and outputs cast as it declares.

    PyTensor's implementations leave dtypes to JAX, whose rules are not those of PyTensor and
    NumPy: in JAX, a sum of int8 is int32, and a product of int32 and float32 is float32.
    """
    own = next((IMPLEMENTATIONS[cls] for cls in type(op).__mro__ if cls in IMPLEMENTATIONS), None)
    implementation = own and own(op, node, core=functools.partial(_funcify, **kwargs))
    if implementation is None:
        implementation = jax_funcify(_with_typed_graphs(op), node=node, **kwargs)
    first, input_dtype = _common_dtype(op, node)
    # Slices and new axes are no operands of an `Elemwise`, but of a `Subtensor`.
    static = range(len(node.inputs))[SIZE_OPERANDS.get(type(op), slice(0))]
    computes_shapes = isinstance(op, _SHAPE_OPS)

    def typed(*inputs: Any) -> Any:
        if computes_shapes and all(map(is_known, inputs)):
            return _perform(op, node, inputs)
        inputs = tuple(
            dict(x)  # a copy: PyTensor writes the next key into the dict of a generator
            if isinstance(x, dict)
            else x
            if place in static
            else _in_jax_dtype(x, variable)
            for place, (x, variable) in enumerate(zip(inputs, node.inputs, strict=True))
        )
        if input_dtype is not None:
            operands = zip(inputs[first:], node.inputs[first:], strict=True)
            cast = (x if v.type.dtype == "bool" else _cast(x, input_dtype) for x, v in operands)
            inputs = (*inputs[:first], *cast)
        results = implementation(*inputs)
        if len(node.outputs) == 1:
            return _typed_result(results, node.outputs[0])
        return tuple(_typed_result(*pair) for pair in zip(results, node.outputs, strict=True))

    return typed


def _typed_result(x: Any, variable: Any) -> Any:
    """Cast a result as the graph declares. A shape stays in NumPy."""
    if isinstance(x, np.ndarray | np.generic) and x.size <= _MAX_KNOWN:
        return x.astype(variable.type.dtype)
    return _cast(x, _dtype_of(variable))


def _in_jax_dtype(x: Any, variable: Any) -> Any:
    """Convert a value that NumPy has to JAX's dtype. A scalar stays in NumPy."""
    is_numpy = isinstance(x, np.ndarray | np.generic)
    return _cast(x, _dtype_of(variable)) if is_numpy else x


def _with_typed_graphs(op: Any) -> Any:
    """Copy an `Op` that contains graphs, and make them typed."""
    if isinstance(op, HasInnerGraph):
        graph: Any = op.fgraph
        # PyTensor freezes the graphs of some classes.
        graph = graph.unfreeze() if hasattr(graph, "unfreeze") else graph.clone()
        op = copy.copy(op)
        op.fgraph = _TypedGraph(graph.inputs, graph.outputs, clone=False)
    for name in ("scalar_op", "core_op"):
        inner = getattr(op, name, None)
        if inner is not None and (typed := _with_typed_graphs(inner)) is not inner:
            op = copy.copy(op)
            setattr(op, name, typed)
    return op


def _common_dtype(op: Any, node: Any) -> tuple[int, Any]:
    """Return the first operand that NumPy casts before it computes, and the dtype it casts to.

    The dtype is None where JAX computes in the same one.
    """
    core = getattr(op, "core_op", op)
    # Before PyTensor 3.3, the first input of `Join` is the axis.
    first = int(isinstance(core, Join) and "axis" not in core.__props__)
    declared = None
    if isinstance(core, CAReduce):
        declared = getattr(core, "acc_dtype", None)
    elif isinstance(core, CumOp):
        declared = node.outputs[0].type.dtype
    elif isinstance(core, Elemwise | ScalarOp | Join | MakeVector | Dot):
        dtypes = {variable.type.dtype for variable in node.inputs[first:]} - {"bool"}
        declared = np.result_type(*dtypes) if len(dtypes) > 1 else None
    return first, None if declared is None else jax.dtypes.canonicalize_dtype(declared)


def _dtype_of(variable: Any) -> Any:
    """Return the dtype that JAX has for a variable. That of a generator or slice is None."""
    dtype = getattr(variable.type, "dtype", None)
    return None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)


def _cast(x: Any, dtype: Any) -> Any:
    """Cast an array or scalar. A shape, which is a tuple, is no array yet."""
    if dtype is None or isinstance(x, tuple):
        return x
    if isinstance(x, BCOO):
        return x if x.dtype == dtype else BCOO((_cast(x.data, dtype), x.indices), shape=x.shape)
    if isinstance(x, bool | int | float | complex | np.generic | np.ndarray):
        numbers = _as_kind(np.asarray(x), dtype).astype(dtype)
        return jnp.asarray(numbers) if numbers.ndim else numbers[()]
    if x.dtype == dtype and not getattr(x, "weak_type", False):
        return x
    return _as_kind(x, dtype).astype(dtype)


def _as_kind(x: Any, dtype: Any) -> Any:
    """Drop the imaginary part for a real dtype, as NumPy does."""
    return x.real if x.dtype.kind == "c" and dtype.kind != "c" else x


def _write_out_unravel_index(fgraph: Any) -> None:
    """Replaces `UnravelIndex`, whose implementation in JAX takes any order for "C"."""
    for node in [node for node in fgraph.toposort() if isinstance(node.op, UnravelIndex)]:
        indices, dims = node.inputs
        axes = range(len(node.outputs))
        places = {}
        for axis in axes if node.op.order == "F" else reversed(axes):
            places[axis] = pt.mod(indices, dims[axis])
            indices = indices // dims[axis]
        news = [places[axis].astype(out.dtype) for axis, out in enumerate(node.outputs)]
        fgraph.replace_all(list(zip(node.outputs, news, strict=True)), import_missing=True)


class _PivotedQR(QR):
    """`QR` of columns in another order, where PyTensor's implementation in JAX keeps theirs."""


@jax_funcify.register(_PivotedQR)
def _(op: _PivotedQR, **_: Any) -> Callable[..., Any]:
    return lambda x: jax.scipy.linalg.qr(x, mode=op.mode, pivoting=True)


def _replace_pivoted_qr(fgraph: Any) -> None:
    for node in fgraph.toposort():
        core = node.op.core_op if isinstance(node.op, Blockwise) else node.op
        if isinstance(core, QR) and core.pivoting:
            pivoted = _PivotedQR(core.mode, pivoting=True)
            op = Blockwise(pivoted) if core is not node.op else pivoted
            fgraph.replace_all(
                list(zip(node.outputs, op(*node.inputs, return_list=True), strict=True))
            )


def _read_the_lower_triangle(fgraph: Any) -> None:
    """Make solves read the lower triangle. PyTensor's rewrites assume that both are equal."""
    for node in fgraph.toposort():
        core = getattr(node.op, "core_op", None)
        if isinstance(core, Solve) and core.assume_a == "pos" and not core.lower:
            a, b = node.inputs
            mirrored = pt.triu(a) + pt.triu(a, 1).mT.conj()
            solved = type(node.op)(Solve(assume_a="pos", lower=True, b_ndim=core.b_ndim))
            fgraph.replace(node.outputs[0], solved(mirrored, b), import_missing=True)


@contextlib.contextmanager
def _name_what_decides_shapes(fgraph: Any) -> Iterator[None]:
    """Says of errors of JAX and PyTensor which inputs decide shapes, where there are any."""
    try:
        yield
    except (AttributeError, IndexError, NotImplementedError, TypeError) as error:
        # JAX rejects `x[:n]` for a traced n by an IndexError.
        sizes = _slice_ends(fgraph) if isinstance(error, IndexError) else _sizes(fgraph)
        if not (deciding := _decide_shapes(fgraph, sizes)):
            raise
        names = " and ".join(f"{variable} ({variable.type})" for variable in deciding)
        raise TypeError(
            f"the value of the graph's input {names} determines a shape, but shapes are static in "
            "JAX: make it a constant, with one graph per value, or pass an array of that shape"
        ) from error


def _sizes(fgraph: Any) -> list[Any]:
    """Return the variables that are sizes of results."""
    return [
        size
        for node in fgraph.toposort()
        for op, where in SIZE_OPERANDS.items()
        if isinstance(node.op, op)
        for size in node.inputs[where]
    ]


def _slice_ends(fgraph: Any) -> list[Any]:
    """Return the variables that are starts, stops and steps of slices."""
    indices = [
        index
        for node in fgraph.toposort()
        for op, first in ((Subtensor, 1), (IncSubtensor, 2))
        if isinstance(node.op, op)
        for index in indices_from_subtensor(node.inputs[first:], node.op.idx_list)
        if isinstance(index, slice)
    ]
    ends = [end for index in indices for end in (index.start, index.stop, index.step)]
    return [end for end in ends if isinstance(end, Variable)]


def _decide_shapes(fgraph: Any, sizes: list[Any]) -> list[Any]:
    """Return the inputs on whose values, not only their shapes, one of the sizes depends."""
    of_shapes = Shape | Shape_i | CSMProperties
    known = [v for v in ancestors(sizes) if v.owner and isinstance(v.owner.op, of_shapes)]
    reached = set(ancestors(sizes, blockers=known))
    return [variable for variable in fgraph.inputs if variable in reached]


def _as_declared(x: Any, declared: Any, name: str) -> Any:
    """Check that an argument has the type that the graph declares for it, and convert it."""
    if isinstance(declared, RandomType):
        return _generator(x, name)
    if isinstance(declared, SparseTensorType) and issparse(x):
        x = BCOO.from_scipy_sparse(x)
    if isinstance(declared, SparseTensorType) != isinstance(x, BCOO):
        remedy = "a BCOO of jax.experimental.sparse, or, outside jax.jit, a SciPy sparse matrix"
        remedy = "a dense array" if isinstance(x, BCOO) else remedy
        raise TypeError(
            f"the graph's input {name} is {declared}, but got {type(x).__name__}: pass {remedy}"
        )
    if isinstance(x, bool | int | float | complex | list | tuple):
        _check_kind(x, declared, name)
        x = jnp.asarray(x, jax.dtypes.canonicalize_dtype(declared.dtype))
    given, wanted = (jax.dtypes.canonicalize_dtype(t.dtype) for t in (x, declared))
    sizes_fit = len(x.shape) == declared.ndim and all(
        size in (None, found) for size, found in zip(declared.shape, x.shape, strict=True)
    )
    if given != wanted or not sizes_fit:
        raise TypeError(f"the graph's input {name} is {declared}, but got {given}{[*x.shape]}")
    return jnp.asarray(x) if isinstance(x, np.ndarray) and x.ndim else x


def _generator(x: Any, name: str) -> dict[str, Any]:
    """Return what PyTensor's implementations in JAX read of a generator: a key of two words."""
    if isinstance(x, np.random.Generator):
        x = jax_typify(x)["jax_state"]
    elif isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if getattr(x, "shape", None) != (2,) or x.dtype != np.uint32:
        raise TypeError(
            f"the graph's input {name} is a random generator: pass a key such as "
            f"jax.random.key(0), or a NumPy Generator outside jax.jit, not {x!r}"
        )
    return {"jax_state": jnp.asarray(x)}


#: Dtypes by what they hold: each kind all that those before it do.
_KINDS = {kind: place for place, kinds in enumerate(("b", "iu", "fV", "c")) for kind in kinds}


def _check_kind(x: Any, declared: Any, name: str) -> None:
    """Refuses numbers of Python's of which the dtype that the graph has for them drops a part."""
    dtypes = [np.dtype(getattr(leaf, "dtype", type(leaf))) for leaf in jax.tree.leaves(x)]
    if any(_KINDS[dtype.kind] > _KINDS[np.dtype(declared.dtype).kind] for dtype in dtypes):
        raise TypeError(f"the graph's input {name} is {declared}, but got {x}")


class _CodeTable(NamedTuple):
    """What `QuantizedDot` knows of a format: the values of its codes, `[2**bits]`."""

    values: np.ndarray
    bits: int


def _codes(qtype: str) -> _CodeTable:
    format = get_format(qtype)
    if format.bits not in (1, 2, 4, 8) or format.storage_dtype.name not in ("int8", "uint8"):
        raise TypeError(
            f"QuantizedDot supports codes of 1, 2, 4 or 8 bits in int8 or uint8, not {qtype}: "
            "PyTensor has no dtype for them. Use to_jax on a graph with a dense matrix, and "
            "vn.implicit."
        )
    bits = int(format.bits)
    fields = np.arange(2**bits, dtype=np.uint8)
    with jax.ensure_compile_time_eval():
        if bits == 8:
            codes = jnp.asarray(fields.view(format.code_dtype))
        else:
            codes = format.from_fields(jnp.asarray(fields))
        return _CodeTable(np.asarray(format.decode(codes, jnp.float32)), bits)


class QuantizedDot(Op):
    """A product `[M, K] @ [K, N]` with a quantized matrix, as an `Op` of PyTensor.

    Call it with `x` and the arrays of a `QArray`, as arrays or variables: `(x, packed, scale)`, or
    `(x, packed, scale, zero_point)`. `quantized_dot` does this for a given `QArray`. The `Op` has
    no gradient in PyTensor: use `to_jax` and `jax.grad`.

    **Arguments:**

    - `qtype`: a format of 1, 2, 4 or 8 bits that is stored in int8 or uint8.
    - `size`: N if several codes share a byte, None if each code has its own byte. Codes are packed
      along the last axis.
    - `zero_point`: whether the call has a zero point.

    **Raises:**

    - `TypeError` if the format is not supported, or an operand has the wrong dtype or rank.
    - `ValueError`, when the graph runs, if the shapes do not fit.

    >>> import jax.numpy as jnp, numpy as np, pytensor.tensor as pt, veneer as vn
    >>> from veneer.interop.pytensor import QuantizedDot
    >>> q = vn.quant.quantize(jnp.eye(4), "int8")
    >>> x = pt.matrix("x", dtype="float32")
    >>> QuantizedDot("int8")(x, np.asarray(q.packed), np.asarray(q.scale)).type.shape
    (None, 4)
    """

    __props__ = ("qtype", "size", "zero_point")

    def __init__(self, qtype: str, size: int | None = None, zero_point: bool = False):
        self.qtype, self.size, self.zero_point = qtype, size, zero_point
        self._codes = _codes(qtype)
        if size is not None and self._codes.bits == 8:
            raise TypeError(f"codes of {qtype} are not packed: size must be None")

    def make_node(self, *leaves: Any) -> Any:
        """Return the node that applies this `Op` to variables or arrays."""
        if len(leaves) != 3 + self.zero_point:
            raise TypeError(f"{self} takes {3 + self.zero_point} operands, but got {len(leaves)}")
        operands = [pt.as_tensor_variable(leaf) for leaf in leaves]
        stored = get_format(self.qtype).storage_dtype.name
        allowed = [("float32", "float64"), (stored,), ("float32", "float64")]
        allowed += [("int8", "uint8", "int32", "float32", "float64")] * self.zero_point
        for name, variable, dtypes in zip(
            ("x", "packed", "scale", "zero_point"), operands, allowed, strict=False
        ):
            if variable.type.ndim != 2 or variable.type.dtype not in dtypes:
                wanted = " or ".join(dtypes)
                raise TypeError(
                    f"{self}: {name} is {variable.type}, but must be a matrix of {wanted}"
                )
        x, packed, scale = operands[:3]
        n = packed.type.shape[1] if self.size is None else self.size
        out = pt.tensor(dtype=upcast(x.dtype, scale.dtype), shape=(x.type.shape[0], n))
        return Apply(self, operands, [out])

    def infer_shape(self, *args: Any) -> Any:
        """Return the shape of the result, as variables."""
        shapes = args[-1]  # after the node, and before PyTensor 3.3 a graph
        n = shapes[1][1] if self.size is None else pt.as_tensor_variable(self.size)
        return [(shapes[0][0], n)]

    def perform(self, node: Any, inputs: Any, output_storage: Any) -> None:
        """Compute the product in NumPy. Tests compare the other implementations with it."""
        x, packed, scale, *zero_point = inputs
        values, bits = self._codes
        fields = packed.view(np.uint8)
        if self.size is not None:
            shifts = np.arange(0, 8, bits, dtype=np.uint8)
            if -(-self.size // len(shifts)) != packed.shape[1]:
                raise ValueError(
                    f"QuantizedDot: {self.size} codes of {bits} bits do not fit into packed "
                    f"{packed.shape}"
                )
            fields = (fields[..., None] >> shifts).reshape(len(packed), -1)[:, : self.size]
        fields = fields & np.uint8(2**bits - 1)
        _check(x.shape, fields.shape, scale.shape, *(z.shape for z in zero_point))
        w = values[fields].astype(scale.dtype)
        for z in zero_point:
            w = w - _repeated(z.astype(scale.dtype), w.shape)
        w = w * _repeated(scale, w.shape)
        dtype = node.outputs[0].dtype
        output_storage[0][0] = x.astype(dtype) @ w.astype(dtype)


def _repeated(tiles: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for axis in (0, 1):
        tiles = tiles.repeat(shape[axis] // max(tiles.shape[axis], 1), axis)
    return tiles


def _check(x: Any, codes: Any, *tiled: Any) -> None:
    if x[1] != codes[0] or not all(can_tile(shape, codes) for shape in tiled):
        raise ValueError(
            f"QuantizedDot of x {x} and codes {codes} with scale (and zero point) {tiled}: x must "
            "fit the codes, and each axis of the scale must divide the axis of the codes"
        )


def quantized_dot(x: Any, w: QArray) -> Any:
    """Multiply a variable by a quantized matrix, which stays packed in the graph.

    **Arguments:**

    - `x`: a PyTensor matrix `[M, K]` of float32 or float64.
    - `w`: a `QArray` `[K, N]`. Packed codes must be packed along the last axis, as
      `vn.quant.quantize` does it for a matrix.

    **Returns:** a PyTensor variable `[M, N]`.

    **Raises:** `TypeError` if `w` is not a matrix, has a minimum or quantized scales, is packed
    along another axis, or has a format for which PyTensor has no dtype.

    >>> import jax.numpy as jnp, pytensor.tensor as pt, veneer as vn
    >>> from veneer.interop.pytensor import quantized_dot
    >>> q = vn.quant.quantize(jnp.eye(4), "int4")
    >>> quantized_dot(pt.matrix("x", dtype="float32"), q).type.shape
    (None, 4)
    """
    if len(w.shape) != 2 or isinstance(w.scale, QArray) or w.minimum is not None:
        raise TypeError(
            f"quantized_dot needs a matrix with a dense scale and without a minimum, not {w}"
        )
    if w.packing is not None and w.packing.axis != -1:
        raise TypeError(f"quantized_dot needs codes packed along the last axis, not {w.packing}")
    size = None if w.packing is None else w.packing.size
    zero_point = [] if w.zero_point is None else [np.asarray(w.zero_point)]
    op = QuantizedDot(w.qtype, size, bool(zero_point))
    return op(x, np.asarray(w.packed), np.asarray(w.scale), *zero_point)


@jax_funcify.register(QuantizedDot)
def _(op: Any, node: Any = None, **_: Any) -> Callable[..., Any]:
    packing = None if op.size is None else Packing(-1, op.size)

    def quantized_dot(x: Any, packed: Any, scale: Any, *zero_point: Any) -> Any:
        leaves = [jnp.asarray(leaf) for leaf in (packed, scale, *zero_point)]
        q = QArray.from_packed(*leaves, qtype=op.qtype, packing=packing)
        return redispatch(jnp.matmul, x, q)

    return quantized_dot


@numba_dispatch.register_funcify_default_op_cache_key(QuantizedDot)
def _(op: Any, node: Any = None, **_: Any) -> Callable[..., Any]:
    values, bits = op._codes
    per_byte = 1 if op.size is None else 8 // bits
    size = -1 if op.size is None else op.size
    mask = 2**bits - 1
    dtype = np.dtype(node.outputs[0].dtype)

    def product(x, packed, scale, zero_point):
        (m, k), n = x.shape, packed.shape[1] if size < 0 else size
        if packed.shape[0] != k or -(-n // per_byte) != packed.shape[1]:
            raise ValueError("QuantizedDot: x and codes do not fit")
        for tiles in (scale.shape, zero_point.shape):
            if 0 in tiles or k % tiles[0] or n % tiles[1]:
                raise ValueError("QuantizedDot: a scale or zero point does not divide the codes")
        out = np.zeros((m, n), dtype)
        row = np.empty(n, dtype)
        for i in range(k):
            of_scale = scale[i * scale.shape[0] // k]
            of_zero = zero_point[i * zero_point.shape[0] // k]
            for j in range(n):
                code = np.uint8(packed[i, j // per_byte]) >> (bits * (j % per_byte)) & mask
                centred = values[code] - of_zero[j * zero_point.shape[1] // n]
                row[j] = centred * of_scale[j * scale.shape[1] // n]
            for r in range(m):
                for j in range(n):
                    out[r, j] += x[r, i] * row[j]
        return out

    # Unwrapped: in tests, functions check the types of their arguments, which Numba cannot compile.
    product = numba_dispatch.numba_njit(inspect.unwrap(product))
    if op.zero_point:
        return product
    none = np.zeros((1, 1), np.float32)

    def without_zero_point(x, packed, scale):
        return product(x, packed, scale, none)

    return numba_dispatch.numba_njit(inspect.unwrap(without_zero_point))
