"""`Lazy`: an array that stores a function and its operands, and is computed when it is used."""

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import ArrayLike

from .._core.errors import check_fields
from .._core.rules import add_rule, register
from .._core.surface.array import ImplicitArray
from .._core.surface.implicit import implicit
from .._core.trace import ImplicitTrace
from .._core.tree import static
from .._core.value import Value, is_value, make_dense, materialise_one
from .._jax.primitives import Primitive, find_primitive
from .._jax.tracing import Tracer, is_eager


@dataclass(frozen=True)
class Partial:
    """A `functools.partial` that equals another one with the same function and arguments.

    `functools.partial` compares by identity, so `jax.jit` would compile again for each instance.
    """

    function: Callable
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Any) -> Any:
        return self.function(*self.args, *args, **dict(self.keywords))

    def __repr__(self) -> str:
        args = [*map(repr, self.args), *(f"{name}={x!r}" for name, x in self.keywords)]
        return f"{_name(self.function)}[{', '.join(args)}]"


@dataclass(frozen=True)
class Deferred:
    """A function that binds a primitive with given parameters to the materialized operands.

    Do not call it under `implicit`: the rule that deferred the primitive would defer it again.
    """

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]

    def __call__(self, *operands: Any) -> Any:
        params = self.primitive.get_bind_params(dict(self.params))
        return self.primitive.bind(*map(materialise_one, operands), **params)

    def __repr__(self) -> str:
        return self.primitive.name


class Lazy(ImplicitArray):
    """An array that is computed as `function(*operands)` when an operation needs it.

    The function does not run if a program does not use the array. It also does not run if the only
    use is in a branch of `jax.lax.cond` that is not taken.

    - Outside of `jax.jit`, the function runs at the first use, and the instance caches the result.
      `jax.tree.map` and `jax.jit` create new instances with an empty cache.
    - Under `jax.jit`, each use traces the function again. XLA removes duplicate computations.
    - If the array is used in a loop or in a call of a jitted function, `function` runs once, before
      the loop or the call.

    The leaves are the operands. So the gradient with respect to a `Lazy` contains the gradients
    with respect to its operands, and `jax.vmap(vn.implicit(f))` maps over the axes of the operands.

    **Keeps the structure:** `stop_gradient`, `copy` and `astype`.

    **Materializes:** every other operation. `vn.explain` lists these operations.

    **Arguments:**

    - `function`: a pure, hashable function that returns one array. It is static: under `jax.jit`,
      each new lambda causes a new compilation. Two `functools.partial` with the same function and
      arguments count as equal.
    - `operands`: pytrees of arrays and implicit arrays, of any shapes and dtypes.

    **Raises:** `TypeError` if `function` is not callable or hashable, captures a traced array or
    does not return one array, or if an operand is not an array. Any error that `function` raises
    when it is traced with the operands.

    >>> import jax.numpy as jnp, veneer as vn
    >>> gram = vn.types.Lazy(lambda x: x.T @ x, jnp.arange(6.0).reshape(3, 2))
    >>> gram, gram.shape
    (Lazy(<lambda>, f32[3,2]), (2, 2))
    >>> vn.implicit(lambda g: g.sum())(gram).item()
    107.0
    """

    operands: tuple[Any, ...]
    function: Callable = static()
    output: int | None = static(default=None)

    batch_transparent = False
    metadata_is_meaning = False  # branches with different functions materialize their results
    is_label = False
    compiles_operators = False  # a compiled operator would not cache the result in the instance

    def __init__(self, function: Any, *operands: Any):
        if not callable(function):
            raise TypeError(f"Lazy takes a function and its operands, got {function!r}")
        if isinstance(function, functools.partial):
            keywords = tuple(sorted(function.keywords.items()))
            function = Partial(function.func, function.args, keywords)
        try:
            hash(function)
        except TypeError as error:
            raise TypeError(
                f"Lazy: {function!r} cannot be hashed ({error}). Pass the arrays that it holds as "
                "operands: Lazy(lambda module, x: module(x), module, x)."
            ) from None
        captured = []
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # the cell is still empty
                captured.append(cell.cell_contents)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(captured)):
            raise TypeError(
                f"Lazy: {_name(function)} captures a traced array, which would not be a leaf. "
                "Pass it as an operand."
            )
        self.__dict__.update(operands=operands, function=function, output=None)

    def __post_init__(self) -> None:
        check_fields(self)
        self.aval()  # trace the function, so that it raises here if it does not fit its operands

    @staticmethod
    def deferred(
        primitive: Primitive | str, operands: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """Defer a JAX primitive, and return its result as a `Lazy`.

        A rule (`vn.register`) can return this result. The primitive runs when the result is needed,
        on the materialized operands. Before that, other rules can inspect `.function.primitive`,
        `.function.params` and `.operands`. If the primitive has several results, `.output` is the
        index of this result, else None.

        **Arguments:**

        - `primitive`: a JAX primitive or its name.
        - `operands`: the operands of the primitive, dense or implicit.
        - `params`: a dict of the parameters of the primitive.

        **Returns:** a `Lazy`. For a primitive with several results, a list with a `Lazy` per
        result; the primitive runs once for all of them.

        **Raises:** `ValueError` if JAX has no primitive with this name.

        >>> import jax, jax.numpy as jnp, veneer as vn
        >>> params = jax.make_jaxpr(jax.lax.linalg.lu)(jnp.eye(2)).eqns[0].params
        >>> vn.types.Lazy.deferred("lu", [jnp.eye(2)], params)
        [Lazy(lu, f32[2,2])[0], Lazy(lu, f32[2,2])[1], Lazy(lu, f32[2,2])[2]]
        """
        if isinstance(primitive, str):
            primitive = find_primitive(primitive)
        function = Deferred(primitive, tuple(params.items()))
        if not primitive.multiple_results:
            return Lazy(function, *operands)
        cache: dict[Any, Any] = {}
        outputs = []
        for i in range(len(jax.eval_shape(function, *operands))):
            lazy = Lazy.__new__(Lazy)  # `__new__` registers the pytree
            fields = {"operands": tuple(operands), "function": function, "output": i}
            lazy.__dict__.update(fields, _cache=cache)
            outputs.append(lazy)
        return outputs

    def materialise(self) -> Any:
        """Return the dense array. Run the function if its result is not cached."""
        config: Any = jax.config
        # The result depends on these settings of JAX.
        key = config.jax_enable_x64, config.jax_default_matmul_precision
        cache = self.__dict__.setdefault("_cache", {})
        if (results := cache.get(key)) is None:
            results = self._run()
            if not any(isinstance(x, Tracer) for x in jax.tree.leaves(results)):
                cache[key] = results
        return results if self.output is None else results[self.output]

    def _run(self) -> Any:
        # Materialize lazy operands, and bind a deferred primitive outside of `implicit`. Otherwise
        # the rule that deferred the primitive would defer it again.
        materialise_lazy = lambda x: materialise_one(x) if isinstance(x, Lazy) else x
        operands = jax.tree.map(materialise_lazy, self.operands, is_leaf=is_value)
        is_primitive = isinstance(self.function, Deferred)
        function = self.function if is_primitive else implicit(self.function)
        return jax.tree.map(materialise_one, function(*operands), is_leaf=is_value)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, without the cached results."""
        return {name: x for name, x in self.__dict__.items() if name != "_cache"}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Lazy":
        """Copy the operands, and share the function: JAX would compile a copied function again."""
        new = copy.copy(self)
        new.__dict__["operands"] = copy.deepcopy(self.operands, memo)
        return new

    def __repr__(self) -> str:
        operands = ", ".join(map(_describe, self.operands))
        index = "" if self.output is None else f"[{self.output}]"
        return f"Lazy({_name(self.function)}, {operands}){index}"


def _name(function: Callable) -> str:
    return getattr(function, "__name__", None) or repr(function)


def _describe(operand: Any) -> str:
    """Return a text for an operand of a `Lazy`, with a text such as `f32[3,2]` for each array."""

    def describe_leaf(x: Any) -> Any:
        if is_value(x) or not hasattr(x, "shape"):
            return x
        return jax.core.ShapedArray(x.shape, x.dtype).str_short(short_dtypes=True)

    shown = jax.tree.map(describe_leaf, operand, is_leaf=is_value)
    return shown if isinstance(shown, str) else repr(shown)


def _register_deferred(name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Lazy, **params: Any) -> Lazy:
        return Lazy.deferred(primitive, [x], params)  # `x` caches its own result


# Only primitives without axes: the axes would be wrong if vmap adds an axis to the operands.
for _primitive in ("stop_gradient", "copy", "convert_element_type"):
    _register_deferred(_primitive)


# Loops, and calls of jitted functions, compute their lazy operands once, before they run.


def _materialize_and_bind(
    primitive: Primitive, operands: Sequence[Any], is_needed: Sequence[bool], params: Any
) -> Any:
    """Bind a loop or a jit after materializing the operands for which `is_needed` is True.

    Return `NotImplemented` if `is_needed` is False for all operands. Bind under `implicit`, because
    the program of the loop may create implicit arrays, even if all operands are dense.
    """
    if not any(is_needed):
        return NotImplemented
    pairs = list(zip(operands, is_needed, strict=True))
    dense = iter(make_dense(primitive, [x for x, needed in pairs if needed]))
    operands = [next(dense) if needed else x for x, needed in pairs]
    return ImplicitTrace.run(lambda *xs: primitive.bind(*xs, **params), operands)


def _register_loop(name: str) -> None:
    primitive = find_primitive(name)

    def rule(*operands: Value | ArrayLike, **params: Any) -> Any:
        is_lazy = [isinstance(x, Lazy) for x in operands]
        return _materialize_and_bind(primitive, operands, is_lazy, params)

    add_rule(rule, [primitive], structural=True, conditional=True)


def _call_jitted(*operands: Lazy | ArrayLike, jaxpr: Any, **params: Any) -> Any:
    # Only eager calls compile the jitted function, whose results a `Lazy` cannot cache.
    if not is_eager():
        return NotImplemented
    used = {id(x) for equation in jaxpr.eqns for x in equation.invars}
    pairs = zip(operands, jaxpr.jaxpr.invars, strict=True)
    is_needed = [isinstance(x, Lazy) and id(variable) in used for x, variable in pairs]
    params = {"jaxpr": jaxpr, **params}
    return _materialize_and_bind(find_primitive("jit"), operands, is_needed, params)


_register_loop("scan")
_register_loop("while")
add_rule(_call_jitted, [find_primitive("jit")], structural=True, conditional=True)
