"""Options of rules for training: `BackwardProduct` for gradients, and N:M sparsity for weights.

With N:M sparsity, n of each group of m neighboring weights are kept, and the others are zero.
"""

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ...types.nm_sparse import largest_positions
from ..conversion.calibration import check_calibration
from ..formats import get_format
from ..formats.tiles import Shape, check_tile_size

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
        return describe_call(self)


def describe_call(options: Any) -> str:
    """Return the call that creates `options`, a dataclass, as a text.

    Keywords that have their default values are left out.
    """
    arguments = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if not field.kw_only:
            arguments.append(repr(value))
        elif value != field.default:
            # A dict is stored as a tuple of pairs, because the options must be hashable.
            is_dict = field.name == "tile_size" and isinstance(value, tuple)
            arguments.append(f"{field.name}={dict(value) if is_dict else value!r}")
    return f"{type(options).__name__}({', '.join(arguments)})"


# `(n, m)`: n of each m neighbors are kept. `(n, m, block)`: n of each m blocks of neighbors.
Sparsity = tuple[int, int] | tuple[int, int, int]


def check_sparsity(sparsity: Any, qtype: DTypeLike | None) -> Sparsity:
    """Convert the `sparsity` that a user passes to a tuple `(n, m)` or `(n, m, block)`.

    `(n, m)` keeps the n largest of each m neighboring weights. `(n, m, block)` keeps n of each m
    blocks of `block` neighbors. If `block` is 1, return `(n, m)`.

    **Raises:** `TypeError` if `sparsity` is not two or three integers. `ValueError` if n, m or
    `block` is out of range, or if the format `qtype` of the weight has no code for 0. `qtype` is
    None if the weight is not quantized.
    """
    try:
        n, m, *rest = map(operator.index, sparsity)
        (block,) = rest or [1]  # This raises if there are more than three integers.
    except (TypeError, ValueError):
        raise TypeError(
            "sparsity must be (n, m), such as (2, 4), or (n, m, block), in whole numbers, not "
            f"{sparsity!r}"
        ) from None
    if not 1 <= n <= m or m < 2:
        raise ValueError(f"sparsity (n, m) must have 1 <= n <= m and m >= 2, not ({n}, {m})")
    if block < 1:
        raise ValueError(f"the block of sparsity must be 1 or more, not {block}")
    if qtype is not None and not get_format(qtype).has_zero:
        raise ValueError(f"{qtype} has no code for 0, which sparsity needs. Use another qtype")
    return (n, m) if block == 1 else (n, m, block)


def group_size(sparsity: Sparsity) -> int:
    """Return the number of weights per group: m for `(n, m)`, and m * block for `(n, m, block)`."""
    return sparsity[1] * (sparsity[2] if len(sparsity) == 3 else 1)


def check_groups(sparsity: Sparsity, shape: Shape, axis: int) -> None:
    """Raise `ValueError` if the group size of a sparsity does not divide an axis of a weight.

    `shape` is the shape of the weight, and `axis` the axis with the groups, counted from the front.
    """
    size = group_size(sparsity)
    if shape[axis] % size:
        raise ValueError(
            f"sparsity {sparsity} has groups of {size}, which do not divide axis "
            f"{axis - len(shape)} (size {shape[axis]}) of w of shape {shape}"
        )


def sparsity_mask(w: jax.Array, sparsity: Sparsity, axis: int) -> jax.Array:
    """Return a mask of the shape of the weight `w`, True for the weights that a sparsity keeps.

    A sparsity `(n, m)` keeps the n largest of each m neighbors along `axis`, and `(n, m, block)`
    the n largest of each m blocks of `block` neighbors. Weights are compared by magnitude, and
    blocks by the sum of the magnitudes. NaN is the largest. Among equal weights or blocks, the
    first are kept, as in `NMSparse.prune`.
    """
    n, m = sparsity[:2]
    block = group_size(sparsity) // m
    axis_last = jnp.moveaxis(w, axis, -1)
    groups = axis_last.reshape(*axis_last.shape[:-1], -1, m, block)
    if block > 1:  # `largest_positions` takes the magnitudes of single weights itself.
        groups = abs(groups)
    positions = largest_positions(groups.sum(-1), n, -1)
    is_kept = (positions[..., None] == jnp.arange(m)).any(-2)  # [..., groups, m]
    mask = jnp.broadcast_to(is_kept[..., None], groups.shape)
    return jnp.moveaxis(mask.reshape(axis_last.shape), -1, axis)
