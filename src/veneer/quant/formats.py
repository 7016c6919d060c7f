"""Formats: how a number becomes few bits. One row of one table each.

A value is stored as a code and its tile's scale. For an integer format `value ≈ code * scale`; for
a codebook format `value ≈ codebook[code] * scale`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

# NormalFloat: quantiles of N(0, 1), normalised to [-1, 1], with an exact zero.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclasses.dataclass(frozen=True)
class Format:
    """How the values of a tile, divided by its scale, become codes of a few bits.

    **Arguments:**

    - `name`: what `quantize` calls it, its `qtype`.
    - `bits`: of a code as stored. Two codes of 4 bits share a byte.
    - `code_dtype`: the dtype of the unpacked codes, `QArray.qvalue`.
    - `bound`: what the largest magnitude of a tile is scaled to, so `scale = absmax / bound`.
    - `codebook`: the value of each code in ascending order, or None where a code is its own value.
    - `source`: where the numbers come from.

    >>> import veneer as vn
    >>> nf4 = vn.quant.FORMATS["nf4"]
    >>> nf4.bits, nf4.code_dtype.name, nf4.storage_dtype.name, nf4.codebook[::5]
    (4, 'uint4', 'uint8', (-1.0, -0.18477343022823334, 0.24611230194568634, 1.0))
    """

    name: str
    bits: int
    code_dtype: np.dtype
    bound: float
    codebook: tuple[float, ...] | None
    source: str

    @property
    def storage_dtype(self) -> np.dtype:
        """The dtype of the stored array: uint8 where two codes share a byte."""
        return np.dtype(np.uint8) if self.bits == 4 else self.code_dtype

    @property
    def signed(self) -> bool:
        """Whether codes are below zero, too."""
        return jnp.issubdtype(self.code_dtype, jnp.signedinteger)

    def encode(self, x: jax.Array) -> jax.Array:
        """Returns the codes of values already divided by their scale; a byte each, of any shape.

        Integers are rounded half to even and clipped; a codebook gives the nearest of its values.
        NaN becomes the code of 0, and is left to the scale to tell.
        """
        x = jnp.where(jnp.isnan(x), 0, x)
        if self.codebook is None:
            low, high = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
            return jnp.clip(jnp.round(x), low, high).astype(jnp.int8)
        # Adding up comparisons needs no array of [..., 16], compiled or not.
        code = jnp.zeros(x.shape, jnp.uint8)
        for below, above in zip(self.codebook, self.codebook[1:], strict=False):
            code += x > (below + above) / 2
        return code

    def decode(self, codes: ArrayLike, dtype: DTypeLike) -> jax.Array:
        """Returns the values that codes stand for, before the scale; in `dtype`, of any shape."""
        if self.codebook is None:
            return jnp.asarray(codes).astype(dtype)
        return jnp.asarray(self.codebook, dtype).at[codes].get(mode="promise_in_bounds")


def _integer(bits: int, code_dtype: DTypeLike) -> Format:
    # Half a step beyond the largest code: that code's bucket reaches so far, and is used in full.
    bound = 2 ** (bits - 1) - 0.5
    source = "symmetric, scale = absmax / (qmax + 1/2), as Qwix 0.1.8"
    return Format(f"int{bits}", bits, np.dtype(code_dtype), bound, None, source)


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        _integer(8, jnp.int8),
        _integer(4, jnp.int4),
        Format("nf4", 4, np.dtype(jnp.uint4), 1.0, _NF4, "QLoRA, arXiv 2305.14314, appendix E"),
    )
}


def get_format(qtype: DTypeLike) -> Format:
    """Returns the format of this name, or of this dtype's name.

    **Raises:** `ValueError`, naming the known formats, where there is none.

    >>> import veneer as vn
    >>> vn.quant.get_format("nf4").bits, vn.quant.get_format("int8").bound
    (4, 127.5)
    """
    name = qtype if isinstance(qtype, str) else jnp.dtype(qtype).name
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; the formats are {', '.join(FORMATS)}")
    return FORMATS[name]
