"""torchao: tensor subclasses in safetensors, described by JSON in the file's header.

The parts of `m.weight` are `m._weight_qdata`, `m._weight_scale` and others. The header states its
type:

- `Int4Tensor`: `qdata` i8 `[out, in / 2]`, the first of two signed codes in the low half of a byte;
  `scale` and `zero_point` `[groups, out]`. The value is `q * s + zero_point`.
- `Int8Tensor`, `Float8Tensor`: one byte per code, for blocks of `block_size`. The value is
  `(q - z) * s`.
- `IntxUnpackedToInt8Tensor`: like `Int8Tensor`, but codes have fewer bits. They are packed here.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from . import codes
from .block_floats import FLOAT8, make_byte_weight
from .stored_tensors import FLOATS, StoredTensors, Weight, make_qarray

_BITS = {f"int{bits}": bits for bits in range(2, 9)}


def find_weights(source: StoredTensors) -> Iterator[Weight]:
    """Yield the quantized weights of a folder in the formats of torchao."""
    for name, text in source.folder.metadata.items():
        description = _parse_object(text)
        kind = description.get("_type")
        if kind in (None, "Tensor", "torch.Tensor") or name in source.headers:
            continue
        if not isinstance(kind, str) or kind not in _KINDS:
            raise source.error(
                name,
                f"has the torchao type {kind!s:.40}, which is not supported. Supported types: "
                f"{', '.join(_KINDS)}",
            )
        module, dot, last = name.rpartition(".")
        prefix = f"{module}{dot}_{last}_"
        if f"{prefix}qdata" not in source.headers:
            raise source.error(f"{prefix}qdata", "is missing")
        if f"{prefix}act_pre_scale" in source.headers:
            raise source.error(
                f"{prefix}act_pre_scale", "scales activations, which is not supported"
            )
        data = description.get("_data")
        yield _KINDS[kind](source, name, prefix, data if isinstance(data, Mapping) else {})


def _make_int4_weight(
    source: StoredTensors, name: str, prefix: str, data: Mapping[str, Any]
) -> Weight:
    qdata, scale, zero = (prefix + part for part in ("qdata", "scale", "zero_point"))
    out, width = source.shape(qdata, rank=2, dtypes=("int8", "uint8"))
    groups, _ = source.shape(scale, rank=2, dtypes=FLOATS)
    source.check(scale, (groups, out), FLOATS, qdata)
    source.check(zero, (groups, out), FLOATS, scale)
    block = _read_block_size(data)
    tile = source.tile(scale, 2 * width, groups, block[-1] if block else None)
    if 2 * width % tile:
        raise source.error(scale, f"has groups of {tile}, which do not divide {2 * width} inputs")
    dtype = source.header(scale).dtype.name
    parts = (qdata, scale, zero)
    return Weight(name, (out, 2 * width), dtype, parts, partial(_read_int4, source, parts, dtype))


def _read_int4(source: StoredTensors, parts: tuple[str, ...], dtype: str) -> Any:
    packed, scale, zero = (source.read(part) for part in parts)
    # `any` would warn of a signaling NaN.
    minimum = np.ascontiguousarray(zero.T) if np.count_nonzero(zero) else None
    packing = codes.last_axis_packing(2 * packed.shape[1], 4)
    return make_qarray(
        packed.view(np.uint8), scale.T, qtype="int4", packing=packing, dtype=dtype, minimum=minimum
    )


def _make_byte_weight(
    source: StoredTensors, name: str, prefix: str, data: Mapping[str, Any]
) -> Weight:
    qdata = f"{prefix}qdata"
    if source.header(qdata).dtype.name not in ("int8", *FLOAT8):
        raise source.error(qdata, "is neither int8 nor an 8-bit float")
    zero = f"{prefix}zero_point"
    stated = data.get("dtype")
    dtype = stated.get("_data") if isinstance(stated, Mapping) else None
    weight = make_byte_weight(
        source,
        qdata,
        f"{prefix}scale",
        _read_block_size(data),
        zero_name=zero if zero in source.headers else None,
        dtype=dtype if dtype in FLOATS else None,
    )
    return weight._replace(name=name)


def _make_narrow_weight(
    source: StoredTensors, name: str, prefix: str, data: Mapping[str, Any]
) -> Weight:
    weight = _make_byte_weight(source, name, prefix, data)
    stated = data.get("target_dtype")
    bits = _BITS.get(str(stated.get("_data") if isinstance(stated, Mapping) else stated))
    if bits is None:
        raise source.error(f"{prefix}qdata", f"is {stated!s:.40}, not int2 to int8")
    return weight._replace(read=partial(_read_narrow, weight, bits)) if bits < 8 else weight


def _read_narrow(weight: Weight, bits: int) -> Any:
    q = weight.read()
    wide = np.asarray(q.packed)
    if wide.size and not -(2 ** (bits - 1)) <= wide.min() <= wide.max() < 2 ** (bits - 1):
        raise ValueError(f"its codes do not fit {bits} bits")
    packed = codes.pack_rows(wide.view(np.uint8) & np.uint8(2**bits - 1), bits)
    packing = codes.last_axis_packing(wide.shape[-1], bits)
    return q.replace(packed=packed, packing=packing, qtype=f"int{bits}")


def _read_block_size(data: Mapping[str, Any]) -> list[int] | None:
    block = data.get("block_size")
    are_sizes = isinstance(block, list) and all(type(n) is int and n > 0 for n in block)
    return block if block and are_sizes else None


_KINDS: dict[Any, Callable[..., Weight]] = {
    "Int4Tensor": _make_int4_weight,
    "Int8Tensor": _make_byte_weight,
    "Float8Tensor": _make_byte_weight,
    "IntxUnpackedToInt8Tensor": _make_narrow_weight,
}


def _parse_object(text: Any) -> Mapping[str, Any]:
    try:
        content = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, Mapping) else {}
