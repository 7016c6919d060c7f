"""Skip tests of libraries that are not installed. CI installs all, and skips nothing."""

import os
import re

import pytest

#: The top-level modules that tests can do without, and what installs them.
LIBRARIES = {
    "beartype": "dev",
    "diffrax": "dev",
    "flatbuffers": "dev",
    "flax": "dev",
    "gguf": "dev",
    "jinja2": "demo",
    "matplotlib": "demo",
    "mlx": "dev",
    "nbclient": "dev",
    "nbformat": "dev",
    "onnx": "bench",
    "optax": "dev",
    "orbax": "dev",
    "pint": "dev",
    "platformdirs": "demo",
    "pytensor": "pytensor",
    "quaxed": "dev",
    "qwix": "dev",
    "sklearn": "dev",
    "tokenizers": "demo",
    "treescope": "dev",
    "unxt": "dev",
}

_REPORTED = re.compile(r"No module named '(\w+)")


def skip_if_missing(collector, report):
    """Return the report of a module's collection, as skipped if it needs a missing library."""
    if report.failed and (reason := reason_to_skip(_REPORTED.findall(str(report.longrepr)))):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, reason)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and (reason := reason_to_skip(missing_modules(call.excinfo.value))):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, reason)
    return report


def missing_modules(error):
    """Return the modules that an error, or one that led to it, says are missing."""
    names = []
    while error is not None:
        if isinstance(error, ImportError) and error.name:
            names.append(error.name)
        if inner := getattr(error, "exc_info", None):  # what a doctest raised
            names += missing_modules(inner[1])
        error = error.__cause__
    return names


def reason_to_skip(modules):
    for name in (module.partition(".")[0] for module in modules):
        if name in LIBRARIES and "CI" not in os.environ:
            return f"Skipped: needs {name}: pip install 'veneer[{LIBRARIES[name]}]'"
    return None
