"""Which vector instructions are used in this process, and so how many numbers they take at once.

`VENEER_KERNELS_ISA` names one of `ISAS`; without it, it is the one that was measured to be the
fastest on this machine, or else the best that its CPU has.
"""

import os

from . import cache
from .machine_code import cpu_features

#: What each needs of a CPU, by LLVM's names of features; the best first.
ISAS = {
    "avx512bf16": {"avx512f", "avx512bw", "avx512vl", "avx512vnni", "avx512bf16"},
    "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl"},
    "avx2": {"avx2", "fma"},
    "neon_i8mm": {"neon", "dotprod", "i8mm"},
    "neon_dotprod": {"neon", "dotprod"},
    "neon": {"neon"},
    "portable": set[str](),
}


def select(name: str | None = None) -> str:
    """Returns the ISA of this name, or the best that this CPU has.

    **Raises:** `ValueError` for an unknown name, and for one that this CPU does not have.

    >>> from veneer.native.isa import select
    >>> select("portable")
    'portable'
    """
    if not name:
        return available()[0]
    if name not in available():
        what = "is not supported by this CPU" if name in ISAS else "is unknown"
        has = ", ".join(available())
        raise ValueError(f"VENEER_KERNELS_ISA={name!r} {what}; this CPU has {has}")
    return name


def available() -> list[str]:
    """Returns the ISAs that this CPU has, the best first.

    >>> from veneer.native.isa import available
    >>> available()[-1]
    'portable'
    """
    has = cpu_features()
    return [isa for isa, needs in ISAS.items() if needs <= has]


def _measured() -> str | None:
    """What was measured to be the fastest, if this process may use it."""
    name = cache.saved_isa()
    return name if name in available() else None


ISA = select(os.environ.get("VENEER_KERNELS_ISA") or _measured())
#: How many f32 or int32 a vector holds.
LANES = 16 if ISA.startswith("avx512") else 8 if ISA == "avx2" else 4
#: Whether it is one of Arm's; how many vectors registers hold; and whether it makes f32 of f16.
IS_NEON = ISA.startswith("neon")
REGISTERS = 32 if IS_NEON or LANES == 16 else 16
CONVERTS_F16 = IS_NEON or LANES == 16
#: Whether it multiplies bytes, and adds up four products; and pairs of bf16.
HAS_VNNI, HAS_BF16 = ISA in ("avx512bf16", "avx512vnni"), ISA == "avx512bf16"
#: Whether it multiplies matrices of 8 x 8 bits.
HAS_GFNI = HAS_VNNI and "gfni" in cpu_features()
