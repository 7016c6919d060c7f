"""Which implementation computes a product with a stored matrix.

Each row of `TABLE` is a kernel and the products that it is used for. XLA computes all other
products, and all products if the environment variable `VENEER_KERNELS` or `use` says "xla". Rows
with `opt_in` are used if one of these says "experimental". Their kernels were never measured.
"""

import dataclasses
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax

from .common.kinds import BITS, BYTES, INTEGER_PLANES, INTEGERS, LOOKUP_BITS
from .common.limits import (
    FLOATS_BY_COLUMNS,
    FLOATS_BY_ROWS,
    INTEGERS_BY_COLUMNS,
    INTEGERS_BY_ROWS,
    LEAST_TILE,
    LONGEST,
    MOST_TILES,
    ROWS,
    SHORT,
    SHORT_VECTORS,
    TILED_COLUMNS,
)
from .common.problem import Codes, MatmulOperands, MatmulProblem, MatmulShape
from .cpu import build
from .gpu import hopper
from .gpu import matmul as gpu_matmul
from .tpu import matmul as tpu_matmul

Choice = Literal["auto", "xla", "experimental"]

# A user context and not a context variable: JAX traces a jitted function anew when it changes.
_choice = jax.make_user_context(None)


@contextmanager
def use(choice: str) -> Iterator[None]:
    """Set how products with stored matrices are computed, in programs that are traced within.

    **Arguments:**

    - `choice`: "auto", by the kernels of the platform where they are faster; "xla", by XLA alone;
      or "experimental", as "auto", and on a TPU by a kernel that was never measured. Outside of
      `use`, the environment variable `VENEER_KERNELS` sets it. The default is "auto".

    **Raises:** `ValueError` for another choice.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer import kernels
    >>> x, w = jnp.ones((2, 256)), vn.quant.quantize(jnp.eye(256), "int8", channelwise_axes=[1])
    >>> with kernels.use("xla"):
    ...     print(vn.explain(jnp.matmul)(x, w).events[0].how)
    convert codes of rhs to float, scale the output
    """
    if choice not in get_args(Choice):
        raise _unknown_choice(choice, "kernels.use")
    with _choice(choice):
        yield


def chosen() -> Choice:
    """Return the choice in force.

    **Raises:** `ValueError` if the environment variable `VENEER_KERNELS` holds no choice.
    """
    choice: Any = _choice.value or os.environ.get("VENEER_KERNELS") or "auto"
    if choice not in get_args(Choice):
        raise _unknown_choice(choice, "VENEER_KERNELS")
    return choice


def _unknown_choice(choice: str, source: str) -> ValueError:
    renamed = ", which is now called 'experimental'" if choice == "pallas" else ""
    return ValueError(f"{source} must be 'auto', 'xla' or 'experimental', not {choice!r}{renamed}")


@runtime_checkable
class DeviceKernel(Protocol):
    """A module with a kernel for GPUs or TPUs."""

    def can_compute(self, codes: Codes, shape: MatmulShape) -> bool:
        """Return whether the kernel computes a product, by its sizes and codes."""
        ...

    def compile(self, operands: MatmulOperands, problem: MatmulProblem) -> None:
        """Compile or lower the kernel for a product. Any error means that this is impossible."""
        ...

    def product(self, operands: MatmulOperands, problem: MatmulProblem) -> jax.Array:
        """Return a product without minima, and without zero points that it does not take."""
        ...

    def takes_zero_points(self, operands: MatmulOperands, problem: MatmulProblem) -> bool:
        """Return whether the kernel subtracts the zero points itself."""
        ...


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A row of the table: a kernel, and the products that it is used for.

    **Arguments:**

    - `activations`: their type in `MatmulShape`; or "float" for all floats, or "16 bits" for bf16
      and f16.
    - `target`: the name of the kernel, with a placeholder for the kind of codes.
    - `least_entries`: of the stored matrix. XLA multiplies a smaller one faster, unless it is one
      of a batch of many, as blocks of a cache are.
    - `least_tile`: codes along the contracted axis that share a scale: each tile costs a
      multiplication by its scale.
    - `least_rows`, `most_rows`: of the activations.
    - `whole`: the contracted size must be a multiple of this number. Tiles must be multiples of it,
      or divide it.
    - `opt_in`: whether the kernel is used only if the choice is "experimental".
    - `module`: the module with the kernel of a GPU or TPU. It may reject further products.
    """

    platform: str
    contracting: str
    activations: str
    target: str
    kinds: tuple[str, ...]
    least_entries: int
    least_tile: int = 1
    least_rows: int = 0
    most_rows: int | None = None
    whole: int = 1
    opt_in: bool = False
    module: DeviceKernel | None = None


_ALL = tuple(BITS)
_WHOLE_FIELDS = (*LOOKUP_BITS, *BYTES)
#: On NVIDIA GPUs, one kernel computes products of up to `FEW_ROWS` rows of activations. For more
#: rows, Hopper GPUs have another kernel for some formats. If it does not apply, the first kernel
#: computes products of up to `MOST_ROWS` rows. Measured with benchmarks/gpu_all.py on an H200.
FEW_ROWS, MOST_ROWS = 32, 64
_LEAST_ENTRIES_GPU = 1 << 18

#: Of the matrices of a batch, how many entries each has at least, and all of them together, where
#: they are smaller than `least_entries`.
_LEAST_OF_MANY, _LEAST_OF_ALL = 1 << 11, 1 << 18

#: Lanes of the widest vectors: what suits them suits those that have fewer.
_LANES = 16


def _gpu(side: str, most_rows: int) -> Candidate:
    """Return the row of the kernel for few rows on NVIDIA GPUs."""
    return Candidate(
        *("gpu", side, "16 bits", f"veneer_{side}_{{}}"),
        *(("lookup4", *BYTES), _LEAST_ENTRIES_GPU),
        most_rows=most_rows,
        module=gpu_matmul,
    )


#: The first row that fits is taken.
TABLE = (
    *(
        Candidate("cpu", side, "bfloat16", f"veneer_bf16_{side}_{{}}", _ALL, 1 << 14, least_rows=16)
        for side in ("rows", "columns")
    ),
    Candidate("cpu", "rows", "float", "veneer_rows_{}", _ALL, 1 << 14),
    Candidate("cpu", "columns", "float", "veneer_columns_{}", _ALL, 1 << 14),
    Candidate("cpu", "rows", "int8", "veneer_integer_rows_{}", INTEGERS, 1 << 14),
    Candidate("cpu", "columns", "int8", "veneer_integer_columns_{}", INTEGERS, 1 << 14),
    Candidate(
        *("cpu", "columns", "int8", "veneer_integer_columns_{}", INTEGER_PLANES, 1 << 14),
        most_rows=INTEGERS_BY_COLUMNS,
        whole=64,
    ),
    *(_gpu(side, FEW_ROWS) for side in ("rows", "columns")),
    *(
        Candidate(
            *("gpu", side, "bfloat16", f"veneer_hopper_{side}_{{}}"),
            *(("lookup4", "int8", "float8_e4m3fn"), _LEAST_ENTRIES_GPU),
            least_rows=FEW_ROWS + 1,
            module=hopper,
        )
        for side in ("rows", "columns")
    ),
    *(_gpu(side, MOST_ROWS) for side in ("rows", "columns")),
    *(
        Candidate(
            *("tpu", side, "float", f"veneer_{side}_{{}}", _WHOLE_FIELDS, 1 << 14),
            opt_in=True,
            module=tpu_matmul,
        )
        for side in ("rows", "columns")
    ),
)


_LEAST_ENTRIES = min(row.least_entries for row in TABLE)

#: The platforms that have kernels.
PLATFORMS = tuple(dict.fromkeys(row.platform for row in TABLE))


def may_serve(entries: int, batch: Any) -> bool:
    """Return whether any kernel multiplies a batch of stored matrices with `entries` codes each.

    No kernel multiplies matrices of a symbolic size, as rows of an embedding have for export.
    """
    return isinstance(entries, int) and _is_large(_LEAST_ENTRIES, entries, batch)


def least_entries(platform: str, entries: int, batch: int) -> int | None:
    """Return from how many entries on kernels of a platform are used.

    None if these entries suffice, or if their number is symbolic.
    """
    rows = (row for row in TABLE if row.platform == platform and not row.opt_in)
    least = min((row.least_entries for row in rows), default=None)
    if least is None or not isinstance(entries, int) or _is_large(least, entries, batch):
        return None
    return least


def _is_large(least: int, entries: int, batch: Any) -> bool:
    """Return whether a matrix has `least` entries, or is one of a batch that is large enough."""
    is_one_of_many = entries >= _LEAST_OF_MANY and isinstance(batch, int)
    return entries >= least or (is_one_of_many and batch * entries >= _LEAST_OF_ALL)


def find(platform: str, codes: Codes, shape: MatmulShape, opt_in: bool = False) -> str | None:
    """Return the name of the kernel for a product, or None if XLA computes it.

    **Arguments:**

    - `opt_in`: whether experimental kernels may compute it.

    >>> from veneer.kernels import select
    >>> from veneer.kernels.common.problem import Codes, MatmulShape
    >>> shape = MatmulShape("rows", "float", m=1, k=4096, n=4096, tile=4096)
    >>> select.find("cpu", Codes(8, "int8"), shape)
    'veneer_rows_int8'
    """
    kernel = candidate(platform, codes, shape, opt_in)
    return None if kernel is None else kernel.target.format(codes.kind)


def candidate(
    platform: str, codes: Codes, shape: MatmulShape, opt_in: bool = False
) -> Candidate | None:
    """Return the row of the table for a product, or None if XLA computes it."""
    for row in TABLE:
        if row.opt_in > opt_in or not _serves(row, platform, codes, shape):
            continue
        if row.module is not hopper or not _gives_way():
            return row
    return None


def _gives_way() -> bool:
    """Return whether kernels for Hopper GPUs cannot run here, and a later row may serve."""
    is_other_gpu = gpu_matmul.compute_capability() is not None and not hopper.is_hopper()
    return is_other_gpu or not hopper.has_jax()


def _serves(kernel: Candidate, platform: str, codes: Codes, shape: MatmulShape) -> bool:
    """Return whether a row of the table is for a product."""
    if (kernel.platform, kernel.contracting) != (platform, shape.contracting):
        return False
    if shape.activations not in _ACTIVATIONS.get(kernel.activations, (kernel.activations,)):
        return False
    if kernel.least_rows > 0 or kernel.most_rows is not None:
        most_rows = math.inf if kernel.most_rows is None else kernel.most_rows
        if not isinstance(shape.m, int) or not kernel.least_rows <= shape.m <= most_rows:
            return False
    has_pairs = (kernel.platform, kernel.activations) == ("cpu", "bfloat16")
    if has_pairs and (shape.k % 2 != 0 or not build.has_bf16()):
        return False  # the kernel multiplies two neighbors at once
    return (
        codes.kind in kernel.kinds
        and (shape.activations != "int8" or codes.is_integer)
        and _is_large(kernel.least_entries, shape.k * shape.n, shape.batch)
        and shape.tile >= kernel.least_tile
        and (kernel.whole == 1 or _is_whole(kernel, shape))
        and (kernel.module is None or kernel.module.can_compute(codes, shape))
    )


def _is_whole(kernel: Candidate, shape: MatmulShape) -> bool:
    whole, tile = kernel.whole, shape.tile
    are_parts = tile % whole == 0 or (whole % tile == 0 and tile % 4 == 0)
    return shape.k % whole == 0 and are_parts


#: The types of activations that a kernel converts to its own.
_ACTIVATIONS = {"float": ("float", "bfloat16", "float16"), "16 bits": ("bfloat16", "float16")}


class KernelSizes(NamedTuple):
    """What the choice depends on, beside the kernel.

    **Arguments:**

    - `m`: rows of activations.
    - `rows`, `columns`: of the stored matrix; and how many of each share a scale: `tile`.
    """

    m: int
    rows: int
    columns: int
    tile: tuple[int, int]


def target_for(family: str, sizes: KernelSizes) -> str | None:
    """Returns the target for a product: the variant that it needs, of `veneer_rows_lookup4` say.

    It is None where there is no such: of integers in bit planes, there is one for few by columns.

    >>> from veneer.kernels.select import KernelSizes, target_for
    >>> target_for("veneer_columns_lookup4", KernelSizes(4, 4096, 4096, (1, 128)))
    'veneer_columns_lookup4_few'
    """
    row = next(row for row in TABLE if row.platform == "cpu" and _is_of(row, family))
    bits = BITS[family.removeprefix(row.target.format(""))]
    activations = "float32" if row.activations == "float" else row.activations
    variant = _variant(activations, row.contracting, bits, sizes)
    is_there = variant == "few" or row.most_rows is None
    return f"{family}_{variant}" if is_there else None


def are_few(target: str) -> bool:
    """Returns whether the rows of x are few, of which a target computes products."""
    return not target.endswith("_many")


def is_for_short_rows(target: str) -> bool:
    """Returns whether a target is for a matrix whose rows are as short as a head."""
    return target.endswith("_short")


def _is_of(row: Candidate, family: str) -> bool:
    return any(row.target.format(kind) == family for kind in row.kinds)


def _variant(activations: str, contracting: str, bits: int, product: KernelSizes) -> str:
    """The variant for a product."""
    if activations == "bfloat16":
        return "many"
    if activations == "int8":
        is_few = _integers_by_rows if contracting == "rows" else _integers_by_columns
        return "few" if is_few(product, bits) else "many"
    if contracting == "rows":
        if product.m > FLOATS_BY_ROWS:
            return "many"
        if product.tile[0] >= LEAST_TILE:
            return "few"
        return "tiled" if _is_tiled(product) else "many"
    if product.m > FLOATS_BY_COLUMNS:
        return "many"
    if _is_short(product):
        return "short"
    return "one" if product.m == 1 else "few"


def _is_tiled(product: KernelSizes) -> bool:
    """Whether each row of the matrix has scales for tiles of whole vectors."""
    columns, (shared, tile) = product.columns, product.tile
    is_whole = columns % TILED_COLUMNS == 0 and tile >= LEAST_TILE and tile.bit_count() == 1
    return shared == 1 and is_whole and columns <= MOST_TILES * tile


def _integers_by_rows(product: KernelSizes, bits: int) -> bool:
    tile = product.tile[0]
    is_tile = LEAST_TILE <= tile <= LONGEST and tile % 4 == 0
    return product.m <= INTEGERS_BY_ROWS.get(bits, 0) and is_tile


def _integers_by_columns(product: KernelSizes, bits: int) -> bool:
    """Tiles are of whole groups of rows, and of columns that are lanes of a vector, or vectors."""
    shared, tile = product.tile
    if product.m > INTEGERS_BY_COLUMNS or product.rows < ROWS or tile > LONGEST:
        return False
    if shared > 1 and (shared % ROWS != 0 or product.rows % ROWS != 0):
        return False
    in_planes = 8 % bits != 0
    lane = 4 if in_planes else 32 // bits
    group = lane * _LANES
    if in_planes and product.columns % group != 0:  # of which vectors are whole
        return False
    if tile == product.columns or group % tile == 0:
        return tile % lane == 0
    return tile % group == 0


def _is_short(product: KernelSizes) -> bool:
    """Whether rows are short, and their scales such as those of keys that a cache has."""
    columns, rows, (shared, tile) = product.columns, product.rows, product.tile
    if columns > SHORT or columns % (SHORT_VECTORS * _LANES) != 0 or rows < _LANES:
        return False
    if tile == columns:
        return shared in (1, rows)
    if shared == 1:  # tiles of whole vectors
        return tile >= LEAST_TILE and tile.bit_count() == 1
    return shared % _LANES == 0 and rows % _LANES == 0


def built(target: str, product: KernelSizes | None = None) -> str | None:
    """Returns a kernel if it can be called in this process, which may compile it.

    Where it cannot, a warning says why, once. Of kernels of products, it is the variant for one.
    """
    reason = build.available()
    if reason is None:
        try:
            name = target if product is None else target_for(target, product)
            return None if name is None else build.target(name)
        except Exception as error:  # whatever Numba, LLVM or a file system may come up with
            reason = f"compiling {target} failed: {error!r}"
    _warn("XLA, which is slower on CPU", reason)
    return None


def can_lower(kernel: Candidate, operands: MatmulOperands, problem: MatmulProblem) -> bool:
    """Return whether the kernel of a GPU or TPU compiles here. A warning says why not, once.

    There is no warning if this process has no GPU that the kernel is for.
    """
    if kernel.module is None or not has_device(kernel):
        return False
    try:
        kernel.module.compile(operands, problem)
    except Exception as error:  # NVRTC and Pallas raise errors of many types
        summary = str(error).strip().partition("\n")[0]
        _warn("XLA", f"no kernel for {kernel.platform.upper()}: {type(error).__name__}: {summary}")
        return False
    return True


def usable(operands: MatmulOperands, problem: MatmulProblem) -> dict[str, str]:
    """Return the names of the kernels that a program runs, by platform.

    XLA computes the product on all other platforms. The kernel of a GPU is compiled to test it, if
    a GPU is here. On other machines, no program runs it.
    """
    shape, names = problem.shape(operands), {}
    for platform in PLATFORMS:
        kernel = candidate(platform, problem.codes, shape, problem.opt_in)
        if kernel is None:
            continue
        if kernel.platform == "gpu":
            if not has_device(kernel):  # before any work
                continue
            arrays = jax.eval_shape(lambda xs: problem.plain(xs.apart())[1], operands)
            if not can_lower(kernel, arrays, dataclasses.replace(problem, tiles=None)):
                continue
        names[platform] = kernel.target.format(problem.codes.kind)
    return names


def has_device(kernel: Candidate) -> bool:
    """Return whether this process has a device for a kernel.

    It need not have a TPU: programs for a TPU can be lowered on another machine.
    """
    if kernel.module is hopper:
        return hopper.is_hopper()
    return kernel.platform != "gpu" or gpu_matmul.compute_capability() is not None


@cache
def _warn(to: str, reason: str) -> None:
    warnings.warn(
        f"products with quantized weights are computed by {to}: {reason}. "
        "Set VENEER_KERNELS=xla to use XLA without this warning",
        stacklevel=2,
    )
