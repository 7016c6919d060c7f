"""Sparse matrices of PyTensor in JAX, as `BCOO` of `jax.experimental.sparse`.

In JAX, the number of entries is part of the type of a sparse matrix. So the result of an
operation that can drop entries, such as a sum, has the largest possible number. Unused entries have
the index (rows, columns), outside the matrix, as in JAX's own `BCOO`.

The implementations use only gathers, scatters and sorts, which `vn.numba` compiles.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

__all__ = ["bind_node", "check_patterns", "register_sparse"]


def _matrix(data: Any, rows: Any, columns: Any, shape: Any) -> BCOO:
    return BCOO((data, jnp.stack([rows, columns], 1)), shape=tuple(map(int, shape)))


def _entries(x: BCOO) -> tuple[Any, Any, Any]:
    return x.data, x.indices[:, 0], x.indices[:, 1]


def _dense(x: Any, dtype: Any = None) -> Any:
    x = x.todense() if isinstance(x, BCOO) else jnp.asarray(x)
    return x if dtype is None else x.astype(dtype)


def _drop_zeros(x: BCOO) -> BCOO:
    data, rows, columns = _entries(x)
    return _mark_unused(data != 0, data, rows, columns, x.shape)


def _mark_unused(use: Any, data: Any, rows: Any, columns: Any, shape: Any) -> BCOO:
    """Build a sparse matrix, and mark the entries whose `use` is False as unused.

    They get an index outside the matrix, because JAX cannot drop entries of a traced matrix.
    `data`, `rows` and `columns` are the values and the indices of the entries.
    """
    return _matrix(data, jnp.where(use, rows, shape[0]), jnp.where(use, columns, shape[1]), shape)


def _from_dense(x: Any) -> BCOO:
    rows, columns = (i.astype(jnp.int32).ravel() for i in jnp.indices(x.shape))
    return _drop_zeros(_matrix(x.ravel(), rows, columns, x.shape))


def _sort_entries(x: BCOO, format: str) -> tuple[Any, Any, Any]:
    """Sort the entries of a matrix by rows ("csr") or by columns ("csc").

    **Returns:** the values, the indices along the axis by which they are sorted, and the indices
    along the other axis.
    """
    data, rows, columns = _entries(x)
    major, minor = (rows, columns) if format == "csr" else (columns, rows)
    order = jnp.lexsort((minor, major))
    return data[order], major[order], minor[order]


def _sum_duplicates(x: BCOO) -> BCOO:
    """Add up the entries of a matrix with equal indices, so that each index has one entry."""
    data, rows, columns = _sort_entries(x, "csr")
    if len(data) < 2:
        return x
    is_new = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    is_new = jnp.concatenate([jnp.ones(1, bool), is_new])
    place = jnp.cumsum(is_new) - 1
    inside = (rows < x.shape[0]) & (columns < x.shape[1])
    sums = jnp.zeros_like(data).at[place].add(jnp.where(inside, data, 0))[place]
    return _mark_unused(is_new & inside, sums, rows, columns, x.shape)


def _check_equal_shapes(op: Any, x: Any, y: Any) -> None:
    if x.shape != y.shape:
        raise ValueError(f"{op} needs equal shapes, but got {x.shape} and {y.shape}")


def _dtype(node: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype)


def _csm_properties(op: Any, node: Any, x: BCOO) -> Any:
    format = node.inputs[0].type.format
    data, major, minor = _sort_entries(x, format)
    size = x.shape[0 if format == "csr" else 1]
    indptr = jnp.searchsorted(major, jnp.arange(size + 1, dtype=major.dtype))
    return data, minor, indptr, np.asarray(x.shape, np.int32)


def _find_rows(indptr: Any, count: int) -> Any:
    """Return the row of each stored entry of a CSR matrix, or the column for CSC: `int32[count]`.

    `indptr` has the index of the first entry of each row. `count` is the number of entries.
    """
    rows = jnp.searchsorted(jnp.asarray(indptr), jnp.arange(count), side="right") - 1
    return rows.astype(jnp.int32)


def _csm(op: Any, node: Any, data: Any, indices: Any, indptr: Any, shape: Any) -> BCOO:
    if not isinstance(shape, np.ndarray | tuple):
        raise TypeError("the shape of a sparse matrix must be static, but it is traced")
    major, minor = _find_rows(indptr, len(data)), jnp.asarray(indices).astype(jnp.int32)
    rows, columns = (major, minor) if op.format == "csr" else (minor, major)
    return _matrix(jnp.asarray(data), rows, columns, shape)


def _csm_grad(
    op: Any,
    node: Any,
    data: Any,
    indices: Any,
    indptr: Any,
    shape: Any,
    g: Any,
    g_at: Any,
    g_ptr: Any,
    _: Any,
) -> Any:
    is_csr = len(indptr) - 1 == shape[0]
    sizes = (len(indptr) - 1, int(shape[1 if is_csr else 0]))
    dense = jnp.zeros(sizes, jnp.asarray(g).dtype)
    dense = dense.at[_find_rows(g_ptr, len(g)), jnp.asarray(g_at)].add(g, mode="drop")
    return dense[_find_rows(indptr, len(data)), jnp.asarray(indices)]


def _structured_dot_grad(op: Any, node: Any, indices: Any, indptr: Any, b: Any, g: Any) -> Any:
    is_csr = "CSR" in type(op).__name__
    major, minor = _find_rows(indptr, len(indices)), jnp.asarray(indices)
    rows, columns = (major, minor) if is_csr else (minor, major)
    return (_dense(g)[rows] * _dense(b)[columns]).sum(1)


def _get_item_2d(op: Any, node: Any, x: BCOO, *parts: Any) -> BCOO:
    data, *indices = _entries(x)
    shape, use = [], True
    for axis in (0, 1):
        bounds = (None if i is None else int(i) for i in parts[3 * axis : 3 * axis + 3])
        chosen = range(*slice(*bounds).indices(x.shape[axis]))
        offset, index = indices[axis] - chosen.start, indices[axis]
        indices[axis] = offset // chosen.step
        use &= (offset % chosen.step == 0) & (index < x.shape[axis])
        use &= (indices[axis] >= 0) & (indices[axis] < len(chosen))
        shape.append(len(chosen))
    rows, columns = indices
    return _mark_unused(use, data, rows, columns, shape)


def _get_item_scalar(op: Any, node: Any, x: BCOO, *at: Any) -> Any:
    data, *indices = _entries(x)
    for i, n in zip(at, x.shape, strict=True):
        if isinstance(i, int | np.integer) and not -n <= i < n:
            raise IndexError(f"{op} of index {i} along an axis of size {n}")
    place = [jnp.where(i < 0, i + n, i) for i, n in zip(at, x.shape, strict=True)]
    return jnp.sum(data, where=(indices[0] == place[0]) & (indices[1] == place[1]))


def _set_in_order(values: Any, zeros: Any, *index: Any) -> Any:
    """Return `zeros` with `zeros[index] = values`, as NumPy computes it.

    If an index occurs several times, the last value is kept. JAX does not guarantee this.
    """
    order = jnp.full(zeros.shape[: len(index)], -1).at[index].max(jnp.arange(len(values)))
    is_set = (order >= 0).reshape(*order.shape, *(1,) * (zeros.ndim - order.ndim))
    return jnp.where(is_set, jnp.asarray(values)[order], zeros)


def _get_item_list_grad(op: Any, node: Any, x: BCOO, index: Any, g: BCOO) -> BCOO:
    return _from_dense(_set_in_order(_dense(g), jnp.zeros(x.shape, g.dtype), jnp.asarray(index)))


def _get_item_2lists_grad(op: Any, node: Any, x: BCOO, rows: Any, columns: Any, g: Any) -> BCOO:
    zeros = jnp.zeros(x.shape, jnp.asarray(g).dtype)
    return _from_dense(_set_in_order(g, zeros, jnp.asarray(rows), jnp.asarray(columns)))


def _construct_from_list(op: Any, node: Any, shape: Any, values: Any, rows: Any) -> BCOO:
    shape = tuple(map(int, shape))
    zeros = jnp.zeros(shape, jnp.asarray(values).dtype)
    return _from_dense(zeros.at[jnp.asarray(rows)].add(values))


def _scale(axis: int, op: Any, node: Any, x: BCOO, s: Any) -> BCOO:
    if s.shape != x.shape[axis : axis + 1]:
        raise ValueError(f"{op} of a matrix {x.shape} by a vector {s.shape}")
    return BCOO((x.data * jnp.asarray(s)[x.indices[:, axis]], x.indices), shape=x.shape)


def _stack(axis: int, op: Any, node: Any, *blocks: BCOO) -> BCOO:
    sizes = {x.shape[1 - axis] for x in blocks}
    if len(sizes) != 1:
        raise ValueError(
            f"{op} of shapes {[x.shape for x in blocks]}: Mismatching dimensions along axis "
            f"{1 - axis}"
        )
    shape = [0, 0]
    shape[1 - axis], shape[axis] = sizes.pop(), sum(x.shape[axis] for x in blocks)
    parts, start = [], 0
    for x in blocks:
        data, *indices = _entries(x)
        # An unused entry stays unused.
        unused = indices[axis] >= x.shape[axis]
        indices[axis] = jnp.where(unused, shape[axis], indices[axis] + start)
        parts.append((data.astype(_dtype(node)), *indices))
        start += x.shape[axis]
    data, rows, columns = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return _matrix(data, rows, columns, shape)


def _sum(op: Any, node: Any, x: BCOO) -> Any:
    axis = op.axis
    data, *indices = _entries(x)
    kept = 0 if axis is None else 1 - axis
    other = indices[1 - kept] < x.shape[1 - kept]
    sums = jnp.zeros(x.shape[kept], data.dtype)
    sums = sums.at[indices[kept]].add(jnp.where(other, data, 0), mode="drop")
    return sums.sum(dtype=data.dtype) if axis is None else sums


def _add(op: Any, node: Any, x: BCOO, y: BCOO) -> BCOO:
    keep_zeros = "Data" in type(op).__name__
    dtype = _dtype(node)
    _check_equal_shapes(op, x, y)
    data = jnp.concatenate([x.data.astype(dtype), y.data.astype(dtype)])
    both = BCOO((data, jnp.concatenate([x.indices, y.indices])), shape=x.shape)
    total = _sum_duplicates(both)
    return total if keep_zeros else _drop_zeros(total)


def _add_dense(op: Any, node: Any, x: BCOO, y: Any) -> Any:
    dtype = _dtype(node)
    _check_equal_shapes(op, x, y)
    return _dense(x, dtype) + _dense(y, dtype)


def _structured_add(op: Any, node: Any, x: BCOO, y: Any) -> BCOO:
    x = _sum_duplicates(x)
    data = jnp.where(x.data != 0, x.data + jnp.asarray(y)[x.indices[:, 1]], 0)
    return _drop_zeros(BCOO((data, x.indices), shape=x.shape))


def _multiply(op: Any, node: Any, x: BCOO, y: BCOO) -> BCOO:
    """Multiply two sparse matrices elementwise.

    Each entry of `x` is looked up in the sorted entries of `y`.
    """
    dtype = _dtype(node)
    _check_equal_shapes(op, x, y)
    (data, rows, columns), other = _entries(_sum_duplicates(x)), _sum_duplicates(y)
    y_data, y_rows, y_columns = _sort_entries(other, "csr")
    if not len(y_data) or not len(data):
        return _matrix(data.astype(dtype) * 0, rows, columns, x.shape)
    # Rank the pairs (row, column) of both matrices without a product that could overflow.
    pairs = [jnp.concatenate(pair) for pair in ((y_rows, rows), (y_columns, columns))]
    order = jnp.lexsort(pairs[::-1])
    first, second = (i[order] for i in pairs)
    is_new = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    ranks = jnp.concatenate([jnp.zeros(1, int), jnp.cumsum(is_new)])
    rank = jnp.zeros_like(ranks).at[order].set(ranks)
    values = jnp.zeros(len(order), dtype).at[rank[: len(y_data)]].add(y_data.astype(dtype))
    product = data.astype(dtype) * values[rank[len(y_data) :]]
    return _drop_zeros(_matrix(product, rows, columns, x.shape))


def _multiply_dense(op: Any, node: Any, x: BCOO, y: Any) -> BCOO:
    dtype = _dtype(node)
    y = jnp.asarray(y).astype(dtype)
    if y.ndim == 2:
        _check_equal_shapes(op, x, y)
        y = y[x.indices[:, 0], x.indices[:, 1]]
    elif y.ndim == 1:
        y = y[x.indices[:, 1]]
    return BCOO((x.data.astype(dtype) * y, x.indices), shape=x.shape)


def _multiply_vector(op: Any, node: Any, x: BCOO, y: Any) -> BCOO:
    if x.shape[1:] != y.shape:
        raise ValueError(f"{op} of a matrix {x.shape} and a vector {y.shape}")
    return _drop_zeros(_sum_duplicates(_multiply_dense(op, node, x, y)))


def _compare(op: Any, node: Any, x: BCOO, y: Any) -> Any:
    _check_equal_shapes(op, x, y)
    result = op.comparison(_dense(x), _dense(y)).astype(jnp.uint8)
    return _from_dense(result) if isinstance(y, BCOO) else result


def _dot(op: Any, node: Any, x: Any, y: Any) -> Any:
    """Return the matrix product of two matrices, sparse or dense.

    If both are sparse, the second one is materialized.
    """
    x, y = (
        BCOO((x.data.astype(_dtype(node)), x.indices), shape=x.shape)
        if isinstance(x, BCOO)
        else jnp.asarray(x).astype(_dtype(node))
        for x in (x, y)
    )
    if isinstance(x, BCOO) and isinstance(y, BCOO):
        y = _dense(y)
    # The primitive that vn.numba compiles has the sparse operand on the left.
    product = x @ y if isinstance(x, BCOO) else (_transpose(y) @ x.T).T
    is_sparse = hasattr(node.outputs[0].type, "format")
    return _from_dense(product) if is_sparse else product


def _usmm(op: Any, node: Any, alpha: Any, x: Any, y: Any, z: Any) -> Any:
    product = _dot(op, node, x, y)
    return jnp.asarray(alpha).astype(product.dtype) * product + _dense(z, product.dtype)


def _sampling_dot(op: Any, node: Any, x: Any, y: Any, pattern: BCOO) -> BCOO:
    pattern = _sum_duplicates(pattern)
    data, rows, columns = _entries(pattern)
    products = (jnp.asarray(x)[rows] * jnp.asarray(y)[columns]).sum(1)
    return _drop_zeros(_matrix(data * products, rows, columns, pattern.shape))


def _transpose(x: BCOO) -> BCOO:
    return BCOO((x.data, x.indices[:, ::-1]), shape=x.shape[::-1])


def _diagonal(x: BCOO) -> Any:
    if x.shape[0] != x.shape[1]:
        raise ValueError(f"Diag only apply on square matrix, not {x.shape}")
    data, rows, columns = _entries(x)
    on = jnp.where(rows == columns, data, 0)
    return jnp.zeros(x.shape[0], data.dtype).at[rows].add(on, mode="drop")


def bind_node(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a function `f(op, node, *operands)` to an entry of `IMPLEMENTATIONS`.

    The entry takes an `Op` and its node, and returns a function of the operands.
    """
    return lambda op, node, **_: functools.partial(function, op, node)


# Functions of an `Op`, its node and the operands, by the class names of PyTensor 3.3 and 3.0.
_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "CSMProperties": _csm_properties,
    "CSM": _csm,
    "CSMGrad": _csm_grad,
    "StructuredDotGradCSC": _structured_dot_grad,
    "StructuredDotGradCSR": _structured_dot_grad,
    "Cast": lambda op, node, x: x,  # every result is cast
    "DenseFromSparse": lambda op, node, x: _dense(x),
    "SparseFromDense": lambda op, node, x: _from_dense(jnp.asarray(x)),
    "GetItemList": lambda op, node, x, i: _from_dense(_dense(x)[jnp.asarray(i)]),
    "GetItemListGrad": _get_item_list_grad,
    "GetItem2Lists": lambda op, node, x, i, j: _dense(x)[jnp.asarray(i), jnp.asarray(j)],
    "GetItem2ListsGrad": _get_item_2lists_grad,
    "GetItem2d": _get_item_2d,
    "GetItemScalar": _get_item_scalar,
    "Transpose": lambda op, node, x: _transpose(x),
    "ColScaleCSC": functools.partial(_scale, 1),
    "RowScaleCSC": functools.partial(_scale, 0),
    "Diag": lambda op, node, x: _diagonal(x),
    "EnsureSortedIndices": lambda op, node, x: x,
    "HStack": functools.partial(_stack, 1),
    "VStack": functools.partial(_stack, 0),
    "Remove0": lambda op, node, x: _drop_zeros(_sum_duplicates(x)),
    "ConstructSparseFromList": _construct_from_list,
    "SpSum": _sum,
    "AddSparseSparse": _add,
    "AddSS": _add,
    "AddSparseSparseData": _add,
    "AddSSData": _add,
    "AddSparseDense": _add_dense,
    "AddSD": _add_dense,
    "StructuredAddSparseDenseVector": _structured_add,
    "StructuredAddSV": _structured_add,
    "MultiplySparseSparse": _multiply,
    "SparseSparseMultiply": _multiply,
    "MultiplySparseDense": _multiply_dense,
    "SparseDenseMultiply": _multiply_dense,
    "MultiplySparseDenseVector": _multiply_vector,
    "SparseDenseVectorMultiply": _multiply_vector,
    **{
        f"{comparison}{operands}": _compare
        for comparison in (
            "Equal",
            "NotEqual",
            "LessThan",
            "GreaterThan",
            "LessEqual",
            "GreaterEqual",
        )
        for operands in ("SparseSparse", "SparseDense", "SS", "SD")
    },
    "TrueDot": _dot,
    "StructuredDot": _dot,
    "Dot": _dot,
    "Usmm": _usmm,
    "SamplingDot": _sampling_dot,
}


def register_sparse(register: Callable[..., Any]) -> None:
    """Call `register(op_class, implementation)` for each sparse operation."""
    from pytensor.sparse import basic, math

    for name, implementation in _IMPLEMENTATIONS.items():
        for module in (basic, math):
            op_class = vars(module).get(name)
            if op_class is not None and op_class.__module__ == module.__name__:
                register(op_class, bind_node(implementation))


# Operations whose result has as many entries as their sparse operands together.
_PRESERVES_PATTERN = {
    "CSM", "Cast", "Transpose", "ColScaleCSC", "RowScaleCSC", "EnsureSortedIndices", "HStack",
    "VStack", "MultiplySparseDense", "SparseDenseMultiply",
}  # fmt: skip


def check_patterns(fgraph: Any) -> None:
    """Reject graphs that read the stored entries of a sparse matrix, if JAX cannot count them.

    In JAX, such a matrix stores more entries than in PyTensor, so the data and the indices differ.
    A graph that only builds other matrices from them is correct, and is accepted.

    **Raises:** `NotImplementedError` for a rejected graph.
    """
    for node in fgraph.toposort():
        if type(node.op).__name__ != "CSMProperties" or _has_known_pattern(node.inputs[0]):
            continue
        if not all(_is_used_only_for_matrices(fgraph, out) for out in node.outputs[:3]):
            raise NotImplementedError(
                f"the graph reads the stored entries of {node.inputs[0]}, but their number is "
                "unknown during tracing: use the matrix itself, or pt.sparse.dense_from_sparse"
            )


def _has_known_pattern(x: Any) -> bool:
    """Return whether a sparse variable stores as many entries in JAX as in PyTensor.

    It does if it is an input, or if the operations that compute it drop no entries.
    """
    if x.owner is None:
        return True
    if type(x.owner.op).__name__ == "CSM":
        indices = x.owner.inputs[1].owner
        is_of_matrix = indices is not None and type(indices.op).__name__ == "CSMProperties"
        return not is_of_matrix or _has_known_pattern(indices.inputs[0])
    sparse = [v for v in x.owner.inputs if hasattr(v.type, "format")]
    return type(x.owner.op).__name__ in _PRESERVES_PATTERN and all(map(_has_known_pattern, sparse))


def _is_used_only_for_matrices(fgraph: Any, x: Any) -> bool:
    """Return whether a graph uses `x` only to build other matrices with the same entries.

    `x` is the stored data or the stored indices of a sparse matrix.
    """
    for client, position in fgraph.clients[x]:
        name = type(client.op).__name__
        if (name == "CSM" and position < 3) or (name == "CSMGrad" and position > 3):
            continue
        others = [v for v in getattr(client, "inputs", []) if v is not x]
        is_function = name == "Elemwise" and all(all(v.type.broadcastable) for v in others)
        if not (is_function or name.startswith(("CSMGrad", "StructuredDotGrad"))):
            return False
        if not all(_is_used_only_for_matrices(fgraph, out) for out in client.outputs):
            return False
    return True
