"""Environment variables of a test run. Set them before JAX and NumPy are imported.

Most of the test time is XLA compilation, and these variables shorten it. Processes that a test
starts, and the workers of pytest-xdist, inherit them.
"""

from collections.abc import MutableMapping
from importlib.metadata import version
from pathlib import Path

PROGRAMS = Path(__file__).parents[2] / ".pytest_cache" / "programs"

# jaxlib 0.10 can still use XLA's former code generators, which compile in a third of the time. They
# round some conversions and sums differently, and have no `clamp` of bools. Tests that depend on
# these use the fixture `current_emitters`.
EMITTERS = "xla_cpu_use_fusion_emitters"
HAS_FORMER_EMITTERS = version("jaxlib").startswith("0.10.")


def xla_flags() -> list[str]:
    former = [f"--{EMITTERS}=false"] if HAS_FORMER_EMITTERS else []
    return ["--xla_backend_optimization_level=0", *former]


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Set the variables that the user has not set. The user's XLA flags come last and win."""
    user_flags = environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in xla_flags() if flag not in user_flags] + user_flags
    environ["XLA_FLAGS"] = " ".join(flags)
    # A compiled program is kept in a file for the other workers and for the next run.
    environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(PROGRAMS))
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # Recording the source lines of each operation takes a tenth of the compile time.
    environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    # The workers use all CPUs already.
    environ.setdefault("OPENBLAS_NUM_THREADS", "1")
