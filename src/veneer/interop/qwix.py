"""The public names of Qwix 0.1.8, implemented by Veneer: `import veneer.interop.qwix as qwix`.

Code that quantizes arrays and multiplies them with Qwix (https://github.com/google/qwix) runs when
this import replaces `import qwix`. It has the names and the arguments of Qwix, and `veneer.quant`
computes the results. Qwix does not need to be installed.

`QArray` is `veneer.quant.QArray`. docs/qwix.md lists results that differ from Qwix, and
replacements for its rules and providers.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from opt_einsum import contract_path
from opt_einsum.parser import parse_einsum_input

from .. import quant
from .._core.surface.array import ImplicitArray
from .._core.trace import redispatch
from ..quant.arrays import QUANTIZABLE, QArray

__all__ = [
    "QArray",
    "conv_general_dilated",
    "dequantize",
    "dot",
    "dot_general",
    "einsum",
    "quantize",
    "ragged_dot",
    "ragged_dot_general",
]
__version__ = "0.1.8"  # of Qwix

_Operand = ArrayLike | ImplicitArray

# What to use instead of other names of Qwix.
_INSTEAD = {
    "LoraProvider": "vn.lora.init_tree(params, rules, key=...)",
    "LoraRule": "vn.lora.Rule(path_regex, rank=...)",
    "PtqProvider": "vn.quant.quantize_tree(params, rules, ...)",
    "QtProvider": "vn.quant.quantize_tree(params, rules, train=True)",
    "QtRule": "vn.quant.Rule(path_regex, qtype, ...)",
    "QuantizationRule": "vn.quant.Rule(path_regex, qtype, ...)",
    "apply_lora_to_model": "vn.lora.init_tree(params, rules, key=...)",
    "quantize_model": "vn.quant.quantize_tree(params, rules, ...)",
    "quantize_params": "vn.quant.quantize_tree(params, rules, ...)",
}


def __getattr__(name: str) -> Any:
    hint = f": use {_INSTEAD[name]}. docs/qwix.md has a table" if name in _INSTEAD else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def quantize(
    array: _Operand,
    qtype: DTypeLike,
    *,
    channelwise_axes: Collection[SupportsIndex] = (),
    tiled_axes: Mapping[SupportsIndex, SupportsIndex | float] | None = None,
    calibration_method: str = "absmax",
    scale_dtype: DTypeLike | None = None,
) -> QArray:
    """Quantize an array. The scales are computed from its values.

    **Arguments:**

    - `array`: f16, bf16, f32 or f64.
    - `qtype`: the format, by its name or dtype: `jnp.int8`, `jnp.int4`, `"nf4"`, `"mxfp8"`.
    - `channelwise_axes`: axes with one scale per index.
    - `tiled_axes`: axes with one scale per tile, `{axis: tile size}`. A float is the tile size as a
      fraction of the axis.
    - `calibration_method`: `"absmax"`, `"minmax"`, `"rms,7"`, `"fixed,-10,10"`, or another method
      of `veneer.quant.quantize`.
    - `scale_dtype`: the dtype of the scale and of the represented array. By default, `array.dtype`.

    **Returns:** a `QArray` of the shape of `array`.

    **Raises:** `TypeError` if `array` is not floating. `ValueError` for an unknown format or
    method, for an axis that is both channelwise and tiled, and if a tile does not divide its axis.

    >>> import jax.numpy as jnp, veneer.interop.qwix as qwix
    >>> w = jnp.linspace(-1, 1, 8).reshape(4, 2)
    >>> q = qwix.quantize(w, jnp.int4, channelwise_axes=[1], tiled_axes={0: 2})
    >>> q.shape, q.scale.shape, q.dtype.name
    ((4, 2), (2, 2), 'float32')
    """
    # Qwix has mxfp8_16 only with the biased scales that its main branch calls "absmax".
    is_biased = calibration_method == "absmax" and quant.get_format(qtype).calibration == "oas"
    q = quant.quantize(
        array,
        qtype,
        channelwise_axes=tuple(channelwise_axes),
        tiled_axes=tiled_axes or None,
        calibration_method="oas" if is_biased else calibration_method,
        scale_dtype=scale_dtype,
    )
    if scale_dtype is None or jnp.dtype(scale_dtype) not in QUANTIZABLE:
        return q
    return q.replace(dense_dtype=scale_dtype)


def dequantize(array: QArray) -> jax.Array:
    """Return the dense array that a `QArray` represents.

    **Arguments:**

    - `array`: a `QArray`.

    **Returns:** a dense array of the same shape and dtype.

    **Raises:** `TypeError` if `array` is not a `QArray`.

    >>> import jax.numpy as jnp, veneer.interop.qwix as qwix
    >>> qwix.dequantize(qwix.quantize(jnp.array([0.0, -2.0]), "nf4")).tolist()
    [0.0, -2.0]
    """
    return quant.dequantize(array)


def dot_general(
    lhs: _Operand,
    rhs: _Operand,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    **kwargs: Any,
) -> jax.Array:
    """Multiply two arrays like `jax.lax.dot_general`. One or both can be a `QArray`.

    **Arguments:**

    - `lhs`, `rhs`: dense arrays or `QArray`s.
    - `dimension_numbers`: as in `jax.lax.dot_general`: the contracted and the batch axes.
    - `precision`: as in `jax.lax.dot_general`.
    - `preferred_element_type`: the dtype of the result. If None, it follows from the dtypes of the
      operands. Dense operands with a dtype of one byte count as int32 or bfloat16.
    - `kwargs`: further keyword arguments of `jax.lax.dot_general`: `out_sharding`.

    **Returns:** a dense array.

    **Raises:** the errors of `jax.lax.dot_general`.

    >>> import jax.numpy as jnp, veneer.interop.qwix as qwix
    >>> w = qwix.quantize(jnp.eye(3), jnp.int8, channelwise_axes=[1])
    >>> qwix.dot_general(jnp.ones((2, 3)), w, (([1], [0]), ([], []))).shape
    (2, 3)
    """
    dtype = _find_element_type(preferred_element_type, lhs, rhs)
    return quant.dot_general(lhs, rhs, dimension_numbers, precision, dtype, **kwargs)


def dot(
    a: _Operand,
    b: _Operand,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    _qwix_dot_general: Callable[..., jax.Array] = dot_general,
) -> jax.Array:
    """Multiply two arrays like `jax.numpy.dot`. One or both can be a `QArray`.

    **Arguments:**

    - `a`, `b`: dense arrays or `QArray`s.
    - `precision`, `preferred_element_type`, `out_sharding`: as in `dot_general`.
    - `_qwix_dot_general`: the function that computes the product, with the signature of
      `dot_general`. It is called once. All arguments except the operands are passed by keyword.

    **Returns:** a dense array.

    **Raises:** the errors of `jax.lax.dot_general`.

    >>> import jax.numpy as jnp, veneer.interop.qwix as qwix
    >>> w = qwix.quantize(jnp.eye(3), jnp.int8, channelwise_axes=[1])
    >>> qwix.dot(jnp.ones((2, 3)), w).shape
    (2, 3)
    """
    ndims = np.ndim(a), np.ndim(b)
    axes = ((ndims[0] - 1,), (max(ndims[1] - 2, 0),)) if all(ndims) else ((), ())
    return _qwix_dot_general(
        a,
        b,
        dimension_numbers=(axes, ((), ())),
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


def einsum(
    *args: Any,
    _qwix_dot_general: Callable[..., jax.Array] = dot_general,
    preferred_element_type: DTypeLike | None = None,
    **kwargs: Any,
) -> jax.Array:
    """Multiply arrays like `jax.numpy.einsum`. Each operand can be a `QArray`.

    **Arguments:**

    - `args`: the subscripts and the operands, or each operand followed by a list of its axes.
    - `_qwix_dot_general`: the function that computes each product of two operands, with the
      signature of `dot_general`. It receives the operands unchanged.
    - `preferred_element_type`: as in `dot_general`.
    - `kwargs`: `precision`, `optimize` and `out_sharding`. `_qwix_dot_general` receives all of them
      except `optimize`.

    The size of an axis in one operand may be a multiple of its size in another, as for the heads of
    queries and keys in attention. The entries of the smaller axis are then repeated.

    **Returns:** a dense array.

    **Raises:** the errors of `jax.numpy.einsum`.

    >>> import jax.numpy as jnp, veneer.interop.qwix as qwix
    >>> w = qwix.quantize(jnp.eye(3), jnp.int8, channelwise_axes=[1])
    >>> qwix.einsum("bsk,kn->bsn", jnp.ones((2, 4, 3)), w).shape
    (2, 4, 3)
    """
    operands = [x for x in args if hasattr(x, "dtype")]
    dtype = _find_element_type(preferred_element_type, *operands)
    if _qwix_dot_general is not dot_general:
        dtype = jnp.result_type(*(x.dtype for x in operands)) if dtype is None else dtype
        return _contract(args, _qwix_dot_general, preferred_element_type=dtype, **kwargs)
    if len({x.dtype for x in operands}) > 1:  # JAX does not promote floats of one byte
        args = tuple(_widen_floats(x) for x in args)
    return quant.einsum(*args, preferred_element_type=dtype, **kwargs)


def _contract(
    args: Sequence[Any],
    dot_general: Callable[..., jax.Array],
    optimize: Any = "auto",
    **options: Any,
) -> jax.Array:
    """Compute an einsum, and each product of two operands with `dot_general`.

    `args` are the subscripts and operands of `jax.numpy.einsum`, and `options` are passed to
    `dot_general`.
    """
    inputs, output, operands = parse_einsum_input(args)
    terms = inputs.split(",")
    sizes: dict[str, Any] = {}
    for term, x in zip(terms, operands, strict=True):
        for label, size in zip(term, x.shape, strict=True):
            known = sizes.setdefault(label, size)
            if label not in output and 1 not in (known, size) and known != size:
                raise ValueError(f"axis {label!r} of {inputs} is summed over {known} and {size}")
            sizes[label] = max(known, size)
    operands = [
        _repeat_to(x, tuple(sizes[label] for label in term))
        for term, x in zip(terms, operands, strict=True)
    ]
    # The order of the products needs a number for each size. JAX takes 8 for a symbolic one, too.
    shapes = [[n if isinstance(n, int) else 8 for n in x.shape] for x in operands]
    path = contract_path(f"{inputs}->{output}", *shapes, shapes=True, optimize=optimize)[1]
    for places, _, subscripts, *_ in path.contraction_list:
        pair, result = subscripts.split("->")
        picked = [operands.pop(place) for place in places]
        if len(picked) == 1:
            operands.append(quant.einsum(subscripts, *picked))
        else:
            operands.append(_multiply(picked, pair.split(","), result, dot_general, options))
    return operands[0]


def _repeat_to(x: Any, shape: tuple[Any, ...]) -> Any:
    """Repeat the entries of `x` along its axes until it has the given shape.

    **Raises:** `ValueError` if a size in `shape` is not a multiple of the size in `x`.
    """
    if x.shape == shape:
        return x
    pairs = [
        (n, 1 if n == wanted else wanted // max(n, 1))
        for n, wanted in zip(x.shape, shape, strict=True)
    ]
    if tuple(n * times for n, times in pairs) != shape:
        raise ValueError(f"an operand of shape {x.shape} cannot be repeated to {shape}")

    def repeat(x: jax.Array) -> jax.Array:
        x = x.reshape([size for n, _ in pairs for size in (n, 1)])
        return jnp.broadcast_to(x, list(itertools.chain(*pairs))).reshape(shape)

    return redispatch(repeat, x)


def _multiply(
    operands: Sequence[Any],
    terms: Sequence[str],
    result: str,
    dot_general: Callable[..., jax.Array],
    options: Mapping[str, Any],
) -> jax.Array:
    """Compute a step of an einsum: the product of two operands, by `dot_general`.

    **Arguments:**

    - `operands`: the two operands.
    - `terms`, `result`: the labels of the axes of each operand, and of the result.
    - `options`: keyword arguments of `dot_general`.
    """
    pair, labels = [], []
    for x, term, other in zip(operands, terms, terms[::-1], strict=True):
        kept = "".join(label for label in dict.fromkeys(term) if label in other + result)
        pair.append(x if kept == term else quant.einsum(f"{term}->{kept}", x))
        labels.append(kept)
    shared = sorted(set(labels[0]) & set(labels[1]))
    batch = [label for label in shared if label in result]
    summed = [label for label in shared if label not in result]
    axes = lambda chosen: tuple(tuple(map(term.index, chosen)) for term in labels)
    out = dot_general(*pair, (axes(summed), axes(batch)), **options)
    order = batch + [label for term in labels for label in term if label not in shared]
    return out.transpose([order.index(label) for label in result])


P = ParamSpec("P")


def _with_qwix_dtypes(product: Callable[P, jax.Array]) -> Callable[P, jax.Array]:
    """Wrap a product of `veneer.quant` so that its result has Qwix's dtype."""
    signature = inspect.signature(product)

    @functools.wraps(product)
    def typed(*args: P.args, **kwargs: P.kwargs) -> jax.Array:
        arguments = signature.bind(*args, **kwargs).arguments
        preferred = arguments.get("preferred_element_type")
        dtype = _find_element_type(preferred, arguments["lhs"], arguments["rhs"])
        return product(**arguments | {"preferred_element_type": dtype})  # type: ignore[call-arg]

    return typed


conv_general_dilated = _with_qwix_dtypes(quant.conv_general_dilated)
ragged_dot = _with_qwix_dtypes(quant.ragged_dot)
ragged_dot_general = _with_qwix_dtypes(quant.ragged_dot_general)


def _widen_type(dtype: DTypeLike) -> DTypeLike:
    """Return the dtype that Qwix promotes to: int32 or bfloat16 for a dtype of one byte."""
    if jnp.dtype(dtype).itemsize > 1:
        return dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.int32
    return jnp.bfloat16 if jnp.issubdtype(dtype, jnp.floating) else dtype


def _find_element_type(preferred: DTypeLike | None, *operands: Any) -> DTypeLike | None:
    """Return the `preferred_element_type` that gives a product the same dtype as in Qwix.

    It is `preferred` if that is not None. Otherwise it is None if JAX chooses the same dtype by
    itself.
    """
    dtypes = [x.dtype for x in operands if hasattr(x, "dtype")]
    wide = [_widen_type(dtype) for dtype in dtypes]
    return preferred if preferred is not None or wide == dtypes else jnp.result_type(*wide)


def _widen_floats(x: Any) -> Any:
    """Return bfloat16 for an array of 1-byte floats, and anything else unchanged."""
    is_float = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.bfloat16) if is_float and x.dtype.itemsize == 1 else x
