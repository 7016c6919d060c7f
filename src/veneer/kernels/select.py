"""Which implementation computes a product with a stored matrix.

`TABLE` says which kernels there are, and for what each is used. Where none is, or the environment
variable `VENEER_KERNELS` or `use` says "xla", it is XLA that computes what the reference does. Rows
that are `opt_in` are used where one of these says "pallas": those kernels were not measured yet.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import jax

from .cpu import build
from .cpu.kinds import BITS, BYTES, INTEGER_PLANES, INTEGERS, LOOKUP_BITS
from .cpu.variants import (
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
from .pallas import call
from .problem import Codes, MatmulOperands, MatmulProblem, MatmulShape

Choice = Literal["auto", "xla", "pallas"]

# A user context and not a context variable: JAX traces a jitted function anew when it changes.
_choice = jax.make_user_context(None)


@contextmanager
def use(choice: str) -> Iterator[None]:
    """Says how products with stored matrices are computed, in what is traced within.

    **Arguments:**

    - `choice`: "auto", by the kernels of the platform where they are faster; "xla"; or "pallas": as
      "auto", and on a GPU or TPU by Pallas kernels, which were not measured. Outside of any `use`
      it is what the environment variable `VENEER_KERNELS` holds, and else "auto".

    **Raises:** `ValueError` for another choice.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer import kernels
    >>> x, w = jnp.ones((2, 256)), vn.quant.quantize(jnp.eye(256), "int8", channelwise_axes=[1])
    >>> with kernels.use("xla"):
    ...     print(vn.explain(jnp.matmul)(x, w).events[0].how)
    rhs scaled outside
    """
    with _choice(_checked(choice, "kernels.use")):
        yield


def chosen() -> Choice:
    """Returns the choice in force.

    **Raises:** `ValueError` where the environment variable `VENEER_KERNELS` holds none.
    """
    return _choice.value or _checked(os.environ.get("VENEER_KERNELS") or "auto", "VENEER_KERNELS")


def _checked(choice: str, source: str) -> Choice:
    if choice not in get_args(Choice):
        raise ValueError(f"{source} is 'auto', 'xla' or 'pallas', not {choice!r}")
    return choice  # type: ignore[return-value]


@dataclass(frozen=True)
class Candidate:
    """A row of the table: a kernel, and the products that it is used for.

    **Arguments:**

    - `target`: what it is called where it is built, with the place of the kind of codes.
    - `least_entries`: of the stored matrix: a smaller one is multiplied sooner by XLA, unless it is
      one of a batch of many, as blocks of a cache are.
    - `least_tile`: along the sum: each tile costs a multiplication by its scale.
    - `least_rows`, `most_rows`: of the activations.
    - `whole`: what is summed is so many numbers, or a multiple; and is a tile, or a part of them.
    - `opt_in`: whether it is used only where that is asked for.
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


_ALL = tuple(BITS)
_WHOLE_FIELDS = (*LOOKUP_BITS, *BYTES)

#: Of the matrices of a batch, how many entries each has at least, and all of them together, where
#: they are smaller than `least_entries`.
_LEAST_OF_MANY, _LEAST_OF_ALL = 1 << 11, 1 << 18

#: Lanes of the widest vectors: what suits them suits those that have fewer.
_LANES = 16

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
    *(
        Candidate(
            platform, side, "float", f"veneer_{side}_{{}}", _WHOLE_FIELDS, 1 << 14, opt_in=True
        )
        for platform in call.MODULES
        for side in ("rows", "columns")
    ),
)


#: What programs may be lowered for, of which there are kernels.
PLATFORMS = tuple(dict.fromkeys(row.platform for row in TABLE))


def may_serve(entries: int, batch: int) -> bool:
    """Returns whether some kernel is for a batch of stored matrices of so many entries each."""
    return any(_is_large(row, entries, batch) for row in TABLE)


def _is_large(kernel: Candidate, entries: int, batch: Any) -> bool:
    is_one_of_many = entries >= _LEAST_OF_MANY and isinstance(batch, int)
    return entries >= kernel.least_entries or (is_one_of_many and batch * entries >= _LEAST_OF_ALL)


def find(platform: str, codes: Codes, shape: MatmulShape, opt_in: bool = False) -> str | None:
    """Returns the target of the kernel for a product, or None where XLA computes it.

    **Arguments:**

    - `opt_in`: whether kernels that are used only where that is asked for may compute it.

    >>> from veneer.kernels import select
    >>> from veneer.kernels.problem import Codes, MatmulShape
    >>> shape = MatmulShape("rows", "float", m=1, k=4096, n=4096, tile=4096)
    >>> select.find("cpu", Codes(8, "int8"), shape)
    'veneer_rows_int8'
    """
    for kernel in TABLE:
        if kernel.opt_in <= opt_in and _serves(kernel, platform, codes, shape):
            return kernel.target.format(codes.kind)
    return None


def _serves(kernel: Candidate, platform: str, codes: Codes, shape: MatmulShape) -> bool:
    return (
        (kernel.platform, kernel.contracting) == (platform, shape.contracting)
        and _takes(kernel, shape)
        and codes.kind in kernel.kinds
        and (shape.activations != "int8" or codes.is_integer)
        and _is_large(kernel, shape.k * shape.n, shape.batch)
        and shape.tile >= kernel.least_tile
        and _is_whole(kernel, shape)
        and (platform not in call.MODULES or call.has_kernel(platform, codes, shape))
    )


def _is_whole(kernel: Candidate, shape: MatmulShape) -> bool:
    whole, tile = kernel.whole, shape.tile
    if whole == 1:
        return True
    are_parts = tile % whole == 0 or (whole % tile == 0 and tile % 4 == 0)
    return shape.k % whole == 0 and are_parts


def _takes(kernel: Candidate, shape: MatmulShape) -> bool:
    """Whether a kernel multiplies activations such as these, which may be made f32."""
    if kernel.activations == "bfloat16":
        is_many = isinstance(shape.m, int) and shape.m >= kernel.least_rows
        # Two neighbours are multiplied at once.
        return shape.activations == "bfloat16" and is_many and shape.k % 2 == 0 and build.has_bf16()
    if kernel.most_rows is not None:
        is_few = isinstance(shape.m, int) and shape.m <= kernel.most_rows
        return is_few and kernel.activations == shape.activations
    return kernel.activations == shape.activations or (kernel.activations, shape.activations) == (
        "float",
        "bfloat16",
    )


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


def lowers(platform: str, operands: MatmulOperands, problem: MatmulProblem) -> bool:
    """Returns whether this JAX lowers the Pallas kernel for a product; a warning says why not."""
    try:
        call.lower(platform, operands, problem)
    except Exception as error:  # whatever Pallas may come up with
        summary = str(error).strip().partition("\n")[0]
        _warn("XLA", f"no kernel for {platform.upper()}: {type(error).__name__}: {summary}")
        return False
    return True


@cache
def _warn(to: str, reason: str) -> None:
    warnings.warn(
        f"products with quantised weights are left to {to}: {reason} "
        "(VENEER_KERNELS=xla says that this is meant)",
        stacklevel=2,
    )
