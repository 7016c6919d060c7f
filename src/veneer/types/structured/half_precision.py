"""Floats of 16 bits or fewer are computed with in f32, as XLA's own matmuls accumulate them."""

from typing import Any

import jax.numpy as jnp


def computing_dtype(*operands: Any) -> Any:
    """The dtype to compute in: the one operands promote to, or f32 if that is a narrower float."""
    dtype = jnp.result_type(*operands)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype("float32") if narrow else dtype
