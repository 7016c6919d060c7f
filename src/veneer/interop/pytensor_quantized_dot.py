"""A product with a quantized matrix as an `Op` of PyTensor, in Python, JAX and Numba."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.link.jax.dispatch import jax_funcify
from pytensor.link.numba.dispatch import basic as numba_dispatch
from pytensor.scalar import upcast

from .._core.trace import redispatch
from ..quant.arrays import QArray
from ..quant.formats import get_format
from ..quant.formats.packing import Packing
from ..quant.formats.tiles import can_tile

__all__ = ["QuantizedDot", "quantized_dot"]


class _CodeTable(NamedTuple):
    """The values of the codes of a format, `float32[2**bits]`, and its number of bits."""

    values: np.ndarray
    bits: int


def _make_code_table(qtype: str) -> _CodeTable:
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
        self._codes = _make_code_table(qtype)
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
        """Return the shape of the result, as PyTensor variables."""
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
        _check_shapes(x.shape, fields.shape, scale.shape, *(z.shape for z in zero_point))
        w = values[fields].astype(scale.dtype)
        for z in zero_point:
            w = w - _repeat_tiles(z.astype(scale.dtype), w.shape)
        w = w * _repeat_tiles(scale, w.shape)
        dtype = node.outputs[0].dtype
        output_storage[0][0] = x.astype(dtype) @ w.astype(dtype)


def _repeat_tiles(tiles: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for axis in (0, 1):
        tiles = tiles.repeat(shape[axis] // max(tiles.shape[axis], 1), axis)
    return tiles


def _check_shapes(x: Any, codes: Any, *tiled: Any) -> None:
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
                centered = values[code] - of_zero[j * zero_point.shape[1] // n]
                row[j] = centered * of_scale[j * scale.shape[1] // n]
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
