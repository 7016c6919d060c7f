"""JAX, Hypothesis and the check of our annotations, as the tests want them."""

import gc
import os
from pathlib import Path

import jax
import jaxtyping
from hypothesis import HealthCheck, settings
from support import contexts, fixed_examples, shares

# pyproject.toml has the annotations of veneer checked at run time, by a hook on its import. pytest
# itself imports a package without hooks when it comes to look for examples in docstrings.
from veneer._jax.source_lines import hide_frames_of

# The hook wraps each function, and JAX would take a wrapper for the user's line.
hide_frames_of(Path(jaxtyping.__file__).parent)
hide_frames_of(Path("<@beartype("))  # how the names of the files that it generates begin

# Set before any backend exists. The reference results are those of the CPU; to try the tests on
# another platform, name it in JAX_PLATFORMS.
if jax.config.jax_platforms is None:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # enough for a 2 x 4 mesh

# Collecting tests leaves hardly any garbage, and looking for it takes a quarter of the time.
gc.disable()

contexts.reuse()
fixed_examples.from_no_modules()

# The same examples in every run: a change is not failed by a property it did not touch, and no
# fresh clone by chance. To look for new ones is what a fuzzer is for.
# The first example of a property compiles, so a time limit on an example would fail by chance.
settings.register_profile(
    "veneer",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
# Fewer there: it is compiling that takes the time, and almost every example is a new program.
settings.register_profile("ci", settings.get_profile("veneer"), max_examples=6)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=3)


# Which of the cases of each test a run has.
pytest_addoption = shares.pytest_addoption
pytest_itemcollected = shares.pytest_itemcollected
pytest_collection_modifyitems = shares.pytest_collection_modifyitems


def pytest_configure(config):
    shares.pytest_configure(config)
    quick = "quick" if config.getoption("quick") else None
    settings.load_profile(quick or ("ci" if os.environ.get("CI") else "veneer"))


def pytest_collection_finish(session):
    # What was imported stays, so that no collection of garbage need look through it.
    gc.freeze()
    # JAX leaves few cycles, and looking for them at Python's own rate takes a tenth of the time.
    gc.set_threshold(1_000_000, 20, 100)
    gc.enable()
