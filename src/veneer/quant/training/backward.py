"""`BackwardProduct`, the options for quantizing a product of the backward pass."""

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
    """The options for quantizing one product of the backward pass, for `vn.quant.Rule`.

    The backward pass of `y = x @ w` multiplies the gradient `g` of `y` by each operand:

    | argument of `Rule` | product | contracted axis of `g` |
    |---|---|---|
    | `grad_input` | `g @ w.T`, the gradient of `x` | the output channels |
    | `grad_weight` | `x.T @ g`, the gradient of `w` | the rows of `x` |

    **Arguments:**

    - `qtype`: the format of `g`. None leaves `g` dense.
    - `tile_size`: the number of values of `g` along the last contracted axis that share a scale. A
      float is a fraction of the axis. `{axis: size}` sets sizes for several axes of `g`. None means
      the tile size of the format if it has one, and otherwise the whole axis. If the other operand
      is quantized again for this product, it gets the same tile size.
    - `calibration_method`: the method that chooses the scales of `g`, as in `vn.quant.quantize`.
      None selects the default method of the format.
    - `residual_qtype`: how this product gets the other operand, `w` or `x`, from the forward pass
      (see the table).
    - `stochastic`: if True, round `g` stochastically with the key that
      `vn.quant.with_stochastic_rounding` sets. Without a key, `g` is rounded to nearest.

    | `residual_qtype` | the other operand |
    |---|---|
    | "forward" | the codes of the forward pass if possible (see below) |
    | None | the array before quantization |
    | a format | the array, quantized to this format |

    With "forward", this product cannot use the codes of the other operand in two cases:

    - The format of the other operand has a codebook, such as nf4.
    - The other operand has one scale per index along an axis that this product contracts. It also
      has zero points, or tiles along another axis.

    The other operand is then quantized again, in the format of the forward pass. With `qtype=None`,
    the codes of the forward pass are always used.

    **Raises:**

    - `ValueError` if a format or a method is unknown, or if there is a method but no `qtype`.
    - `ValueError` if an integer tile size is below 1, if a fraction is 0, negative or above 1, or
      if the format has another fixed tile size.
    - `TypeError` if a tile size is not a number.

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
            pairs = tuple(sorted(self.tile_size.items()))  # Options must be hashable.
            object.__setattr__(self, "tile_size", pairs)
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
        """True if `residual_qtype` is "forward"."""
        return self.residual_qtype == FORWARD

    def __repr__(self) -> str:
        """Return the call that creates this object, without arguments that have their defaults."""
        arguments = [repr(self.qtype)]
        _, *keyword_fields = dataclasses.fields(self)
        for field in keyword_fields:
            value = getattr(self, field.name)
            if value != field.default:
                value = dict(value) if isinstance(value, tuple) else value
                arguments.append(f"{field.name}={value!r}")
        return f"BackwardProduct({', '.join(arguments)})"
