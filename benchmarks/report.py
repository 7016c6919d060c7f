"""Run benchmarks, and write their tables into pages of docs/.

    python benchmarks/report.py                    # all pages, in several hours
    python benchmarks/report.py --pages numba      # one page

A page has places for tables: `<!-- script.py argument -->` and `<!-- end -->`. The output of
`python benchmarks/script.py argument` replaces the text between them.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
from measure import parser

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGES = ("benchmarks", "performance", "numba", "checkpoints")


def printed_by(program: str, *arguments: str) -> str:
    command = [sys.executable, str(HERE / program), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def fill(page: str, name: str, text: str) -> str:
    """Return the page with `text` between `<!-- name -->` and `<!-- end -->`."""
    start = re.escape(f"<!-- {name} -->")
    filled, count = re.subn(
        rf"({start}\n).*?(<!-- end -->)",
        lambda m: f"{m[1]}\n{text}\n\n{m[2]}",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"the page has {count} places for {name}, not one")
    return filled


def write(page: str, name: str, text: str) -> None:
    """Write `text` into the place `name` of a page."""
    path = DOCS / f"{page}.md"
    path.write_text(fill(path.read_text("utf-8"), name, text), "utf-8")


def write_rows(page: str, name: str, table: str, note: str) -> None:
    """Write a table and a note into the place `name` of a page.

    Rows of the table on the page that the new table does not have stay, if the columns are the
    same.
    """
    start = re.escape(f"<!-- {name} -->")
    text = (DOCS / f"{page}.md").read_text("utf-8")
    found = re.search(rf"{start}\n(.*?)<!-- end -->", text, flags=re.DOTALL)
    there = "" if found is None else found[1]
    write(page, name, f"{with_rows_of(there, table)}\n\n{note}")


def with_rows_of(there: str, table: str) -> str:
    """Return the table `table`, with additional rows of the table `there`, in its order.

    >>> old, new = "| a |\\n| - |\\n| 1 |\\n| 2 |", "| a |\\n| - |\\n| 2 |\\n| 3 |"
    >>> with_rows_of(old, new).splitlines()
    ['| a |', '| - |', '| 1 |', '| 2 |', '| 3 |']
    """
    old, new = ([x for x in text.splitlines() if x.startswith("|")] for text in (there, table))
    if old[:2] != new[:2]:
        return table
    named = lambda lines: {line.split("|")[1].strip(): line for line in lines[2:]}
    return "\n".join([*new[:2], *(named(old) | named(new)).values()])


def made_with() -> str:
    """Return the versions and the machine of a measurement, in a few words."""
    from veneer.native.simd import ISA

    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    cpu = models[0] if models else platform.processor()
    versions = f"JAX {jax.__version__}, Python {platform.python_version()}"
    return f"{versions}; {os.cpu_count()} cores of {cpu}, whose kernels are those for {ISA}."


def main(names: list[str], folder: str, *, rounds: int | None) -> None:
    chosen = [] if rounds is None else ["--rounds", str(rounds)]
    for name in names:
        path = DOCS / f"{name}.md"
        page = fill(path.read_text("utf-8"), "made with", made_with())
        for command in sorted(re.findall(r"<!-- (\S+\.py(?: \w+)?) -->", page)):
            print(command, flush=True)
            program, *arguments = command.split()
            arguments += [folder] if program == "peers.py" else []
            arguments += [] if program == "checkpoint_loading.py" else chosen  # it has no rounds
            page = fill(page, command, printed_by(program, *arguments))
        path.write_text(page, "utf-8")


if __name__ == "__main__":
    options = parser(__doc__)
    options.set_defaults(rounds=None)  # each benchmark has its own default
    options.add_argument("--peers", help="the folder for the environments of peers.py")
    options.add_argument("--pages", nargs="+", choices=PAGES, default=PAGES, help="default: all")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.pages, arguments.peers or temporary, rounds=arguments.rounds)
