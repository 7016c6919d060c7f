"""What a run has of the cases of each test, where it need not have all.

    pytest --quick
    pytest --quick --share 1/2

A quick run has every test, and every value of a parameter once in each file: where ten tests of a
file are parametrised over the same formats, each format is tried by one or two of them. Of a test
that is marked as `long` it has but one case, or as many as `long(quick=0)` says: none of the long
examples, and nothing of the real model.

A share is for where other runs take the others. A test of formats by shapes by transformations is
run for every format, every shape and every transformation, and for every second combination of
them; what is left out, `--share 2/2` runs. So a test of one parameter is run whole by both, and a
test of none; but where it is marked as `divided`, each of its cases is in one share alone, or
`divided(by="file")` with all of its file. The shares of a quick run are of the cases that it has.
"""

import re
from collections import Counter, defaultdict
from zlib import crc32

import pytest

#: Of the tests of these, little depends on the version of JAX: what does is in most of them
#: together, and in the tests of the transformations. A share has some of their cases, or files.
DIVIDED = {
    "fuzz": "case",  # others run in CI each day
    "interop": "case",
    "kernels/cpu": "file",  # compiled by Numba, and tests of a file share what was compiled
    "native": "case",
    "numba": "case",
    "quant": "case",
    "types": "case",
    "test_architecture.py": "file",  # of the sources, which are the same on each
    "test_package.py": "case",
    "test_testing.py": "case",
}


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="run a few cases of each test")
    parser.addoption("--share", metavar="I/N", help="run a share of the cases of each test")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "divided: each case, or file, is in one share alone; see support/shares.py"
    )
    config.addinivalue_line(
        "markers", "long(quick=1): a quick run has so many of its cases; see support/shares.py"
    )


def pytest_itemcollected(item):
    """Mark as divided what is in a folder or file that is."""
    path = item.nodeid.partition("::")[0].removeprefix("tests/")
    by = next((DIVIDED[name] for name in DIVIDED if path.startswith(name)), None)
    if by == "file" or (by == "case" and hasattr(item, "callspec")):
        item.add_marker(pytest.mark.divided(by=by))


def pytest_collection_modifyitems(config, items):
    kept = items
    if config.getoption("quick"):
        kept = _kept(kept, (quick_cases(list(_by(_test, of))) for of in _by(_file, kept)))
    if config.getoption("share") is not None:
        share, n_shares = _parsed(config.getoption("share"))
        kept = _kept(kept, (cases_of_share(of, share, n_shares) for of in _by(_test, kept)))
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


def _kept(items, sets):
    """The items that are in one of the sets, in their order: all workers must have the same."""
    chosen = set().union(*sets)
    return [item for item in items if item in chosen]


def _by(key, items):
    """The items in lists, by their test or file."""
    groups = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.values()


def _test(item):
    return item.nodeid.partition("[")[0]


def _file(item):
    return item.nodeid.partition("::")[0]


def _parsed(text):
    match = re.fullmatch(r"([1-9])/([1-9])", text)
    if not match or match[1] > match[2]:
        raise pytest.UsageError(f"--share is one such as 1/2, not {text}")
    return int(match[1]), int(match[2])


def cases_of_share(cases, share, n_shares):
    """The cases of one test that are of a share."""
    marker = cases[0].get_closest_marker("divided")
    if marker:
        name = _file if marker.kwargs.get("by") == "file" else lambda case: case.nodeid
        return {case for case in cases if crc32(name(case).encode()) % n_shares == share - 1}
    if not hasattr(cases[0], "callspec"):
        return set(cases)
    values = {case: _values(case) for case in cases}
    places = defaultdict(dict)  # of a parameter's values, in the order in which they come
    for name, value in (pair for pairs in values.values() for pair in pairs):
        places[name].setdefault(value, len(places[name]))
    number = lambda case: sum(places[name][value] for name, value in values[case])
    kept = {case for case in cases if number(case) % n_shares == share - 1}
    seen = {pair for case in kept for pair in values[case]}
    for case in cases:  # and what it takes to have each value
        if not seen.issuperset(values[case]):
            kept.add(case)
            seen.update(values[case])
    return kept


def quick_cases(tests):
    """The cases, of all tests of a file, that a quick run has.

    The tests take turns, each with the case that has the most values that no case has had; of
    such, with the one whose values have been had the fewest times.
    """
    kept, times = set(), Counter()
    turns = []  # of each test, its cases that are left, and how many of them it may have
    for cases in tests:
        marker = cases[0].get_closest_marker("long")
        most = marker.kwargs.get("quick", 1) if marker else len(cases)
        turns.append(({case: _values(case) for case in cases}, len(cases) - most))
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
                kept.add(best)
                times.update(left.pop(best))
        first = False
    return kept


def _values(case):
    """The parameters of a case and their values, by identity where a value has no hash."""
    params = case.callspec.params if hasattr(case, "callspec") else {}
    return [(name, _key(value)) for name, value in params.items()]


def _key(value):
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value  # True is not 1
