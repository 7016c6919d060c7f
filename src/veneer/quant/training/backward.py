"""`BackwardProduct`: how a product of the backward pass is quantised."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..conversion.calibration import check_calibration
from ..conversion.scale_axes import check_tile_size
from ..formats import get_format

FORWARD = "forward"


@dataclasses.dataclass(frozen=True)
class BackwardProduct:
    """How a product of the backward pass is quantised: that of the gradient with an operand.

    Of `y = x @ w` there are two: `g @ w.T` is the gradient of the input, which sums over the
    channels of `y`, and `x.T @ g` that of the weight, which sums over its rows.

    **Arguments:**

    - `qtype`: the format of the gradient `g`; None leaves it as it is.
    - `tile_size`: how many values of `g`, along the last axis that the product sums over, share a
      scale; a float is the share of that axis. `{axis: size}` makes blocks, of the axes of `g`.
      None is all of them, or the tile that the format is defined for. The other operand has the
      same, along its own axes, where it is quantised for this product.
    - `calibration_method`: of `g`; None is the format's own.
    - `residual_qtype`: what the other operand is, which the forward pass keeps. "forward": as it
      was multiplied there, by its codes; where these are of no use for a product on codes, since
      tiles, zero points or a codebook go with the other axis, it is quantised anew in their format.
      None: as it was before it was quantised. Or a format, in which that is quantised.
    - `stochastic`: whether `g` is rounded at random where its weight has a key, by
      `vn.quant.with_stochastic_rounding`; or to nearest all the same.

    **Raises:** `ValueError` for an unknown format or method, a tile below 1, a share above 1, and a
    tile that is not the format's; `TypeError` for a tile that is no number.

    >>> import veneer as vn
    >>> vn.quant.Rule(
    ...     ".*kernel", "int8", act_qtype="int8", grad_qtype="int8",
    ...     grad_weight=vn.quant.BackwardProduct("float8_e5m2", tile_size=128),
    ... ).grad_weight
    BackwardProduct('float8_e5m2', tile_size=128)
    """

    qtype: str | None
    _: dataclasses.KW_ONLY
    tile_size: int | np.integer | float | Mapping[int, int | float] | tuple[Any, ...] | None = None
    calibration_method: str | None = None
    residual_qtype: str | None = FORWARD
    stochastic: bool = True

    def __post_init__(self) -> None:
        format = None if self.qtype is None else get_format(self.qtype)
        check_tile_size(self.tile_size, format, by_axis=True)
        if isinstance(self.tile_size, Mapping):
            pairs = tuple(sorted(self.tile_size.items()))
            object.__setattr__(self, "tile_size", pairs)  # hashable
        if self.residual_qtype not in (None, FORWARD):
            object.__setattr__(self, "residual_qtype", get_format(self.residual_qtype).name)
        if format is None:
            if self.calibration_method is not None:
                raise ValueError(
                    "calibration_method says how the gradient is quantised, which qtype=None "
                    "leaves as it is"
                )
            return
        object.__setattr__(self, "qtype", format.name)
        if self.calibration_method is not None:
            check_calibration(self.calibration_method, format)

    @property
    def reuses_forward(self) -> bool:
        """Whether the other operand is what the forward pass multiplied."""
        return self.residual_qtype == FORWARD

    def __repr__(self) -> str:
        """Returns the call that makes it."""
        _, *others = (f for f in dataclasses.fields(self) if f.init)
        values = ((field, getattr(self, field.name)) for field in others)
        values = ((f, dict(value) if isinstance(value, tuple) else value) for f, value in values)
        parts = [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return f"BackwardProduct({', '.join([repr(self.qtype), *parts])})"
