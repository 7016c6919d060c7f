"""`QArray`, a quantized array that looks dense, and checks of its fields.

The messages of the checks name the field and the remedy.

    pairs   decoding two neighboring values at once, which is faster on GPUs
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..._core.errors import reject_derivatives
from ..._core.leaf_axes import LeafAxis, Movement, aligned_axes
from ..._core.surface.array import ImplicitArray, has_title, title
from ..._core.tree import static
from ..formats import Format, get_format
from ..formats.packing import UNITS, Packing, axis_to_pack, pack, packed_size, unpack
from ..formats.table import format_of_codes
from ..formats.tiles import Leaf, Shape, can_tile, over_tiles, tile_shape
from .pairs import compute_elementwise, runs_on_gpu

# The dtypes that can be quantized. Floats of 8 bits are codes already.
QUANTIZABLE = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))


class QArray(ImplicitArray):
    """A quantized array that represents `(qvalue - zero_point) * scale + minimum`.

    In a format with a codebook, `codebook[qvalue]` takes the place of `qvalue`. Most arrays have no
    zero point and no minimum. `vn.quant.quantize` creates a QArray from a dense array.

    Codes of fewer than 8 bits are stored without gaps: two codes of 4 bits per byte, eight codes of
    3 bits in three bytes. `packed` is the stored array, and `qvalue` returns the unpacked codes.
    `nbytes` is the size of all stored arrays. Codes are packed along the last axis. If padding
    would waste bytes there, as in a convolution kernel `[out, in, 3, 3]`, another axis is used.

    `vn.quant.quantize` gives the dense array the dtype of the input. The constructor gives the
    dense array the dtype of `scale`, or float32 if `scale` has 8 bits.

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
    - `zero_point`: the code that represents 0, per tile. The rules for the shape of `scale` apply.
      Only integer formats have zero points. To store packed zero points, pass a `QArray` with
      scale 1.
    - `qtype`: the format. The default is the format named like the dtype of `qvalue`, such as int4.
    - `minimum`: a value that is added after scaling, per tile, as in GGUF's Q4_1. The rules for the
      shape and dtype of `scale` apply.

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
    dense_tangent: ClassVar[bool] = True  # the rounding has derivative 1 (straight-through)

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
        format = format_of_codes(qvalue, qtype)
        packing, dense_dtype = None, None
        if format.bits < 8:
            qvalue, packing = pack_codes(jnp.asarray(qvalue), format)
        elif qvalue.dtype != format.code_dtype:
            qvalue = qvalue.astype(format.code_dtype)
        if zero_point is not None and zero_point.dtype.name in ("int2", "int4", "uint2", "uint4"):
            # File formats have no integers below 8 bits, so uint4 becomes uint8.
            zero_point = zero_point.astype(zero_point.dtype.name[:-1] + "8")
        self._set_fields(qvalue, scale, zero_point, minimum, format.name, packing, dense_dtype)

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
        _check_arrays(packed=packed, scale=scale, zero_point=zero_point, minimum=minimum)
        new, name = cls.__new__(cls), get_format(qtype).name
        new._set_fields(packed, scale, zero_point, minimum, name, packing, dense_dtype)
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
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if unknown := sorted(changes.keys() - fields.keys()):
            raise TypeError(
                f"a QArray has no field {unknown[0]!r}; its fields are {', '.join(fields)}"
            )
        return self.from_packed(**fields | changes)

    # `copy.replace` (Python 3.13) calls `__replace__`, which a dataclass implements by `__init__`.
    __replace__ = replace

    def _set_fields(self, *values: Any) -> None:
        """Set all fields to `values`, which are in the order of the dataclass fields.

        If `dense_dtype` is None, choose the dtype of the scale, or float32 if it has 8 bits.
        """
        fields = dict(zip([f.name for f in dataclasses.fields(self)], values, strict=True))
        dtype, scale_dtype = fields["dense_dtype"], fields["scale"].dtype
        if dtype is None:
            dtype = scale_dtype if scale_dtype in QUANTIZABLE else jnp.float32
        self.__dict__.update(fields | {"dense_dtype": jnp.dtype(dtype).name})

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def type_name(self) -> str:
        """The name of the format in jaxprs and tables, such as "q4" for int4."""
        return f"q{self.qtype[3:]}" if self.qtype.startswith("int") else self.qtype

    @property
    def storage_name(self) -> str:
        """Which values share a scale, for tables: "tile 64", "channelwise" or "one scale"."""
        sizes = [*zip(self.tile_shape, self.scale.shape, strict=True)]
        if any(tile > 1 and count > 1 for tile, count in sizes):
            # Include the size of an axis that is one tile: "tile 3×64" for tiles of [3, 64].
            return f"tile {'×'.join(str(tile) for tile, _ in sizes if tile > 1)}"
        return "channelwise" if self.scale.size > 1 else "one scale"

    @property
    def format(self) -> Format:
        """The entry of `vn.quant.FORMATS` for `qtype`."""
        return get_format(self.qtype)

    @property
    def qvalue(self) -> jax.Array:
        """The unpacked codes, in the `code_dtype` of the format, such as int4."""
        reject_derivatives(self)
        return self.codes().astype(self.format.code_dtype)

    @property
    def tile_shape(self) -> Shape:
        """The number of values that share one scale, along each axis."""
        return tile_shape(self.shape, self.scale.shape)

    def __repr__(self) -> str:
        """Return the format, shape and bits per value, or all fields if a leaf is not an array."""
        return f"QArray({title(self)})" if has_title(self) else super().__repr__()

    def codes(self) -> jax.Array:
        """Return the unpacked codes in int8, uint8, int16 or a float dtype of 8 bits."""
        format = self.format
        if format.bits >= 8:
            return jnp.asarray(self.packed)
        fields = unpack(self.packed, self.packing, format.bits, by_shifts=runs_on_gpu())
        return format.from_fields(fields)

    def unpacked(self) -> "QArray":
        """Return a copy that stores one code per byte. The format must have fewer than 8 bits."""
        fields = unpack(self.packed, self.packing, self.format.bits, by_shifts=runs_on_gpu())
        return self.changed(packed=fields, packing=None)

    def with_codes(self, codes: jax.Array) -> "QArray":
        """Return a copy with other codes, which are packed along the same axis.

        `codes` holds unpacked codes, as the method `codes` returns them.
        """
        format = self.format
        if format.bits >= 8:
            return self.changed(packed=codes.astype(format.code_dtype))
        fields = format.to_fields(codes)
        if self.packing is not None:
            fields, _ = pack(fields, format.bits, self.packing.axis)
        return self.changed(packed=fields)

    def _decode(self, dtype: DTypeLike) -> jax.Array:
        """Return the value of each code in `dtype`, without zero point and scale."""
        format = self.format
        if not runs_on_gpu() or format.bits not in (1, 2, 4):
            return format.decode(self.codes(), dtype)
        # GPUs convert 32-bit integers to floats in one instruction, and other integers in several.
        packed = jnp.asarray(self.packed).astype(jnp.uint32)
        fields = unpack(packed, self.packing, format.bits, by_shifts=True)
        return format.decode(format.from_fields(fields), dtype)

    def scales(self) -> jax.Array:
        """Return the scales in f32, or in f64 if they are stored in f64.

        Quantized scales are dequantized.
        """
        return _to_wide_floats(self.scale)

    def minima(self) -> jax.Array | None:
        """Return the minima in f32 or f64 like `scales`, or None if the array has no minima."""
        return None if self.minimum is None else _to_wide_floats(self.minimum)

    def zero_points(self) -> jax.Array | None:
        """Return the unpacked zero points, or None if the array has no zero points."""
        zero_point = self.zero_point
        if zero_point is None:
            return None
        return zero_point.codes() if isinstance(zero_point, QArray) else jnp.asarray(zero_point)

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of the dense array.

        **Raises:** `ValueError` if a function that works on leaves, such as `jax.tree.map`, changed
        the dtype of the codes, or sliced the packed axis.
        """
        check_codes_are_stored(self)
        stored = jax.typeof(self.packed)  # The dense array has the sharding of the stored codes.
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
        """Return a list of `vn.LeafAxis` per stored array, with one entry per axis.

        A `vn.LeafAxis` maps an axis of a stored array to an axis of the dense array.
        """

        def block_size(size: int, count: int) -> Any:
            if count == 1:
                return "shared"
            # Symbolic sizes support only equality. An axis of size 0 can have any number of tiles.
            return 1 if size in (0, count) else size // count

        packed_axes = list(aligned_axes(self.ndim))
        if self.packing is not None:
            axis = self.packing.axis
            codes, bytes_ = UNITS[self.format.bits]
            packed_axes[axis] = LeafAxis(axis, block=codes, packed_in=bytes_)
        axes = [packed_axes]
        for leaf in (self.scale, self.zero_point, self.minimum):
            if leaf is not None:
                blocks = map(block_size, self.shape, leaf.shape)
                axes.append([LeafAxis(i - self.ndim, block) for i, block in enumerate(blocks)])
        return axes

    def _movable(self) -> "QArray":
        """Return an equal array that is easier to transpose and reshape.

        If the packed axis has size 1, the result stores one code per byte, which takes as many
        bytes. Such an array can be transposed and reshaped freely. Otherwise return `self`.
        """
        is_free = self.packing is None or self.packing.size != 1
        return self if is_free else self.unpacked()

    def _moved(self, movement: Movement) -> "QArray":
        """Return a copy with a new `packing`, after a primitive moved the axes of the leaves.

        `movement` describes the primitive, such as a transpose or a reshape.
        """
        if self.packing is None:
            return self
        axis = movement.axes[self.packing.axis]
        assert axis is not None  # A movement that removes or merges the packed axis is rejected.
        packing = Packing(axis - len(movement.shape), movement.shape[axis])
        return self.changed(packing=packing)

    def changed(self, **changes: Any) -> "QArray":
        """Return a copy in which some fields have new values, like `replace` without its checks."""
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
        reject_derivatives(self)
        check_codes_are_stored(self)
        return compute_elementwise(QArray._dequantize, self, self.dtype)

    def _dequantize(self) -> jax.Array:
        scale = self.scales()
        # A dense array in f64 is computed in f64, even if its scales are stored in f32.
        wide = jnp.promote_types(scale.dtype, self.dtype)
        x = self._decode(wide)
        if (zero_point := self.zero_points()) is not None:
            x = over_tiles(jnp.subtract, x, zero_point.astype(wide))
        if self.scale.dtype == jnp.float8_e8m0fnu:
            # The smallest scale, 2**-127, is subnormal in f32, and XLA for CPUs treats it as 0.
            # So multiply by 0.5, and then by 2**-126, the smallest normal number.
            tiny = float(jnp.finfo(scale.dtype).tiny)
            x = over_tiles(jnp.multiply, x, jnp.where(scale < tiny, 0.5, 1).astype(wide))
            scale = jnp.maximum(scale, tiny)
        x = over_tiles(jnp.multiply, x, scale.astype(wide))
        if (minimum := self.minima()) is not None:
            x = over_tiles(jnp.add, x, minimum.astype(wide))
        return x.astype(self.dtype)

    def materialise(self) -> jax.Array:
        """Return the dense array. `vn.materialise` calls this method."""
        return self.dequantize()


def _to_wide_floats(leaf: "Leaf | QArray") -> jax.Array:
    """Convert scales or minima, which may be quantized, to f32, or to f64 if they are f64."""
    wide = jax.dtypes.canonicalize_dtype(jnp.float64 if leaf.dtype == jnp.float64 else jnp.float32)
    if isinstance(leaf, QArray):  # Do not round to a dense dtype of 16 bits.
        return leaf.changed(dense_dtype=wide.name).dequantize()
    return jnp.asarray(leaf).astype(wide)


def pack_codes(codes: jax.Array, format: Format) -> tuple[jax.Array, Packing | None]:
    """Pack codes into bytes. Return a pair: the stored array, and its `Packing`.

    The `Packing` is None if the format has 8 bits or more per code, or `codes` is a scalar, so that
    no two codes share a byte.
    """
    if format.bits >= 8:
        return codes.astype(format.code_dtype), None
    fields = format.to_fields(codes)
    if not codes.ndim:
        return fields, None
    return pack(fields, format.bits, axis_to_pack(codes.shape, format.bits))


# Checks of the fields.


def _check_arrays(**arrays: Any) -> None:
    """Raise `TypeError` if one of `arrays`, the arguments of `QArray`, has a wrong type."""
    for name, array in arrays.items():
        is_optional = name in ("zero_point", "minimum") and array is None
        is_quantized = name not in ("qvalue", "packed") and isinstance(array, QArray)
        if not (isinstance(array, jax.Array | np.ndarray) or is_optional or is_quantized):
            raise TypeError(
                f"{name} must be a JAX or NumPy array with the rank of the codes, not a "
                f"{type(array).__name__}: convert it with jnp.asarray"
            )


def check_fields(q: QArray) -> None:
    """Raise `ValueError` if a field has a dtype or shape that `QArray` does not allow."""
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


def check_codes_are_stored(q: QArray) -> None:
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
