"""MXFP4 as gpt-oss has it: stacks of matrices in e2m1, a power of two for each 32 values.

`<name>_blocks` u8 `[..., out, groups, 16]`, the first of two values in the low half of a byte, and
`<name>_scales` u8 `[..., out, groups]`, the exponent plus 127. The dense checkpoint has the
transpose, `[..., in, out]`, under `<name>`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...quant import Packing
from .source import StoredTensors, Weight, quantised

E8M0 = np.dtype(jnp.float8_e8m0fnu)


def weights(source: StoredTensors) -> Iterator[Weight]:
    """The weights of a folder like gpt-oss's."""
    for name in source.modules("_blocks"):
        yield _weight(source, name)


def _weight(source: StoredTensors, name: str) -> Weight:
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    header = source.header(blocks)
    *lead, out, groups, width = source.shape(
        blocks, rank=max(len(header.shape), 3), dtypes=("uint8",)
    )
    if width != 16:
        raise source.error(blocks, f"has blocks of {width} bytes, not of 16")
    source.check(scales, header.shape[:-1], ("uint8", "float8_e8m0fnu"), blocks)
    dtype = source.dense_dtype("float8_e8m0fnu")
    read = partial(_read, source, name, dtype)
    return Weight(name, (*lead, groups * 32, out), dtype, (blocks, scales), read)


def _read(source: StoredTensors, name: str, dtype: str) -> Any:
    blocks = source.read(f"{name}_blocks")
    packed = blocks.reshape(*blocks.shape[:-2], -1).swapaxes(-1, -2)
    scale = source.read(f"{name}_scales").view(E8M0).swapaxes(-1, -2)
    packing = Packing(-2, 2 * packed.shape[-2])
    return quantised(packed, scale, qtype="mxfp4", packing=packing, dtype=dtype)
