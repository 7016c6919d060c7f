"""A plugin of pytest: of a suite that is not ours, which tests fail, and why.

Where one of those that `--expected` names passes, or is there no more, the run fails as it does
where another one fails: the list stays true. Those of `skips` are not run: they are
in parts, which pytest reports one by one, or take long.
"""

import tomllib
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    # A string, for it is sent to the workers of pytest-xdist.
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
