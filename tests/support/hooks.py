"""Pytest hooks that apply to all tests, those in `src` too. `tests/conftest.py` registers them.

The hooks of a conftest apply only to the folder that it is in.
"""

import jax
import pytest

from support import memory, optional

COMPILED_WHILE_COLLECTING = pytest.StashKey[dict[str, int]]()

#: How many programs were compiled so far.
compiled_programs = 0


def _count_compiled_program(event, duration, **kwargs):
    global compiled_programs
    compiled_programs += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count_compiled_program)
releaser = memory.ProgramReleaser()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    before = compiled_programs
    report = yield
    if compiled_programs > before and collector.nodeid.endswith(".py"):
        count = compiled_programs - before
        collector.config.stash.setdefault(COMPILED_WHILE_COLLECTING, {})[collector.nodeid] = count
    if report.failed:
        optional.skip_if_missing(report, collector.path, optional.reported(report))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and call.excinfo:
        optional.skip_if_missing(report, item.path, optional.missing_modules(call.excinfo.value))
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    releaser.check()


#: The peak memory of each worker that has ended, in bytes.
worker_peaks = []


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak_bytes"] = memory.peak_bytes()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    # A worker that crashed has no output.
    worker_peaks.append(getattr(node, "workeroutput", {}).get("peak_bytes", 0))


def pytest_terminal_summary(terminalreporter):
    if any(worker_peaks):
        peak = max(worker_peaks) / 1e9
        terminalreporter.write_line(f"largest worker: {peak:.2f} GB of memory at its peak")
