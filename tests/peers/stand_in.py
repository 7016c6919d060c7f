"""A plugin of pytest: `veneer.interop.quax` stands in for Quax in a suite that is not ours.

`expected.toml` says which tests fail, and why. Where one of them passes, or is there no more, the
run fails as it does where another one fails: the list stays true.
"""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import settings

import veneer.interop.quax as quax

# What of Quax stands beside its core, and so is tried on ours: the types of its documentation, and
# the names by which the tests ask for the version of JAX.
BESIDE_THE_CORE = {"_compat": "_compat.py", "examples": "examples/__init__.py"}


def pytest_addoption(parser: pytest.Parser) -> None:
    # Strings, for they are sent to the workers of pytest-xdist.
    parser.addoption("--expected", help="the TOML file that says what fails")
    parser.addoption("--quax", help="the folder of Quax's package in its sources")


def pytest_configure(config: pytest.Config) -> None:
    # unxt draws, and a plugin that is not here would compare the pictures that its tests return.
    config.addinivalue_line("markers", "mpl_image_compare: compares nothing here")
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestReturnNotNoneWarning")
    # The same examples in every run; and the first of a property compiles, however long that takes.
    settings.register_profile("peers", derandomize=True, database=None, deadline=None)
    settings.load_profile("peers")
    sys.modules["quax"] = quax
    for name, file in BESIDE_THE_CORE.items():
        spec = importlib.util.spec_from_file_location(
            f"quax.{name}", Path(config.option.quax, file)
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        setattr(quax, name, module)
        spec.loader.exec_module(module)


@pytest.hookimpl(tryfirst=True)  # before -k chooses among them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    expected = tomllib.loads(Path(config.option.expected).read_text(encoding="utf-8"))
    fails = {
        test: group["reason"] for group in expected.get("fails", []) for test in group["tests"]
    }
    passes = {test for group in expected.get("passes", []) for test in group["tests"]}
    for item in items:
        if item.nodeid in passes:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "xfail"]
        elif item.nodeid in fails:
            mark = pytest.mark.xfail(reason=fails[item.nodeid], strict=True)
            item.add_marker(mark, append=False)
    gone = {*fails, *passes} - {item.nodeid for item in items}
    of_all = not any("::" in argument for argument in config.args)
    if gone and of_all:
        raise pytest.UsageError(f"{config.option.expected} names tests that are gone: {gone}")
