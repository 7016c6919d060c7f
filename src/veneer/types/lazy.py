"""`Lazy`: a deferred computation, run once when its result is needed."""

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
    """A function with arguments, compared by what it holds; `functools.partial` is by identity."""

    function: Callable
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Any) -> Any:
        """What the function gives, with these arguments after its own."""
        return self.function(*self.args, *args, **dict(self.keywords))

    def __repr__(self) -> str:
        args = [*map(repr, self.args), *(f"{name}={x!r}" for name, x in self.keywords)]
        return f"{_name(self.function)}[{', '.join(args)}]"


@dataclass(frozen=True)
class Deferred:
    """A primitive and its parameters, to be bound on the dense forms of the operands.

    Not under `implicit`: the rule that deferred it would run, and defer it again.
    """

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]

    def __call__(self, *operands: Any) -> Any:
        """What the primitive gives."""
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

    **Raises:**

    - `TypeError` if `function` is not callable or hashable, captures a traced array, or does not
      return one array.
    - `TypeError` if an operand is not an array.
    - Any error that `function` raises when it is traced with the operands.

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
    metadata_is_meaning = False  # of two branches that differ in it, both results are arrays
    is_label = False
    compiles_operators = False  # a run within a compiled operator would not be kept

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
        if _captures_tracer(function):
            raise TypeError(
                f"Lazy: {_name(function)} captures a traced array, which would not be a leaf. "
                "Pass it as an operand."
            )
        self.__dict__.update(operands=operands, function=function, output=None)

    def __post_init__(self) -> None:
        check_fields(self)
        self.aval()  # so that a function that does not fit its operands fails here

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
        count = len(jax.eval_shape(function, *operands))
        kept: dict[Any, Any] = {}
        outputs = []
        for i in range(count):
            lazy = Lazy.__new__(Lazy)  # which registers the pytree
            fields = {"operands": tuple(operands), "function": function, "output": i}
            lazy.__dict__.update(fields, _kept=kept)
            outputs.append(lazy)
        return outputs

    def materialise(self) -> Any:
        """Return the dense array. Run the function if its result is not cached."""
        results = self._results()
        return results if self.output is None else results[self.output]

    def _results(self) -> Any:
        kept, context = self.__dict__.setdefault("_kept", {}), _context()
        if context in kept:
            return kept[context]
        # One deferred by a rule below is run, and not wrapped, for the rule would defer again.
        operands = jax.tree.map(_run_if_lazy, self.operands, is_leaf=is_value)
        is_primitive = isinstance(self.function, Deferred)
        run = self.function if is_primitive else implicit(self.function)
        results = jax.tree.map(materialise_one, run(*operands), is_leaf=is_value)
        if not any(isinstance(x, Tracer) for x in jax.tree.leaves(results)):
            kept[context] = results
        return results

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, without the results of a run."""
        return {name: x for name, x in self.__dict__.items() if name != "_kept"}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Lazy":
        """Copy the operands. The function stays: a copy of a jitted function is another program."""
        new = copy.copy(self)
        new.__dict__["operands"] = copy.deepcopy(self.operands, memo)
        return new

    def __repr__(self) -> str:
        operands = ", ".join(map(_show, self.operands))
        index = "" if self.output is None else f"[{self.output}]"
        return f"Lazy({_name(self.function)}, {operands}){index}"


def _context() -> tuple[Any, ...]:
    """The settings of JAX by which a run may give another result."""
    config: Any = jax.config
    return config.jax_enable_x64, config.jax_default_matmul_precision


def _run_if_lazy(x: Any) -> Any:
    return materialise_one(x) if isinstance(x, Lazy) else x


def _captures_tracer(function: Any) -> bool:
    captured = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell that is yet empty
            captured.append(cell.cell_contents)
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(captured))


def _name(function: Callable) -> str:
    return getattr(function, "__name__", None) or repr(function)


def _show(operand: Any) -> str:
    shown = jax.tree.map(
        lambda x: _short(x) if hasattr(x, "shape") and not is_value(x) else x,
        operand,
        is_leaf=is_value,
    )
    return shown if isinstance(shown, str) else repr(shown)


def _short(x: Any) -> str:
    return jax.core.ShapedArray(x.shape, x.dtype).str_short(short_dtypes=True)


def _stays_lazy(name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Lazy, **params: Any) -> Lazy:
        return Lazy.deferred(primitive, [x], params)  # of x itself, which keeps its result


# Of no axes: what vmap adds to the operands would be counted among them.
for _primitive in ("stop_gradient", "copy", "convert_element_type"):
    _stays_lazy(_primitive)


def _bind_with(primitive: Primitive, needed: Sequence[bool], operands: Sequence[Any], params: Any):
    """Bind a loop or a jit again, with the lazy operands that it needs materialized.

    Its program may build implicit arrays, even if all operands are dense now.
    """
    if not any(needed):
        return NotImplemented
    ready = make_dense(primitive, [x for x, n in zip(operands, needed, strict=True) if n])
    dense = iter(ready)
    operands = [next(dense) if n else x for x, n in zip(operands, needed, strict=True)]
    return ImplicitTrace.run(lambda *xs: primitive.bind(*xs, **params), operands)


def _loop(name: str) -> None:
    primitive = find_primitive(name)

    def run_before(*operands: Value | ArrayLike, **params: Any) -> Any:
        return _bind_with(primitive, [isinstance(x, Lazy) for x in operands], operands, params)

    add_rule(run_before, [primitive], structural=True, conditional=True)


def _run_before_call(*operands: Lazy | ArrayLike, jaxpr: Any, **params: Any) -> Any:
    # Computed at once, a jit is a call of a compiled function, and its runs are not kept.
    if not is_eager():
        return NotImplemented
    used = {id(x) for equation in jaxpr.eqns for x in equation.invars}
    invars = jaxpr.jaxpr.invars
    needed = [isinstance(x, Lazy) and id(v) in used for x, v in zip(operands, invars, strict=True)]
    return _bind_with(find_primitive("jit"), needed, operands, {"jaxpr": jaxpr, **params})


_loop("scan")
_loop("while")
add_rule(_run_before_call, [find_primitive("jit")], structural=True, conditional=True)
