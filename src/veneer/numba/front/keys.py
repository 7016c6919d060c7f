"""Typed keys of random numbers: in programs, a number of 64 bits, of which the high ones are first.

So whatever moves entries, moves keys. Outside of programs a key is its data, two uint32.
"""

from typing import Any

import jax
import numpy as np

#: The dtype of keys of threefry2x32, as JAX writes it; those of other algorithms are not supported.
_THREEFRY = "key<fry>"


def is_key(x: Any) -> bool:
    """Whether an array, or what stands for one, is of typed keys."""
    return jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


def known_aval(aval: Any) -> Any:
    """The aval of an array in a program: that of the numbers, if it is of keys."""
    if str(getattr(aval, "dtype", "")) != _THREEFRY:
        return aval
    return jax.ShapeDtypeStruct(aval.shape, np.dtype(np.uint64))


def known_params(equation: Any) -> dict[str, Any]:
    """The parameters of an equation in a program: what fills gaps between keys is of numbers."""
    params = equation.params
    if params.get("fill_value") is None or not is_key(equation.outvars[0].aval):
        return params
    half = int(params["fill_value"])  # of each of the two uint32
    return params | {"fill_value": half << 32 | half}


def numbers(x: Any) -> Any:
    """A constant of a program as the numbers of keys, if it is of those."""
    if not is_key(x):
        return x
    data = np.asarray(jax.random.key_data(x)).astype(np.uint64)
    return data[..., 0] << np.uint64(32) | data[..., 1]


def data(x: Any) -> Any:
    """An argument or a result as the data of keys, if it is of those: `uint32[..., 2]`."""
    if not is_key(x):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, x)
    return jax.random.key_data(x)


def like(leaf: Any, example: Any) -> Any:
    """Data of keys as keys, if the example was of those."""
    if not is_key(example):
        return leaf
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(example))
