"""`QArray`: a quantised array that looks dense."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..._core.leaf_axes import LeafAxis, Movement, aligned
from ..._core.surface.array import ImplicitArray
from ..._core.surface.mistakes import refuse_derivatives
from ..._core.surface.shown import has_title, title
from ..._core.tree import static
from ..formats import FORMATS, Format, get_format
from ..formats.packing import UNITS, Packing, axis_to_pack, pack, packed_size, unpack
from ..formats.tiles import Leaf, Shape, can_tile, over_tiles, tile_shape
from .pairs import compute_elementwise, runs_on_gpu

_NARROW_INTEGERS = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}

# Narrower floats are codes already.
QUANTIZABLE = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))


# As jaxprs show them: q8[4096,11008].
_SHORT_NAMES = {f"int{bits}": f"q{bits}" for bits in (*range(1, 9), 16)}


class QArray(ImplicitArray):
    """A quantized array that represents `(qvalue - zero_point) * scale + minimum`.

    In a format with a codebook, `codebook[qvalue]` takes the place of `qvalue`. Most arrays have no
    zero point and no minimum. `vn.quant.quantize` creates a QArray from a dense array.

    Codes of fewer than 8 bits are stored without gaps: two codes of 4 bits per byte, eight codes of
    3 bits in three bytes. `packed` is the stored array, and `qvalue` returns the unpacked codes.
    `nbytes` is the size of all stored arrays. Codes are packed along the last axis. If padding
    would waste bytes there, as in a convolution kernel `[out, in, 3, 3]`, another axis is used.

    If `vn.quant.quantize` creates a QArray, the dense array has the dtype of the input. If the
    constructor creates it, the dense array has the dtype of `scale`, or float32 if `scale` has 8
    bits.

    `vmap` and `scan` slice all stored arrays along their leading axes. Therefore the scale of
    stacked weights must have the full size along these axes: name them in the `channelwise_axes` of
    `vn.quant.quantize`.

    **Arguments:**

    - `qvalue`: the codes, `[..., K, N]`, in `FORMATS[qtype].code_dtype`: int4 for int4, uint4 for
      nf4, int8 for int5, float8_e4m3fn for mxfp8. Formats whose codes are integers accept any
      integer dtype, if the codes are in range.
    - `scale`: a floating array with the rank of `qvalue`. The size of each axis divides the size of
      the same axis of `qvalue`, and each entry is the scale of one tile. Scales in float8_e8m0fnu
      are powers of two. If scales are quantized, as in nvfp4, `scale` is itself a `QArray`.
    - `zero_point`: the code that represents 0. Its shape follows the rule for `scale`. Only integer
      formats have zero points. To store packed zero points, pass them as a `QArray` whose scale
      is 1.
    - `qtype`: the format. The default is the format named like the dtype of `qvalue`, such as int4.
    - `minimum`: a value that is added after scaling, as in GGUF's Q4_1. Its shape and dtype follow
      the rules for `scale`.

    **Raises:**

    - `TypeError` if one of the arrays is not a JAX or NumPy array.
    - `ValueError` if the format is unknown, or if the dtype of `qvalue` names no format and `qtype`
      is missing.
    - `ValueError` if a shape or dtype does not follow the rules above, or a code is out of range.

    >>> import jax.numpy as jnp, veneer as vn
    >>> q = vn.quant.QArray(jnp.array([[1, -2], [3, 4]], jnp.int4), jnp.array([[0.5, 1.0]]))
    >>> q.shape, q.dtype.name, q.packed.shape, q.nbytes
    ((2, 2), 'float32', (2, 1), 10)
    >>> q.dequantize().tolist()
    [[0.5, -2.0], [1.5, 4.0]]
    """

    metadata_is_meaning: ClassVar[bool] = False
    trainable: ClassVar[tuple[str, ...] | None] = ()
    dense_tangent: ClassVar[bool] = True  # straight through the rounding

    packed: Leaf
    scale: "Leaf | QArray"
    zero_point: "Leaf | QArray | None"
    minimum: "Leaf | QArray | None"
    qtype: str = static()
    packing: Packing | None = static()
    dense_dtype: str = static()

    def __init__(
        self,
        qvalue: Leaf,
        scale: "Leaf | QArray",
        zero_point: "Leaf | QArray | None" = None,
        qtype: DTypeLike | None = None,
        *,
        minimum: "Leaf | QArray | None" = None,
    ):
        _check_arrays(qvalue=qvalue, scale=scale, zero_point=zero_point, minimum=minimum)
        format = _format_of_codes(qvalue, qtype)
        packing = None
        if format.bits < 8:
            qvalue, packing = pack_codes(jnp.asarray(qvalue), format)
        elif qvalue.dtype != format.code_dtype:
            qvalue = qvalue.astype(format.code_dtype)
        if zero_point is not None and zero_point.dtype.name in _NARROW_INTEGERS:
            # A leaf that is stored as it is, so of a dtype that files have.
            zero_point = zero_point.astype(_NARROW_INTEGERS[zero_point.dtype.name])
        self._set(qvalue, scale, zero_point, minimum, format.name, packing, None)

    @classmethod
    def from_packed(
        cls,
        packed: Leaf,
        scale: "Leaf | QArray",
        zero_point: "Leaf | QArray | None" = None,
        *,
        minimum: "Leaf | QArray | None" = None,
        qtype: DTypeLike,
        packing: Packing | None = None,
        dense_dtype: DTypeLike | None = None,
    ) -> "QArray":
        """Create a QArray from packed codes, such as the codes in a checkpoint.

        **Arguments:**

        - `packed`: the stored codes. Codes of 8 bits or more have the `code_dtype` of the format.
          Narrower codes are packed in uint8.
        - `scale`, `zero_point`, `minimum`: as for `QArray`.
        - `qtype`: the format.
        - `packing`: a `vn.quant.Packing`: the axis along which narrower codes are packed, and its
          unpacked size. None means one code per byte.
        - `dense_dtype`: the dtype of the dense array. None is the dtype of `scale`, or float32 if
          `scale` has 8 bits.

        **Returns:** a `QArray`, or the subclass on which the method is called. It uses the arrays
        without a copy.

        **Raises:**

        - `TypeError` if one of the arrays is not a JAX or NumPy array.
        - `ValueError` if the format is unknown, or a shape or dtype breaks the rules of `QArray`.

        >>> import jax.numpy as jnp, veneer as vn
        >>> vn.quant.QArray.from_packed(
        ...     jnp.array([0x21, 0x0F], jnp.uint8), jnp.ones(1), qtype="int4",
        ...     packing=vn.quant.Packing(axis=-1, size=3),
        ... ).dequantize().tolist()
        [1.0, 2.0, -1.0]
        """
        new = cls.__new__(cls)
        new._set(packed, scale, zero_point, minimum, get_format(qtype).name, packing, dense_dtype)
        new.__post_init__()
        return new

    def replace(self, **changes: Any) -> "QArray":
        """Return a copy in which some fields have new values.

        `dataclasses.replace` does not work here, because the constructor takes unpacked codes.

        **Arguments:**

        - `changes`: the new values, as keyword arguments. The fields are the arrays `packed`,
          `scale`, `zero_point` and `minimum`, and the metadata `qtype`, `packing` and
          `dense_dtype`.

        **Returns:** an array of the same class. Fields that are not in `changes` stay the same.

        **Raises:**

        - `TypeError` if a name is not a field.
        - The errors of `from_packed`.

        >>> import jax.numpy as jnp, veneer as vn
        >>> q = vn.quant.quantize(jnp.array([1.0, -1.0]), "nf4")
        >>> q.replace(scale=2 * q.scale).dequantize().tolist()
        [2.0, -2.0]
        """
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if unknown := sorted(changes.keys() - parts.keys()):
            raise TypeError(
                f"a QArray has no field {unknown[0]!r}; its fields are {', '.join(parts)}"
            )
        return self.from_packed(**parts | changes)

    # For `copy.replace`, which Python has from 3.13 on. Dataclasses would define it by `__init__`.
    __replace__ = replace

    def _set(
        self,
        packed: Leaf,
        scale: "Leaf | QArray",
        zero_point: "Leaf | QArray | None",
        minimum: "Leaf | QArray | None",
        qtype: str,
        packing: Packing | None,
        dense_dtype: DTypeLike | None,
    ) -> None:
        _check_arrays(packed=packed, scale=scale, zero_point=zero_point, minimum=minimum)
        if dense_dtype is None:
            dense_dtype = scale.dtype if scale.dtype in QUANTIZABLE else jnp.float32
        dense_dtype = jnp.dtype(dense_dtype).name
        self._assign(packed, scale, zero_point, minimum, qtype, packing, dense_dtype)

    def __post_init__(self) -> None:
        _validate(self)

    def _assign(self, *values: Any) -> None:
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)  # the dataclass is frozen

    @property
    def type_name(self) -> str:
        """The name of the format in jaxprs and tables, such as "q4" for int4."""
        return _SHORT_NAMES.get(self.qtype, self.qtype)

    @property
    def storage_name(self) -> str:
        """The granularity of the scales: "tile 64", "channelwise" or "one scale"."""
        return self._tiles()

    @property
    def format(self) -> Format:
        """The entry of `vn.quant.FORMATS` for `qtype`."""
        return get_format(self.qtype)

    @property
    def qvalue(self) -> jax.Array:
        """The unpacked codes, in the `code_dtype` of the format, such as int4."""
        refuse_derivatives(self)
        return self.codes().astype(self.format.code_dtype)

    @property
    def tile_shape(self) -> Shape:
        """The number of values that share one scale, along each axis."""
        return tile_shape(self.shape, self.scale.shape)

    def _tiles(self) -> str:
        """Returns what shares a scale: `tile 64`."""
        sizes = [*zip(self.tile_shape, self.scale.shape, strict=True)]
        if any(tile > 1 and count > 1 for tile, count in sizes):
            # Of an axis that one tile takes, too.
            return f"tile {'×'.join(str(tile) for tile, _ in sizes if tile > 1)}"
        return "channelwise" if self.scale.size > 1 else "one scale"

    def __repr__(self) -> str:
        """Return the title, or all fields if a part is not an array."""
        return f"QArray({title(self)})" if has_title(self) else super().__repr__()

    def codes(self) -> jax.Array:
        """Return the unpacked codes in int8, uint8, int16 or a float dtype of 8 bits."""
        format = self.format
        if format.bits >= 8:
            return jnp.asarray(self.packed)
        fields = unpack(self.packed, self.packing, format.bits, by_shifts=runs_on_gpu())
        return format.from_fields(fields)

    def _decode(self, dtype: DTypeLike) -> jax.Array:
        """Return the values of the codes, before zero points and scales, in `dtype`."""
        format = self.format
        if not runs_on_gpu() or format.bits not in (1, 2, 4):
            return format.decode(self.codes(), dtype)
        # GPUs convert integers of 32 bits to floats in one instruction, and narrower ones in more.
        packed = jnp.asarray(self.packed).astype(jnp.uint32)
        fields = unpack(packed, self.packing, format.bits, by_shifts=True)
        return format.decode(format.from_fields(fields), dtype)

    def scales(self) -> jax.Array:
        """Return the scales in f32, or in f64 if they are stored in f64.

        Quantized scales are dequantized.
        """
        return _wide(self.scale)

    def minima(self) -> jax.Array | None:
        """Return the minima in f32, or in f64 if they are stored in f64.

        If the array has no minima, return None.
        """
        return None if self.minimum is None else _wide(self.minimum)

    def zero_points(self) -> jax.Array | None:
        """Return the unpacked zero points as integers, or None if the array has none."""
        zero_point = self.zero_point
        if zero_point is None:
            return None
        return zero_point.codes() if isinstance(zero_point, QArray) else jnp.asarray(zero_point)

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of the dense array.

        **Raises:** `ValueError` if a function that works on leaves, such as `jax.tree.map`, changed
        the dtype of the codes, or sliced the axis along which they are packed.
        """
        stored = jax.typeof(self.packed)  # with its sharding, which the codes share
        _check_codes_are_stored(self, stored.dtype)
        shape = list(stored.shape)
        if self.packing is not None:
            axis, size = self.packing
            if shape[axis] != packed_size(size, self.format.bits):
                raise ValueError(
                    f"a QArray packed along axis {axis} (size {size}) cannot have stored codes of "
                    f"shape {stored.shape}. Outside vn.implicit, vmap and tree functions can slice "
                    "only its leading axes; under vn.implicit, any axis"
                )
            shape[axis] = size
        # A stored float64 is float32 where jax_enable_x64 is not set.
        dtype = jax.dtypes.canonicalize_dtype(self.dense_dtype)
        return stored.update(shape=tuple(shape), dtype=dtype, weak_type=False)

    def leaf_axes(self) -> list[list[LeafAxis]]:
        """Return one list per stored array, with a `vn.LeafAxis` for each of its axes."""
        ndim = self.ndim

        def of(leaf: Any) -> list[LeafAxis]:
            counts = zip(self.shape, leaf.shape, strict=True)
            return [LeafAxis(i - ndim, block(*sizes)) for i, sizes in enumerate(counts)]

        def block(size: int, count: int) -> Any:
            if count == 1:
                return "shared"
            # By equality alone, which also symbolic sizes have. An axis of size 0 has any count.
            return 1 if size in (0, count) else size // count

        packed = list(aligned(ndim))
        if self.packing is not None:
            axis = self.packing.axis
            packed[axis] = LeafAxis(axis, *UNITS[self.format.bits])
        others = (self.scale, self.zero_point, self.minimum)
        return [packed, *(of(x) for x in others if x is not None)]

    def _movable(self) -> "QArray":
        """Returns this array with a code a byte where a packed axis has size 1: it is no larger."""
        if self.packing is None or self.packing.size != 1:
            return self
        return self._assigned(
            packed=unpack(self.packed, self.packing, self.format.bits), packing=None
        )

    def _moved(self, movement: Movement) -> "QArray":
        """Returns this array, whose leaves were moved, packed along the axis that now is."""
        if self.packing is None:
            return self
        axis = movement.axes[self.packing.axis]
        assert axis is not None
        packing = Packing(axis - len(movement.shape), movement.shape[axis])
        return self._assigned(packing=packing)

    def _assigned(self, **changes: Any) -> "QArray":
        """Returns a copy of which some parts are others, unchecked."""
        new = type(self).__new__(type(self))
        new.__dict__.update({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        new.__dict__.update(changes)
        return new

    def dequantize(self) -> jax.Array:
        """Return the dense array, like `vn.quant.dequantize`.

        **Raises:**

        - `TypeError` if the array holds gradients of its leaves, as `jax.grad` returns them.
        - `ValueError` if `jax.tree.map` or a similar function changed the dtype of the codes.
        """
        refuse_derivatives(self)
        _check_codes_are_stored(self, self.packed.dtype)
        return compute_elementwise(QArray._dequantize, self, self.dtype)

    def _dequantize(self) -> jax.Array:
        scale = self.scales()
        # A scale in f32 does not make numbers in f64 less: products scale sums of these in f64.
        wide = jnp.promote_types(scale.dtype, self.dtype)
        x = self._decode(wide)
        if (zero_point := self.zero_points()) is not None:
            x = over_tiles(jnp.subtract, x, zero_point.astype(wide))
        if self.scale.dtype == jnp.float8_e8m0fnu:
            # The least scale, 2**-127, is subnormal in f32, and XLA for CPUs computes with 0
            # instead. Two factors keep the products that are normal numbers.
            least = float(jnp.finfo(scale.dtype).tiny)
            x = over_tiles(jnp.multiply, x, jnp.where(scale < least, 0.5, 1).astype(wide))
            scale = jnp.maximum(scale, least)
        x = over_tiles(jnp.multiply, x, scale.astype(wide))
        if (minimum := self.minima()) is not None:
            x = over_tiles(jnp.add, x, minimum.astype(wide))
        return x.astype(self.dtype)

    def materialise(self) -> jax.Array:
        """Return the dense array. `vn.materialise` calls this method."""
        return self.dequantize()


def _wide(leaf: "Leaf | QArray") -> jax.Array:
    """Returns floats, which may be quantised, in f32 or f64; JAX promotes none of 8 bits."""
    wide = jax.dtypes.canonicalize_dtype(jnp.float64 if leaf.dtype == jnp.float64 else jnp.float32)
    if isinstance(leaf, QArray):  # not rounded to what it stands for, which may be of 16 bits
        return leaf._assigned(dense_dtype=wide.name).dequantize()
    return jnp.asarray(leaf).astype(wide)


def pack_codes(codes: jax.Array, format: Format) -> tuple[jax.Array, Packing | None]:
    """Returns codes as they are stored: packed where they are below 8 bits."""
    if format.bits >= 8:
        return codes.astype(format.code_dtype), None
    fields = format.to_fields(codes)
    if not codes.ndim:
        return fields, None
    return pack(fields, format.bits, axis_to_pack(codes.shape, format.bits))


def _format_of_codes(qvalue: Leaf, qtype: DTypeLike | None) -> Format:
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
    is_full = dtype == format.code_dtype and format.bits in (
        4,
        8,
        16,
    )  # any code of the dtype is one
    if has_integers and not is_full and dtype.name != format.name:
        _check_codes(qvalue, format)
    return format


def _check_codes(qvalue: Leaf, format: Format) -> None:
    """Refuses codes that the format does not have, or of another dtype that cannot be looked at."""
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


def _check_arrays(**parts: Any) -> None:
    for name, part in parts.items():
        if isinstance(part, jax.Array | np.ndarray):
            continue
        if name in ("zero_point", "minimum") and part is None:
            continue
        if name in ("scale", "zero_point", "minimum") and isinstance(part, QArray):
            continue
        raise TypeError(
            f"{name} must be a JAX or NumPy array with the rank of the codes, not a "
            f"{type(part).__name__}: convert it with jnp.asarray"
        )


def _validate(q: QArray) -> None:
    _validate_packed(q)
    for name, leaf in (("scale", q.scale), ("minimum", q.minimum)):
        if leaf is not None and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"{name} must have a floating dtype, not {leaf.dtype.name}")
    if not jnp.issubdtype(jnp.dtype(q.dense_dtype), jnp.floating):
        raise ValueError(f"dense_dtype must be a floating dtype, not {q.dense_dtype}")
    if q.zero_point is not None and not q.format.is_integer:
        raise ValueError(f"{q.qtype} is not an integer format, so it has no zero_point")
    if isinstance(q.zero_point, QArray) and not q.zero_point.format.is_integer:
        raise ValueError(f"zero_point must have an integer format, not {q.zero_point.qtype}")
    for name in ("scale", "zero_point", "minimum"):
        leaf = getattr(q, name)
        if leaf is not None and not can_tile(leaf.shape, q.shape):
            raise ValueError(
                f"{name} of shape {leaf.shape} does not tile codes of shape {q.shape}: it needs "
                "the same rank, and the size of each axis must divide the size of the codes' axis"
            )


def _check_codes_are_stored(q: QArray, dtype: Any) -> None:
    """Reject codes that a function of leaves has converted, as `jax.tree.map(lambda x: 0.9 * x)`.

    Derivatives by codes have dtype float0.
    """
    if dtype not in (q.format.storage_dtype, jax.dtypes.float0):
        raise ValueError(
            f"the codes of a QArray in {q.qtype} are {jnp.dtype(dtype).name}, not "
            f"{q.format.storage_dtype.name}. A function of leaves, such as jax.tree.map, changed "
            "codes and scales separately. To change the array, use vn.tree.map, or call the "
            "function under vn.implicit"
        )


def _validate_packed(q: QArray) -> None:
    if q.packed.dtype != q.format.storage_dtype:
        raise ValueError(
            f"{q.qtype} is stored in {q.format.storage_dtype.name}, but packed has dtype "
            f"{q.packed.dtype.name}"
        )
    if q.packing is None:
        return
    axis, size = q.packing
    bits = q.format.bits
    if bits >= 8:
        raise ValueError(f"{q.qtype} takes whole bytes, so packing must be None, not {q.packing}")
    if not -q.packed.ndim <= axis < 0 or q.packed.shape[axis] != packed_size(size, bits):
        raise ValueError(
            f"packed of shape {q.packed.shape} does not fit {q.packing}: the axis must be "
            f"negative, and have {packed_size(size, bits)} bytes"
        )
