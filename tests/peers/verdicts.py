"""A pytest plugin that lists which tests of another library fail, and why.

`--expected` names a file with the tests that are expected to fail. The run also fails if one of
them passes or no longer exists. Tests under `skips` are not run, because they take long or have
subtests.
"""

import tomllib
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    # A string, because it is sent to the workers of pytest-xdist.
    parser.addoption("--expected", help="the TOML file that says what fails")


@pytest.hookimpl(tryfirst=True)  # before -k chooses among them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    expected = tomllib.loads(Path(config.option.expected).read_text(encoding="utf-8"))
    fails = {
        test: group["reason"] for group in expected.get("fails", []) for test in group["tests"]
    }
    skips = {
        test: group["reason"] for group in expected.get("skips", []) for test in group["tests"]
    }
    passes = {test for group in expected.get("passes", []) for test in group["tests"]}
    for item in items:
        if item.nodeid in passes:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "xfail"]
        elif item.nodeid in skips:
            item.add_marker(pytest.mark.skip(reason=skips[item.nodeid]))
        elif item.nodeid in fails:
            mark = pytest.mark.xfail(reason=fails[item.nodeid], strict=True)
            item.add_marker(mark, append=False)
    gone = {*fails, *skips, *passes} - {item.nodeid for item in items}
    of_all = not any("::" in argument for argument in config.args)
    if gone and of_all:
        raise pytest.UsageError(f"{config.option.expected} names tests that are gone: {gone}")
