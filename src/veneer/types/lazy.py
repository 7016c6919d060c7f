"""`Lazy`: a deferred computation, run once when its result is needed."""

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import ArrayLike

from .._core.rules import add_rule, register
from .._core.surface.array import ImplicitArray
from .._core.surface.mistakes import check_fields
from .._core.trace import ImplicitTrace
from .._core.transform import implicit
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
    """A deferred computation: `function(*operands)`, run when its result is needed, and once.

    Anything that computes with it needs it, and makes it dense; `vn.explain` shows where. What is
    never needed is never run: an argument that a program ignores, or a branch of `jax.lax.cond`
    that is not taken. It stays deferred through `stop_gradient`, `copy` and `astype`.

    The leaves are those of the operands, so derivatives by a `Lazy` are derivatives by them.

    *Once*: the result of a run on concrete operands is kept on the instance. What a transformation
    makes of it (`jax.tree.map`, an argument of `jax.jit`) is another instance. Under `jax.jit` each
    use traces the function, and XLA merges what is computed twice. Before a loop it is run, as the
    loop would run it in each turn; so it is before a call of a jitted function that computes with
    it, unless that is traced in turn. The function should be pure, as one given to `jax.jit`.

    Entries may depend on each other in any way, so a loop never slices one. `jax.vmap` of
    `vn.implicit(f)` maps the operands, as JAX does with any pytree: there a stack of operands
    stands for a stack of computations.

    **Arguments:**

    - `function`: hashable, and of one array as its result. Two that are equal make equal programs:
      a lambda made anew each time is compiled anew. Of a `functools.partial` the function and the
      arguments are compared. Implicit arrays among the operands meet their rules in it.
    - `operands`: pytrees of arrays and implicit arrays.

    **Raises:** TypeError for a function that cannot be hashed or captures a traced array, for an
    operand that is no array, and for a result that is none; whatever `function` raises on the
    shapes of the operands.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> runs = []
    >>> def gram(x):
    ...     jax.debug.callback(lambda: runs.append("a run"))
    ...     return x.T @ x
    >>> g = Lazy(gram, jnp.arange(6.0).reshape(3, 2))
    >>> g, g.shape
    (Lazy(gram, f32[3,2]), (2, 2))
    >>> vn.implicit(lambda g: g.sum() + g.max())(g).item()
    142.0
    >>> jax.effects_barrier()
    >>> runs
    ['a run']
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
                f"Lazy: {_name(function)} captures a traced array, which would be no leaf. Pass it "
                "as an operand."
            )
        self.__dict__.update(operands=operands, function=function, output=None)

    def __post_init__(self) -> None:
        check_fields(self)
        self.aval()  # so that a function that does not fit its operands fails here

    @staticmethod
    def deferred(
        primitive: Primitive | str, operands: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """What a primitive gives, deferred: what a rule returns to leave that for later.

        It is bound on the dense forms of the operands, if it ever is; rules for types that know
        better see `.function.primitive`, `.function.params`, `.operands` and `.output`.

        **Returns:** a `Lazy`; of a primitive of several results, a list of them that share the run.

        >>> import jax, jax.numpy as jnp
        >>> params = jax.make_jaxpr(jax.lax.linalg.lu)(jnp.eye(2)).eqns[0].params
        >>> Lazy.deferred("lu", [jnp.eye(2)], params)
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
        """The result, of a run now or of one that was kept."""
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
