"""`convert`: the way out of training."""

from typing import Any

import jax

from ..._core.surface.arguments import check_parameters
from ..weights.activations import ActivationQuantized
from .fake_quantized import FakeQuantized


def convert(params: Any) -> Any:
    """Quantize the weights of a trained model.

    Each `FakeQuantized` becomes a `QArray`. If it has an `act_qtype`, an `ActivationQuantized`
    wraps the `QArray`. The model gives the same results as in training, up to rounding. The
    full-precision weights are dropped.

    **Arguments:**

    - `params`: any pytree.

    **Returns:** a tree like `params`. A `FakeQuantized` without a `qtype` becomes a dense array.
    Leaves of other types are unchanged.

    **Raises:** `ValueError` if `params` holds no arrays, if `act_tile_size` of a weight is a dict,
    which only training supports, or if a weight was sliced along its `tile_axis`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> params = {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}
    >>> rules = [vn.quant.Rule("kernel", "int4")]
    >>> trained = vn.quant.quantize_tree(params, rules, train=True)
    >>> vn.quant.convert(trained)["kernel"].nbytes, trained["kernel"].nbytes
    (32, 128)
    """
    check_parameters(params, "convert(params)")
    is_ours = lambda x: isinstance(x, FakeQuantized)
    return jax.tree.map(lambda x: _converted(x) if is_ours(x) else x, params, is_leaf=is_ours)


def _converted(w: FakeQuantized) -> Any:
    quantized = w.quantize()
    if w.act_qtype is None:
        return quantized
    if isinstance(w.act_tile_size, tuple):
        raise ValueError(
            f"act_tile_size={dict(w.act_tile_size)} makes blocks of activations, which only "
            "training supports. Replace it with a number before convert"
        )
    return ActivationQuantized(
        quantized,
        qtype=w.act_qtype,
        calibration_method=w.act_calibration_method,
        tile_size=w.act_tile_size,
        contracting=tuple(axis - w.ndim for axis in w.tile_axes),
    )
