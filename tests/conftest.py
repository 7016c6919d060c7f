"""Settings of every run: JAX, Hypothesis, workers, memory, and which cases run."""

import gc
import os
from pathlib import Path

import pytest
from support import environment

environment.set_defaults(os.environ)
# The tests assume 32-bit types, whatever the user has set. Tests of 64 bits turn those on.
os.environ["JAX_ENABLE_X64"] = "0"

import jax  # noqa: E402
import jaxtyping  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from jax._src import compiler  # noqa: E402
from support import contexts, fixed_examples, hooks, memory, optional, selection  # noqa: E402

from veneer._jax.frames import hide_frames_of  # noqa: E402

# The tests run on the CPU. To try another platform, set JAX_PLATFORMS.
if jax.config.jax_platforms is None:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # enough for a 2 x 4 mesh

# The default form of JAX's errors depends on whether IPython is installed.
jax.config.update("jax_traceback_filtering", "tracebackhide")

# The import hook of jaxtyping wraps each function, and JAX would take a wrapper for user code.
hide_frames_of(Path(jaxtyping.__file__).parent)
hide_frames_of(Path("<@beartype("))  # how the file names of generated functions begin

# Collection leaves hardly any garbage, and looking for it takes a quarter of the time.
gc.disable()

contexts.reuse()
fixed_examples.from_no_modules()

# Every run has the same examples. The fuzzer tries new ones.
# The first example of a property compiles, so a time limit for one example would fail by chance.
settings.register_profile(
    "all",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
# Almost every example compiles a program, so a quick run has fewer.
settings.register_profile("quick", settings.get_profile("all"), max_examples=3)

pytest_addoption = selection.pytest_addoption
pytest_itemcollected = selection.pytest_itemcollected
pytest_collection_modifyitems = selection.pytest_collection_modifyitems


@pytest.fixture
def compiled_while_collecting(pytestconfig):
    """Return how many programs each test module compiled on import."""
    return pytestconfig.stash.get(hooks.COMPILED_WHILE_COLLECTING, {})


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Use all CPUs for the whole suite. Use this process for named files and for `--pdb`."""
    if not __debug__:
        raise pytest.UsageError("python -O skips assert statements: run the tests without -O")
    is_whole_suite = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    has_no_choice = getattr(config.option, "numprocesses", 0) is None  # 0 without pytest-xdist
    is_worker = hasattr(config, "workerinput")
    is_debugged = config.option.usepdb or config.option.trace
    if is_whole_suite and has_no_choice and not is_worker and not is_debugged:
        config.option.numprocesses = "auto"
        config.option.dist = "worksteal"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    # None leaves the choice to pytest-xdist, which reads this variable.
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else memory.number_of_workers()


def pytest_report_header(config):
    lines = [selection.header(config)]
    if missing := [*filter(optional.is_in_dev, optional.missing_libraries())]:
        lines.append(f"tests that need {', '.join(missing)} are skipped: make setup")
    return lines


def pytest_configure(config):
    selection.pytest_configure(config)
    config.pluginmanager.register(hooks)
    settings.load_profile("all" if config.getoption("all") else "quick")
    if not config.getoption("--jaxtyping-packages"):
        jaxtyping.config.update("jaxtyping_disable", True)


def pytest_collection_finish(session):
    # The imported modules and chosen tests stay, so the garbage collector need not look at them.
    gc.collect()
    gc.freeze()
    # JAX leaves few cycles, and looking for them at Python's own rate takes a tenth of the time.
    gc.set_threshold(1_000_000, 20, 100)
    gc.enable()


@pytest.fixture(scope="module")
def current_emitters():
    """Compile with the code generators that users have. See `environment.EMITTERS`."""
    get_compile_options = compiler.get_compile_options

    def with_current_emitters(*args, **kwargs):
        options = get_compile_options(*args, **kwargs)
        overrides = [*options.env_option_overrides, (environment.EMITTERS, True)]
        options.env_option_overrides = overrides
        return options

    with pytest.MonkeyPatch.context() as patch:
        if environment.HAS_FORMER_EMITTERS:
            patch.setattr(compiler, "get_compile_options", with_current_emitters)
            jax.clear_caches()
        yield
