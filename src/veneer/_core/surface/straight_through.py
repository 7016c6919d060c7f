"""`ste`: run a function with the derivative of the identity.

For a dense result, a `custom_jvp` suffices. The leaves of an implicit result may be integers, which
have no tangents. So `ste` returns a `StraightThrough` with two fields: the result, and the argument
of the function. The tangent of the argument serves as the tangent of the result.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import zero_from_primal

from ..._jax.primitives import Primitive
from ..primitives.leaves import dense_unless
from ..trace import redispatch
from ..value import Value, aval_of, describe, is_value, materialise_one
from .array import ImplicitArray


def ste(fn: Callable) -> Callable:
    """Replace the derivative of a function by the identity (straight-through estimator).

    The new function computes `fn`. Its derivative with respect to the first argument is the
    identity. So `fn` can be a function without a useful derivative, such as `jnp.round`. Forward
    mode, reverse mode and higher derivatives are supported. The other arguments get no gradient.
    Source: Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons for
    Conditional Computation (arXiv 1308.3432).

    **Arguments:**

    - `fn`: a function whose first argument is an array, dense or implicit. Its result must be an
      array of the same shape and dtype, dense or implicit.

    **Returns:** a function with the same arguments. If `fn` returns an implicit array, such as a
    `QArray`, operations on the result use the rules of that type. The derivatives of these
    operations equal the derivatives of the same operations on the dense array.

    **Raises:** `TypeError`, in a call of the new function, if `fn` does not return an array with
    the shape and dtype of the first argument.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> jax.value_and_grad(vn.ste(jnp.round))(1.7)
    (Array(2., dtype=float32, weak_type=True), Array(1., dtype=float32, weak_type=True))
    >>> quantize = vn.ste(vn.quant.quantize)
    >>> jax.grad(lambda w: (jnp.ones(2) @ quantize(w, "int8")).sum())(jnp.eye(2)).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    @wraps(fn, updated=())
    def straight_through(x: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Constants, because JAX may be unable to differentiate fn.
        constant_x, constant_args, constant_kwargs = jax.tree.map(
            lambda leaf: jax.lax.stop_gradient(leaf) if isinstance(leaf, _ARRAYS) else leaf,
            (x, args, kwargs),
        )
        value = fn(constant_x, *constant_args, **constant_kwargs)
        _check_result(fn, value, x)
        if isinstance(value, Value):
            return StraightThrough(value, x)
        return redispatch(_with_derivative_of, value, x)

    return straight_through


_ARRAYS = (jax.Array, np.ndarray)


def _check_result(fn: Callable, value: Any, x: Any) -> None:
    """Raise `TypeError` if `value`, the result of `fn(x)`, is not an array like `x`."""
    name = getattr(fn, "__name__", repr(fn))
    try:
        x_aval, aval = aval_of(x), aval_of(value)
    except TypeError:
        raise TypeError(
            f"vn.ste needs a function from an array to an array, and {name} returned "
            f"{value!r} for {x!r}. For a tree of arrays, call vn.tree.map(vn.ste(fn), tree)"
        ) from None
    if (aval.shape, aval.dtype) != (x_aval.shape, x_aval.dtype):
        shown_x, shown_value = describe([x, value])
        raise TypeError(
            f"{name} returned {shown_value} for {shown_x}. vn.ste needs a result of the same shape "
            "and dtype"
        )


@jax.custom_jvp
def _with_derivative_of(value: Any, x: Any) -> Any:
    """Return the array `value`. Its derivatives are the derivatives of `x`, not of `value`."""
    del x
    return value


@_with_derivative_of.defjvp
def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
    _, tangent = tangents
    return _with_derivative_of(*primals), tangent  # the same rule, for higher derivatives


class StraightThrough(ImplicitArray):
    """The result of `ste`: the implicit array `value`, with the derivatives of `source`.

    A primitive runs the rules of `value`. Its derivative equals the derivative of the primitive at
    the dense array of `value`, applied to the tangent of `source`.

    In a function that is given to `jax.linear_transpose`, a `StraightThrough`, like every
    `custom_jvp`, has no derivative. Materialize the array first in such a function.
    """

    default_precedence: ClassVar[int] = -1  # the `default` of other operands runs first

    value: Value  # [...]
    source: Any  # [...], dense or implicit

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of `value`, which may be a tracer of a `vn.hijax` type."""
        return aval_of(self.value).update()  # a ShapedArray, also for such a type

    def materialise(self) -> Any:
        """Return the dense array of `value`, with the derivatives of `source`."""
        return redispatch(_with_derivative_of, materialise_one(self.value), self.source)

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run a primitive on the fields `value`. Wrap implicit results in `StraightThrough`."""
        bind = partial(primitive.bind, **primitive.get_bind_params(params))
        run = partial(redispatch, bind)  # returns dense or implicit results
        run_dense = lambda *xs: jax.tree.map(materialise_one, run(*xs), is_leaf=is_value)

        @jax.custom_jvp
        def call(*values: Any) -> Any:
            out = run(*(x.value if _is_straight(x) else x for x in values))
            # The source of a result only has a tangent, which the rule below sets.
            wrap = lambda y: StraightThrough(y, jnp.zeros(y.shape, y.dtype)) if is_value(y) else y
            return jax.tree.map(wrap, out, is_leaf=is_value)

        @call.defjvp
        def _(values: Any, tangents: Any) -> tuple[Any, Any]:
            # The derivative is computed on dense arrays. Otherwise, JAX would transpose a `call` of
            # the tangents, and ignore the derivative rule of that `call` in the next derivative.
            dense = dense_unless(lambda x: not _is_straight(x), primitive, values)
            dense_tangents = map(_tangent_of_dense, values, tangents)
            tangent = jax.jvp(run_dense, tuple(dense), tuple(dense_tangents))[1]
            out = call(*values)
            return out, jax.tree.map(_tangent_of_result, out, tangent, is_leaf=_is_straight)

        return call(*values)


def _is_straight(x: Any) -> bool:
    return isinstance(x, StraightThrough)


def _tangent_of_dense(x: Any, tangent: Any) -> Any:
    """Return the dense tangent of an operand `x`, given `tangent`, with the structure of `x`.

    The dense tangent of a `StraightThrough` is the tangent of the dense array of its `source`.
    """
    if not isinstance(x, StraightThrough):
        return tangent
    return jax.jvp(materialise_one, (x.source,), (tangent.source,))[1]


def _tangent_of_result(out: Any, tangent: Any) -> Any:
    """Return the tangent of a result `out`, given `tangent`, the tangent of its dense array."""
    if not isinstance(out, StraightThrough):
        return tangent
    return StraightThrough(jax.tree.map(zero_from_primal, out.value), tangent)
