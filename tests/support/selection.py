"""Choose which cases of each test a run has.

    python -m pytest                 # quick: some cases of each test, in a few minutes
    python -m pytest --slow          # the tests that a quick run leaves out
    python -m pytest --all           # every case of every test
    python -m pytest --share 1/2     # half of the cases; another run takes --share 2/2
    python -m pytest --sample 1/3    # a third of the cases, and of the tests

Within two limits, a quick run tries every value of a parameter once per file, and each test once.
If ten tests of a file are parametrized over the same formats, each format is tried by one or two of
them. The limits use `durations.json`, which records the seconds per case of each test that takes
long. A quick run gives a test at most as many cases as fit into `BUDGET`. It omits a test if one
case takes longer than `LONGEST`; then `--slow` runs one case of it. `make durations` measures the
file again. A quick run also omits the tests that are marked as `slow`; `--slow` runs all of their
cases.

Shares split the cases between several runs. With two shares, a test over formats and shapes runs in
each share with every format, every shape and half of the combinations. A test with one parameter or
none runs in full in each share. For tests that are marked as `divided`, each case runs in only one
share; with `divided(by="file")`, each file does. A sample takes each case of any test with the same
probability, but always the same ones.
"""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from zlib import crc32

import pytest

ROOT = Path(__file__).parents[2]
DURATIONS = Path(__file__).with_name("durations.json")

#: In a quick run, the cases of a test beyond the first take at most this many seconds together.
BUDGET = 0.35
#: A quick run omits a test if one case takes longer than this, in seconds.
LONGEST = 2.0
#: `durations.json` records a test if one case takes at least this many seconds.
RECORDED = 0.2

#: Folders and files whose tests hardly depend on the version of JAX. CI runs half of their cases,
#: or of their files, on each version.
DIVIDED = {
    "files": "case",
    "fuzz": "case",
    "interop": "case",
    "kernels/cpu": "file",  # tests of a file share the kernels that Numba compiles
    "native": "case",
    "numba": "case",
    "quant": "case",
    "types": "case",
    "test_architecture.py": "file",
    "test_package.py": "case",
    "test_testing.py": "case",
}

#: Tests that compile kernels of the CPU.
KERNELS = ("tests/kernels/", "tests/native/", "tests/quant/ops/")


def pytest_addoption(parser):
    group = parser.getgroup("veneer", "which cases run: a case is a test with its parameters")
    add = group.addoption
    add("--all", action="store_true", help="run every case of every test; by default, run some")
    add("--slow", action="store_true", help="run only the tests that are omitted by default")
    add("--share", metavar="I/N", help="of every test, run part I of N of its cases")
    add("--sample", metavar="I/N", help="run part I of N of all cases, so not of every test")
    overwrites = f"measure the tests that run, and overwrite tests/support/{DURATIONS.name}"
    add("--record-durations", action="store_true", help=overwrites)


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "divided: each case, or file, is in one share alone; see support/selection.py"
    )
    if config.getoption("all") and config.getoption("slow"):
        raise pytest.UsageError("--all has the slow tests: leave out --slow")
    for option in ("share", "sample"):  # here, for a worker of xdist cannot show an error
        if config.getoption(option) is not None:
            parse_fraction(option, config.getoption(option))
    config.addinivalue_line("markers", "slow: a quick run omits it; see support/selection.py")
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder())


def pytest_itemcollected(item):
    """Mark the tests of `DIVIDED` folders and files."""
    path = item.nodeid.partition("::")[0].removeprefix("tests/")
    by = next((DIVIDED[name] for name in DIVIDED if path.startswith(name)), None)
    if by == "file" or (by == "case" and hasattr(item, "callspec")):
        item.add_marker(pytest.mark.divided(by=by))


def header(config):
    """Return a line that says which cases run."""
    if config.getoption("all"):
        return "every case"
    if config.getoption("slow"):
        return "slow run: the tests that a quick run omits; --all runs every case"
    return "quick run: some cases of each test; --all runs every case, --slow the slow tests"


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    chosen = list(items)
    if not config.getoption("all"):
        unlimited = _files_of_named_tests(config)
        limited = [item for item in items if item.path not in unlimited]
        limit = _slow if config.getoption("slow") else _quick
        kept = set(limit(limited, recorded_durations()))
        chosen = [item for item in items if item in kept or item.path in unlimited]
    if config.getoption("share") is not None:
        share, n_shares = parse_fraction("share", config.getoption("share"))
        of_share = (cases_of_share(cases, share, n_shares) for cases in _grouped(_test, chosen))
        kept = set().union(*of_share)
        chosen = [item for item in chosen if item in kept]  # workers need the same order
    if config.getoption("sample") is not None:
        part, n_parts = parse_fraction("sample", config.getoption("sample"))
        chosen = [item for item in chosen if in_part(item, part, n_parts)]
    if len(chosen) < len(items):
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen
    move_kernels_to_the_middle(items)


def move_kernels_to_the_middle(items):
    """Let one worker compile the kernels, and another the programs of `vn.numba`.

    Compiled code of Numba stays in the process. pytest-xdist gives each of two workers half of the
    items, and later moves items from the end of a half. So the kernels start the second half. The
    order of the other items is kept.
    """
    kernels = [item for item in items if _file(item).startswith(KERNELS)]
    others = [item for item in items if not _file(item).startswith(KERNELS)]
    middle = len(items) // 2
    items[:] = [*others[:middle], *kernels, *others[middle:]]


def _files_of_named_tests(config):
    """Return the files of the arguments that name a test, as in `tests/test_package.py::test_x`."""
    folder = config.invocation_params.dir
    return {(folder / arg.partition("::")[0]).resolve() for arg in config.args if "::" in arg}


def _quick(items, seconds):
    chosen = set()
    for of_file in _grouped(_file, items):
        tests = list(_grouped(_test, of_file))
        chosen |= quick_cases(tests, [quick_limit(cases, seconds) for cases in tests])
    return [item for item in items if item in chosen]


def _slow(items, seconds):
    chosen = set()
    for cases in _grouped(_test, items):
        if cases[0].get_closest_marker("slow"):
            chosen.update(cases)
        elif quick_limit(cases, seconds) == 0:
            chosen.add(cases[0])
    return [item for item in items if item in chosen]


def recorded_durations():
    """Return the seconds of one case for each test that takes long."""
    if not DURATIONS.exists():
        return {}
    of_files = json.loads(DURATIONS.read_text("utf-8"))
    return {f"{file}::{test}": s for file, tests in of_files.items() for test, s in tests.items()}


def quick_limit(cases, seconds):
    """Return how many cases of a test a quick run may have."""
    duration = seconds.get(_test(cases[0]), 0)
    if cases[0].get_closest_marker("slow") or duration > LONGEST:
        return 0
    return max(1, int(BUDGET / duration)) if duration else len(cases)


def _grouped(key, items):
    """Group the items by test or by file."""
    groups = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.values()


def _test(item):
    return item.nodeid.partition("[")[0]


def _file(item):
    return item.nodeid.partition("::")[0]


def in_part(item, part, n_parts):
    """Return whether a sample has an item."""
    return crc32(item.nodeid.encode()) % n_parts == part - 1


def parse_fraction(option, text):
    """Return I and N of an option that is given as I/N."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not match or int(match[1]) > int(match[2]):
        raise pytest.UsageError(f"--{option} takes I/N, 1 <= I <= N, as in 1/2, and not {text!r}")
    return int(match[1]), int(match[2])


def cases_of_share(cases, share, n_shares):
    """Return the cases of one test that belong to a share."""
    marker = cases[0].get_closest_marker("divided")
    if marker:
        name = _file if marker.kwargs.get("by") == "file" else lambda case: case.nodeid
        return {case for case in cases if crc32(name(case).encode()) % n_shares == share - 1}
    if not hasattr(cases[0], "callspec"):
        return set(cases)
    values = {case: _values(case) for case in cases}
    indices = defaultdict(dict)  # for each parameter, its values in order of appearance
    for name, value in (pair for pairs in values.values() for pair in pairs):
        indices[name].setdefault(value, len(indices[name]))
    number = lambda case: sum(indices[name][value] for name, value in values[case])
    kept = {case for case in cases if number(case) % n_shares == share - 1}
    seen = {pair for case in kept for pair in values[case]}
    for case in cases:  # add cases until every value is there
        if not seen.issuperset(values[case]):
            kept.add(case)
            seen.update(values[case])
    return kept


def quick_cases(tests, limits):
    """Choose the cases that a quick run takes from the tests of one file.

    The tests take turns. Each adds the case with the most values that no chosen case has; among
    equals, the case whose values were chosen least often. A test drops out when it has as many
    cases as its limit, or, after the first turn, when its values have all been tried.
    """
    chosen, times = set(), Counter()
    turns = []  # for each test: the cases not chosen yet, and how many of them stay
    for cases, limit in zip(tests, limits, strict=True):
        turns.append(({case: _values(case) for case in cases}, max(0, len(cases) - limit)))
    first = True
    while turns:
        for turn in list(turns):
            left, end = turn
            rank = lambda case, left=left: (
                -sum(not times[pair] for pair in left[case]),
                sum(times[pair] for pair in left[case]),
            )
            best = min(left, key=rank) if len(left) > end else None
            if best is None or (not first and rank(best)[0] == 0):
                turns.remove(turn)
            else:
                chosen.add(best)
                times.update(left.pop(best))
        first = False
    return chosen


def _values(case):
    """Return the parameters of a case with their values, as hashable pairs."""
    params = case.callspec.params if hasattr(case, "callspec") else {}
    return [(name, _key(value)) for name, value in params.items()]


def _key(value):
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value  # True is not 1


class DurationRecorder:
    """A pytest plugin that writes the mean seconds per case of each test to `durations.json`."""

    def __init__(self):
        self.seconds = defaultdict(lambda: defaultdict(float))  # by test, then by case

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            return
        test = report.nodeid.partition("[")[0]
        self.seconds[test][report.nodeid] += report.duration

    def pytest_sessionfinish(self):
        files = defaultdict(dict)
        for test, seconds in {**recorded_durations(), **self.means()}.items():
            file, _, name = test.partition("::")
            if seconds >= RECORDED and (ROOT / file).exists():
                files[file][name] = seconds
        ordered = {file: dict(sorted(files[file].items())) for file in sorted(files)}
        DURATIONS.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")

    def means(self):
        """Return the mean seconds per case of each test that ran."""
        cases_of = {test: cases.values() for test, cases in self.seconds.items()}
        return {test: round(sum(cases) / len(cases), 1) for test, cases in cases_of.items()}
