"""Break the package, one line at a time, and report which breaks `make test` catches.

    python tests/support/mutations.py                  # all, from the environment of make setup
    python tests/support/mutations.py -k numba         # those whose text or tests contain it
    python tests/support/mutations.py --check          # check that each text occurs once

Each mutation is made in a copy of the project. The tests that are most likely to catch it run
first, and all others only if those pass. The exit status is 0 if at most three mutations survive.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

#: The number of mutations that may survive.
SURVIVORS = 3


class Mutation(NamedTuple):
    """A text that occurs once in the package, its replacement, and the tests to try first.

    It has no path, because a module may move.
    """

    old: str
    new: str
    tests: str  # paths under tests/, separated by spaces


MUTATIONS = [
    # The core.
    Mutation(
        "issubclass(data[0], Value) and not data[0].batch_transparent:",
        "issubclass(data[0], Value) and False:",
        "transforms/test_batch_axes.py transforms/test_meeting.py core/test_movement.py",
    ),
    Mutation(
        "highest = max((cls.default_precedence for cls in classes), default=0)",
        "highest = min((cls.default_precedence for cls in classes), default=0)",
        "core/test_rules.py types/labels",
    ),
    Mutation(
        "with policy_in_force(policy), restore_place(is_derivative):",
        "with policy_in_force(current_policy()), restore_place(is_derivative):",
        "core/test_policy.py transforms/test_custom_derivatives.py",
    ),
    Mutation(
        "ImplicitTracer(trace, x) if s else x for s, x in",
        "ImplicitTracer(trace, x) if isinstance(x, Value) else x for s, x in",
        "core/test_implicit.py",
    ),
    # Primitives.
    Mutation(
        "can_slice = lambda x: not isinstance(x, Value) or has_batch_axes(x, 1)",
        "can_slice = lambda x: True",
        "transforms/test_control_flow.py transforms/test_batch_axes.py types",
    ),
    Mutation(
        "xs, [i for i, x in enumerate(xs) if x.unit is not None]",
        "xs, [i for i, x in enumerate(xs) if x.unit is None]",
        "types/labels",
    ),
    Mutation(
        "_custom_jvp_p, results[: len(results) // 2])",
        "_custom_jvp_p, results[len(results) // 2 :])",
        "transforms/test_custom_derivatives.py transforms/matrix",
    ),
    # Quantization.
    Mutation(
        "exponent - (fraction == 0.5)",
        "exponent - (fraction > 0.5)",
        "quant/test_formats.py quant/test_quantize.py quant/test_qarray.py",
    ),
    Mutation("(random < x - floor)", "(random > x - floor)", "quant/test_rounding.py"),
    Mutation("if tile < 1 or size % tile:", "if tile < 1:", "quant/test_quantize.py"),
    Mutation(
        "padding = -packing.size % codes_per_unit",
        "padding = packing.size % codes_per_unit",
        "quant/test_packing.py",
    ),
    Mutation(
        "x = over_tiles(jnp.subtract, x, zero_point.astype(wide)",
        "x = over_tiles(jnp.add, x, zero_point.astype(wide)",
        "quant/test_qarray.py quant/test_quantize.py",
    ),
    Mutation(
        "return Range(jnp.minimum(low, 0), jnp.maximum(high, 0))",
        "return Range(low, high)",
        "quant/test_calibration.py",
    ),
    Mutation(
        "low = -format.bound if format.signed or not format.is_integer else 0",
        "low = -format.bound",
        "quant/test_quantize_clipping.py quant/training",
    ),
    # Types.
    Mutation(
        "return x - self.scale * jnp.matrix_transpose(low) @ solved_a",
        "return x + self.scale * jnp.matrix_transpose(low) @ solved_a",
        "types/lora",
    ),
    Mutation(
        "return determinant[0] * sign, determinant[1] + logabsdet",
        "return determinant[0], determinant[1] + logabsdet",
        "types/lora",
    ),
    Mutation(
        "return b / (entries[..., None] if left_side else entries[..., None, :])",
        "return b / entries[..., None]",
        "types/structured/test_diagonal.py types/structured/test_linear_algebra.py",
    ),
    Mutation(
        "odd = (self.indices.shape[-1] - _count_cycles(jnp.asarray(self.indices))) % 2",
        "odd = _count_cycles(jnp.asarray(self.indices)) % 2",
        "types/structured/test_permutation.py",
    ),
    Mutation(
        "smaller = y.unit if factor(x.unit, y.unit) >= 1 else x.unit",
        "smaller = x.unit if factor(x.unit, y.unit) >= 1 else y.unit",
        "types/labels",
    ),
    # Kernels.
    Mutation(
        "planes = [(((eights >> bit) & 1) << shifts)",
        "planes = [(((eights >> bit) & 1) << shifts[::-1])",
        "quant/test_packing.py kernels",
    ),
    Mutation(
        "x = word(job, X) + batch * m * x_stride + 4 * row",
        "x = word(job, X) + 4 * row",
        "kernels/cpu/test_rows.py",
    ),
    Mutation(
        "end = min(i + shared - within, count)",
        "end = min(i + shared, count)",
        "kernels/cpu/test_integer.py",
    ),
    # High types.
    Mutation(
        "x.accum(_sum_first_axis(x.aval, ct) if d is None else ct)",
        "x.accum(ct[0] if d is None else ct)",
        "hijax/test_vmap.py hijax",
    ),
    Mutation(
        "return as_typed_operand(result)",
        "return result",
        "hijax",
    ),
    # Native code.
    Mutation("return n - 1 - i if reverse else i", "return i", "numba/test_cumulative.py"),
    Mutation(
        'symbol = ">" if b.primitive == "argmax" else "<"',
        'symbol = ">=" if b.primitive == "argmax" else "<="',
        "numba/test_reduce.py numba",
    ),
    Mutation(
        '"U" if lower else "L",\n        "N" if transpose_a',
        '"L" if lower else "U",\n        "N" if transpose_a',
        "numba/test_linear_algebra.py",
    ),
    Mutation(
        "return [i * stride + j * step for i, j, stride, step in axes]",
        "return [i * stride + j for i, j, stride, step in axes]",
        "numba/test_windows.py",
    ),
    # Other libraries.
    Mutation(
        "while name in leaves:  #",
        "while False and name in leaves:  #",
        "files/test_safetensors.py",
    ),
    Mutation(
        "return implicit(self.fn, self.filter_spec)(*args, **kwargs)",
        "return implicit(self.fn)(*args, **kwargs)",
        "interop/test_quax.py",
    ),
]


def found_in(root: Path, mutation: Mutation) -> Path:
    """Return the module with the text of a mutation. The text must occur exactly once."""
    counts = {p: p.read_text("utf-8").count(mutation.old) for p in (root / "src").rglob("*.py")}
    where = [path for path, count in counts.items() for _ in range(count)]
    if len(where) != 1:
        raise SystemExit(f"found {len(where)} times in src instead of once: {mutation.old!r}")
    return where[0]


def is_caught(copy: Path, mutation: Mutation) -> str | None:
    """Return "its tests" or "all tests", whichever caught a mutation, or None."""
    path = found_in(copy, mutation)
    text = path.read_text("utf-8")
    path.write_text(text.replace(mutation.old, mutation.new), "utf-8")
    try:
        own = [f"tests/{name}" for name in mutation.tests.split()]
        for which, paths in (("its tests", own), ("all tests", [])):
            if failures(copy, paths) is not None:
                return which
        return None
    finally:
        path.write_text(text, "utf-8")


def failures(copy: Path, paths: list[str]) -> str | None:
    """Run the quick tests of a copy. Return the output up to the first failure, or None."""
    environment = os.environ | {
        "CI": "true",
        "PYTHONPATH": str(copy / "src"),
        "JAX_COMPILATION_CACHE_DIR": str(copy.parents[1] / "programs"),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    # The status is 5 if a quick run skips all of these tests, and negative if a test crashed.
    if done.returncode not in (0, 1, 2, 3, 5) and done.returncode > 0:
        raise SystemExit(f"pytest did not run:\n{done.stdout}\n{done.stderr}")
    return None if done.returncode in (0, 5) else done.stdout[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", default="", help="only mutations whose text or tests contain this")
    parser.add_argument("--jobs", type=int, default=1, help="how many mutations to try in parallel")
    parser.add_argument("--check", action="store_true", help="only check that the texts exist")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if options.k in f"{m.old} {m.tests}"]
    for mutation in chosen:
        found_in(ROOT, mutation)
    if options.check:
        print(f"each of {len(chosen)} texts occurs once")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copies: Queue[Path] = Queue()
        unneeded = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")
        for job in range(options.jobs):
            copy = Path(folder) / str(job) / "copy"  # tests read the name of the folder
            shutil.copytree(ROOT, copy, ignore=unneeded)
            copies.put(copy)
        if output := failures(copy, []):
            raise SystemExit(f"the quick tests fail without a mutation:\n{output}")
        with ThreadPoolExecutor(options.jobs) as pool:
            caught = sum(pool.map(lambda mutation: try_mutation(copies, mutation), chosen))
    print(f"{caught} of {len(chosen)} caught")
    return int(len(chosen) - caught > SURVIVORS)


def try_mutation(copies: "Queue[Path]", mutation: Mutation) -> bool:
    """Print what catches a mutation, and return whether anything does."""
    copy = copies.get()
    try:
        start, name = time.monotonic(), found_in(copy, mutation).relative_to(copy / "src")
        by = is_caught(copy, mutation)
    finally:
        copies.put(copy)
    seconds = time.monotonic() - start
    print(f"{by or 'SURVIVES':10} {seconds:5.0f} s  {name}: {mutation.new!r}", flush=True)
    return by is not None


if __name__ == "__main__":
    sys.exit(main())
