"""Settings of every run: JAX, Hypothesis, workers, memory, and which cases run."""

import gc
import os
from pathlib import Path

import pytest
from support import environment

environment.set_defaults(os.environ)

import jax  # noqa: E402
import jaxtyping  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from jax._src import compiler  # noqa: E402
from support import contexts, fixed_examples, memory, optional, selection  # noqa: E402

from veneer._jax.source_lines import hide_frames_of  # noqa: E402

# The reference results are those of the CPU. To try another platform, name it in JAX_PLATFORMS.
if jax.config.jax_platforms is None:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # enough for a 2 x 4 mesh

# The import hook of jaxtyping wraps each function, and JAX would take a wrapper for user code.
hide_frames_of(Path(jaxtyping.__file__).parent)
hide_frames_of(Path("<@beartype("))  # how the file names of generated functions begin

# Collection leaves hardly any garbage, and looking for it takes a quarter of the time.
gc.disable()

contexts.reuse()
fixed_examples.from_no_modules()

# Every run has the same examples. New ones are the fuzzer's task.
# The first example of a property compiles, so a time limit for one example would fail by chance.
settings.register_profile(
    "all",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
# Almost every example is a program to compile.
settings.register_profile("ci", settings.get_profile("all"), max_examples=6)
settings.register_profile("quick", settings.get_profile("all"), max_examples=3)

pytest_addoption = selection.pytest_addoption
pytest_itemcollected = selection.pytest_itemcollected
pytest_collection_modifyitems = selection.pytest_collection_modifyitems
pytest_runtest_makereport = optional.pytest_runtest_makereport

#: The programs that were compiled so far, as `test_collection_compiles_nothing` counts them.
compiled_programs = 0


def _count_compiled_program(event, duration, **kwargs):
    global compiled_programs
    compiled_programs += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count_compiled_program)
COMPILED_WHILE_COLLECTING = pytest.StashKey[dict[str, int]]()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    before = compiled_programs
    report = yield
    if compiled_programs > before and collector.nodeid.endswith(".py"):
        count = compiled_programs - before
        collector.config.stash.setdefault(COMPILED_WHILE_COLLECTING, {})[collector.nodeid] = count
    return optional.skip_if_missing(collector, report)


@pytest.fixture
def compiled_while_collecting(pytestconfig):
    """Return the number of programs by the test module that compiled them when it was imported."""
    return pytestconfig.stash.get(COMPILED_WHILE_COLLECTING, {})


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the whole suite on all CPUs; run named files, and a debugger, in this process."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    unset = getattr(config.option, "numprocesses", 0) is None  # 0 is for a missing xdist
    is_worker = hasattr(config, "workerinput")
    if whole and unset and not is_worker and not config.option.usepdb:
        config.option.numprocesses = memory.number_of_workers()
        config.option.dist = "worksteal"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    return memory.number_of_workers()


def pytest_configure(config):
    selection.pytest_configure(config)
    quick = "quick" if not config.getoption("all") else None
    settings.load_profile(quick or ("ci" if os.environ.get("CI") else "all"))
    if not config.getoption("--jaxtyping-packages"):
        jaxtyping.config.update("jaxtyping_disable", True)


def pytest_collection_finish(session):
    # The imported modules and chosen tests stay, so the garbage collector need not look at them.
    gc.collect()
    gc.freeze()
    # JAX leaves few cycles, and looking for them at Python's own rate takes a tenth of the time.
    gc.set_threshold(1_000_000, 20, 100)
    gc.enable()


programs = memory.ProgramReleaser()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    programs.check()


@pytest.fixture
def current_emitters(monkeypatch):
    """Compile as XLA does for users, where `environment` chooses its former code generators."""
    if environment.HAS_FORMER_EMITTERS:
        get_compile_options = compiler.get_compile_options

        def with_current_emitters(*args, **kwargs):
            options = get_compile_options(*args, **kwargs)
            overrides = [*options.env_option_overrides, (environment.EMITTERS, True)]
            options.env_option_overrides = overrides
            return options

        monkeypatch.setattr(compiler, "get_compile_options", with_current_emitters)
        jax.clear_caches()
