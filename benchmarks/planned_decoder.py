"""Compare the estimates of `veneer plan` with compiled programs.

    python benchmarks/planned_decoder.py    # ten minutes

Prints the two tables of docs/scale.md. The first compares a decoder on 8 virtual devices with its
plan. *held* is the bytes of weights and cache, or of weights, updates and moments. *at a time* is
the peak by `memory_analysis`. *received* is the bytes that collectives send to a device. The
second table is the time to trace and lower a program as wide as Llama 3.1 405B for up to 64
devices that do not exist.
"""

import json
import statistics
import time
from collections.abc import Iterator

import jax
from measure import ROOT
from support.planned_decoder import STEPS, Program, compared, held

from veneer.plan import PlannedStep, Split, model_of


def rows() -> Iterator[str]:
    """Compile a decoder for each plan, and yield the rows of the first table, in MB."""
    yield "| step, weights | data × tensor | held: plan | program | at a time | | received | |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for use in STEPS:
        for format in ("f32", "int4"):
            for plan, measured in compared(use, format):
                said = held(plan), plan.total, sum(plan.received.values())
                pairs = zip(said, measured, strict=True)
                numbers = " | ".join(f"{n / 1e6:.2f}" for pair in pairs for n in pair)
                name = f"{plan.split.data} × {plan.split.tensor}"
                name += ", in parts" * plan.split.in_parts
                yield f"| {use}, {format} | {name} | {numbers} |"


#: The numbers of layers and devices of the second table.
COSTS = (8, 8), (32, 8), (126, 8), (126, 64)
ROUNDS = 5


def costs() -> Iterator[str]:
    """Yield the rows of the second table, for a training step with an int4 model."""
    config = ROOT / "docs" / "configs" / "llama-3.1-405b.json"
    said, step = json.loads(config.read_text("utf-8")), PlannedStep(64, 4096, rank=16)
    programs = []
    for layers, devices in COSTS:
        model = model_of(said | {"num_hidden_layers": layers})
        split = Split(devices // 8, 1, 8)
        programs.append(Program.of_model(model, split, step, "int4"))
    times: list[list[float]] = [[] for _ in COSTS]
    for _ in range(ROUNDS):
        for program, taken in zip(programs, times, strict=True):
            jax.clear_caches()
            start = time.perf_counter()
            program.lowered()
            taken.append(time.perf_counter() - start)
    yield "| layers | devices | operations of the program | traced and lowered in |"
    yield "|---:|---:|---:|---:|"
    for (layers, devices), program, taken in zip(COSTS, programs, times, strict=True):
        count = program.lowered().as_text().count(" = ")
        yield f"| {layers} | {devices} | {count:,} | {statistics.median(taken):.1f} s |"


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    for table in (rows(), costs()):
        for row in (*table, ""):
            print(row, flush=True)


if __name__ == "__main__":
    main()
