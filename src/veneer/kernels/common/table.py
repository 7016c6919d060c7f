"""The table of all kernels that multiply by stored matrices. Each row is one kernel.

To add a kernel, write a module with it, and add a row. `select.py` takes the first row that fits a
product. XLA computes all products that no row fits.

CPU kernels with the same name have different variants:

    one     one row of activations: all sums stay in registers
    few     few rows of activations: the time goes into reading the matrix
    short   few rows of activations, and a matrix with short rows, such as keys of one head
    tiled   few rows of activations, and a matrix with tiles along each row, such as cached values
    many    more rows of activations: the matrix is decoded once for all of them

`benchmarks/cpu_variants.py` compares `one` and `tiled` with the more general `few`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from .problem import BITS, BYTES, INTEGER_PLANES, INTEGERS, LOOKUP_BITS, Codes, MatmulShape

#: The fewest entries of a stored matrix, by platform. XLA multiplies smaller ones faster.
LEAST_ENTRIES = {"cpu": 1 << 14, "gpu": 1 << 18, "tpu": 1 << 14}
#: Smaller matrices are large enough if each has the first number of entries, and the batch has the
#: second. Blocks of a cache are such a batch.
_LEAST_IN_BATCH, _LEAST_OF_BATCH = 1 << 11, 1 << 18

#: On NVIDIA GPUs, one kernel computes products of up to `FEW_ROWS` rows of activations. For more
#: rows, Hopper GPUs have another kernel for some formats. If it does not apply, the first kernel
#: computes products of up to `MOST_ROWS` rows. Measured with benchmarks/gpu_all.py on an H200.
FEW_ROWS, MOST_ROWS = 32, 64

# Sizes that CPU kernels are compiled for.

#: The most rows of activations for kernels of few rows, by the contracted axis of the matrix. More
#: rows are faster by a kernel that decodes a block of the matrix once for all of them.
FLOATS_BY_ROWS, FLOATS_BY_COLUMNS, INT8_BY_COLUMNS = 16, 23, 16
#: The same for int8 activations and contracted rows, by the bits of a code. The kernel interleaves
#: the matrix again for every four rows of activations, unless all fields of a byte fit in
#: registers.
INT8_ROWS_BY_BITS = {8: 8, 4: 6, 2: 4, 1: 4}
INT8_BY_ROWS = max(INT8_ROWS_BY_BITS.values())
#: The fewest codes in a tile along an axis of the matrix, for kernels of few rows of activations
#: that contract rows or read short rows, and for kernels that subtract zero points.
LEAST_TILE = 16
#: The most codes in a tile, for kernels that sum a tile of int8 products in int32.
LONGEST = 32768
#: Rows of the matrix that the kernel for few rows of int8 that contracts columns multiplies at
#: once.
ROWS = 4
#: A kernel for matrices with tiles along each row: its columns are a multiple of the first number,
#: and a row has at most the second number of tiles.
TILED_COLUMNS, MOST_TILES = 64, 512
#: A kernel for short rows, such as the keys of one attention head: the vectors of columns that it
#: decodes at once, and the most columns.
SHORT_VECTORS, SHORT = 4, 256
#: The lanes of the widest vectors. Sizes that fit them also fit narrower vectors.
_LANES = 16

#: The formats that CPU kernels quantize to, and the bits of their codes.
QUANTIZED_BITS = {"int8": 8, "int4": 4, "nf4": 4}
#: The size of the table of such a kernel: two numbers, and up to 15 thresholds.
QUANTIZE_TABLE = 17
#: For tiles within rows, such a kernel takes a multiple of `WITHIN_ROWS` columns: whole vectors of
#: any CPU. Otherwise, a tile has at most `MOST_COLUMNS` columns.
WITHIN_ROWS, MOST_COLUMNS = 32, 4096


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """A row of the table: a kernel, and the products that it computes.

    **Arguments:**

    - `platform`: "cpu", "gpu" or "tpu".
    - `name`: its name without the kind of codes. In reports, the kernel "rows" for int8 codes is
      called "rows_int8".
    - `module`: its module in `veneer.kernels`, imported on first use. A module for GPUs or TPUs has
      the functions of `select.DeviceKernel`.
    - `contracting`: the contracted axis of the matrix, "rows" or "columns".
    - `activations`: the types of activations that it multiplies, as in `MatmulShape.activations`.
    - `kinds`: the kinds of codes that it reads, as in `Codes.kind`.
    - `variant`: distinguishes CPU kernels of the same name.
    - `least_rows`, `most_rows`: the limits of the number of rows of activations. If one is set, the
      kernel does not compute products with a symbolic number of rows.
    - `fits`: a further condition on the sizes and on the bits of a code.
    - `requires_bf16`: whether only CPUs with instructions that multiply bf16 can run the kernel.
    - `adds_minima`: whether a CPU kernel adds minima, or subtracts zero points, itself. Otherwise,
      XLA adds their term to the product.
    - `function`: the name of a function of a CPU module. It takes a kind of codes and returns the
      `JobFunctions` of the kernel.
    - `opt_in`: the kernel was never measured, and runs only if the choice is "experimental".
    """

    platform: str
    name: str
    module: str
    contracting: str
    activations: tuple[str, ...]
    kinds: tuple[str, ...]
    variant: str = ""
    least_rows: int = 1
    most_rows: int | None = None
    fits: Callable[[MatmulShape, int], bool] | None = None
    requires_bf16: bool = False
    adds_minima: bool = False
    function: str = "build"
    opt_in: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of activations that a CPU kernel reads. Other dtypes are converted to it."""
        return {"float": "float32"}.get(self.activations[0], self.activations[0])

    @property
    def has_few_rows(self) -> bool:
        """True if a CPU kernel is for few rows of activations."""
        return self.variant != "many"

    def subtracts_zero_points(self, shape: MatmulShape) -> bool:
        """Return whether a CPU kernel subtracts zero points, one per tile, itself.

        If tiles are short, there are nearly as many zero points as codes. Then only the kernel for
        short rows (variant "short") subtracts them. For other kernels, XLA adds their term.
        """
        return self.adds_minima and (shape.tile >= LEAST_TILE or self.variant == "short")

    def target(self, kind: str) -> str:
        """Return the name of the FFI target of a CPU kernel, such as "veneer_rows_int8_few".

        `kind` is the kind of codes, such as "int8".
        """
        return f"veneer_{self.name}_{kind}_{self.variant}"

    def computes(self, codes: Codes, shape: MatmulShape) -> bool:
        """Return whether the kernel can compute a product, on some device of its platform."""
        if self.contracting != shape.contracting or shape.activations not in self.activations:
            return False
        if codes.kind not in self.kinds or (shape.activations == "int8" and not codes.is_integer):
            return False
        if self.least_rows > 1 or self.most_rows is not None:
            if not isinstance(shape.m, int) or shape.m < self.least_rows:
                return False
            if self.most_rows is not None and shape.m > self.most_rows:
                return False
        is_large = is_large_enough(self.platform, shape.k * shape.n, shape.batch)
        return is_large and (self.fits is None or self.fits(shape, BITS[codes.kind]))


def is_large_enough(platform: str, entries: int, batch: int) -> bool:
    """Return whether a product is large enough for the kernels of a platform.

    XLA computes smaller products. The product has `batch` stored matrices with `entries` codes
    each. `batch` may be symbolic.
    """
    if entries >= LEAST_ENTRIES[platform]:
        return True
    is_batch = entries >= _LEAST_IN_BATCH and isinstance(batch, int)
    return is_batch and batch * entries >= _LEAST_OF_BATCH


# Conditions on sizes, for CPU kernels. The matrix is `[rows, columns]`, and a tile of it is
# `[tile_rows, tile_columns]`.


def _has_even_k(shape: MatmulShape, bits: int) -> bool:
    return shape.k % 2 == 0  # the kernel multiplies pairs of neighbors


def _has_row_tiles(shape: MatmulShape, bits: int) -> bool:
    return shape.tile >= LEAST_TILE


def _has_column_tiles(shape: MatmulShape, bits: int) -> bool:
    tile = shape.tile_columns
    are_vectors = tile >= LEAST_TILE and tile.bit_count() == 1
    has_size = shape.columns % TILED_COLUMNS == 0 and shape.columns <= MOST_TILES * tile
    return shape.tile_rows == 1 and are_vectors and has_size


def _is_short(shape: MatmulShape, bits: int) -> bool:
    columns, rows = shape.columns, shape.rows
    if columns > SHORT or columns % (SHORT_VECTORS * _LANES) != 0 or rows < _LANES:
        return False
    if shape.tile_columns == columns:
        return shape.tile_rows in (1, rows)
    if shape.tile_rows == 1:
        return shape.tile_columns >= LEAST_TILE and shape.tile_columns.bit_count() == 1
    return shape.tile_rows % _LANES == 0 and rows % _LANES == 0


def _rows_fit(shape: MatmulShape, bits: int) -> bool:
    is_tile = LEAST_TILE <= shape.tile_rows <= LONGEST and shape.tile_rows % 4 == 0
    return shape.m <= INT8_ROWS_BY_BITS.get(bits, 0) and is_tile


def _columns_fit(shape: MatmulShape, bits: int) -> bool:
    shared, tile = shape.tile_rows, shape.tile_columns
    if shape.rows < ROWS or tile > LONGEST:
        return False
    if shared > 1 and (shared % ROWS != 0 or shape.rows % ROWS != 0):
        return False
    is_in_planes = 8 % bits != 0
    lane = 4 if is_in_planes else 32 // bits  # codes in a lane
    vector = lane * _LANES
    if is_in_planes and shape.columns % vector != 0:
        return False
    if tile == shape.columns or vector % tile == 0:
        return tile % lane == 0
    return tile % vector == 0


# The rows.

_FLOATS, _BF16, _INT8 = ("float", "bfloat16", "float16"), ("bfloat16",), ("int8",)
_ALL, _PACKED = tuple(BITS), (*INTEGERS, *INTEGER_PLANES)
_HOPPER = ("lookup4", "int8", "float8_e4m3fn")
_PAIRS: dict[str, Any] = {"least_rows": 16, "requires_bf16": True, "function": "build_bf16"}


def _cpu(
    module: str,
    contracting: str,
    variant: str,
    activations: tuple[str, ...],
    kinds: tuple[str, ...],
    most_rows: int | None = None,
    fits: Callable[[MatmulShape, int], bool] | None = None,
    adds_minima: bool = True,
    **fields: Any,
) -> KernelRow:
    prefix = {"float": "", "bfloat16": "bf16_", "int8": "integer_"}[activations[0]]
    return KernelRow(
        *("cpu", prefix + contracting, f"cpu.{module}", contracting, activations, kinds, variant),
        most_rows=most_rows,
        fits=fits,
        adds_minima=adds_minima,
        **fields,
    )


def _gpu(contracting: str, most_rows: int) -> KernelRow:
    activations, kinds = ("bfloat16", "float16"), ("lookup4", *BYTES)
    return KernelRow(
        *("gpu", contracting, "gpu.matmul", contracting, activations, kinds), most_rows=most_rows
    )


def _hopper(contracting: str) -> KernelRow:
    return KernelRow(
        *("gpu", f"hopper_{contracting}", "gpu.hopper", contracting, _BF16, _HOPPER),
        least_rows=FEW_ROWS + 1,
    )


def _tpu(contracting: str) -> KernelRow:
    kinds = (*LOOKUP_BITS, *BYTES)
    return KernelRow("tpu", contracting, "tpu", contracting, _FLOATS, kinds, opt_in=True)


#: The first row that fits computes a product.
TABLE = (
    # CPUs that multiply pairs of bf16.
    _cpu("floats.rows_many", "rows", "many", _BF16, _ALL, None, _has_even_k, **_PAIRS),
    _cpu("floats.columns_many", "columns", "many", _BF16, _ALL, None, _has_even_k, **_PAIRS),
    # All CPUs, f32.
    _cpu("floats.rows_few", "rows", "few", _FLOATS, _ALL, FLOATS_BY_ROWS, _has_row_tiles),
    _cpu("floats.rows_tiled", "rows", "tiled", _FLOATS, _ALL, FLOATS_BY_ROWS, _has_column_tiles),
    _cpu("floats.rows_many", "rows", "many", _FLOATS, _ALL),
    _cpu("floats.columns_short", "columns", "short", _FLOATS, _ALL, FLOATS_BY_COLUMNS, _is_short),
    _cpu("floats.columns_few", "columns", "one", _FLOATS, _ALL, 1, function="build_one_row"),
    _cpu("floats.columns_few", "columns", "few", _FLOATS, _ALL, FLOATS_BY_COLUMNS, least_rows=2),
    _cpu("floats.columns_many", "columns", "many", _FLOATS, _ALL),
    # All CPUs, int8.
    _cpu("integers.rows_few", "rows", "few", _INT8, INTEGERS, INT8_BY_ROWS, _rows_fit, False),
    _cpu(
        *("integers.blocks", "rows", "many", _INT8, INTEGERS),
        function="build_rows",
        adds_minima=False,
    ),
    _cpu("integers.columns_few", "columns", "few", _INT8, _PACKED, INT8_BY_COLUMNS, _columns_fit),
    _cpu("integers.blocks", "columns", "many", _INT8, INTEGERS, function="build_columns"),
    # NVIDIA GPUs.
    _gpu("rows", FEW_ROWS),
    _gpu("columns", FEW_ROWS),
    _hopper("rows"),
    _hopper("columns"),
    _gpu("rows", MOST_ROWS),
    _gpu("columns", MOST_ROWS),
    # TPUs.
    _tpu("rows"),
    _tpu("columns"),
)

#: The platforms that have kernels.
PLATFORMS = tuple(dict.fromkeys(row.platform for row in TABLE))
