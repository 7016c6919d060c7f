"""Skip tests of libraries that are not installed. In CI a missing library is an error."""

import os
import re
from importlib.util import find_spec

import pytest

#: The optional modules, and the extra or dependency group that installs each. All tests need the
#: group `test` and the extras `cli` and `numba`.
LIBRARIES = {
    "absl": "dev",
    "beartype": "dev",
    "build": "build",
    "diffrax": "dev",
    "flatbuffers": "dev",
    "flax": "dev",
    "gguf": "dev",
    "hatchling": "build",
    "ipykernel": "dev",
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

#: The names above that are dependency groups.
_GROUPS = {"bench", "build", "dev"}

_REPORTED = re.compile(r"No module named '(\w+)")


def skip_if_missing(report, path, modules):
    """Mark a failed report as skipped if one of the modules is a library that is missing."""
    if reason := reason_to_skip(modules):
        report.outcome = "skipped"
        report.longrepr = (str(path), 0, f"Skipped: {reason}")


def reported(report):
    """Return the missing modules that the report of a module's collection names."""
    return _REPORTED.findall(str(report.longrepr))


def missing_modules(error):
    """Return the missing modules that an error and its causes report."""
    names = []
    while error is not None:
        if isinstance(error, ImportError) and error.name:
            names.append(error.name)
        for failure in [error, *getattr(error, "failures", ())]:  # of a doctest
            if raised := getattr(failure, "exc_info", None):
                names += missing_modules(raised[1])
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return names


def reason_to_skip(modules):
    """Return why a test is skipped if one of the modules is a library that is missing."""
    for name in (module.partition(".")[0] for module in modules):
        is_missing = name in LIBRARIES and not find_spec(name)
        if is_missing and not ("CI" in os.environ and is_in_dev(name)):
            return f"needs {name}: {install_command(LIBRARIES[name])}"
    return None


def install_command(name):
    """Return the command that installs an extra or a dependency group."""
    return f"pip install --group {name}" if name in _GROUPS else f"pip install '.[{name}]'"


def is_in_dev(library):
    """Return whether `make setup` installs an optional library."""
    return LIBRARIES[library] not in ("bench", "pytensor")


def missing_libraries(extra=None):
    """Return the optional libraries, of one extra or group or of all, that are not installed."""
    names = [name for name in LIBRARIES if extra in (None, LIBRARIES[name])]
    return [name for name in names if not find_spec(name)]


def needs(extra):
    """Return a mark that skips a test unless all libraries of an extra or group are installed."""
    reason = reason_to_skip(missing_libraries(extra))
    return pytest.mark.skipif(reason is not None, reason=str(reason))
