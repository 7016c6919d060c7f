"""What works in Qwix and what in veneer, for each operation and each transformation.

A cell works where the result agrees with the same program of the dequantized operands in float64.
Both libraries quantize the same arrays, and each is held to what its own codes are worth. Prints
the tables, and writes them into docs/qwix.md.
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

if __name__ == "__main__":  # before JAX starts: two devices, and programs compiled in little time
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

# Which operands are quantized.
OPERANDS = {"weight": (False, True), "activation": (True, False), "both": (True, True)}
# How finely, and the method.
GRANULARITIES = ["tensor", "channel", "tile 128", "tile 32", "channel, minmax"]
TRANSFORMATIONS = ["eager", "jit", "grad", "vmap", "scan", "checkpoint", "shard_map"]

# Of the largest number: what f32 loses in sums of some hundred terms, and in the scales on the way.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Cell:
    """Where in the table."""

    operation: str
    operands: str
    format: str
    granularity: str
    transformation: str


@dataclass(frozen=True)
class Library:
    """One of the two: its name and functions, and what its quantized arrays are worth exactly."""

    name: str
    functions: Any
    quantize: Callable
    worth: Callable[[Any], np.ndarray]

    def shard_map(self, program: Callable, mesh: Any, specs: tuple, operands: tuple) -> jax.Array:
        """The program with the columns of `rhs` on two devices."""
        out = PartitionSpec(*[None] * specs[2], "x")
        if self.name == "veneer":  # the specs of the dense arrays, cut leaf by leaf
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


def worth(q: vn.quant.QArray) -> np.ndarray:
    """What the codes stand for, in float64 and by NumPy."""
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
    Library("Qwix", qwix, _qwix_quantize, lambda q: worth(from_qwix(q))),
    Library("veneer", vn.quant, vn.quant.quantize, worth),
]


def granularities(format: str) -> list[str]:
    """Those that the format has: a tile of its own, or any; zero points for two of Qwix's."""
    own = vn.quant.FORMATS[format].tile_size
    if own is not None:
        return [f"tile {own}"]
    return GRANULARITIES if format in ("int8", "int4") else GRANULARITIES[:-1]


def transformations(operation: Operation) -> list[str]:
    """Those that JAX has for dense operands."""
    return [name for name in TRANSFORMATIONS if name != "grad" or operation.differentiable]


def arrays(shape: Sequence[int], seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) + 0.2, jnp.float32)


def loss(result: jax.Array) -> jax.Array:
    """Linear, so that its derivative tells nothing of the rounding of the result."""
    weights = jnp.cos(jnp.arange(result.size, dtype=result.dtype)).reshape(result.shape)
    return jnp.sum(weights * result)


Program = Callable[[], Any]


class Setting:
    """An operation of operands in a format, by one library: its programs, transformed."""

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
        """Of each transformation, a function of nothing."""
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
        """The product that quantizes its activations, too, with a derivative by them."""
        if self.library.name == "Qwix":  # whose functions know of no other way
            call = partial(self.operation.call, self.library.functions)
            return lambda x, w: call(self.quantizers[0](x), w)
        contracting = [axis - len(self.operation.rhs) for axis in self.operation.summed[1]]
        quantize = partial(
            vn.quant.ActivationQuantized, qtype=self.cells[0].format, contracting=contracting
        )
        call = vn.implicit(partial(self.operation.call, DENSE))
        return lambda x, w: call(x, quantize(w))

    def references(self) -> dict[str, np.ndarray]:
        """The answers in float64, from what the quantized operands are worth."""
        exact = [
            tuple(
                self.library.worth(x) if quantized else np.asarray(x, np.float64)
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
    """Nothing where a result is right, or else what is wrong with it."""
    if result.shape != expected.shape:
        return f"wrong shape {result.shape}, not {expected.shape}"
    difference = np.abs(np.asarray(result, np.float64) - expected).max()
    largest = np.abs(expected).max()
    return "" if difference <= TOLERANCE * largest else "wrong numbers"


def message(error: Exception) -> str:
    """The type of an error, and the first line of what it says, without its numbers."""
    first = (str(error).strip() or "no message").splitlines()[0]
    first = re.sub(r"%\S+|\[[\d, ]*\]|\([\d, ]*\)|\d+", "…", first)
    return f"{type(error).__name__}: {first[:110]}"


def outcomes(settings: Sequence[Setting]) -> Iterator[tuple[Cell, str]]:
    """Runs every program; yields what is wrong with it, or nothing, for each cell."""
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
    """Compiles programs as one, for that is faster; in halves, where there is an error in it."""
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


Table = dict[Cell, dict[str, str]]  # of each cell, what is wrong with it in each library


def compare(
    operations: Iterable[Operation],
    operands: Iterable[str],
    formats: Iterable[str],
    finenesses: Sequence[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Table:
    """The table, of all granularities of a format or those that are named."""
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
    """The cells where Qwix works and we do not."""
    return [cell for cell, errors in table.items() if errors["veneer"] and not errors["Qwix"]]


def counts(table: Table, row: Callable[[Cell], str], title: str) -> str:
    """For each row and transformation, in how many cells each works."""
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
    """What goes wrong, how often and where."""
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
    parser.add_argument("--csv", type=Path, help="also write every cell there")
    parser.add_argument("--print-only", action="store_true", help="leave docs/qwix.md as it is")
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
