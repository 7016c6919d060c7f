"""The CPU that is compiled for: this one, or what Numba's settings say of it.

Numba reads `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES`. What it compiles, LLVM turns into machine
code, which has to be for the same CPU.
"""

import os
import platform
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from . import machine_code


def target_machine() -> Any:
    """Returns LLVM's machine that compiles for the CPU."""
    name, features = _settings()
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    return machine_code.target_machine(name or llvm.get_host_cpu_name(), features)


def features() -> set[str]:
    """Returns what the CPU is known to have, by LLVM's names of features."""
    name, features = _settings()
    # Each CPU of 64 bits of Arm's has vectors.
    always = {"neon"} if platform.machine().lower() in ("aarch64", "arm64") else set[str]()
    if features is not None:
        return always | {f[1:] for f in features.split(",") if f.startswith("+")}
    if name not in (None, "host"):
        return always  # of another CPU nothing is known but its name
    return always | {feature for feature, has in llvm.get_host_cpu_features().items() if has}


def _settings() -> tuple[str | None, str | None]:
    """The name and the features that Numba is told; None where it is told nothing."""
    if "numba" not in sys.modules and not Path(".numba_config.yaml").exists():
        name = os.environ.get("NUMBA_CPU_NAME")  # as Numba would, which takes long to be imported
        of_generic = "" if (name or "").lower() == "generic" else None
        return name, os.environ.get("NUMBA_CPU_FEATURES", of_generic)
    from numba.core import config

    settings = vars(config)  # which names no settings for mypy to know
    return settings["CPU_NAME"], settings["CPU_FEATURES"]
