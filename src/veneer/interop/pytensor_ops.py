"""JAX implementations of PyTensor operations that replace PyTensor's own in `to_jax`.

Some accept sizes computed from shapes. Others implement operations that PyTensor's JAX mode lacks
or computes differently from `Op.perform`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytensor.compile.ops import DeepCopyOp
from pytensor.link.jax.dispatch.shape import JAXShapeTuple
from pytensor.printing import Print
from pytensor.scalar.basic import AND, OR, XOR
from pytensor.sparse.basic import CSM, ConstructSparseFromList, CSMGrad, GetItem2d
from pytensor.tensor.basic import Alloc, AllocEmpty, ARange, Eye, Split
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.extra_ops import RavelMultiIndex, Repeat
from pytensor.tensor.linalg.decomposition.eigen import Eigh, Eigvalsh
from pytensor.tensor.linalg.decomposition.lu import LU
from pytensor.tensor.linalg.decomposition.schur import QZ
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.tridiagonal import LUFactorTridiagonal, SolveLUFactorTridiagonal
from pytensor.tensor.pad import Pad
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import AdvancedIncSubtensor, indices_from_subtensor

from .pytensor_sparse import bind_node, register_sparse

__all__ = ["IMPLEMENTATIONS", "SIZE_OPERANDS", "is_known"]

Implementation = Callable[..., Any]


def is_known(x: Any) -> bool:
    """Return whether a value is known while JAX traces, such as a shape or a constant.

    A tuple is known if all of its entries are.
    """
    if isinstance(x, tuple):
        return all(map(is_known, x))
    return isinstance(x, bool | int | float | np.generic | np.ndarray)


# The operands that say how large the result is.
SIZE_OPERANDS: dict[type, slice] = {
    ARange: slice(None),
    Alloc: slice(1, None),
    AllocEmpty: slice(None),
    CSM: slice(3, None),
    CSMGrad: slice(3, 4),
    ConstructSparseFromList: slice(1),
    Eye: slice(None),
    GetItem2d: slice(1, None),
    JAXShapeTuple: slice(None),
    Pad: slice(1, 2),
    Repeat: slice(1, None),
    Reshape: slice(1, None),
    SpecifyShape: slice(1, None),
    Split: slice(1, None),
}


def _arange(op: Any, node: Any, *ends: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(op.dtype)
    # Python numbers: a start of int8 would limit the others.
    start, stop, step = (x.item() if is_known(x) else x for x in ends)
    return jnp.arange(start, stop, step, dtype=dtype)


def _split(op: Any, node: Any, x: Any, *where: Any) -> Any:
    # Before PyTensor 3.3, the axis is an operand.
    axis = op.axis if hasattr(op, "axis") else int(where[0])
    sizes = np.asarray([int(size) for size in where[-1]])
    if len(sizes) != op.len_splits or min(sizes) < 0 or sum(sizes) != x.shape[axis]:
        raise ValueError(
            f"Split into {op.len_splits} parts of sizes {sizes} along axis {axis} of an array "
            f"{x.shape}"
        )
    return jnp.split(x, np.cumsum(sizes)[:-1], axis=axis)


def _repeat(op: Any, node: Any, x: Any, repeats: Any) -> Any:
    if not is_known(repeats):
        raise TypeError("the numbers of repetitions must be static, but they are traced")
    return jnp.repeat(x, np.asarray(repeats), axis=op.axis)


def _print(op: Any, node: Any, x: Any) -> Any:
    # Not `jax.debug.print`, which JAX 0.12 prints wrongly if the message has braces.
    jax.debug.callback(lambda value: op.global_fn(op, np.asarray(value)), x)
    return x


# Bitwise reductions. PyTensor's neutral element of `and` is -1, which unsigned types reject.
_BITWISE = {
    AND: (jax.lax.bitwise_and, -1),
    OR: (jax.lax.bitwise_or, 0),
    XOR: (jax.lax.bitwise_xor, 0),
}


def _reduce(op: Any, node: Any, **_: Any) -> Implementation | None:
    bitwise = _BITWISE.get(type(op.scalar_op))
    if bitwise is None:
        return None
    function, neutral = bitwise

    def reduce(x: Any) -> Any:
        axes = range(x.ndim) if op.axis is None else op.axis
        start = np.asarray(neutral).astype(x.dtype)  # -1 is all ones, and True
        return jax.lax.reduce(jnp.asarray(x), start, function, tuple(axes))

    return reduce


def is_out_of_range(index: Any, size: Any) -> bool:
    """Return whether an index, or any of an array of them, is outside `[0, size)`.

    Return False if the index or the size is traced, because their values are unknown.
    """
    if isinstance(index, jax.core.Tracer) or isinstance(size, jax.core.Tracer):
        return False
    return bool(((index < 0) | (index >= size)).any())


def _ravel_multi_index(op: Any, node: Any, *operands: Any) -> Any:
    *indices, dims = operands
    axes = range(len(indices))
    stride: Any = 1
    total: Any = 0
    for axis in axes if op.order == "F" else reversed(axes):
        index, size = jnp.asarray(indices[axis]), dims[axis]
        if op.mode == "clip":
            index = jnp.clip(index, 0, size - 1)
        elif op.mode == "wrap":
            index = index % size
        elif is_out_of_range(index, size):
            raise ValueError(f"an index of ravel_multi_index is not in [0, {size})")
        total = total + index * stride
        stride = stride * size
    return total


def _increment(op: Any, node: Any, **_: Any) -> Implementation | None:
    """Implement `x[index] += y` as NumPy does: an index that occurs twice is added to once.

    Return None, to use PyTensor's implementation, if the `Op` sets entries or counts duplicates.
    """
    if op.set_instead_of_inc or not op.ignore_duplicates:
        return None

    def increment(x: Any, y: Any, *operands: Any) -> Any:
        at = tuple(indices_from_subtensor(operands, op.idx_list))
        x = jnp.asarray(x)
        return x.at[at].set(x[at] + y)

    return increment


def _blockwise(op: Any, node: Any, *, core: Any, **_: Any) -> Implementation:
    core_node = op._create_dummy_core_node(node.inputs, propagate_unbatched_core_inputs=True)
    vectorized = jnp.vectorize(core(core_node.op, core_node), signature=op.signature)

    def blockwise(*inputs: Any) -> Any:
        inputs = tuple(jnp.asarray(x) for x in inputs)
        op._check_runtime_broadcast(node, inputs)
        return vectorized(*inputs)

    return blockwise


def _mirror_triangle(a: Any, lower: bool, conjugate: bool = True) -> Any:
    """Copy the lower or upper triangle of a symmetric or Hermitian matrix to the other triangle.

    `conjugate` is True for a Hermitian matrix, whose diagonal becomes real.
    """
    part = jnp.tril(a) if lower else jnp.triu(a)
    other = jnp.swapaxes(part, -1, -2)
    on_diagonal = jnp.eye(a.shape[-1], dtype=bool)
    if not conjugate:
        return jnp.where(on_diagonal, a, part + other)
    return jnp.where(on_diagonal, a.real.astype(a.dtype), part + other.conj())


def _eigh(op: Any, node: Any, **_: Any) -> Implementation | None:
    is_complex = node.inputs[0].type.dtype.startswith("complex")
    if is_complex and any(not v.type.dtype.startswith("complex") for v in node.outputs[1:]):
        raise NotImplementedError(
            "PyTensor declares the eigenvectors of a complex matrix as real, so their imaginary "
            "parts would be lost"
        )
    if len(node.inputs) == 2:
        return None

    def eigh(a: Any) -> Any:
        values, vectors = jnp.linalg.eigh(_mirror_triangle(a, op.lower))
        return values if isinstance(op, Eigvalsh) else (values, vectors)

    return eigh


def _solve(op: Any, node: Any, **_: Any) -> Implementation | None:
    """Implement `Solve` of a symmetric, Hermitian or positive definite matrix.

    Only its lower triangle is read if `op.lower` is true, else only the upper one. Return None, to
    use PyTensor's implementation, for other matrices.
    """
    if op.assume_a not in ("sym", "her", "pos"):
        return None

    def solve(a: Any, b: Any) -> Any:
        a = _mirror_triangle(a, op.lower, conjugate=op.assume_a != "sym")
        kind = "pos" if op.assume_a == "pos" else "gen"
        return jax.scipy.linalg.solve(a, b, assume_a=kind)

    return solve


def _lu(op: Any, node: Any, **_: Any) -> Implementation | None:
    if not op.p_indices:
        return None

    def lu(a: Any) -> Any:
        p, lower, upper = jax.scipy.linalg.lu(a)
        return jnp.argmax(p, axis=-1), lower, upper

    return lu


def _tridiagonal_factor(op: Any, node: Any, dl: Any, d: Any, du: Any) -> Any:
    """Return the LU factors of a tridiagonal matrix with pivoting, as `gttrf` of LAPACK does.

    `dl`, `d` and `du` are the diagonal below the main one, the main one, and the one above.

    **Returns:** the factors of the elimination, the three diagonals of the upper factor, and the
    pivots, counted from 1.
    """
    dtype = jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype)
    size = lambda x: abs(x.real) + abs(x.imag) if jnp.iscomplexobj(x) else abs(x)
    dl, d, du = (jnp.asarray(x, dtype) for x in (dl, d, du))
    n = len(d)
    if n == 1:
        none = jnp.zeros(0, dtype)
        return none, d, none, none, jnp.ones(1, jnp.int32)

    def step(row: Any, below: Any) -> Any:
        diagonal, upper = row
        left, pivot, right, i = below
        swap = ~(size(diagonal) >= size(left))  # NaN on the diagonal is swapped, as in LAPACK
        top = jnp.where(swap, left, diagonal)
        is_zero = top == 0
        factor = jnp.where(swap, diagonal, left) / jnp.where(is_zero, 1, top)
        factor = jnp.where(is_zero, left, factor)
        first = jnp.where(swap, pivot, upper)
        second = jnp.where(swap, right, 0)
        next_diagonal = jnp.where(
            swap, upper - factor * pivot, pivot - jnp.where(is_zero, 0, factor) * upper
        )
        next_upper = jnp.where(swap, -factor * right, right)
        place = i + 1 + swap.astype(jnp.int32)  # counted from 1, as LAPACK does
        return (next_diagonal, next_upper), (factor, top, first, second, place)

    right = jnp.concatenate([du[1:], jnp.zeros(1, dtype)])
    below = (dl, d[1:], right, jnp.arange(n - 1, dtype=jnp.int32))
    (last, _), (dl, tops, du, du2, places) = jax.lax.scan(step, (d[0], du[0]), below)
    places = jnp.concatenate([places, jnp.full(1, n, jnp.int32)])
    return dl, jnp.concatenate([tops, last[None]]), du, du2[: n - 2], places


def _tridiagonal_solve(op: Any, node: Any, **_: Any) -> Implementation:
    """Return a function that solves a tridiagonal system, as `gttrs` of LAPACK does.

    It takes the LU factors that `_tridiagonal_factor` returns, and the right-hand side.
    """
    dtype = jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype)

    def forward(dl: Any, swaps: Any, b: Any) -> Any:
        def step(row: Any, x: Any) -> Any:
            factor, swap, below = x
            top, bottom = jnp.where(swap, below, row), jnp.where(swap, row, below)
            return bottom - factor * top, top

        last, tops = jax.lax.scan(step, b[0], (dl, swaps, b[1:]))
        return jnp.concatenate([tops, last[None]])

    def backward(dl: Any, swaps: Any, b: Any) -> Any:
        def step(below: Any, x: Any) -> Any:
            factor, swap, row = x
            row = row - factor * below
            top, bottom = jnp.where(swap, below, row), jnp.where(swap, row, below)
            return top, bottom

        first, bottoms = jax.lax.scan(step, b[-1], (dl, swaps, b[:-1]), reverse=True)
        return jnp.concatenate([first[None], bottoms])

    def upper(d: Any, du: Any, du2: Any, b: Any, reverse: bool) -> Any:
        def step(solved: Any, x: Any) -> Any:
            nearest, second = solved
            diagonal, one, two, right = x
            result = (right - one * nearest - two * second) / diagonal
            return (result, nearest), result

        none = jnp.zeros_like(b[0])
        return jax.lax.scan(step, (none, none), (d, du, du2, b), reverse=reverse)[1]

    def solve(dl: Any, d: Any, du: Any, du2: Any, places: Any, b: Any) -> Any:
        dl, d, du, du2, b = (jnp.asarray(x, dtype) for x in (dl, d, du, du2, b))
        swaps = jnp.asarray(places)[:-1] != jnp.arange(1, len(d))
        pad = lambda x, before: jnp.pad(x, (before, len(d) - len(x) - before))
        if op.transposed:
            solved = upper(d, pad(du, 1)[: len(d)], pad(du2, min(2, len(d))), b, reverse=False)
            return backward(dl, swaps, solved)
        solved = forward(dl, swaps, b)
        return upper(d, pad(du, 0), pad(du2, 0), solved, reverse=True)

    return solve


def _call_perform_on_host(op: Any, node: Any, **_: Any) -> Implementation:
    """Return a JAX function that calls `Op.perform` on the host.

    It is for an `Op` of two matrices that JAX cannot compute, such as `QZ`.
    """
    dtypes = [jax.dtypes.canonicalize_dtype(v.type.dtype) for v in node.outputs]

    def perform(*inputs: Any) -> Any:
        storage: list[list[Any]] = [[None] for _ in node.outputs]
        operands = [np.array(x, v.type.dtype) for x, v in zip(inputs, node.inputs, strict=True)]
        op.perform(node, operands, storage)
        return tuple(np.asarray(s[0], dtype) for s, dtype in zip(storage, dtypes, strict=True))

    def call(a: Any, b: Any) -> Any:
        shapes = [a.shape if v.type.ndim == 2 else a.shape[:1] for v in node.outputs]
        results = [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, dtypes, strict=True)]
        return jax.pure_callback(perform, tuple(results), a, b, vmap_method="sequential")

    return call


# Functions of an `Op`, its node and the operands.
_DIRECT: dict[type, Callable[..., Any]] = {
    ARange: _arange,
    DeepCopyOp: lambda op, node, x: x,  # also of sparse matrices
    Eye: lambda op, node, n, m, k: jnp.eye(
        *(int(n), int(m), int(k)), dtype=jax.dtypes.canonicalize_dtype(op.dtype)
    ),
    LUFactorTridiagonal: _tridiagonal_factor,
    Print: _print,
    RavelMultiIndex: _ravel_multi_index,
    Repeat: _repeat,
    Reshape: lambda op, node, x, shape: jnp.reshape(x, tuple(int(size) for size in shape)),
    Shape: lambda op, node, x: np.asarray(np.shape(x), np.int64),
    Shape_i: lambda op, node, x: np.int64(np.shape(x)[op.i]),
    Split: _split,
}

# Functions of an `Op`, its node, and `core`, a function that implements another `Op`. They return
# an implementation, which takes the operands, or None to use PyTensor's.
IMPLEMENTATIONS: dict[type, Callable[..., Implementation | None]] = {
    AdvancedIncSubtensor: _increment,
    Blockwise: _blockwise,
    CAReduce: _reduce,
    Eigh: _eigh,
    Eigvalsh: _eigh,
    LU: _lu,
    QZ: _call_perform_on_host,
    Solve: _solve,
    SolveLUFactorTridiagonal: _tridiagonal_solve,
    **{op_class: bind_node(function) for op_class, function in _DIRECT.items()},
}
register_sparse(IMPLEMENTATIONS.__setitem__)
