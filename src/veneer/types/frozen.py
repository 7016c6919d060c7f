"""`Frozen`: an array that gets no gradient."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from .._core.surface import Leaf, check_axes
from .._core.surface.array import ImplicitArray
from .._core.trace import redispatch
from .._core.value import Value, aval_of
from .._jax.primitives import Primitive


class Frozen(ImplicitArray):
    """An array `[...]` that gets no gradient, like an argument of `jax.lax.stop_gradient`.

    Operations use the rules of the type of `x`. For example, a frozen `QArray` is multiplied like a
    `QArray`. Results are not `Frozen`, but no gradient flows back from them to `x`. In fine-tuning,
    `vn.freeze` and `vn.unfreeze` wrap and unwrap the arrays of a model, and `vn.trainable` is False
    for frozen arrays.

    **Keeps the structure:** `stop_gradient`, `copy`, and batching and slicing by `jax.vmap` and
    loops.

    **Materializes:** every operation that materializes `x`. Rules for jitted functions, such as
    `jnp.linalg.inv`, do not apply to a frozen array.

    **Arguments:**

    - `x`: a dense or implicit array `[...]` of any dtype.

    **Raises:** `TypeError` if `x` is not an array. For a tree of arrays, use `vn.freeze`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.types.Frozen(jnp.eye(2))
    >>> w
    Frozen(x=f32[2,2])
    >>> jax.grad(lambda w: (jnp.ones(2) @ w).sum())(w).x.tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """

    trainable: ClassVar[tuple[str, ...] | None] = ()
    default_precedence: ClassVar[int] = 1
    #: The tangent is zero, even if the leaf has another tangent.
    is_label: ClassVar[bool | None] = False

    x: Leaf  # [...]

    def __post_init__(self) -> None:
        check_axes(self, x="")

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of `x`."""
        return aval_of(self.x)

    def materialise(self) -> Any:
        """Return `x` without a gradient. The result is implicit if `x` is."""
        return jax.tree.map(jax.lax.stop_gradient, self.x)

    def partition(self, spec: PartitionSpec, shape: tuple[int, ...]) -> "Frozen | None":
        """Return a `PartitionSpec` per leaf, or None if the leaves of `x` cannot be sharded.

        **Arguments:**

        - `spec`: the `PartitionSpec` of the dense array.
        - `shape`: the shape of the dense array.
        """
        specs = self.x.partition(spec, shape) if isinstance(self.x, Value) else spec
        if specs is None:
            return None
        return jax.tree.map(lambda _: specs, self, is_leaf=lambda y: y is self.x)

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run a primitive on the arrays inside the frozen operands, which get no gradient."""
        bind = lambda *xs: primitive.bind(*xs, **primitive.get_bind_params(params))
        return redispatch(bind, *(x.materialise() if isinstance(x, Frozen) else x for x in values))
