"""`check_rules`: an array type is held to the dense program."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.policy import Policy, policy_in_force
from .._core.rules import rules_of
from .._core.surface.implicit import implicit
from .._core.value import Value, is_part, is_value, materialise
from .programs import CHOLESKY, KINKED, SOLVES, Program, programs_of

#: A program `f` of each of a stack, and of a dense array, where `m` is `implicit` or makes dense.
_OF_STACKS: dict[str, Callable[[Callable, Program, Any, Any], Any]] = {
    "vmap within": lambda m, f, ws, d: m(lambda ws, d: jax.vmap(lambda w: f(w, d))(ws))(ws, d),
    "scan within": lambda m, f, ws, d: m(
        lambda ws, d: jax.lax.scan(lambda c, w: (c, f(w, d)), 0, ws)[1]
    )(ws, d),
    "vmap outside": lambda m, f, ws, d: jax.vmap(lambda w: m(f)(w, d))(ws),
}


@dataclass(frozen=True)
class CheckedRules:
    """The result of `vn.testing.check_rules`.

    | attribute | content |
    |---|---|
    | `agree` | the names of the test programs that gave the same results with the dense array |
    | `rules` | a dict from a primitive to the places (file and line) of the rules that ran |
    | `made_dense` | the primitives that no rule fitted, so that the array was materialized |
    | `refused` | a dict from each test program that the type rejected to the error message |

    >>> import veneer as vn
    >>> print(vn.testing.CheckedRules(("neg",), {"neg": frozenset({"f.py:3"})}, frozenset({"exp"})))
    1 program agrees with the dense array. Rules ran for neg. Materialized for exp.
    """

    agree: tuple[str, ...]
    rules: Mapping[str, frozenset[str]]
    made_dense: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rules, dense = (", ".join(sorted(x)) for x in (self.rules, self.made_dense))
        rejected = f" Rejected programs: {len(self.refused)}." if self.refused else ""
        agree = "1 program agrees" if len(self.agree) == 1 else f"{len(self.agree)} programs agree"
        return (
            f"{agree} with the dense array. Rules ran for "
            f"{rules or 'no primitive'}. Materialized for {dense or 'no primitive'}.{rejected}"
        )


def check_rules(
    cls: type[Value],
    example: Any,
    *,
    programs: Mapping[str, Program] | None = None,
    untested: Iterable[str] = (),
    dense: Callable[[Any], Any] = materialise,
    may_refuse: bool = False,
    transformations: bool = True,
    tolerance: float = 64.0,
) -> CheckedRules:
    """Compare an array type with its dense array in about a hundred small programs.

    The programs cover elementwise functions, arithmetic, comparisons, reductions, products, solves
    and data movement. Each result must have the same shape, dtype and values as with the dense
    array. For each rule that ran, one program also runs under `vmap` (inside and outside
    `vn.implicit`), in a scan over a stack, and under `grad` with respect to the leaves. If a result
    is an implicit array, the checks in `__post_init__` of its class must pass.

    **Arguments:**

    - `cls`: the type, a subclass of `vn.ImplicitArray`.
    - `example`: a small instance with concrete values, such as a matrix `[4, 3]` or a stack
      `[2, 4, 4]`. If rules treat some shapes or options differently, check an example of each.
    - `programs`: a dict of further programs, such as `{"conv": lambda w, d: ...}`. `w` is the
      example and `d` is a dense array of its shape. To replace a built-in program, use its name.
    - `untested`: names of primitives whose rules may stay unused, because other tests cover them.
    - `dense`: a function that replaces the implicit arrays of a tree with dense arrays. A type that
      cannot be materialized needs its own function. The default is `vn.materialise`.
    - `may_refuse`: whether a program passes if it raises a `TypeError` or `ValueError` whose
      message has the name of the type.
    - `transformations`: whether to run programs under `vmap`, `scan` and `grad`, which takes most
      of the time.
    - `tolerance`: the allowed difference, in units of the machine epsilon of the dtype times the
      largest absolute value (at least 1) of the dense result. 16-bit dtypes use `tolerance / 16`.

    **Returns:** a `vn.testing.CheckedRules`.

    **Raises:** `AssertionError` with a list of the programs that differ or raise an error, or of
    the rules of `cls` that no program ran. `TypeError` if `cls` is not a subclass of
    `vn.ImplicitArray`, or `example` is not an instance of it.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> class Diagonal(vn.ImplicitArray):
    ...     diagonal: jax.Array  # [..., n]
    ...     def materialise(self):
    ...         return self.diagonal[..., None] * jnp.eye(self.diagonal.shape[-1])
    >>> @vn.register("neg")
    ... def _(x: Diagonal, **params):
    ...     return Diagonal(-x.diagonal)
    >>> checked = vn.testing.check_rules(Diagonal, Diagonal(jnp.array([1.0, 2.0, 3.0])))
    >>> "neg" in checked.rules, "exp" in checked.made_dense
    (True, True)
    >>> @vn.register("exp")
    ... def _(x: Diagonal, **params):
    ...     return Diagonal(jnp.exp(x.diagonal))  # and exp(0) is 1
    >>> vn.testing.check_rules(Diagonal, Diagonal(jnp.ones(3)), transformations=False)
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: Diagonal(diagonal=f32[3]) differs from its dense array:
    exp: 6 of 9 values differ, by up to 1...
    """
    if not (isinstance(cls, type) and issubclass(cls, Value)):
        raise TypeError(f"check_rules takes a subclass of vn.ImplicitArray, not {cls!r}.")
    if not isinstance(example, cls):
        raise TypeError(f"The example must be a {cls.__name__}, not {example!r}.")
    check = _Check(example, dense, cls.__name__ if may_refuse else None, tolerance)
    check.as_they_are({**_all_programs(check.x), **(programs or {})})
    if transformations:
        check.of_stacks()
        check.derivatives()
    check.report()
    rules = {name: frozenset(at) for name, at in check.rules.items()}
    unmet = {target.name: rule for target, rule in rules_of(cls) if target.name not in rules}
    unmet = {name: rule for name, rule in unmet.items() if name not in {*untested}}
    if unmet:
        listing = "\n".join(f"{name}: {rule}" for name, rule in sorted(unmet.items()))
        raise AssertionError(
            f"These rules of {cls.__name__} ran in no program. Pass programs= that use them, "
            f"another example, or untested=[...] if they are tested elsewhere:\n{listing}"
        )
    agree = tuple(name for name in check.programs if name not in check.refused)
    return CheckedRules(agree, rules, frozenset(check.made_dense), check.refused)


def _all_programs(x: Any) -> dict[str, Program]:
    """Those of an array, with solves if it is a matrix of which there is an inverse."""
    found = programs_of(x.shape)
    square = x.ndim == 2 and x.shape[0] == x.shape[1] and x.size > 0
    if square and x.dtype.name in ("float32", "float64"):
        wide = np.asarray(x, np.float64)
        if np.linalg.cond(wide) < 1e3:
            found |= SOLVES
            if (wide == wide.T).all() and np.linalg.eigvalsh(wide).min() > 0:
                found |= CHOLESKY
    return found


class _Check:
    """The programs of an example, and what has been found of them so far."""

    def __init__(self, example: Any, dense: Callable, refusing: str | None, tolerance: float):
        self.w, self.dense, self._refusing, self._tolerance = example, dense, refusing, tolerance
        self.x = jnp.asarray(dense(example))
        self.d = _beside(self.x)
        self.programs: dict[str, Program] = {}
        self.by_rules: dict[str, Program] = {}  # those in which a rule ran that had not before
        self.rules: dict[str, set[str]] = {}
        self.made_dense: set[str] = set()
        self.refused: dict[str, str] = {}
        self._differences: dict[str, str] = {}
        stated = example.aval()
        if (stated.shape, stated.dtype) != (self.x.shape, self.x.dtype):
            raise AssertionError(
                f"aval() of {example!r} returns {stated}, but its dense array is {self.x.aval}."
            )

    def report(self) -> None:
        """Refuses what has been found to differ."""
        if self._differences:
            shown = "\n".join(f"{name}: {what}" for name, what in self._differences.items())
            raise AssertionError(f"{self.w!r} differs from its dense array:\n{shown}")

    def as_they_are(self, programs: Mapping[str, Program]) -> None:
        """The programs, compiled as one; those that JAX does not refuse of the dense array."""
        # Some of what it does not do for complex numbers JAX finds out as it lowers a program.
        is_complex = jnp.issubdtype(self.x.dtype, jnp.complexfloating)
        for name, program in programs.items():
            try:
                if is_complex:
                    jax.jit(program).lower(self.x, self.d)
                else:
                    jax.eval_shape(program, self.x, self.d)
            except Exception:  # whatever JAX raises for this dtype or shape
                continue
            self.programs[name] = program

        def run(program: Program, m: Callable, w: Any) -> Any:
            return m(program)(w, self.d)

        self._compare("", self.programs, run, self.w, note=True)

    def of_stacks(self) -> None:
        """One for each rule, of stacks: if leaves can be stacked."""
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), self.w)
        try:
            is_stack = self.w.batch_transparent and stack.aval().shape == (2, *self.x.shape)
        except Exception:  # whatever a type raises on leaves that make no sense to it
            is_stack = False
        if not is_stack:
            return
        for how, transformed in _OF_STACKS.items():

            def run(program: Program, m: Callable, ws: Any, transformed: Any = transformed) -> Any:
                return transformed(m, program, ws, self.d)

            self._compare(how, self.by_rules, run, stack)

    def derivatives(self) -> None:
        """One for each rule, by the leaves, if it is smooth."""
        smooth = {name: f for name, f in self.by_rules.items() if name not in KINKED}

        def run(program: Program, m: Callable, w: Any) -> Any:
            loss = lambda w: _sum_of_sines(self.dense(m(program)(w, self.d)))
            gradient = jax.grad(loss, allow_int=True)(w)
            leaves = jax.tree.leaves(gradient)
            return [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]

        # Of losses, through several operations: the error is some times that of one.
        self._compare("grad", smooth, run, self.w, tolerance=8 * self._tolerance)

    def _compare(
        self,
        how: str,
        programs: Mapping[str, Program],
        run: Callable[[Program, Callable, Any], Any],
        w: Any,
        *,
        note: bool = False,
        tolerance: float | None = None,
    ) -> None:
        """Runs programs by the rules and by the dense array, and notes what differs."""
        of_dense = lambda f: lambda w, *more: f(self.dense(w), *more)
        events: list[Any] = []

        def both(w: Any) -> dict[str, Any]:
            results = {}
            for name, program in programs.items():
                before = len(events)
                try:
                    expected = run(program, of_dense, w)
                except Exception:  # it has no such transformation, as it is
                    continue
                try:
                    result = run(program, implicit, w)
                    jax.tree.map(_check_constructed, result, is_leaf=is_value)
                    results[name] = self.dense(result), expected
                except Exception as error:  # whatever a rule raises
                    self._raised(_titled(name, how), error)
                if note:
                    self._note(name, events[before:])
            return results

        with policy_in_force(Policy(events=events)):
            results = jax.jit(both)(w)
        for name, (found, expected) in results.items():
            what = _difference(found, expected, self.x.dtype, tolerance or self._tolerance)
            if what is not None:
                self._differences[_titled(name, how)] = what

    def _raised(self, name: str, error: Exception) -> None:
        text = " ".join(str(error).split())
        is_refusal = isinstance(error, TypeError | ValueError) and self._refusing is not None
        if is_refusal and str(self._refusing) in text:
            self.refused[name] = text
        else:
            self._differences[name] = f"{type(error).__name__}: {text}"

    def _note(self, name: str, events: Iterable[Any]) -> None:
        for event in events:
            if event.rule is None:
                self.made_dense.add(event.primitive)
            else:
                places = self.rules.setdefault(event.primitive, set())
                if event.rule not in places:
                    self.by_rules[name] = self.programs[name]
                places.add(event.rule)


def _titled(name: str, how: str) -> str:
    return f"{name}, {how}" if how else name


def _beside(x: jax.Array) -> jax.Array:
    """A dense array to go with one: of its shape and dtype, with no two entries alike, and no 0."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return (1 + jnp.arange(x.size) / max(x.size, 1)).reshape(x.shape).astype(x.dtype)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (1 + jnp.arange(x.size) % 100).reshape(x.shape).astype(x.dtype)
    return x


def _check_constructed(x: Any) -> None:
    """Has the constructor of each value look at it, for the leaves may come from elsewhere."""
    if isinstance(x, Value):
        for part in jax.tree.leaves(x, is_leaf=is_part(x)):
            _check_constructed(part)
        post_init = getattr(x, "__post_init__", None)
        if post_init is not None:
            post_init()


def _sum_of_sines(tree: Any) -> jax.Array:
    """A number that depends on every floating entry."""
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floating:
        raise TypeError("nothing to differentiate")
    return sum((jnp.sin(x.astype(jnp.float32)).sum() for x in floating), jnp.float32(0))


def _difference(found: Any, expected: Any, dtype: Any, tolerance: float) -> str | None:
    """What differs in two trees of arrays, or None."""
    structures: list[Any] = [jax.tree.structure(x) for x in (found, expected)]
    if structures[0] != structures[1]:
        return f"{structures[0]}, where the dense array gives {structures[1]}"
    compare = partial(_difference_of_arrays, dtype=dtype, tolerance=tolerance)
    found, expected = (jax.tree.leaves(x) for x in (found, expected))
    return next((what for what in map(compare, found, expected) if what), None)


def _difference_of_arrays(x: Any, y: Any, dtype: Any, tolerance: float) -> str | None:
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"{jax.typeof(x)}, where the dense array gives {jax.typeof(y)}"
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    # Sums of a few terms in another order; of halves, rounded now and then on the way.
    inexact = [t for t in (dtype, x.dtype) if jnp.issubdtype(t, jnp.inexact)]
    eps = max((float(jnp.finfo(t).eps) for t in inexact), default=0.0)
    eps = eps if jnp.issubdtype(x.dtype, jnp.inexact) else 0.0
    units = tolerance / 16 if jnp.dtype(dtype).itemsize < 4 else tolerance
    wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    x, y = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
    largest = np.max(np.abs(y), initial=1, where=np.isfinite(y))
    close = np.isclose(x, y, rtol=0, atol=units * eps * largest, equal_nan=True)
    if close.all():
        return None
    with np.errstate(invalid="ignore"):
        by = np.abs(x - y)[~close]
    worst = float(np.max(by, initial=0.0, where=np.isfinite(by)))
    return f"{(~close).sum()} of {close.size} values differ, by up to {worst:.3g}"
