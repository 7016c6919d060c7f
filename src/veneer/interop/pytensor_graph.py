"""Implement a PyTensor graph in JAX: rewrites, implementations with declared dtypes, and checks.

PyTensor's own implementations leave dtypes to JAX, whose rules differ from NumPy's. Here,
each result has the dtype that the graph declares.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytensor.tensor as pt
from jax.experimental.sparse import BCOO
from pytensor.compile.mode import get_mode
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.traversal import ancestors
from pytensor.link.jax.dispatch import jax_funcify
from pytensor.link.jax.dispatch.basic import jax_typify
from pytensor.link.utils import fgraph_to_python
from pytensor.scalar import ScalarOp, ScalarType
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
from scipy.sparse import issparse

from .pytensor_ops import IMPLEMENTATIONS, SIZE_OPERANDS, is_known
from .pytensor_sparse import check_patterns


def rewrite_for_jax(fgraph: Any) -> None:
    """Rewrite a graph in place as in PyTensor's JAX mode, and check that JAX can compute it.

    **Raises:** `TypeError` for an input that is not an array, a sparse matrix or a random
    generator. `NotImplementedError` if the graph reads the stored entries of a sparse matrix, and
    JAX does not know their number.
    """
    for variable in fgraph.inputs:
        if not isinstance(variable.type, RandomType) and not hasattr(variable.type, "dtype"):
            raise TypeError(
                f"the graph's input {variable} is {variable.type}: to_jax supports arrays, sparse "
                "matrices and random generators"
            )
    _expand_unravel_index(fgraph)
    _replace_pivoted_qr(fgraph)
    _read_lower_triangle(fgraph)
    get_mode("JAX").optimizer.rewrite(fgraph)
    check_patterns(fgraph)


def implement_graph(fgraph: Any) -> Callable[..., Any]:
    """Return a function that computes the outputs of a graph with JAX.

    The graph has been rewritten by `rewrite_for_jax`.

    **Raises:** `NotImplementedError` if PyTensor's implementation of an `Op` ignores a parameter.
    """
    # Constants are computed now, so that they are arrays even if `to_jax` is called under
    # `jax.jit`.
    with warnings.catch_warnings(), jax.ensure_compile_time_eval():
        warnings.filterwarnings("error", ".*(ignores the|is ignored)", UserWarning)
        try:
            return _implement_typed_graph(fgraph)
        except UserWarning as error:
            raise NotImplementedError(
                f"PyTensor would compute another graph in JAX: {error}"
            ) from error


class _TypedGraph(FunctionGraph):
    """The graph inside an `Op` such as `Scan`. In JAX, its results get the declared dtypes."""


@jax_funcify.register(_TypedGraph)
def _implement_typed_graph(fgraph: Any, node: Any = None, **kwargs: Any) -> Callable[..., Any]:
    return fgraph_to_python(
        fgraph,
        implement_op,
        type_conversion_fn=_convert_constant,
        **{"fgraph_name": "to_jax", **kwargs},
    )


def _convert_constant(data: Any, variable: Any = None, **kwargs: Any) -> Any:
    """Convert the value of a constant of a graph to JAX.

    Scalars and short vectors stay in NumPy, because they may determine a shape.
    """
    if isinstance(data, np.ndarray):
        is_small = data.ndim == 0 or (data.ndim == 1 and data.size <= _MAX_KNOWN)
        return data[()] if is_small else jnp.asarray(data, dtype_of(variable))
    return jax_typify(data, variable=variable, **kwargs)


# Kinds of dtypes in an order in which each holds the values of all before: bool, int, float,
# complex.
_KINDS = {kind: place for place, kinds in enumerate(("b", "iu", "fV", "c")) for kind in kinds}
# The largest vector whose values are kept in NumPy. Shapes are shorter.
_MAX_KNOWN = 64


# Operations that compute shapes from shapes. If the operands are small, so are the results.
_SHAPE_OPS = (
    CAReduce, CumOp, DimShuffle, Elemwise, IncSubtensor, Join, MakeVector, Reshape,
    ScalarFromTensor, ScalarOp, Split, Subtensor, TensorFromScalar,
)  # fmt: skip


def _perform(op: Any, node: Any, inputs: Sequence[Any]) -> Any:
    """Compute the results of an `Op` in NumPy, with `Op.perform`. The inputs are not traced."""
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


def implement_op(op: Any, node: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return a JAX function of the operands of `node` that computes its `Op`.

    Its results have the dtypes that the graph declares. Without casts, JAX would compute a sum of
    int8 in int32, and a product of int32 and float32 in float32. In PyTensor, as in NumPy, both are
    wider. An implementation of Veneer is preferred to one in PyTensor.
    """
    ours = next((IMPLEMENTATIONS[cls] for cls in type(op).__mro__ if cls in IMPLEMENTATIONS), None)
    implementation = ours and ours(op, node, core=functools.partial(implement_op, **kwargs))
    if implementation is None:
        implementation = jax_funcify(_type_inner_graphs(op), node=node, **kwargs)
    first, input_dtype = _find_common_dtype(op, node)
    # Operands that are sizes may be slices or shapes. They are not cast.
    static = range(len(node.inputs))[SIZE_OPERANDS.get(type(op), slice(0))]
    computes_shapes = isinstance(op, _SHAPE_OPS)

    def typed(*inputs: Any) -> Any:
        if computes_shapes and all(map(is_known, inputs)):
            return _perform(op, node, inputs)
        operands = list(inputs)
        for i, (x, variable) in enumerate(zip(inputs, node.inputs, strict=True)):
            if isinstance(x, dict):
                operands[i] = dict(x)  # PyTensor writes the next key into the dict of a generator
            elif i not in static and isinstance(x, np.ndarray | np.generic):
                operands[i] = _cast(x, dtype_of(variable))
            if input_dtype is not None and i >= first and variable.type.dtype != "bool":
                operands[i] = _cast(operands[i], input_dtype)
        results = implementation(*operands)
        if len(node.outputs) == 1:
            return _cast_result(results, node.outputs[0])
        return tuple(_cast_result(*pair) for pair in zip(results, node.outputs, strict=True))

    return typed


def _cast_result(x: Any, variable: Any) -> Any:
    """Cast the result of an `Op` to the dtype that the graph declares for `variable`.

    A small NumPy array, such as a shape, stays in NumPy.
    """
    if isinstance(x, np.ndarray | np.generic) and x.size <= _MAX_KNOWN:
        return x.astype(variable.type.dtype)
    return _cast(x, dtype_of(variable))


def _type_inner_graphs(op: Any) -> Any:
    """Copy an `Op` so that the graphs inside it give results of the declared dtypes."""
    if isinstance(op, HasInnerGraph):
        graph: Any = op.fgraph
        # PyTensor freezes the graphs of some classes.
        graph = graph.unfreeze() if hasattr(graph, "unfreeze") else graph.clone()
        op = copy.copy(op)
        op.fgraph = _TypedGraph(graph.inputs, graph.outputs, clone=False)
    for name in ("scalar_op", "core_op"):
        inner = getattr(op, name, None)
        if inner is not None and (typed := _type_inner_graphs(inner)) is not inner:
            op = copy.copy(op)
            setattr(op, name, typed)
    return op


def _find_common_dtype(op: Any, node: Any) -> tuple[int, Any]:
    """Return the dtype to which an `Op` casts its operands before it computes, as NumPy does.

    **Returns:** the index of the first operand to cast, and the dtype. The dtype is None if JAX
    needs no cast to compute the same result.
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


def dtype_of(variable: Any) -> Any:
    """Return the dtype of a variable in JAX, or None for a generator or a slice."""
    dtype = getattr(variable.type, "dtype", None)
    return None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)


def _cast(x: Any, dtype: Any) -> Any:
    """Cast a dense or sparse array or a scalar to `dtype`.

    A tuple, which is a shape, is returned unchanged, and so is everything if `dtype` is None.
    """
    if dtype is None or isinstance(x, tuple):
        return x
    if isinstance(x, BCOO):
        return x if x.dtype == dtype else BCOO((_cast(x.data, dtype), x.indices), shape=x.shape)
    if isinstance(x, bool | int | float | complex | np.generic | np.ndarray):
        numbers = _drop_imaginary_part(np.asarray(x), dtype).astype(dtype)
        return jnp.asarray(numbers) if numbers.ndim else numbers[()]
    if x.dtype == dtype and not getattr(x, "weak_type", False):
        return x
    return _drop_imaginary_part(x, dtype).astype(dtype)


def _drop_imaginary_part(x: Any, dtype: Any) -> Any:
    """Return the real part of a complex array if `dtype` is real. Otherwise, return `x` unchanged.

    NumPy casts in the same way.
    """
    return x.real if x.dtype.kind == "c" and dtype.kind != "c" else x


def _expand_unravel_index(fgraph: Any) -> None:
    """Replace each `UnravelIndex` of a graph by divisions.

    PyTensor's JAX implementation ignores its order ("C" or "F").
    """
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
    """A `QR` with column pivoting, which PyTensor's JAX implementation ignores."""


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


def _read_lower_triangle(fgraph: Any) -> None:
    """Make positive definite solves of a graph read the lower triangle of their matrix.

    A solve that reads the upper triangle gets a matrix with this triangle copied to the lower one,
    because PyTensor's rewrites assume that both triangles are equal.
    """
    for node in fgraph.toposort():
        core = getattr(node.op, "core_op", None)
        if isinstance(core, Solve) and core.assume_a == "pos" and not core.lower:
            a, b = node.inputs
            mirrored = pt.triu(a) + pt.triu(a, 1).mT.conj()
            solved = type(node.op)(Solve(assume_a="pos", lower=True, b_ndim=core.b_ndim))
            fgraph.replace(node.outputs[0], solved(mirrored, b), import_missing=True)


@contextlib.contextmanager
def name_deciding_inputs(fgraph: Any) -> Iterator[None]:
    """Replace errors of JAX about dynamic shapes, in a `with` block, by a `TypeError`.

    The `TypeError` names the inputs of the graph whose values determine shapes. If there is no such
    input, the error is unchanged.
    """
    try:
        yield
    except (AttributeError, IndexError, NotImplementedError, TypeError) as error:
        # JAX rejects `x[:n]` for a traced n by an IndexError.
        sizes = _find_slice_bounds(fgraph) if isinstance(error, IndexError) else _find_sizes(fgraph)
        if not (deciding := _find_deciding_inputs(fgraph, sizes)):
            raise
        names = " and ".join(f"{variable} ({variable.type})" for variable in deciding)
        raise TypeError(
            f"the value of the graph's input {names} determines a shape, but shapes are static in "
            "JAX: make it a constant, with one graph per value, or pass an array of that shape"
        ) from error


def _find_sizes(fgraph: Any) -> list[Any]:
    """Return the variables of a graph that determine the shape of a result, as of `Reshape`."""
    return [
        size
        for node in fgraph.toposort()
        for op, where in SIZE_OPERANDS.items()
        if isinstance(node.op, op)
        for size in node.inputs[where]
    ]


def _find_slice_bounds(fgraph: Any) -> list[Any]:
    """Return the variables of a graph that are starts, stops or steps of slices."""
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


def _find_deciding_inputs(fgraph: Any, sizes: list[Any]) -> list[Any]:
    """Return the inputs of a graph whose values, not only their shapes, determine one of `sizes`.

    `sizes` are variables of the graph.
    """
    of_shapes = Shape | Shape_i | CSMProperties
    known = [v for v in ancestors(sizes) if v.owner and isinstance(v.owner.op, of_shapes)]
    reached = set(ancestors(sizes, blockers=known))
    return [variable for variable in fgraph.inputs if variable in reached]


def convert_argument(x: Any, declared: Any, name: str) -> Any:
    """Check that an argument has the type that the graph declares, and convert it to a JAX array.

    **Arguments:**

    - `x`: the argument.
    - `declared`, `name`: the PyTensor type and the name of the input.

    **Raises:** `TypeError` if the argument has another kind, dtype or shape.
    """
    if isinstance(declared, RandomType):
        return _convert_generator(x, name)
    if isinstance(declared, SparseTensorType) and issparse(x):
        x = BCOO.from_scipy_sparse(x)
    if isinstance(declared, SparseTensorType) != isinstance(x, BCOO):
        remedy = "a BCOO of jax.experimental.sparse, or, outside jax.jit, a SciPy sparse matrix"
        remedy = "a dense array" if isinstance(x, BCOO) else remedy
        raise TypeError(
            f"the graph's input {name} is {declared}, but got {type(x).__name__}: pass {remedy}"
        )
    if isinstance(x, bool | int | float | complex | list | tuple):
        dtypes = [np.dtype(getattr(leaf, "dtype", type(leaf))) for leaf in jax.tree.leaves(x)]
        if any(_KINDS[t.kind] > _KINDS[np.dtype(declared.dtype).kind] for t in dtypes):
            raise TypeError(f"the graph's input {name} is {declared}, but got {x}")
        x = jnp.asarray(x, jax.dtypes.canonicalize_dtype(declared.dtype))
    actual, wanted = (jax.dtypes.canonicalize_dtype(t.dtype) for t in (x, declared))
    sizes_fit = len(x.shape) == declared.ndim and all(
        size in (None, n) for size, n in zip(declared.shape, x.shape, strict=True)
    )
    if actual != wanted or not sizes_fit:
        raise TypeError(f"the graph's input {name} is {declared}, but got {actual}{[*x.shape]}")
    return jnp.asarray(x) if isinstance(x, np.ndarray) and x.ndim else x


def _convert_generator(x: Any, name: str) -> dict[str, Any]:
    """Convert a JAX key or a NumPy `Generator` to the form that PyTensor's JAX code reads.

    It is a dict with the data of a key, `uint32[2]`. `name` is the name of the input, for errors.
    """
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
