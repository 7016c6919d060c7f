"""Compare the rules of an array type with the dense program: `check_rules`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.policy import Policy, policy_in_force
from .._core.rules import rules_of
from .._core.surface.implicit import implicit
from .._core.value import Value, is_part, is_value, materialise
from .programs import CHOLESKY, NOT_SMOOTH, SOLVES, Program, programs_for_shape

# It runs a program on a value under a transformation: `implicit`, or one that materializes.
_Run = Callable[[Program, Callable, Any], Any]


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
    check.run_programs({**_programs_for(check.x), **(programs or {})})
    if transformations:
        check.run_on_stacks()
        check.run_derivatives()
    if check.differences:
        listing = "\n".join(f"{name}: {text}" for name, text in check.differences.items())
        raise AssertionError(f"{example!r} differs from its dense array:\n{listing}")
    rules = {name: frozenset(at) for name, at in check.rules.items()}
    tested = {*rules, *untested}
    unused = {target.name: rule for target, rule in rules_of(cls) if target.name not in tested}
    if unused:
        listing = "\n".join(f"{name}: {rule}" for name, rule in sorted(unused.items()))
        raise AssertionError(
            f"These rules of {cls.__name__} ran in no program. Pass programs= that use them, "
            f"another example, or untested=[...] if they are tested elsewhere:\n{listing}"
        )
    agree = tuple(name for name in check.programs if name not in check.refused)
    return CheckedRules(agree, rules, frozenset(check.made_dense), check.refused)


def _programs_for(x: Any) -> dict[str, Program]:
    """Return the programs for a dense array. Solves need a well-conditioned square matrix."""
    programs = programs_for_shape(x.shape)
    is_square = x.ndim == 2 and x.shape[0] == x.shape[1] and x.size > 0
    if is_square and x.dtype.name in ("float32", "float64"):
        wide = np.asarray(x, np.float64)
        if np.linalg.cond(wide) < 1e3:
            programs |= SOLVES
            if (wide == wide.T).all() and np.linalg.eigvalsh(wide).min() > 0:
                programs |= CHOLESKY
    return programs


class _Check:
    """The programs that ran on an example, the rules that they used, and the differences."""

    def __init__(self, example: Any, dense: Callable, refusing: str | None, tolerance: float):
        self.w, self.dense, self._refusing, self._tolerance = example, dense, refusing, tolerance
        self.x = jnp.asarray(dense(example))
        self.d = _nonzero_array_like(self.x)
        self.programs: dict[str, Program] = {}
        self.programs_by_rule: dict[str, Program] = {}  # the first program that used each rule
        self.rules: dict[str, set[str]] = {}
        self.made_dense: set[str] = set()
        self.refused: dict[str, str] = {}
        self.differences: dict[str, str] = {}
        claimed = example.aval()
        if (claimed.shape, claimed.dtype) != (self.x.shape, self.x.dtype):
            raise AssertionError(
                f"aval() of {example!r} returns {claimed}, but its dense array is {self.x.aval}."
            )

    def run_programs(self, programs: Mapping[str, Program]) -> None:
        """Run the programs that JAX supports for the dense array, and record the rules."""
        # JAX finds some functions that it lacks for complex numbers only when it lowers a program.
        is_complex = jnp.issubdtype(self.x.dtype, jnp.complexfloating)
        for name, program in programs.items():
            try:
                if is_complex:
                    jax.jit(program).lower(self.x, self.d)
                else:
                    jax.eval_shape(program, self.x, self.d)
            except Exception:  # JAX raises errors of many types for a wrong dtype or shape
                continue
            self.programs[name] = program
        self._compare("", self.programs, lambda f, m, w: m(f)(w, self.d), self.w, record=True)

    def run_on_stacks(self) -> None:
        """Run one program per rule on a stack of two examples, if their leaves can be stacked."""
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), self.w)
        try:
            is_stack = self.w.batch_transparent and stack.aval().shape == (2, *self.x.shape)
        except Exception:  # a type may raise any error for leaves with a wrong shape
            is_stack = False
        if not is_stack:
            return
        vmap: _Run = lambda f, m, ws: m(lambda ws, d: jax.vmap(lambda w: f(w, d))(ws))(ws, self.d)
        scan: _Run = lambda f, m, ws: m(
            lambda ws, d: jax.lax.scan(lambda c, w: (c, f(w, d)), 0, ws)[1]
        )(ws, self.d)
        vmap_outside: _Run = lambda f, m, ws: jax.vmap(lambda w: m(f)(w, self.d))(ws)
        self._compare("vmap within", self.programs_by_rule, vmap, stack)
        self._compare("scan within", self.programs_by_rule, scan, stack)
        self._compare("vmap outside", self.programs_by_rule, vmap_outside, stack)

    def run_derivatives(self) -> None:
        """Differentiate one program per rule with respect to the leaves, if it is smooth."""
        smooth = {n: f for n, f in self.programs_by_rule.items() if n not in NOT_SMOOTH}

        def run(program: Program, m: Callable, w: Any) -> Any:
            loss = lambda w: _sum_of_sines(self.dense(m(program)(w, self.d)))
            gradient = jax.grad(loss, allow_int=True)(w)
            leaves = jax.tree.leaves(gradient)
            return [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]

        # The errors of several operations add up in a loss.
        self._compare("grad", smooth, run, self.w, tolerance=8 * self._tolerance)

    def _compare(
        self,
        mode: str,
        programs: Mapping[str, Program],
        run: _Run,
        w: Any,
        *,
        record: bool = False,
        tolerance: float | None = None,
    ) -> None:
        """Run programs with the rules and with the dense array, and store the differences.

        All programs are compiled as one. `run` calls a program under a transformation: `implicit`,
        or one that materializes the arguments.
        """
        materialise_argument = lambda f: lambda w, *more: f(self.dense(w), *more)
        title = lambda name: f"{name}, {mode}" if mode else name
        events: list[Any] = []

        def run_all(w: Any) -> dict[str, Any]:
            results = {}
            for name, program in programs.items():
                before = len(events)
                try:
                    expected = run(program, materialise_argument, w)
                except Exception:  # JAX does not support the transformation of this program
                    continue
                try:
                    result = run(program, implicit, w)
                    jax.tree.map(_check_constructor, result, is_leaf=is_value)
                    results[name] = self.dense(result), expected
                except Exception as error:  # a rule may raise any error
                    self._record_error(title(name), error)
                if record:
                    self._record_events(name, events[before:])
            return results

        with policy_in_force(Policy(events=events)):
            results = jax.jit(run_all)(w)
        for name, (result, expected) in results.items():
            text = _compare_trees(result, expected, self.x.dtype, tolerance or self._tolerance)
            if text is not None:
                self.differences[title(name)] = text

    def _record_error(self, name: str, error: Exception) -> None:
        text = " ".join(str(error).split())
        is_refusal = isinstance(error, TypeError | ValueError) and self._refusing is not None
        if is_refusal and str(self._refusing) in text:
            self.refused[name] = text
        else:
            self.differences[name] = f"{type(error).__name__}: {text}"

    def _record_events(self, name: str, events: Iterable[Any]) -> None:
        for event in events:
            if event.rule is None:
                self.made_dense.add(event.primitive)
            else:
                places = self.rules.setdefault(event.primitive, set())
                if event.rule not in places:
                    self.programs_by_rule[name] = self.programs[name]
                places.add(event.rule)


def _nonzero_array_like(x: jax.Array) -> jax.Array:
    """Return an array of the same shape and dtype, without zeros. Float entries are distinct."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return (1 + jnp.arange(x.size) / max(x.size, 1)).reshape(x.shape).astype(x.dtype)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (1 + jnp.arange(x.size) % 100).reshape(x.shape).astype(x.dtype)
    return x


def _check_constructor(x: Any) -> None:
    """Call `__post_init__` of each value in `x`, because JAX builds values without it."""
    if isinstance(x, Value):
        for part in jax.tree.leaves(x, is_leaf=is_part(x)):
            _check_constructor(part)
        post_init = getattr(x, "__post_init__", None)
        if post_init is not None:
            post_init()


def _sum_of_sines(tree: Any) -> jax.Array:
    """Return a scalar that depends on every floating entry of a tree."""
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floating:
        raise TypeError("nothing to differentiate")
    return sum((jnp.sin(x.astype(jnp.float32)).sum() for x in floating), jnp.float32(0))


def _compare_trees(result: Any, expected: Any, dtype: Any, tolerance: float) -> str | None:
    """Return a text with the first difference of two trees of arrays, or None."""
    structures: list[Any] = [jax.tree.structure(x) for x in (result, expected)]
    if structures[0] != structures[1]:
        return f"{structures[0]}, where the dense array gives {structures[1]}"
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    texts = (_compare_arrays(x, y, dtype, tolerance) for x, y in pairs)
    return next(filter(None, texts), None)


def _compare_arrays(x: Any, y: Any, dtype: Any, tolerance: float) -> str | None:
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"{jax.typeof(x)}, where the dense array gives {jax.typeof(y)}"
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    # The terms of a sum may be added in another order, and 16-bit numbers are rounded in between.
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
        errors = np.abs(x - y)[~close]
    worst = float(np.max(errors, initial=0.0, where=np.isfinite(errors)))
    return f"{(~close).sum()} of {close.size} values differ, by up to {worst:.3g}"
