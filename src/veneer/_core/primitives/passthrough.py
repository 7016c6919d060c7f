"""Rules of primitives that compute nothing: they return their operands or pass them to the host.

A primitive that returns its operand is a hint to the compiler, a transformation or a checkpoint
policy. It is bound with each leaf.

A function of the host expects arrays, so its implicit operands are materialized on the device
before the call. Materializing them inside the callback would run JAX there. On CPU this can
deadlock in JAX 0.10, because callbacks and programs wait for the same threads
(jax-ml/jax#24255). To pass the leaves instead, register a rule for a type. A label (a type whose
only leaf is the dense array) that cannot be materialized, such as an array with a unit, is passed
unchanged. `jax.debug.print` prints leaves, and materializes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax.primitives import Primitive, find_primitive
from ..rules import register, structural
from ..value import MATERIALISE, Value, materialise_one
from .leaves import dense_unless, has_no_dense_form

for _primitive in map(find_primitive, ("copy", "stop_gradient", "xla_metadata_value")):

    @register(_primitive, precedence=-1)
    def _(x: Value, *, _primitive: Primitive = _primitive, **params: Any) -> Value:
        return jax.tree.map(lambda leaf: _primitive.bind(leaf, **params), x)


@register("name", precedence=-1)
def _name_leaves(x: Value, *, name: str) -> Any:
    if name == MATERIALISE:  # `vn.materialise` names an array so, to materialize it here
        return materialise_one(x)
    return jax.tree.map(lambda leaf: find_primitive("name").bind(leaf, name=name), x)


@register("layout_constraint", precedence=-1)
def _ignore_layout(x: Value, **params: Any) -> Value:
    del params  # the layout of the dense array does not apply to the leaves
    return x


@register("reduce_precision", precedence=-1)
def _reduce_precision(x: Value, *, exponent_bits: int, mantissa_bits: int) -> Any:
    # jax.checkpoint marks saved values by a reduction to their own precision, so mark each leaf in
    # this way. This rule does not apply to a reduction to a lower precision.
    own = jnp.finfo(x.aval().dtype)
    if exponent_bits < own.nexp or mantissa_bits < own.nmant:
        return NotImplemented

    def mark(leaf: Any) -> Any:
        dtype = jax.typeof(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            return leaf
        return jax.lax.reduce_precision(leaf, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)

    return jax.tree.map(mark, x)


@register("dce_sink", precedence=-1)
def _dce_sink(x: Value, **params: Any) -> list[Any]:
    for leaf in jax.tree.leaves(x):  # keep each leaf alive during dead code elimination
        find_primitive("dce_sink").bind(leaf, **params)
    return []


@register("optimization_barrier", precedence=-1)
def _optimization_barrier(*operands: Any) -> list[Any]:
    return jax.lax.optimization_barrier(list(operands))


# Callbacks and debug prints.


@dataclass(frozen=True)
class _LeafCallback:
    """A callback that takes leaves, rebuilds implicit values, and calls the user's callback.

    Two instances with equal fields are equal, so that JAX does not compile a program again.
    """

    function: Callable
    treedef: Any

    def __call__(self, *leaves: Any) -> Any:
        return self.function(*jax.tree.unflatten(self.treedef, leaves))


for _name in ("pure_callback", "io_callback", "debug_callback"):

    @structural(_name)
    def _(*operands: Any, callback: Callable, _name: str = _name, **params: Any) -> Any:
        primitive = find_primitive(_name)
        arguments = dense_unless(has_no_dense_form, primitive, operands)
        leaves, treedef = jax.tree.flatten(arguments)
        return primitive.bind(*leaves, callback=_LeafCallback(callback, treedef), **params)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Printed:
    """A wrapper that formats an implicit array as its type and fields, and an array as numbers."""

    value: Any

    def __str__(self) -> str:
        return format(self, "")

    def __format__(self, spec: str) -> str:
        x = self.value
        if isinstance(x, Value):
            values = ((f.name, _Printed(getattr(x, f.name))) for f in fields(x))  # type: ignore[arg-type]
            shown = (f"{name}={format(value, spec)}" for name, value in values)
            return f"{type(x).__name__}({', '.join(shown)})"
        if not hasattr(x, "shape"):  # a static field
            return repr(x)
        array = np.asarray(x)
        # `array[()]` is a NumPy scalar, which takes format specs.
        return format(array[()], spec) if array.ndim == 0 else str(array)


@dataclass(frozen=True)
class _Static:
    """An argument of `jax.debug.print` that is not an array, wrapped as a leaf of a pytree."""

    value: Any


@structural("debug_print")
def _debug_print(*operands: Any, in_tree: Any, static_args: Any, **params: Any) -> Any:
    # Rebuild the arguments of the user's call. `static_args` has pairs (position, object).
    static, traced = dict(static_args), iter(operands)
    wrap = lambda x: _Printed(x) if isinstance(x, Value) else x
    arguments = [
        _Static(static[i]) if i in static else wrap(next(traced)) for i in range(in_tree.num_leaves)
    ]
    # Flatten implicit arrays to their leaves. This changes the positions of static arguments.
    leaves, in_tree = jax.tree.flatten(jax.tree.unflatten(in_tree, arguments))
    static_args = tuple((i, x.value) for i, x in enumerate(leaves) if isinstance(x, _Static))
    arrays = [x for x in leaves if not isinstance(x, _Static)]
    bind = find_primitive("debug_print").bind
    return bind(*arrays, in_tree=in_tree, static_args=static_args, **params)
