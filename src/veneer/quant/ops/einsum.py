"""`einsum` and `dot`: jax.numpy's own, whose products meet the rule for `dot_general`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..._core.surface.array import ImplicitArray
from ..._core.transform import redispatch
from ..._core.value import materialise
from .operands import as_operand


def einsum(*args: Any, preferred_element_type: DTypeLike | None = None, **kwargs: Any) -> jax.Array:
    """Does what `jax.numpy.einsum` does; any of the operands may be `QArray`s.

    Operands are contracted two at a time, each time as `dot_general` does it. What stands in no
    product, as the sum over an axis of one operand alone, dequantises.

    **Arguments:** those of `jax.numpy.einsum`: the subscripts and operands, or operands each with a
    list of its axes; and `optimize`, `precision`, `preferred_element_type`, `out_sharding`.
    Implicit arrays of other types are materialised.

    **Returns:** an array of the shape and dtype that the dense operands give.

    **Raises:** what `jax.numpy.einsum` raises.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(3), "int4", channelwise_axes=[1])
    >>> vn.quant.einsum("...k,kn->n...", jnp.ones((2, 3)), w).shape
    (3, 2)
    """
    options = {"preferred_element_type": preferred_element_type, **kwargs}
    operands = [as_operand(x) if isinstance(x, ImplicitArray) else x for x in args]
    # A result that is no product, such as an operand transposed, may be quantised itself.
    return materialise(redispatch(lambda operands: jnp.einsum(*operands, **options), operands))


def dot(
    a: ArrayLike | ImplicitArray,
    b: ArrayLike | ImplicitArray,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Does what `jax.numpy.dot` does; either operand, or both, may be a `QArray`.

    **Arguments:** those of `jax.numpy.dot`. Implicit arrays of other types are materialised.

    **Returns:** an array of the shape and dtype that the dense operands give: a matrix product, or
    the sum over the last axis of `a` and the last but one of `b`.

    **Raises:** what `jax.numpy.dot` raises.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(3), "int4", channelwise_axes=[1])
    >>> vn.quant.dot(jnp.ones((2, 3)), w).shape
    (2, 3)
    """

    def of_arrays(a: ArrayLike, b: ArrayLike) -> jax.Array:
        return jnp.dot(
            a,
            b,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )

    return materialise(redispatch(of_arrays, *map(as_operand, (a, b))))
