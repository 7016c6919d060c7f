"""The CPU that code is compiled for, and object files loaded into this process by LLVM alone.

The CPU is this one, unless Numba's settings `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` name another.
"""

import os
import platform
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from .cache import COMPILING


def target_machine() -> Any:
    """Return the LLVM target machine of the CPU that code is compiled for."""
    name, features = _numba_settings()
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    return _create_target_machine(name or llvm.get_host_cpu_name(), features)


def cpu_features() -> set[str]:
    """Return the features of the CPU that code is compiled for, by their names in LLVM."""
    name, features = _numba_settings()
    # Every 64-bit Arm CPU has NEON.
    always = {"neon"} if platform.machine().lower() in ("aarch64", "arm64") else set[str]()
    if features is not None:
        return always | {f[1:] for f in features.split(",") if f.startswith("+")}
    if name not in (None, "host"):
        return always  # LLVM can list only the features of the host
    return always | {feature for feature, has in llvm.get_host_cpu_features().items() if has}


def load(object_code: bytes, *names: str) -> list[int]:
    """Load an object file for the rest of the process.

    Return the addresses of the functions in it that have these `names`.
    """
    with COMPILING:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _create_target_machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(object_code))
        engine.finalize_object()
        addresses = [engine.get_function_address(name) for name in names]
        # Otherwise Python would unload the code at exit, while threads of XLA may still run it.
        engine.detach()
        return addresses


def register_symbol(name: str, address: int) -> None:
    """Let object files that are loaded later call the function at `address` by the name `name`."""
    with COMPILING:
        llvm.add_symbol(name, address)


def _create_target_machine(cpu: str = "", features: str = "") -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=cpu,
        features=features,
        opt=3,
        # As in Numba: code that MCJIT loads needs static relocation on x86.
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def _numba_settings() -> tuple[str | None, str | None]:
    """Return the name and the features of the CPU in Numba's settings. None means unset."""
    if "numba" not in sys.modules and not Path(".numba_config.yaml").exists():
        # Read the variables as Numba does, because to import Numba takes long.
        name = os.environ.get("NUMBA_CPU_NAME")
        default = "" if (name or "").lower() == "generic" else None
        return name, os.environ.get("NUMBA_CPU_FEATURES", default)
    from numba.core import config

    settings = vars(config)  # a dict, because mypy does not know the attributes
    return settings["CPU_NAME"], settings["CPU_FEATURES"]
