"""Object files, loaded with LLVM alone: what is compiled already needs no Numba."""

from typing import Any

import llvmlite.binding as llvm

from .forks import COMPILING


def target_machine(cpu: str = "", features: str = "") -> Any:
    """Returns LLVM's machine that compiles for a CPU, or that loads what was compiled."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=cpu,
        features=features,
        opt=3,
        # As Numba has it: code that is loaded by LLVM needs static relocation on x86.
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def load(object_code: bytes, *names: str) -> list[int]:
    """Returns the addresses of functions of an object file, which stays loaded for good."""
    with COMPILING:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(object_code))
        engine.finalize_object()
        addresses = [engine.get_function_address(name) for name in names]
        engine.detach()  # or its code would go as Python ends, while XLA's threads may still run it
        return addresses


def name_address(name: str, address: int) -> None:
    """Lets object files that are loaded from now on call a function by name."""
    with COMPILING:
        llvm.add_symbol(name, address)


def host() -> str:
    """Returns what LLVM calls this CPU, with its features."""
    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
