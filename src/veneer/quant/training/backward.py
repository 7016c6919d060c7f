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
    """A recipe for one product of the backward pass, which multiplies a gradient with an operand.

    `y = x @ w` has two: `g @ w.T`, the gradient of the input, contracts the channels of `y`, and
    `x.T @ g`, the gradient of the weight, contracts its rows. `Rule.grad_input` and
    `Rule.grad_weight` take one each.

    **Arguments:**

    - `qtype`: the format of the gradient `g`. None leaves it dense.
    - `tile_size`: the number of values of `g` along the last contracted axis that share a scale. A
      float is a fraction of the axis. `{axis: size}` makes blocks. None is the whole axis, or the
      tile of the format. The other operand has the same tiles, along its own axes, if it is
      quantized for this product.
    - `calibration_method`: the method for `g`. None is the default of the format.
    - `residual_qtype`: the other operand, which the forward pass keeps (see the table).
    - `stochastic`: round `g` stochastically if its weight has a key from
      `vn.quant.with_stochastic_rounding`.

    | `residual_qtype` | the other operand |
    |---|---|
    | "forward" | the codes of the forward pass, or new codes if these have scales along that axis |
    | None | the array before quantization |
    | a format | that array, quantized to this format |

    **Raises:**

    - `ValueError` for an unknown format or method, or a tile that is out of range or does not fit
      the format.
    - `TypeError` for a tile that is not a number.

    >>> import veneer as vn
    >>> product = vn.quant.BackwardProduct("float8_e5m2", tile_size=128)
    >>> rule = vn.quant.Rule(".*", "int8", act_qtype="int8", grad_weight=product)
    >>> rule.grad_weight
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
                    "calibration_method needs a qtype, because qtype=None leaves the gradient dense"
                )
            return
        object.__setattr__(self, "qtype", format.name)
        if self.calibration_method is not None:
            check_calibration(self.calibration_method, format)

    @property
    def reuses_forward(self) -> bool:
        """Return whether the other operand is the one that the forward pass multiplied."""
        return self.residual_qtype == FORWARD

    def __repr__(self) -> str:
        """Return the call that creates it."""
        _, *others = (f for f in dataclasses.fields(self) if f.init)
        values = ((field, getattr(self, field.name)) for field in others)
        values = ((f, dict(value) if isinstance(value, tuple) else value) for f, value in values)
        parts = [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return f"BackwardProduct({', '.join([repr(self.qtype), *parts])})"
