"""Convert between `QArray` and the quantized arrays of Qwix, with equal codes and scales."""

import jax.numpy as jnp
import qwix

from veneer.quant import QArray, get_format

# The formats of Qwix 0.1.8, by our names.
QWIX_NAMES = {
    "int8": jnp.int8,
    "int7": "int7",
    "int6": "int6",
    "int5": "int5",
    "int4": jnp.int4,
    "int3": "int3",
    "int2": "int2",
    "nf4": "nf4",
    "float8_e4m3fn": jnp.float8_e4m3fn,
    "float8_e5m2": jnp.float8_e5m2,
    "float4_e2m1fn": jnp.float4_e2m1fn,
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}


def our_name(qtype) -> str:
    """Return our name of a format of Qwix."""
    return get_format(qtype).name


def from_qwix(q: qwix.QArray) -> QArray:
    """Return the `QArray` with the codes, scales and zero points of Qwix's array.

    If our format has a special dtype of scales, the scales must be exact in it. They are if Qwix
    quantized the array.
    """
    format = get_format(q.qtype)
    codes = q.qvalue
    if format.codebook is not None and codes.dtype == jnp.float4_e2m1fn:
        codes = format.encode(codes.astype(jnp.float32))
    scale = q.scale
    if format.scale_tile is not None:  # Qwix has no scales of scales
        ones = jnp.ones([1] * scale.ndim, jnp.float32)
        inner = get_format(format.scale_dtype)
        scale = QArray.from_packed(scale.astype(inner.code_dtype), ones, qtype=inner.name)
    elif format.scale_dtype is not None:
        scale = scale.astype(format.scale_dtype)
    made = QArray(codes.astype(format.code_dtype), scale, q.zero_point, format.name)
    return made.replace(dense_dtype=q.scale.dtype)


def to_qwix(q: QArray) -> qwix.QArray:
    """Return Qwix's array with the codes, scales and zero points of a `QArray`."""
    qtype = QWIX_NAMES[q.qtype]
    codes = q.codes()
    if q.format.is_integer:
        # Qwix stores integers of up to 4 bits as int4, the others as int8.
        codes = codes.astype(jnp.int4 if q.format.bits <= 4 else jnp.int8)
    elif q.qtype == "nf4":
        codes = codes.astype(jnp.uint4)
    elif q.format.codebook is not None:
        codes = q.format.decode(codes, jnp.float32).astype(jnp.float4_e2m1fn)
    zero_point = q.zero_point if q.zero_point is None else q.zero_point.astype(codes.dtype)
    return qwix.QArray(codes, q.scales().astype(q.dtype), zero_point, qtype)
