"""`Frozen`: an array by which no gradient goes."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from .._core.surface.array import ImplicitArray
from .._core.transform import redispatch
from .._core.value import Value
from .._jax.primitives import Primitive
from .axes import Leaf, check_axes


class Frozen(ImplicitArray):
    """An array, dense or implicit, that is a constant to derivatives: `stop_gradient(x)`.

    Every primitive goes on to what it holds, without a gradient: a frozen `QArray` is multiplied by
    the rules of `QArray`, at their cost. So results are not frozen, but constant to derivatives all
    the same. `vn.freeze` and `vn.unfreeze` wrap and unwrap the arrays of a model, and
    `vn.trainable` says False for them.

    **Arguments:**

    - `x`: the array, `[...]`.

    **Raises:** `TypeError` where `x` is no array; `vn.freeze` takes trees of them.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.freeze(jnp.eye(2))
    >>> w
    Frozen(x=f32[2,2])
    >>> jax.grad(lambda w: (jnp.ones(2) @ w).sum())(w).x.tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """

    trainable: ClassVar[tuple[str, ...] | None] = ()
    default_precedence: ClassVar[int] = 1
    #: Its tangent is zero, and not that of the leaf.
    is_label: ClassVar[bool | None] = False

    x: Leaf  # [...]

    def __post_init__(self) -> None:
        check_axes(self, x="")

    def aval(self) -> jax.core.ShapedArray:
        """The shape and dtype of `x`."""
        return self.x.aval() if isinstance(self.x, Value) else jax.typeof(self.x)

    def materialise(self) -> Any:
        """What it holds, without a gradient; that may be implicit in turn."""
        return jax.tree.map(jax.lax.stop_gradient, self.x)

    def partition(self, spec: PartitionSpec, shape: tuple[int, ...]) -> "Frozen | None":
        """What it holds is cut as it would be alone."""
        held = self.x.partition(spec, shape) if isinstance(self.x, Value) else spec
        if held is None:
            return None
        return jax.tree.map(lambda _: held, self, is_leaf=lambda y: y is self.x)

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """What the primitive gives on what is held."""
        bind = lambda *xs: primitive.bind(*xs, **primitive.get_bind_params(params))
        return redispatch(bind, *(x.materialise() if isinstance(x, Frozen) else x for x in values))
