"""Vector instructions on blocks of registers, and the instruction set (ISA) of this process.

Only this package knows the instructions of each CPU. Kernels know the number of lanes of a vector,
and the number of registers.

    blocks          the type of a block, the decorator of instructions, and emitters of LLVM IR
    floats          f32 and pairs of bf16: loads, stores, arithmetic, reductions
    integers        int32 and bytes: dot products of four bytes, lookup tables, orders of bytes

The environment variable `VENEER_KERNELS_ISA` names the ISA. Without the variable, it is the ISA
that `veneer doctor --choose` measured to be the fastest on this machine, or else the best of its
CPU.
"""

import os

from .. import cache
from ..machine_code import cpu_features

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


def select_isa(name: str | None = None) -> str:
    """Return the ISA of this name, or without a name the best that this CPU has.

    **Raises:** `ValueError` if the name is unknown, or if this CPU does not have the ISA.

    >>> from veneer.native.simd import select_isa
    >>> select_isa("portable")
    'portable'
    """
    if not name:
        return available_isas()[0]
    if name not in available_isas():
        problem = "is not supported by this CPU" if name in ISAS else "is unknown"
        names = ", ".join(available_isas())
        raise ValueError(f"VENEER_KERNELS_ISA={name!r} {problem}; this CPU has {names}")
    return name


def available_isas() -> list[str]:
    """Return the ISAs that this CPU has, the best first.

    >>> from veneer.native.simd import available_isas
    >>> available_isas()[-1]
    'portable'
    """
    features = cpu_features()
    return [isa for isa, needed in ISAS.items() if needed <= features]


def _choose_isa() -> str:
    if name := os.environ.get("VENEER_KERNELS_ISA"):
        return select_isa(name)
    saved = cache.saved_isa()
    return saved if saved in available_isas() else select_isa()


ISA = _choose_isa()
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
