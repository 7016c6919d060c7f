"""Choose which cases of each test a run has.

    python -m pytest                 # quick: some cases of each test, in a few minutes
    python -m pytest --slow          # the tests that a quick run leaves out
    python -m pytest --all           # every case of every test
    python -m pytest --share 1/2     # half of the cases; another run takes --share 2/2

A quick run tries every value of a parameter at least once per file, and each test at least once.
Where ten tests of a file have the same formats as their parameter, each format is tried by one or
two of them. The run time is bounded by `durations.json`, which has the seconds of one case for
every test that takes long: a test gets as many cases as fit into `BUDGET`, and a test whose single
case takes longer than `LONGEST` is left to `--slow`, which runs one case of it. `make durations`
measures the file again. A test that is marked as `slow` is always left to `--slow`, which runs all
of its cases.

A share is for a run beside others. A test of formats by shapes runs, in each of two shares, with
every format, every shape, and half of the combinations. A test with one parameter, or none, runs
whole in each share, unless it is marked as `divided`: then each of its cases is in one share alone,
or with `divided(by="file")` all tests of its file are.
"""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from zlib import crc32

import pytest

ROOT = Path(__file__).parents[2]
DURATIONS = Path(__file__).with_name("durations.json")

#: Seconds that the cases of one test may take together in a quick run.
BUDGET = 0.5
#: Seconds of one case from which on a quick run goes without the test.
LONGEST = 2.5
#: Seconds from which on `durations.json` has a test.
RECORDED = 0.2

#: Folders and files whose tests hardly depend on the version of JAX. CI runs half of their cases,
#: or of their files, on each version.
DIVIDED = {
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


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every case of every test")
    parser.addoption("--slow", action="store_true", help="run the tests that a quick run omits")
    parser.addoption("--share", metavar="I/N", help="run a share of the cases of each test")
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name}")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "divided: each case, or file, is in one share alone; see support/selection.py"
    )
    config.addinivalue_line("markers", "slow: a quick run omits it; see support/selection.py")
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder())


def pytest_itemcollected(item):
    """Mark the tests of `DIVIDED` folders and files."""
    path = item.nodeid.partition("::")[0].removeprefix("tests/")
    by = next((DIVIDED[name] for name in DIVIDED if path.startswith(name)), None)
    if by == "file" or (by == "case" and hasattr(item, "callspec")):
        item.add_marker(pytest.mark.divided(by=by))


def pytest_collection_modifyitems(config, items):
    chosen = list(items)
    if not config.getoption("all"):
        seconds = recorded_durations()
        chosen = _slow(items, seconds) if config.getoption("slow") else _quick(items, seconds)
    if config.getoption("share") is not None:
        share, n_shares = _parse_share(config.getoption("share"))
        of_share = (cases_of_share(cases, share, n_shares) for cases in _grouped(_test, chosen))
        kept = set().union(*of_share)
        chosen = [item for item in chosen if item in kept]  # workers need the same order
    if len(chosen) < len(items):
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


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
    """Return the items in lists, by their test or by their file."""
    groups = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.values()


def _test(item):
    return item.nodeid.partition("[")[0]


def _file(item):
    return item.nodeid.partition("::")[0]


def _parse_share(text):
    match = re.fullmatch(r"([1-9])/([1-9])", text)
    if not match or match[1] > match[2]:
        raise pytest.UsageError(f"--share must be like 1/2, not {text}")
    return int(match[1]), int(match[2])


def cases_of_share(cases, share, n_shares):
    """Return the cases of one test that a share has."""
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
    """Return the cases, of all tests of a file, that a quick run has.

    The tests take turns. Each adds the case with the most values that no chosen case has; among
    equals, the case whose values were chosen least often. A test drops out when it has as many
    cases as its limit, or, after the first turn, when its values have all been tried.
    """
    chosen, times = set(), Counter()
    turns = []  # for each test: the cases that are left, and how many may remain
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
    """Write the mean seconds of one case of every test that takes long to `durations.json`."""

    def __init__(self):
        self.seconds = defaultdict(lambda: defaultdict(float))  # by test, then by case

    def pytest_runtest_logreport(self, report):
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
        """Return the mean seconds of a case by test. Tests that did not run are not there."""
        cases_of = {test: cases.values() for test, cases in self.seconds.items()}
        return {test: round(sum(cases) / len(cases), 1) for test, cases in cases_of.items()}
