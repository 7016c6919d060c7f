"""A share of the cases of each test, where other runs take the others.

    pytest --share 1/2

A test of formats by shapes by transformations is run for every format, every shape and every
transformation, and for every second combination of them; what is left out, `--share 2/2` runs. So
a test of one parameter is run whole by both, and a test of none; but where it is marked as
`divided`, each of its cases is in one share alone, or `divided(by="file")` with all of its file.
"""

import re
from collections import defaultdict
from zlib import crc32

import pytest


def pytest_addoption(parser):
    parser.addoption("--share", metavar="I/N", help="run a share of the cases of each test")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "divided: each case, or file, is in one share alone; see support/shares.py"
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("share") is None:
        return
    share, n_shares = _parsed(config.getoption("share"))
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    kept = set().union(*(cases_of_share(cases, share, n_shares) for cases in tests.values()))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _parsed(text):
    match = re.fullmatch(r"([1-9])/([1-9])", text)
    if not match or match[1] > match[2]:
        raise pytest.UsageError(f"--share is one such as 1/2, not {text}")
    return int(match[1]), int(match[2])


def cases_of_share(cases, share, n_shares):
    """The cases of one test that are of a share."""
    marker = cases[0].get_closest_marker("divided")
    if marker:
        whole = marker.kwargs.get("by") == "file"
        name = lambda case: case.nodeid.partition("::")[0] if whole else case.nodeid
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


def _values(case):
    """The parameters of a case and their values, by identity where a value has no hash."""
    return [(name, _key(value)) for name, value in case.callspec.params.items()]


def _key(value):
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value  # True is not 1
