"""Test the rules of an array type: compare it with its dense array in many small programs.

programs        the test programs, for arrays of any shape
"""

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

__all__ = ["CheckedRules", "check_rules"]

# A function `run(program, transform, w)` that runs a program on an array `w`. `transform` is
# `implicit`, or a function that makes a program materialize `w` first.
_Run = Callable[[Program, Callable, Any], Any]


@dataclass(frozen=True)
class CheckedRules:
    """The result of `vn.testing.check_rules`.

    | attribute | content |
    |---|---|
    | `agree` | the names of the test programs that gave the same results with the dense array |
    | `rules` | a dict from each primitive to the places (file and line) of its rules that ran |
    | `made_dense` | the primitives that had no matching rule and materialized the array |
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
        count = len(self.agree)
        rules = ", ".join(sorted(self.rules)) or "no primitive"
        dense = ", ".join(sorted(self.made_dense)) or "no primitive"
        rejected = f" Rejected programs: {len(self.refused)}." if self.refused else ""
        return (
            f"{count} program{' agrees' if count == 1 else 's agree'} with the dense array. "
            f"Rules ran for {rules}. Materialized for {dense}.{rejected}"
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

    - `cls`: the array type, a subclass of `vn.ImplicitArray`.
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
    check.run_programs({**_programs_for(check.dense_example), **(programs or {})})
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
    """Return the test programs for an array type whose dense array is `x`.

    They include linear solves if `x` is a well-conditioned square matrix of floats.
    """
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
    """The check of one implicit array, `example`, and its results.

    It runs programs on `example` and on its dense array, and stores the rules that ran and the
    programs whose results differ. An error whose message contains `type_name` means that the array
    type rejects the program. Any other error counts as a difference. If `type_name` is None, all
    errors do.
    """

    def __init__(self, example: Any, dense: Callable, type_name: str | None, tolerance: float):
        self._example, self._dense = example, dense
        self._type_name, self._tolerance = type_name, tolerance
        self.dense_example = x = jnp.asarray(dense(example))
        self._operand = _nonzero_array_like(x)  # the second argument of each program
        self.programs: dict[str, Program] = {}
        self._rule_programs: dict[str, Program] = {}  # the first program that used each rule
        self.rules: dict[str, set[str]] = {}  # the places of the rules that ran, by primitive
        self.made_dense: set[str] = set()  # primitives
        self.refused: dict[str, str] = {}  # error messages by program
        self.differences: dict[str, str] = {}  # descriptions by program
        aval = example.aval()
        if (aval.shape, aval.dtype) != (x.shape, x.dtype):
            raise AssertionError(
                f"aval() of {example!r} returns {aval}, but its dense array is {x.aval}."
            )

    def run_programs(self, programs: Mapping[str, Program]) -> None:
        """Run the programs on the example, and store which rules ran.

        Skip programs that raise an error for the dense array of the example.
        """
        x, d = self.dense_example, self._operand
        is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
        for name, program in programs.items():
            try:
                if is_complex:  # JAX rejects some complex functions only in lowering
                    jax.jit(program).lower(x, d)
                else:
                    jax.eval_shape(program, x, d)
            except Exception:  # JAX raises errors of many types for a wrong dtype or shape
                continue
            self.programs[name] = program
        run: _Run = lambda program, transform, w: transform(program)(w, d)
        self._compare("", self.programs, run, self._example, record=True)

    def run_on_stacks(self) -> None:
        """Run one program per rule on a stack of two examples, under `vmap` and in a `scan`.

        Do nothing if the stacked leaves do not represent the stacked dense arrays.
        """
        example, d = self._example, self._operand
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), example)
        try:
            shape = (2, *self.dense_example.shape)
            is_stack = example.batch_transparent and stack.aval().shape == shape
        except Exception:  # a type may raise any error for leaves with a wrong shape
            is_stack = False
        if not is_stack:
            return

        def run_vmap(program: Program, transform: Callable, stack: Any) -> Any:
            return transform(lambda stack, d: jax.vmap(lambda w: program(w, d))(stack))(stack, d)

        def run_scan(program: Program, transform: Callable, stack: Any) -> Any:
            scan = lambda stack, d: jax.lax.scan(lambda c, w: (c, program(w, d)), 0, stack)[1]
            return transform(scan)(stack, d)

        def run_vmap_outside(program: Program, transform: Callable, stack: Any) -> Any:
            return jax.vmap(lambda w: transform(program)(w, d))(stack)

        # "within" or "outside" `transform`, which is `vn.implicit`.
        self._compare("vmap within", self._rule_programs, run_vmap, stack)
        self._compare("scan within", self._rule_programs, run_scan, stack)
        self._compare("vmap outside", self._rule_programs, run_vmap_outside, stack)

    def run_derivatives(self) -> None:
        """Compare gradients with respect to the leaves of the example, in one program per rule.

        Skip the programs in `NOT_SMOOTH`, whose derivatives jump or are inaccurate.
        """
        smooth = {n: f for n, f in self._rule_programs.items() if n not in NOT_SMOOTH}

        def run(program: Program, transform: Callable, w: Any) -> Any:
            loss = lambda w: _sum_of_sines(self._dense(transform(program)(w, self._operand)))
            leaves = jax.tree.leaves(jax.grad(loss, allow_int=True)(w))
            # The gradient of an integer leaf has the dtype float0.
            return [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]

        # The errors of several operations add up in a loss.
        self._compare("grad", smooth, run, self._example, tolerance=8 * self._tolerance)

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
        """Run programs on `w` and on its dense array, and store the differences of the results.

        `run(program, transform, w)` runs `transform(program)`, for example under `vmap`. Here,
        `transform` is `implicit`, or replaces `w` by its dense array. `mode` names the run in
        messages. If `record` is True, also store which rules ran.
        """
        with_dense_argument = lambda f: lambda w, *others: f(self._dense(w), *others)
        title = lambda name: f"{name}, {mode}" if mode else name
        events: list[Any] = []

        def run_all(w: Any) -> dict[str, Any]:
            results = {}
            for name, program in programs.items():
                events.clear()
                try:
                    expected = run(program, with_dense_argument, w)
                except Exception:  # JAX does not support the transformation of this program
                    continue
                try:
                    result = run(program, implicit, w)
                    jax.tree.map(_check_constructor, result, is_leaf=is_value)
                    results[name] = self._dense(result), expected
                except Exception as error:  # a rule may raise any error
                    self._record_error(title(name), error)
                if record:
                    self._record_events(name, events)
            return results

        with policy_in_force(Policy(events=events)):
            results = jax.jit(run_all)(w)  # one compilation for all programs
        for name, (result, expected) in results.items():
            text = _compare_trees(
                result, expected, self.dense_example.dtype, tolerance or self._tolerance
            )
            if text is not None:
                self.differences[title(name)] = text

    def _record_error(self, name: str, error: Exception) -> None:
        """Store the error of a program under the key `name`, in `refused` or in `differences`.

        It is a rejection, stored in `refused`, if the message names the array type and the caller
        allows rejections (`type_name` is set).
        """
        text = " ".join(str(error).split())
        may_reject = isinstance(error, TypeError | ValueError) and self._type_name is not None
        if may_reject and str(self._type_name) in text:
            self.refused[name] = text
        else:
            self.differences[name] = f"{type(error).__name__}: {text}"

    def _record_events(self, name: str, events: Iterable[Any]) -> None:
        """Store which rules ran in a program, and which primitives materialized the example.

        `name` is the name of the program, and `events` has the `vn.Event`s of its run.
        """
        for event in events:
            if event.rule is None:
                self.made_dense.add(event.primitive)
            else:
                places = self.rules.setdefault(event.primitive, set())
                if event.rule not in places:
                    self._rule_programs[name] = self.programs[name]
                places.add(event.rule)


def _nonzero_array_like(x: jax.Array) -> jax.Array:
    """Return an array with the shape and dtype of `x`, without zeros. Float entries are distinct.

    If the dtype is neither floating, complex nor integer, return `x`.
    """
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return (1 + jnp.arange(x.size) / max(x.size, 1)).reshape(x.shape).astype(x.dtype)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (1 + jnp.arange(x.size) % 100).reshape(x.shape).astype(x.dtype)
    return x


def _check_constructor(x: Any) -> None:
    """Call `__post_init__` of `x` and of the implicit arrays in `x`, to run its checks.

    JAX creates these arrays from their leaves without `__post_init__`.
    """
    if isinstance(x, Value):
        for part in jax.tree.leaves(x, is_leaf=is_part(x)):
            _check_constructor(part)
        post_init = getattr(x, "__post_init__", None)
        if post_init is not None:
            post_init()


def _sum_of_sines(tree: Any) -> jax.Array:
    """Return the sum of `sin` of all floating entries of a tree, a smooth loss function."""
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floating:
        raise TypeError("nothing to differentiate")
    return sum((jnp.sin(x.astype(jnp.float32)).sum() for x in floating), jnp.float32(0))


def _compare_trees(result: Any, expected: Any, dtype: Any, tolerance: float) -> str | None:
    """Describe the first difference of two trees of arrays. Return None if they agree.

    `dtype` is the dtype of the example, and `tolerance` the argument of `check_rules`.
    """
    structure: Any = jax.tree.structure(result)
    if structure != jax.tree.structure(expected):
        return f"{structure}, where the dense array gives {jax.tree.structure(expected)}"
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    texts = (_compare_arrays(x, y, dtype, tolerance) for x, y in pairs)
    return next(filter(None, texts), None)


def _compare_arrays(x: Any, y: Any, dtype: Any, tolerance: float) -> str | None:
    """Describe the difference of two arrays. Return None if they agree within the tolerance.

    `y` is the expected result. `dtype` and `tolerance` are the same as in `_compare_trees`.
    """
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"{jax.typeof(x)}, where the dense array gives {jax.typeof(y)}"
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    # The terms of a sum may be added in another order, and 16-bit numbers are rounded in between.
    eps = 0.0  # results that are not floating must be equal
    if jnp.issubdtype(x.dtype, jnp.inexact):
        inexact = [t for t in (dtype, x.dtype) if jnp.issubdtype(t, jnp.inexact)]
        eps = max(float(jnp.finfo(t).eps) for t in inexact)
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


def __dir__() -> list[str]:
    return __all__
