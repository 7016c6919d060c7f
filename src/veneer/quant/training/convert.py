"""`convert`: the way out of training."""

from typing import Any

import jax

from ..activations import ActivationQuantized
from .fake_quantized import FakeQuantized


def convert(params: Any) -> Any:
    """The tree with what has been trained quantised: a `QArray` for each `FakeQuantized`.

    A program gives with it what it gave in training, to rounding: an `act_qtype` is kept, in an
    `ActivationQuantized`. Master weights are gone, and with them 4 to 16 times the bytes.

    **Arguments:**

    - `params`: any pytree.

    >>> import jax.numpy as jnp, veneer as vn
    >>> params = {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}
    >>> rules = [vn.quant.Rule("kernel", "int4")]
    >>> trained = vn.quant.quantize_tree(params, rules, train=True)
    >>> vn.quant.convert(trained)["kernel"].nbytes, trained["kernel"].nbytes
    (32, 128)
    """
    is_ours = lambda x: isinstance(x, FakeQuantized)
    return jax.tree.map(lambda x: _converted(x) if is_ours(x) else x, params, is_leaf=is_ours)


def _converted(w: FakeQuantized) -> Any:
    quantized = w.quantize()
    if w.act_qtype is None:
        return quantized
    if isinstance(w.act_tile_size, tuple):
        raise ValueError(
            f"act_tile_size={dict(w.act_tile_size)} makes blocks of activations, which is for "
            "training: what it becomes has tiles along the axis that a product contracts"
        )
    return ActivationQuantized(
        quantized,
        qtype=w.act_qtype,
        calibration_method=w.act_calibration_method,
        tile_size=w.act_tile_size,
        contracting=tuple(axis - w.ndim for axis in w.tile_axes),
    )
