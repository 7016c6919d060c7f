"""Comparisons for tests: compiled programs with references, and references with JAX."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._core.surface.implicit import implicit
from .backend.interpreted import interpreted
from .codegen.calls import Calls
from .compiler import compile, source_of
from .front.graph import traced
from .front.keys import data
from .reference import performed

#: By how much results of a dtype may differ, relatively: some units in their last place.
_RTOL = {2: 1e-2, 4: 1e-5, 8: 1e-12}


def compare_numba_and_py(
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    native: bool = True,
) -> Any:
    """Compile a JAX function, and compare its results with those of the NumPy rules.

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
    expected = performed(f)(*args)
    graph, _, out_tree = traced(f, tuple(args))
    calls = Calls()
    source = source_of(graph, calls)
    leaves = [np.asarray(data(x)) for x in jax.tree.leaves(list(args))]
    inputs = [x.astype(v.aval.dtype) for x, v in zip(leaves, graph.inputs, strict=True)]
    before = [x.copy() for x in inputs]
    results = calls.checked(interpreted(source))(*inputs)
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
    assert_trees_equal(performed(f)(*args), expected, rtol, atol, "by its reference")
    return expected


def _assert_unchanged(arrays: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> None:
    for number, (array, old) in enumerate(zip(arrays, before, strict=True)):
        assert array.tobytes() == old.tobytes(), f"argument {number} was written to"


def assert_trees_equal(
    result: Any, expected: Any, rtol: float | None, atol: float | None, how: str
) -> None:
    """Checks that two trees have the same structure, dtypes and shapes, and values close by."""
    structures: list[Any] = [jax.tree.structure(x) for x in (result, expected)]
    assert structures[0] == structures[1], structures
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(result), jax.tree.leaves(expected), strict=True
    ):
        where = f"result{jax.tree_util.keystr(path)}, {how}"
        x, y = np.asarray(data(x)), np.asarray(data(y))
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
