"""The vector instruction set (ISA) of kernels in this process, and the size of its vectors.

The environment variable `VENEER_KERNELS_ISA` names it. Without the variable, it is the one that
`veneer doctor --choose` measured to be the fastest on this machine, or else the best of its CPU.
"""

import os

from . import cache
from .machine_code import cpu_features

#: The features that a CPU must have for each ISA, by their names in LLVM. The best ISA is first.
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
    """Return the ISA of this name, or without a name the best that this CPU has.

    **Raises:** `ValueError` if the name is unknown, or if this CPU does not have the ISA.

    >>> from veneer.native.isa import select
    >>> select("portable")
    'portable'
    """
    if not name:
        return available()[0]
    if name not in available():
        problem = "is not supported by this CPU" if name in ISAS else "is unknown"
        names = ", ".join(available())
        raise ValueError(f"VENEER_KERNELS_ISA={name!r} {problem}; this CPU has {names}")
    return name


def available() -> list[str]:
    """Return the ISAs that this CPU has, the best first.

    >>> from veneer.native.isa import available
    >>> available()[-1]
    'portable'
    """
    features = cpu_features()
    return [isa for isa, needed in ISAS.items() if needed <= features]


_saved = cache.saved_isa()
ISA = select(os.environ.get("VENEER_KERNELS_ISA") or (_saved if _saved in available() else None))
#: The number of f32 or int32 in a vector.
LANES = 16 if ISA.startswith("avx512") else 8 if ISA == "avx2" else 4
#: True for the ISAs of Arm; the number of vector registers; true if f16 converts to f32.
IS_NEON = ISA.startswith("neon")
REGISTERS = 32 if IS_NEON or LANES == 16 else 16
CONVERTS_F16 = IS_NEON or LANES == 16
#: True for ISAs with dot products of four bytes, and of two bf16.
HAS_VNNI, HAS_BF16 = ISA in ("avx512bf16", "avx512vnni"), ISA == "avx512bf16"
#: True if the CPU multiplies 8x8 bit matrices.
HAS_GFNI = HAS_VNNI and "gfni" in cpu_features()
