"""The operations that take quantized operands, as programs of any library that has them.

Qwix and `veneer.quant` have functions of the same names and arguments, and JAX has them for dense
arrays: a library is what has the six as attributes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DENSE = SimpleNamespace(
    dot=jnp.dot,
    dot_general=lax.dot_general,
    einsum=jnp.einsum,
    conv_general_dilated=lax.conv_general_dilated,
    ragged_dot=lax.ragged_dot,
    ragged_dot_general=lax.ragged_dot_general,
)

Shape = tuple[int, ...]
GROUPS = 3
GROUP_SIZES = np.array([5, 0, 11], np.int32)  # of 16 rows


@dataclass(frozen=True)
class Operation:
    """A product, the shapes of its operands, and the axes of each that are summed over.

    The last of those is the one that is tiled; the others that are not summed are channelwise.
    """

    name: str
    lhs: Shape
    rhs: Shape
    summed: tuple[Shape, Shape]
    columns: int  # the axis of rhs that is the last one of the result
    call: Callable[[Any, Any, Any], jax.Array]  # of a library and two operands
    differentiable: bool = True  # in JAX, of dense operands

    def tiling(self, side: int, granularity: str, tile: int | None) -> Mapping[str, Any]:
        """The arguments of `quantize` for an operand: "tensor", "channel" or "tile"."""
        if granularity == "tensor":
            return {}
        summed = self.summed[side]
        shape = (self.lhs, self.rhs)[side]
        channelwise = [axis for axis in range(len(shape)) if axis not in summed]
        if granularity == "channel":
            return {"channelwise_axes": channelwise}
        return {"channelwise_axes": channelwise, "tiled_axes": {summed[-1]: tile}}


# Groups of rows, by a weight that is transposed; and of what is summed.
_TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
_GROUPED_SUM = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())

OPERATIONS = [
    Operation("dot", (8, 256), (256, 16), ((1,), (0,)), 1, lambda lib, x, w: lib.dot(x, w)),
    Operation(
        "dot_general",
        (2, 8, 256),
        (2, 16, 256),
        ((2,), (2,)),
        1,
        lambda lib, x, w: lib.dot_general(x, w, (((2,), (2,)), ((0,), (0,)))),
    ),
    Operation(
        "einsum",
        (2, 4, 2, 256),
        (2, 256, 16),
        ((2, 3), (0, 1)),
        2,
        lambda lib, x, w: lib.einsum("bthd,hdo->bto", x, w),
    ),
    Operation(
        "conv_general_dilated",
        (2, 6, 6, 128),
        (3, 3, 128, 8),
        ((1, 2, 3), (0, 1, 2)),
        3,
        lambda lib, x, w: lib.conv_general_dilated(
            x, w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
    ),
    Operation(
        "ragged_dot",
        (16, 256),
        (GROUPS, 256, 16),
        ((1,), (1,)),
        2,
        lambda lib, x, w: lib.ragged_dot(x, w, jnp.asarray(GROUP_SIZES)),
    ),
    Operation(
        "ragged_dot_general",
        (16, 256),
        (GROUPS, 16, 256),
        ((1,), (2,)),
        1,
        lambda lib, x, w: lib.ragged_dot_general(x, w, jnp.asarray(GROUP_SIZES), _TRANSPOSED),
    ),
    Operation(
        "ragged_dot_general, groups of the sum",
        (256, 8),
        (256, 16),
        ((0,), (0,)),
        1,
        lambda lib, x, w: lib.ragged_dot_general(x, w, jnp.asarray(16 * GROUP_SIZES), _GROUPED_SUM),
        differentiable=False,
    ),
]
