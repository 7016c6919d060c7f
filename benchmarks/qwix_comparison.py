"""Compare which operations work in Qwix and in veneer, under which transformations.

    python benchmarks/qwix_comparison.py                 # write into docs/qwix.md; half an hour
    python benchmarks/qwix_comparison.py --print-only    # print the tables

A cell is an operation with quantized operands, in a format, under a transformation. It works if the
result agrees with the same program on the dequantized operands in float64. Both libraries quantize
the same arrays, and each is compared with its own dequantized codes.
"""

import argparse
import collections
import csv
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before JAX starts: use two devices, and compile fast
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2"
    )

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax.sharding import AxisType, PartitionSpec
from measure import markdown_table
from report import fill
from support.operations import DENSE, OPERATIONS, Operation
from support.qwix_arrays import QWIX_NAMES, from_qwix

import veneer as vn

PAGE = Path(__file__).parent.parent / "docs" / "qwix.md"

# Whether the left and the right operand are quantized.
OPERANDS = {"weight": (False, True), "activation": (True, False), "both": (True, True)}
# The granularity of the scales, and the calibration method.
GRANULARITIES = ["tensor", "channel", "tile 128", "tile 32", "channel, minmax"]
TRANSFORMATIONS = ["eager", "jit", "grad", "vmap", "scan", "checkpoint", "shard_map"]

# Relative to the largest number: the rounding of f32 in sums of some hundred terms.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Cell:
    """The position of a result in the table."""

    operation: str
    operands: str
    format: str
    granularity: str
    transformation: str


@dataclass(frozen=True)
class Library:
    """A library: its functions, and the exact dequantized array of its quantized arrays."""

    name: str
    functions: Any
    quantize: Callable
    dequantized: Callable[[Any], np.ndarray]

    def shard_map(self, program: Callable, mesh: Any, specs: tuple, operands: tuple) -> jax.Array:
        """Run a program with the columns of `rhs` divided over two devices."""
        out = PartitionSpec(*[None] * specs[2], "x")
        if self.name == "veneer":  # takes the specs of the dense arrays
            mapped = jax.shard_map(program, mesh=mesh, in_specs=specs[:2], out_specs=out)
            return vn.implicit(mapped)(*operands)

        def of_leaf(spec: PartitionSpec, leaf: jax.Array) -> PartitionSpec:
            pairs = itertools.zip_longest(spec, leaf.shape[: len(spec)])
            return PartitionSpec(*(None if size == 1 else entry for entry, size in pairs))

        leaves = tuple(
            jax.tree.map(partial(of_leaf, spec), operand)
            for spec, operand in zip(specs[:2], operands, strict=True)
        )
        return jax.shard_map(program, mesh=mesh, in_specs=leaves, out_specs=out)(*operands)


def dequantized(q: vn.quant.QArray) -> np.ndarray:
    """Dequantize in float64, by NumPy."""
    values = np.asarray(q.format.decode(q.codes(), jnp.float32), np.float64)
    if q.zero_point is not None:
        values = values - _spread(np.asarray(q.zero_point, np.float64), values.shape)
    return values * _spread(np.asarray(q.scales(), np.float64), values.shape)


def _spread(scale: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    for axis, (count, size) in enumerate(zip(scale.shape, shape, strict=True)):
        scale = np.repeat(scale, size // count, axis)
    return scale


def _qwix_quantize(x: jax.Array, format: str, **arguments: Any) -> qwix.QArray:
    return qwix.quantize(x, QWIX_NAMES[format], **arguments)


LIBRARIES = [
    Library("Qwix", qwix, _qwix_quantize, lambda q: dequantized(from_qwix(q))),
    Library("veneer", vn.quant, vn.quant.quantize, dequantized),
]


def granularities(format: str) -> list[str]:
    """Return the granularities of a format in the table. Only two have zero points in Qwix."""
    own = vn.quant.FORMATS[format].tile_size
    if own is not None:
        return [f"tile {own}"]
    return GRANULARITIES if format in ("int8", "int4") else GRANULARITIES[:-1]


def transformations(operation: Operation) -> list[str]:
    """Return the transformations that work on dense operands in JAX."""
    return [name for name in TRANSFORMATIONS if name != "grad" or operation.differentiable]


def arrays(shape: Sequence[int], seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) + 0.2, jnp.float32)


def loss(result: jax.Array) -> jax.Array:
    """Return a linear function of the result. Its derivative does not depend on rounding."""
    weights = jnp.cos(jnp.arange(result.size, dtype=result.dtype)).reshape(result.shape)
    return jnp.sum(weights * result)


Program = Callable[[], Any]


class Setting:
    """An operation with operands in a format, in one library."""

    def __init__(
        self, library: Library, operation: Operation, operands: str, format: str, granularity: str
    ):
        self.library, self.operation = library, operation
        self.quantized = OPERANDS[operands]
        self.cells = [
            Cell(operation.name, operands, format, granularity, name)
            for name in transformations(operation)
        ]
        kind, _, tile = granularity.removesuffix(", minmax").partition(" ")
        method = {"calibration_method": "minmax"} if granularity.endswith("minmax") else {}
        tilings = [operation.tiling(side, kind, int(tile or 0)) for side in (0, 1)]
        self.quantizers = [
            lambda x, tiling=tiling: library.quantize(x, format, **method, **tiling)
            for tiling in tilings
        ]
        shapes = operation.lhs, operation.rhs
        self.dense = [
            tuple(arrays(shape, 2 * i + j) for j, shape in enumerate(shapes)) for i in (0, 1)
        ]
        self.instances = [
            tuple(
                quantize(x) if quantized else x
                for x, quantize, quantized in zip(
                    pair, self.quantizers, self.quantized, strict=True
                )
            )
            for pair in self.dense
        ]
        self.stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.instances)
        self.expected = self.references()

    def programs(self) -> dict[str, Program]:
        """Return a function without arguments for each transformation."""
        call = partial(self.operation.call, self.library.functions)
        operands, stacked = self.instances[0], self.stacked

        def by_activations(call: Callable) -> Any:
            if self.quantized == (True, False):
                return jax.grad(lambda w: loss(call(operands[0], w)))(operands[1])
            if self.quantized == (True, True):
                call = self.of_dense_activations()
            return jax.grad(lambda x: loss(call(x, operands[1])))(self.dense[0][0])

        def scan() -> jax.Array:
            step = lambda carry, pair: (carry, call(*pair))
            return jax.lax.scan(step, None, stacked)[1]

        def shard_map() -> jax.Array:
            mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
            columns = PartitionSpec(*[None] * self.operation.columns, "x")
            ndim = self.expected["jit"].ndim
            specs = (PartitionSpec(), columns, ndim - 1)
            return self.library.shard_map(call, mesh, specs, operands)

        checkpointed = jax.checkpoint(call)
        return {
            "eager": lambda: call(*operands),
            "jit": lambda: call(*operands),
            "grad": lambda: by_activations(call),
            "vmap": lambda: jax.vmap(call)(*stacked),
            "scan": scan,
            "checkpoint": lambda: (
                checkpointed(*operands)
                if self.quantized == (True, True) or not self.operation.differentiable
                else by_activations(checkpointed)
            ),
            "shard_map": shard_map,
        }

    def of_dense_activations(self) -> Callable:
        """Return the product that quantizes its activations and has a derivative by them."""
        if self.library.name == "Qwix":  # its functions quantize before the product
            call = partial(self.operation.call, self.library.functions)
            return lambda x, w: call(self.quantizers[0](x), w)
        contracting = [axis - len(self.operation.rhs) for axis in self.operation.summed[1]]
        quantize = partial(
            vn.quant.ActivationQuantized, qtype=self.cells[0].format, contracting=contracting
        )
        call = vn.implicit(partial(self.operation.call, DENSE))
        return lambda x, w: call(x, quantize(w))

    def references(self) -> dict[str, np.ndarray]:
        """Return the exact result for each transformation, in float64."""
        exact = [
            tuple(
                self.library.dequantized(x) if quantized else np.asarray(x, np.float64)
                for x, quantized in zip(pair, self.quantized, strict=True)
            )
            for pair in self.instances
        ]
        side = 1 if self.quantized == (True, False) else 0
        one, derivative = reference(self.operation.name, side, *exact[0])
        two, _ = reference(self.operation.name, side, *exact[1])
        value = self.quantized == (True, True) or not self.operation.differentiable
        return {
            "eager": one,
            "jit": one,
            "grad": derivative,
            "vmap": np.stack([one, two]),
            "scan": np.stack([one, two]),
            "checkpoint": one if value else derivative,
            "shard_map": one,
        }


def reference(name: str, side: int, lhs: np.ndarray, rhs: np.ndarray) -> tuple[np.ndarray, Any]:
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, _references[name, side](lhs, rhs))


def _reference(operation: Operation, side: int) -> Callable:
    call = partial(operation.call, DENSE)
    if not operation.differentiable:
        return jax.jit(lambda *operands: (call(*operands), jnp.zeros(())))
    derivative = jax.grad(lambda *operands: loss(call(*operands)), side)
    return jax.jit(lambda *operands: (call(*operands), derivative(*operands)))


_references = {(op.name, side): _reference(op, side) for op in OPERATIONS for side in (0, 1)}


def error_of(result: Any, expected: np.ndarray) -> str:
    """Return an empty string if a result is right, otherwise the error."""
    if result.shape != expected.shape:
        return f"wrong shape {result.shape}, not {expected.shape}"
    difference = np.abs(np.asarray(result, np.float64) - expected).max()
    largest = np.abs(expected).max()
    return "" if difference <= TOLERANCE * largest else "wrong numbers"


def message(error: Exception) -> str:
    """Return the type of an error and the first line of its message, without numbers."""
    first = (str(error).strip() or "no message").splitlines()[0]
    first = re.sub(r"%\S+|\[[\d, ]*\]|\([\d, ]*\)|\d+", "…", first)
    return f"{type(error).__name__}: {first[:110]}"


def outcomes(settings: Sequence[Setting]) -> Iterator[tuple[Cell, str]]:
    """Run all programs. Yield each cell with its error, or with an empty string."""
    compiled: dict[Cell, Program] = {}
    expected: dict[Cell, np.ndarray] = {}
    for setting in settings:
        programs = setting.programs()
        for cell in setting.cells:
            program = programs[cell.transformation]
            expected[cell] = setting.expected[cell.transformation]
            try:
                if cell.transformation == "eager":
                    yield cell, error_of(program(), expected[cell])
                else:
                    jax.eval_shape(program)
                    compiled[cell] = program
            except Exception as error:
                yield cell, message(error)
    yield from _run(compiled, expected)


def _run(
    programs: Mapping[Cell, Program], expected: Mapping[Cell, np.ndarray]
) -> Iterator[tuple[Cell, str]]:
    """Compile all programs as one, which is faster. If that fails, run them in halves."""
    if not programs:
        return
    try:
        results = jax.jit(lambda: [program() for program in programs.values()])()
        jax.block_until_ready(results)
    except Exception as error:
        if len(programs) == 1:
            yield next(iter(programs)), message(error)
            return
        items = [*programs.items()]
        middle = len(items) // 2
        yield from _run(dict(items[:middle]), expected)
        yield from _run(dict(items[middle:]), expected)
        return
    for cell, result in zip(programs, results, strict=True):
        yield cell, error_of(result, expected[cell])


Table = dict[Cell, dict[str, str]]  # the error of each cell in each library


def compare(
    operations: Iterable[Operation],
    operands: Iterable[str],
    formats: Iterable[str],
    finenesses: Sequence[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Table:
    """Return the table.

    **Arguments:**

    - `finenesses`: the granularities to include. All of them if it is empty.
    - `progress`: called with a line of text after each format.
    """
    table: Table = collections.defaultdict(dict)
    for operation, which, format in itertools.product(operations, operands, formats):
        for library in LIBRARIES:
            settings = []
            for granularity in granularities(format):
                if finenesses and granularity not in finenesses:
                    continue
                try:
                    settings.append(Setting(library, operation, which, format, granularity))
                except Exception as error:
                    for name in transformations(operation):
                        cell = Cell(operation.name, which, format, granularity, name)
                        table[cell][library.name] = message(error)
            for cell, error in outcomes(settings):
                table[cell][library.name] = error
        progress(f"{operation.name}, {which}, {format}")
    return table


def lost(table: Table) -> list[Cell]:
    """Return the cells that work in Qwix and not in veneer."""
    return [cell for cell, errors in table.items() if errors["veneer"] and not errors["Qwix"]]


def counts(table: Table, row: Callable[[Cell], str], title: str) -> str:
    """Return a table of the numbers of cells that work, by row and transformation."""
    rows = list(dict.fromkeys(map(row, table)))
    lines = []
    for name in rows:
        line = [name]
        for transformation in TRANSFORMATIONS:
            cells = [
                errors
                for cell, errors in table.items()
                if row(cell) == name and cell.transformation == transformation
            ]
            works = [sum(not errors[library.name] for errors in cells) for library in LIBRARIES]
            line.append(f"{works[1]} · {works[0]} of {len(cells)}")
        lines.append(line)
    return markdown_table([title, *TRANSFORMATIONS], lines)


def failures(table: Table, library: str) -> str:
    """Return a table of the errors of a library: how often and where they occur."""
    where = collections.defaultdict(list)
    for cell, errors in table.items():
        if errors[library]:
            where[errors[library]].append(cell)
    if not where:
        return "None."

    def named(cells: Sequence[Cell]) -> str:
        parts = []
        for field in ("operation", "operands", "format", "granularity", "transformation"):
            values = dict.fromkeys(getattr(cell, field) for cell in cells)
            every = {getattr(cell, field) for cell in table}
            parts.append("all" if set(values) == every and len(every) > 1 else ", ".join(values))
        return "; ".join(parts)

    rows = [
        [f"`{error}`", str(len(cells)), named(cells)]
        for error, cells in sorted(where.items(), key=lambda item: -len(item[1]))
    ]
    return markdown_table(["error", "cells", "where"], rows)


def report(table: Table) -> str:
    works = {
        library.name: sum(not errors[library.name] for errors in table.values())
        for library in LIBRARIES
    }
    losses = lost(table)
    return "\n\n".join(
        [
            f"JAX {jax.__version__}, Qwix {qwix.__version__}, on CPU. Of {len(table)} cells, "
            f"veneer works in {works['veneer']} and Qwix in {works['Qwix']}. Cells where Qwix "
            f"works and veneer does not: {len(losses) or 'none'}.",
            counts(table, lambda cell: f"{cell.operation}: {cell.operands}", "ours · Qwix's"),
            counts(table, lambda cell: cell.format, "ours · Qwix's"),
            counts(table, lambda cell: cell.granularity, "ours · Qwix's"),
            "Where Qwix does not work:",
            failures(table, "Qwix"),
            "Where veneer does not:",
            failures(table, "veneer"),
        ]
    )


def main() -> None:
    names = [op.name for op in OPERATIONS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", nargs="*", default=names, choices=names)
    parser.add_argument("--formats", nargs="*", default=[*QWIX_NAMES], choices=[*QWIX_NAMES])
    parser.add_argument("--csv", type=Path, help="also write every cell to this file")
    parser.add_argument("--print-only", action="store_true", help="do not write docs/qwix.md")
    options = parser.parse_args()
    table = compare(
        [op for op in OPERATIONS if op.name in options.operations],
        OPERANDS,
        options.formats,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    text = report(table)
    print(text)
    losses = lost(table)
    for cell in losses[:20]:
        print(f"lost: {cell}: {table[cell]['veneer']}", file=sys.stderr)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*Cell.__dataclass_fields__, "Qwix", "veneer"])
            for cell, errors in table.items():
                writer.writerow([*vars(cell).values(), errors["Qwix"], errors["veneer"]])
    if not options.print_only:
        PAGE.write_text(fill(PAGE.read_text("utf-8"), "qwix_comparison.py", text), "utf-8")


if __name__ == "__main__":
    main()
