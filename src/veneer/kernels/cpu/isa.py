"""Which instructions the kernels of this process use, and so how many numbers they take at once.

`VENEER_KERNELS_ISA` names one of `ISAS`; without it, it is the best that this CPU has.
"""

import os

import llvmlite.binding
from numba.core import config

#: What each needs of a CPU, by LLVM's names of features; the best first.
ISAS = {
    "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl"},
    "avx2": {"avx2", "fma"},
    "portable": set[str](),
}


def chosen(name: str | None = None) -> str:
    """Returns the ISA of this name, or the best that this CPU has.

    **Raises:** `ValueError` for an unknown name, and for one that this CPU does not have.

    >>> from veneer.kernels.cpu.isa import chosen
    >>> chosen("portable")
    'portable'
    """
    available = [isa for isa, needs in ISAS.items() if needs <= _features()]
    if not name:
        return available[0]
    if name not in available:
        what = "is not one that this CPU has" if name in ISAS else "is unknown"
        raise ValueError(f"VENEER_KERNELS_ISA={name!r} {what}; this CPU has {', '.join(available)}")
    return name


def _features() -> set[str]:
    """What Numba compiles for, which its own settings may have narrowed."""
    settings = vars(config)
    if settings["CPU_FEATURES"] is not None:
        return {name[1:] for name in settings["CPU_FEATURES"].split(",") if name.startswith("+")}
    if settings["CPU_NAME"] not in (None, "host"):
        return set()  # of another CPU nothing is known but its name
    return {name for name, has in llvmlite.binding.get_host_cpu_features().items() if has}


ISA = chosen(os.environ.get("VENEER_KERNELS_ISA"))
#: How many f32 or int32 a vector holds.
LANES = {"avx512vnni": 16, "avx512": 16, "avx2": 8, "portable": 4}[ISA]
