"""The operations that take quantized operands, for any library with their names.

`veneer.quant` and Qwix have functions with the same names and arguments, and `DENSE` has them for
dense arrays. An operation takes such a library as its first argument.
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
    """A product, the shapes of its operands, and their contracted axes.

    **Arguments:**

    - `summed`: the contracted axes of each operand. The last one has tiles. Other axes are
      channelwise.
    - `columns`: the axis of `rhs` that is the last axis of the result.
    - `call`: takes a library and two operands.
    - `differentiable`: whether JAX can differentiate the product of dense operands.
    """

    name: str
    lhs: Shape
    rhs: Shape
    summed: tuple[Shape, Shape]
    columns: int
    call: Callable[[Any, Any, Any], jax.Array]
    differentiable: bool = True

    def tiling(self, side: int, granularity: str, tile: int | None) -> Mapping[str, Any]:
        """Return the axes arguments of `quantize` for an operand.

        **Arguments:**

        - `granularity`: "tensor", "channel" or "tile".
        """
        if granularity == "tensor":
            return {}
        summed = self.summed[side]
        shape = (self.lhs, self.rhs)[side]
        channelwise = [axis for axis in range(len(shape)) if axis not in summed]
        if granularity == "channel":
            return {"channelwise_axes": channelwise}
        return {"channelwise_axes": channelwise, "tiled_axes": {summed[-1]: tile}}


# Groups of rows with a transposed weight, and groups of the contracted axis.
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
