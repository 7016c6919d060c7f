"""Environment variables of a test run. Set them before JAX and NumPy are imported.

XLA takes most of the time of the tests, so these keep it short. Processes that a test starts, and
the workers of pytest-xdist, inherit them.
"""

from collections.abc import MutableMapping
from importlib.metadata import version
from pathlib import Path

PROGRAMS = Path(__file__).parents[2] / ".pytest_cache" / "programs"

# jaxlib 0.10 can still use XLA's former code generators, which compile in a third of the time. They
# round some conversions to mxfp4 differently and have no `clamp` of bools: the fixture
# `current_emitters` is for tests of these.
EMITTERS = "xla_cpu_use_fusion_emitters"
HAS_FORMER_EMITTERS = version("jaxlib").startswith("0.10.")


def xla_flags() -> list[str]:
    former = [f"--{EMITTERS}=false"] if HAS_FORMER_EMITTERS else []
    return ["--xla_backend_optimization_level=0", *former]


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Set what the user has not set. Flags of the user come last, and win."""
    given = environ.get("XLA_FLAGS", "").split()
    environ["XLA_FLAGS"] = " ".join([flag for flag in xla_flags() if flag not in given] + given)
    # A compiled program is kept in a file for the other workers and for the next run.
    environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(PROGRAMS))
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # A tenth of the time of compiling goes into the source lines of each operation.
    environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    # The workers use all CPUs already.
    environ.setdefault("OPENBLAS_NUM_THREADS", "1")
