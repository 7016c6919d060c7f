"""`ste`: run a function with the derivative of the identity.

For a dense result, a `custom_jvp` suffices. An implicit result has no dense array that could have a
tangent, and its leaves may be integers. So it is wrapped in a `StraightThrough`, together with the
argument of the function, whose tangent it has.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import zero_from_primal

from ..._jax.primitives import Primitive
from ..primitives.labels import dense_unless
from ..transform import redispatch
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
        # fn may have no derivative, so it gets constants.
        constant_x, constant_args, constant_kwargs = jax.tree.map(
            lambda leaf: jax.lax.stop_gradient(leaf) if isinstance(leaf, _ARRAYS) else leaf,
            (x, args, kwargs),
        )
        value = fn(constant_x, *constant_args, **constant_kwargs)
        _check(fn, value, x)
        if isinstance(value, Value):
            return StraightThrough(value, x)
        return redispatch(_derivative_of, value, x)

    return straight_through


_ARRAYS = (jax.Array, np.ndarray)


def _check(fn: Callable, value: Any, x: Any) -> None:
    try:
        (given,), (got,) = describe([x]), describe([value])
        avals = [v.aval() if isinstance(v, Value) else jax.typeof(v) for v in (x, value)]
    except TypeError:
        raise TypeError(
            f"vn.ste needs a function from an array to an array, and {_name(fn)} returned "
            f"{value!r} for {x!r}. For a tree of arrays, call vn.tree.map(vn.ste(fn), tree)"
        ) from None
    if len({(aval.shape, aval.dtype) for aval in avals}) > 1:
        raise TypeError(
            f"{_name(fn)} returned {got} for {given}. vn.ste needs a result of the same shape and "
            "dtype"
        )


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", repr(fn))


@jax.custom_jvp
def _derivative_of(value: Any, x: Any) -> Any:
    """Return `value`, with the derivative of `x`."""
    del x
    return value


@_derivative_of.defjvp
def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
    _, tangent = tangents
    return _derivative_of(*primals), tangent  # the same rule, for higher derivatives


class StraightThrough(ImplicitArray):
    """The result of `ste`: the implicit array `value`, with the derivatives of `source`.

    A primitive runs the rules of `value`. Its derivative equals the derivative of the primitive at
    the dense array of `value`, applied to the tangent of `source`.

    Like every `custom_jvp`, it has no derivative inside the argument of `jax.linear_transpose`.
    There, materialize it first.
    """

    default_precedence: ClassVar[int] = -1  # the `default` of other operands runs first

    value: Value  # [...]
    source: Any  # [...], dense or implicit

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of `value`, which may be a tracer of a high type."""
        return aval_of(self.value).update()

    def materialise(self) -> Any:
        """Return the dense array of `value`, with the derivatives of `source`."""
        return redispatch(_derivative_of, materialise_one(self.value), self.source)

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run a primitive on `value`. An implicit result is a `StraightThrough` again."""
        bind = partial(primitive.bind, **primitive.get_bind_params(params))
        run = partial(redispatch, bind)
        run_dense = lambda *xs: jax.tree.map(materialise_one, run(*xs), is_leaf=is_value)

        @jax.custom_jvp
        def call(*values: Any) -> Any:
            out = run(*(x.value if _is_straight(x) else x for x in values))
            # The source of a result only has a tangent, which the rule below sets.
            wrap = lambda y: StraightThrough(y, jnp.zeros(y.shape, y.dtype)) if is_value(y) else y
            return jax.tree.map(wrap, out, is_leaf=is_value)

        @call.defjvp
        def _(values: Any, tangents: Any) -> tuple[Any, Any]:
            # On dense arrays: JAX would transpose a `call` that is linear in the tangents, and
            # ignore its rule in the next derivative.
            dense = dense_unless(lambda x: not _is_straight(x), primitive, values)
            dense_tangents = map(_tangent_of_dense, values, tangents)
            tangent = jax.jvp(run_dense, tuple(dense), tuple(dense_tangents))[1]
            out = call(*values)
            return out, jax.tree.map(_tangent_of_result, out, tangent, is_leaf=_is_straight)

        return call(*values)


def _is_straight(x: Any) -> bool:
    return isinstance(x, StraightThrough)


def _tangent_of_dense(x: Any, tangent: Any) -> Any:
    if not isinstance(x, StraightThrough):
        return tangent
    return jax.jvp(materialise_one, (x.source,), (tangent.source,))[1]


def _tangent_of_result(out: Any, tangent: Any) -> Any:
    if not isinstance(out, StraightThrough):
        return tangent
    return StraightThrough(jax.tree.map(zero_from_primal, out.value), tangent)
