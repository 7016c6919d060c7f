"""Calibration: from the values of a tile to its scale."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .formats import Format

# From values and the axes of a tile to the magnitude that the format's bound stands for.
CALIBRATIONS: dict[str, Callable[[jax.Array, tuple[int, ...]], jax.Array]] = {
    "absmax": lambda x, axes: jnp.max(jnp.abs(x), axis=axes, initial=0),
}


def check_calibration(method: str) -> None:
    """Raises `ValueError`, naming the known methods, where there is none of this name."""
    if method not in CALIBRATIONS:
        raise ValueError(
            f"unknown calibration_method {method!r}; the methods are {', '.join(CALIBRATIONS)}"
        )


def calibrate(
    tiles: jax.Array, axes: tuple[int, ...], format: Format, method: str, dtype: DTypeLike
) -> jax.Array:
    """Returns the scale of each tile, as it is stored: in `dtype`.

    A tile of zeros has scale 1. A tile with a NaN or an infinity in it, or with a scale too large
    to divide by, has scale NaN: it is seen, and the other tiles are not touched.

    **Arguments:**

    - `tiles`: values of at least f32, from which `axes`, those of a tile, are reduced.
    - `format`, `method`: whose bound, and which of `CALIBRATIONS`.
    - `dtype`: of the scale.
    """
    magnitude = CALIBRATIONS[method](tiles, axes)
    # XLA's reduction to a maximum drops NaN on CPU, in arrays of some size.
    magnitude = jnp.where(jnp.isnan(tiles).any(axes), jnp.nan, magnitude)
    scale = (magnitude / format.bound).astype(dtype)
    # Compared where it is divided by: a scale may be subnormal in f16, and not yet in f32. XLA
    # divides by multiplying with the reciprocal, so that must be a normal number, too.
    wide = scale.astype(tiles.dtype)
    tiny = jnp.finfo(wide.dtype).tiny
    return jnp.where(wide < tiny, 1, jnp.where(wide <= 1 / tiny, scale, jnp.nan))
