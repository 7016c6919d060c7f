"""A pytest plugin that runs the tests of Quax and its clients on `veneer.interop.quax`."""

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import settings

import veneer.interop.quax as quax

# The names by which Quax's tests ask for the version of JAX.
COMPAT = "quax._compat"


def pytest_addoption(parser: pytest.Parser) -> None:
    # A string, because it is sent to the workers of pytest-xdist.
    parser.addoption("--quax", help="the folder of Quax's package in its sources")


def pytest_configure(config: pytest.Config) -> None:
    # unxt draws, and a plugin that is not here would compare the pictures that its tests return.
    config.addinivalue_line("markers", "mpl_image_compare: compares nothing here")
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestReturnNotNoneWarning")
    # The same examples in every run; and the first of a property compiles, however long that takes.
    settings.register_profile("peers", derandomize=True, database=None, deadline=None)
    settings.load_profile("peers")
    quax.replace_quax()
    spec = importlib.util.spec_from_file_location(COMPAT, Path(config.option.quax, "_compat.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[COMPAT] = quax._compat = module
    spec.loader.exec_module(module)
    # A test imports the module of this example by a private name.
    prng = quax.examples.prng
    sys.modules["quax.examples.prng._core"] = prng._core = prng
