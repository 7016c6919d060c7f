"""`Codes`: what a kernel is told of the numbers in a stored matrix."""

import dataclasses

from .cpu.kinds import BYTES, LOOKUP_BITS


@dataclasses.dataclass(frozen=True)
class Codes:
    """How the codes of a matrix `[R, C]` are stored, and what each is worth before its scale.

    Codes of 8 bits are numbers of a dtype. Narrower ones share bytes with their neighbours along C,
    the first in the lowest bits, and are looked up.

    **Arguments:**

    - `bits`: of a code: 1, 2, 4 or 8.
    - `dtype`: of codes of 8 bits: int8, uint8, float8_e4m3fn or float8_e5m2; else "".
    - `values`: what each narrower code is worth, as the field that is stored, `2**bits` of them.

    **Raises:** `ValueError` where these do not fit together.

    >>> from veneer.kernels.codes import Codes
    >>> Codes(2, values=(0.0, 1.0, -2.0, -1.0)).kind
    'lookup2'
    >>> Codes(8, "int8").is_integer
    True
    """

    bits: int
    dtype: str = ""
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        narrow = (
            self.bits in LOOKUP_BITS.values()
            and not self.dtype
            and len(self.values) == 2**self.bits
        )
        if not narrow and not (self.bits == 8 and self.dtype in BYTES and not self.values):
            raise ValueError(
                f"no kernel has codes of {self.bits} bits with dtype {self.dtype!r} and "
                f"{len(self.values)} values: 8 bits have one of {', '.join(BYTES)}, and 1, 2 and "
                "4 have no dtype and a value a code"
            )

    @property
    def kind(self) -> str:
        """What kernels are named after: the dtype, or lookup1, lookup2, lookup4."""
        return self.dtype or f"lookup{self.bits}"

    @property
    def is_integer(self) -> bool:
        """Whether every code is worth an integer that int8 or uint8 holds."""
        if self.dtype:
            return self.dtype in ("int8", "uint8")
        return all(value == int(value) and -128 <= value <= 127 for value in self.values)

    @property
    def table(self) -> tuple[float, ...]:
        """What fields are worth, repeated to 16 entries; zeros where nothing is looked up."""
        return self.values * (16 // len(self.values)) if self.values else (0.0,) * 16

    def row_bytes(self, columns: int) -> int:
        """Returns the bytes that a row of so many codes takes."""
        return -(-columns * self.bits // 8)
