"""A pytest plugin: PyTensor's suites for JAX and Numba test `to_jax`.

Each suite compares graphs by one function. The plugin replaces the function of the JAX suite with
`to_jax` under `jax.jit`, and the one of the Numba suite with `vn.numba.compile` of `to_jax`. At the
end it prints how many calls gave the right results, wrong results, or an error.
"""

import copy
import importlib
import inspect
from collections import Counter
from functools import partial
from types import CodeType

import jax
import numpy as np
import pytest
from jax.experimental.sparse import BCOO
from pytensor import function
from scipy.sparse import issparse

import veneer as vn
from veneer.interop.pytensor import to_jax

SUITES = {
    "tests.link.jax.test_basic": ("compare_jax_and_py", lambda f, values: jax.jit(f)(*values)),
    "tests.link.numba.test_basic": (
        "compare_numba_and_py",
        lambda f, values: vn.numba.compile(f, *values)(*values),
    ),
}
CALLS: Counter[str] = Counter()


class StopComparison(Exception):
    """Ends a test before it inspects the function that PyTensor compiles."""


class Compiled:
    """A function of `to_jax`. Access to an attribute of PyTensor's function ends the test."""

    def __init__(self, run):
        self._run = run

    def __call__(self, *values):
        if self._run is None:  # PyTensor's writes into its arguments
            raise StopComparison
        return self._run(*values)

    def __getattr__(self, name):
        raise StopComparison


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    try:
        return (yield)
    except StopComparison:
        return None


def as_dense(x):
    """Return a result as a NumPy array. PyTensor's comparisons count entries that are stored."""
    return np.asarray(x.todense() if hasattr(x, "todense") else x)


def compare(suite, run, graph_inputs, graph_outputs, test_inputs, *, assert_fn=None, **options):
    """Compare a graph as the function of the suite does, with ours instead of PyTensor's."""
    is_sequence = isinstance(graph_outputs, list | tuple)
    outputs = list(graph_outputs) if is_sequence else [graph_outputs]
    inputs = [getattr(x, "variable", x) for x in graph_inputs]  # In(x, borrow=True)
    inplace = options.get("inplace", False)
    expected = function(
        graph_inputs, outputs, mode=options.get("py_mode", suite.py_mode), accept_inplace=inplace
    )(*copy.deepcopy(list(test_inputs)))

    def ours(*values):
        # As `function` does, convert an argument to the type of the input if no part is lost.
        pairs = zip(inputs, copy.deepcopy(values), strict=True)
        arguments = [x.type.filter(value) for x, value in pairs]
        arguments = [BCOO.from_scipy_sparse(x) if issparse(x) else x for x in arguments]
        results = run(to_jax(outputs, inputs), arguments)
        return list(results) if is_sequence else results[0]

    try:
        if options.get("updates"):
            raise NotImplementedError("to_jax has no updates of shared variables")
        results = ours(*test_inputs)
    except Exception:
        CALLS[f"{suite.__name__} refused"] += 1
        raise
    try:
        for result, value in zip(results if is_sequence else [results], expected, strict=True):
            if issparse(value):
                np.testing.assert_allclose(as_dense(result), value.toarray(), rtol=1e-4, atol=1e-8)
            else:
                (assert_fn or partial(np.testing.assert_allclose, rtol=1e-4))(
                    np.asarray(result), value
                )
    except BaseException:
        CALLS[f"{suite.__name__} wrong"] += 1
        raise
    CALLS[f"{suite.__name__} right"] += 1
    return Compiled(None if inplace else ours), results


def can_compare(code, scope) -> bool:
    """Return whether a function, or one that it calls in its module or class, compares graphs."""
    names = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names.update(inner.co_names)
    if any(name.startswith(("compare_jax", "compare_numba")) for name in names):
        return True
    helpers = [scope[name] for name in names if name in scope]
    codes = [getattr(inspect.unwrap(x), "__code__", None) for x in helpers if callable(x)]
    less = {name: value for name, value in scope.items() if name not in names}
    return any(can_compare(code, less) for code in codes if code is not None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that compare nothing: they test PyTensor's own linkers."""
    kept = [
        item
        for item in items
        if can_compare(
            inspect.unwrap(item.function).__code__, vars(item.module) | vars(item.cls or object)
        )
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_enable_x64", True)  # as importing PyTensor's dispatch for JAX does
    for module, (name, run) in SUITES.items():
        suite = importlib.import_module(module)
        setattr(suite, name, partial(compare, suite, run))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist
        session.config.workeroutput["calls"] = dict(CALLS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    CALLS.update(getattr(node, "workeroutput", {}).get("calls", {}))


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.section("calls of the comparisons")
    for name, number in sorted(CALLS.items()):
        terminalreporter.line(f"{name}: {number}")
