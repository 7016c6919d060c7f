"""Checks of the fields of a `QArray`, with messages that name the field and the remedy."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..formats import FORMATS, Format, get_format
from ..formats.packing import packed_size
from ..formats.tiles import Leaf, Shape, can_tile

if TYPE_CHECKING:
    from .qarray import QArray


def format_of_codes(qvalue: Leaf, qtype: DTypeLike | None) -> Format:
    """Return the format of codes that a user passes to `QArray`.

    If `qtype` is None, the dtype of the codes has the name of the format, such as "int8".

    **Raises:** `ValueError` if the dtype or the range of the codes does not fit the format.
    """
    dtype = qvalue.dtype
    if qtype is None and dtype.name not in FORMATS:
        raise ValueError(f"qvalue has dtype {dtype.name}, which is not a format: pass qtype")
    format = get_format(dtype.name if qtype is None else qtype)
    has_integers = format.is_integer or format.codebook is not None
    if dtype != format.code_dtype and not (has_integers and jnp.issubdtype(dtype, jnp.integer)):
        raise ValueError(
            f"qvalue has dtype {dtype.name}, but codes of {format.name} are "
            f"{format.code_dtype.name}. To quantize values, call vn.quant.quantize"
        )
    # If every value of the dtype is a code, such as uint4 for nf4, there is nothing to check.
    has_only_codes = dtype == format.code_dtype and format.bits in (4, 8, 16)
    if has_integers and not has_only_codes and dtype.name != format.name:
        _check_code_range(qvalue, format)
    return format


def _check_code_range(qvalue: Leaf, format: Format) -> None:
    """Raise `ValueError` if an integer in `qvalue` is not a code of the format.

    The values of a tracer are unknown, so a tracer must have the `code_dtype` of the format.
    """
    if isinstance(qvalue, jax.core.Tracer):
        if qvalue.dtype == format.code_dtype:
            return
        raise ValueError(
            f"codes of {format.name} are {format.code_dtype.name}, and the range of "
            f"{qvalue.dtype.name} codes cannot be checked in a traced program: pass "
            f"qvalue.astype(jnp.{format.code_dtype})"
        )
    low, high = format.code_range
    codes = np.asarray(qvalue)
    if codes.size and not low <= codes.min() <= codes.max() <= high:
        raise ValueError(
            f"codes of {format.name} are from {low} to {high}, but qvalue has codes from "
            f"{codes.min()} to {codes.max()}"
        )
    if format.bits == 1 and format.signed and not codes.all():
        raise ValueError(f"codes of {format.name} are -1 and 1, but qvalue has code 0")


def check_fields(q: "QArray") -> None:
    """Raise `ValueError` if the dtype or shape of a field breaks a rule of `QArray`."""
    if q.packed.dtype != q.format.storage_dtype:
        raise ValueError(
            f"{q.qtype} is stored in {q.format.storage_dtype.name}, but packed has dtype "
            f"{q.packed.dtype.name}"
        )
    if q.packing is not None:
        if q.format.bits >= 8:
            raise ValueError(
                f"{q.qtype} takes whole bytes, so packing must be None, not {q.packing}"
            )
        axis, count = q.packing.axis, packed_size(q.packing.size, q.format.bits)
        if not -q.packed.ndim <= axis < 0 or q.packed.shape[axis] != count:
            raise ValueError(
                f"packed of shape {q.packed.shape} does not fit {q.packing}: the axis must be "
                f"negative, and have {count} bytes"
            )
    for name, leaf in (("scale", q.scale), ("minimum", q.minimum)):
        if leaf is not None and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"{name} must have a floating dtype, not {leaf.dtype.name}")
    if not jnp.issubdtype(jnp.dtype(q.dense_dtype), jnp.floating):
        raise ValueError(f"dense_dtype must be a floating dtype, not {q.dense_dtype}")
    if q.zero_point is not None and not q.format.is_integer:
        raise ValueError(f"{q.qtype} is not an integer format, so it has no zero_point")
    zero_point: Any = q.zero_point
    is_qarray = not isinstance(zero_point, jax.Array | np.ndarray | None)
    if is_qarray and not zero_point.format.is_integer:
        raise ValueError(f"zero_point must have an integer format, not {zero_point.qtype}")
    for name in ("scale", "zero_point", "minimum"):
        leaf = getattr(q, name)
        if leaf is not None:
            check_tiling(name, leaf.shape, "codes", q.shape)


def check_tiling(name: str, scale_shape: Shape, tiled_name: str, shape: Shape) -> None:
    """Raise `ValueError` if a scale of `scale_shape` does not fit values of `shape`.

    The message calls the scale `name` and the values `tiled_name`.
    """
    if not can_tile(scale_shape, shape):
        raise ValueError(
            f"{name} of shape {scale_shape} does not tile {tiled_name} of shape {shape}: it needs "
            "the same rank, and the size of each axis must divide the size of the tiled axis"
        )


def check_codes_are_stored(q: "QArray") -> None:
    """Raise `ValueError` if the dtype of the stored codes is not the storage dtype of the format.

    This happens if a function converts the leaves, such as `jax.tree.map(lambda x: 0.9 * x, q)`.
    float0, the dtype of derivatives with respect to integers, is accepted.
    """
    dtype = jax.typeof(q.packed).dtype
    if dtype not in (q.format.storage_dtype, jax.dtypes.float0):
        raise ValueError(
            f"the codes of a QArray in {q.qtype} are {jnp.dtype(dtype).name}, not "
            f"{q.format.storage_dtype.name}. A function of leaves, such as jax.tree.map, changed "
            "codes and scales separately. To change the array, use vn.tree.map, or call the "
            "function under vn.implicit"
        )
