"""Comparisons for tests: compiled programs with NumPy rules, and NumPy rules with JAX."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._core.surface.implicit import implicit
from .codegen import storage
from .codegen.calls import Calls
from .codegen.graph import key_data, trace
from .codegen.program import Source
from .codegen.registry import evaluate
from .compiler import compile, source_of
from .maths.instructions import python_function

#: The default relative tolerance by the size of a float in bytes: some units in the last place.
_RTOL = {2: 1e-2, 4: 1e-5, 8: 1e-12}


def compare_numba_and_py(
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    native: bool = True,
) -> Any:
    """Compile a JAX function, and compare its results with the results of the NumPy rules.

    The comparison covers the values, dtypes, shapes and structure of the results. It also checks
    that no argument is modified. The generated code runs in Python, with a check of each memory
    access, and then as native code.

    **Arguments:**

    - `f`: a JAX function, as for `vn.numba.compile`.
    - `args`: the arguments of `f`, a sequence.
    - `rtol`: the relative tolerance. The default is 1e-2 for floats of 16 bits, 1e-5 for float32
      and 1e-12 for float64. Integers must be equal.
    - `atol`: the absolute tolerance. The default is `rtol` times the largest absolute value of the
      expected result.
    - `native`: whether to compile and run native code. If False, the code runs only in Python.

    **Returns:** the results of the compiled function, or of the run in Python if `native` is False.

    **Raises:** `AssertionError` if the results differ. `NotImplementedError` if a primitive has no
    rule.

    >>> import jax.numpy as jnp, numpy as np, veneer as vn
    >>> _ = vn.numba.compare_numba_and_py(lambda x: jnp.tanh(x).sum(), [np.ones(3, np.float32)])
    """
    expected = with_numpy_rules(f)(*args)
    graph, _, out_tree = trace(f, tuple(args))
    calls = Calls()
    source = source_of(graph, calls)
    leaves = [np.asarray(key_data(x)) for x in jax.tree.leaves(list(args))]
    inputs = [x.astype(v.aval.dtype) for x, v in zip(leaves, graph.inputs, strict=True)]
    before = [x.copy() for x in inputs]
    results = calls.with_errors(python_program(source))(*inputs)
    results = results if isinstance(results, tuple | list) else (results,)
    result = jax.tree.unflatten(out_tree, results)
    _assert_unchanged(inputs, before)
    assert_trees_equal(result, expected, rtol, atol, "in Python")
    if native:
        compiled = compile(f, *args)
        result = compiled(*jax.tree.unflatten(jax.tree.structure(tuple(args)), inputs))
        _assert_unchanged(inputs, before)
        assert_trees_equal(result, expected, rtol, atol, "compiled")
    return result


def compare_jax_and_py(
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> Any:
    """Run a function in JAX and with the NumPy rules of its primitives, and compare the results.

    **Arguments:**

    - `f`: a JAX function, as for `vn.numba.compile`.
    - `args`: the arguments of `f`, a sequence.
    - `rtol`, `atol`: the tolerances, as for `vn.numba.compare_numba_and_py`.

    **Returns:** the results of JAX.

    **Raises:** `AssertionError` if the results differ. `NotImplementedError` if a primitive has no
    rule in `vn.numba.perform`.

    >>> import jax.numpy as jnp, numpy as np, veneer as vn
    >>> _ = vn.numba.compare_jax_and_py(lambda x: jnp.tanh(x).sum(), [np.ones(3, np.float32)])
    """
    expected = jax.jit(implicit(f))(*args)
    assert_trees_equal(with_numpy_rules(f)(*args), expected, rtol, atol, "by NumPy rules")
    return expected


def _assert_unchanged(arrays: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> None:
    for number, (array, old) in enumerate(zip(arrays, before, strict=True)):
        assert array.tobytes() == old.tobytes(), f"argument {number} was written to"


def assert_trees_equal(
    result: Any, expected: Any, rtol: float | None, atol: float | None, how: str
) -> None:
    """Assert that two pytrees have equal structures, dtypes and shapes, and close values.

    `how` says in error messages how `result` was computed.
    """
    structures: list[Any] = [jax.tree.structure(x) for x in (result, expected)]
    assert structures[0] == structures[1], structures
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(result), jax.tree.leaves(expected), strict=True
    ):
        where = f"result{jax.tree_util.keystr(path)}, {how}"
        x, y = np.asarray(key_data(x)), np.asarray(key_data(y))
        actual, wanted = (x.dtype, x.shape), (y.dtype, y.shape)
        assert actual == wanted, f"{where}: {actual}, and not {wanted}"
        _assert_close(x, y, rtol, atol, where)


def _assert_close(
    x: np.ndarray, y: np.ndarray, rtol: float | None, atol: float | None, where: str
) -> None:
    if x.dtype.kind in "biu":
        np.testing.assert_array_equal(x, y, where)
        return
    part = x.dtype.itemsize // 2 if x.dtype.kind == "c" else x.dtype.itemsize
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    x, y = x.astype(wide), y.astype(wide)
    rtol = _RTOL[part] if rtol is None else rtol
    finite = np.abs(y[np.isfinite(y)])
    atol = (finite.max() if finite.size else 0.0) * rtol if atol is None else atol
    np.testing.assert_allclose(x, y, rtol, atol, err_msg=where)


def with_numpy_rules(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the JAX function `f` with the NumPy rules of primitives."""

    def run(*args: Any) -> Any:
        graph, _, out_tree = trace(f, args)
        leaves = [np.asarray(key_data(x)) for x in jax.tree.leaves(args)]
        typed = [x.astype(v.aval.dtype) for x, v in zip(leaves, graph.inputs, strict=True)]
        return jax.tree.unflatten(out_tree, evaluate(graph, typed))

    return run


class _Pointer:
    """A pointer to an entry of an array, for generated code that Python runs.

    Each access is checked to be within the array.
    """

    def __init__(self, entries: np.ndarray, start: int = 0):
        self.entries, self.start = entries, start

    def _position(self, index: Any) -> int:
        position = int(index) + self.start
        if not 0 <= position < len(self.entries):
            raise IndexError(f"{position} is not within an array of {len(self.entries)} entries")
        return position

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Pointer(self.entries, self.start + index.start)
        return self.entries[self._position(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        if value.dtype != self.entries.dtype:
            raise TypeError(f"{value.dtype} is written to memory of {self.entries.dtype}")
        self.entries[self._position(index)] = value


def python_program(source: Source) -> Callable[..., list[np.ndarray]]:
    """Return a function that runs a generated program in Python, and checks each memory access.

    The function takes NumPy arrays, and returns a list of the results.
    """
    names: dict[str, Any] = {name: python_function(f) for name, f in source.names.items()}
    names["np"] = np
    exec(source.text, names)

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        sizes = iter(source.work_sizes)

        def memory(work: Any, offset: Any, like: Any) -> _Pointer:
            uninitialized = np.full(next(sizes) * like.itemsize, 0xA5, np.uint8)
            return _Pointer(uninitialized.view(like.dtype))

        names["memory"] = memory
        inputs = [_pointer(x) for x in arrays]
        results = [
            np.empty(shape, memory.dtype)
            for memory, shape in zip(source.outputs, source.output_shapes, strict=True)
        ]
        constants = [_pointer(x) for x in source.constants]
        with np.errstate(all="ignore"):
            names["program"](*inputs, *map(_pointer, results), *constants, None)
        return results

    return run


def _pointer(array: np.ndarray) -> _Pointer:
    return _Pointer(array.reshape(-1).view(storage.stored_dtype(array.dtype)))
