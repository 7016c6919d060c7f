"""Dynamic slices, gather and scatter, mostly with indices out of bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn

X = np.arange(12, dtype=np.float32).reshape(3, 4)
INDICES = np.array([2, -1, 0, 7, -9, 1, 2])
METHODS = "set add subtract multiply min max".split()


def check(f, *args, native=False):
    """Compare the references with JAX, and the program with the references."""
    vn.numba.compare_jax_and_py(f, args)
    vn.numba.compare_numba_and_py(f, args, native=native)


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_gather_agrees_with_jax(mode):
    def f(x, i):
        get = lambda at: at.get(mode=mode)
        return get(x.at[i]), get(x.at[:, i]), get(x.at[i, i]), get(x.at[i[:, None], :2])

    check(f, X, np.clip(INDICES, 0, 2) if mode == "promise_in_bounds" else INDICES)


@pytest.mark.parametrize(
    "dtype", ["int32", "int8", "uint32", "bool", "float16", "bfloat16", "complex64"]
)
def test_gather_fills_with_the_values_of_jax(dtype):
    x = X.astype(jnp.dtype(dtype))
    check(lambda x, i: (x.at[i].get(mode="fill"), x.at[i, i].get(mode="clip")), x, INDICES)


@pytest.mark.usefixtures("current_emitters")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64", "uint64"])
def test_indices_can_have_any_integer_dtype(dtype):
    long = np.arange(300, dtype=np.float32)
    highest = np.iinfo(dtype).max
    with jax.enable_x64(True):
        i = np.array([0, 100, highest, highest - 1], dtype)

        def f(x, i, j):
            numbers = lax.GatherDimensionNumbers((), (0,), (0,))
            places = lax.ScatterDimensionNumbers((), (0,), (0,))
            gathered = [lax.gather(x, i[:, None], numbers, (1,), mode=m) for m in ("clip", "fill")]
            scattered = [
                lax.scatter_add(x, i[:, None], x[:4], places, mode=m) for m in ("clip", "drop")
            ]
            return gathered, scattered, lax.dynamic_slice(x, (j,), (5,))

        check(f, long, i, i[-1])


@pytest.mark.parametrize("mode", ["clip", "drop"])
@pytest.mark.parametrize("method", METHODS)
def test_scatter_agrees_with_jax(method, mode):
    def f(x, i):
        update = lambda at, y: getattr(at, method)(y, mode=mode)
        rows, entries = update(x.at[i], 2.0), update(x.at[i, i], jnp.arange(7.0))
        return rows, entries, update(x.at[:, i], 3 * jnp.arange(7.0))

    check(f, X, INDICES)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "bfloat16", "complex64"])
def test_scatter_of_other_dtypes_agrees_with_jax(dtype):
    x = (X * 30).astype(jnp.int32).astype(jnp.dtype(dtype))
    methods = [m for m in METHODS if not (dtype == "bool" and m not in ("set", "min", "max"))]
    methods = [m for m in methods if not (dtype == "complex64" and m in ("min", "max"))]
    f = lambda x, i: [getattr(x.at[i], m)(x[0]) for m in methods]
    check(f, x, INDICES)


def test_scatter_of_windows_partly_outside_agrees_with_jax():
    numbers = lax.ScatterDimensionNumbers((1,), (), (0,))

    def f(x, i):
        updates = jnp.ones((5, 3), x.dtype)
        return [lax.scatter_add(x, i, updates, numbers, mode=mode) for mode in ("clip", "drop")]

    check(f, np.arange(6, dtype=np.float32), np.array([[-1], [0], [3], [4], [6]]))


@pytest.mark.parametrize("mode", ["clip", "drop"])
@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_nothing_is_scattered_into_an_empty_array(dtype, mode):
    f = lambda x, y, i: (x.at[i].set(1.0, mode=mode), y.at[i].add(2.0, mode=mode))
    check(f, X[0, :0], X[:0], np.array([0, 3], dtype))


def test_scatter_applies_functions():
    def f(x, i):
        twice = x.at[i].apply(lambda y: jnp.tanh(y) * jnp.exp(-y))
        return twice, x.at[i, i].apply(jnp.sin)

    check(f, X, np.array([1, 2]))


def test_batched_gathers_and_scatters_agree_with_jax():
    def f(x, i, j):
        return (
            x[i],
            x.at[i].add(2.0),
            x.at[j].multiply(2.0),
            lax.dynamic_slice(x, (i,), (2,)),
            lax.dynamic_update_slice(x, x[:2] + 1, (i,)),
        )

    args = (np.array([1, 9, -1]), np.array([[0, 0], [3, 4], [-1, 2]]))
    check(jax.vmap(f), X, *args)
    check(
        jax.vmap(f, (1, 0, 1)), X, np.array([1, 9, -1, 0]), args[1].reshape(2, 3)[:, [0, 1, 2, 0]]
    )


@pytest.mark.parametrize("start", [-5, 0, 1, 9])
def test_slices_start_within_the_array(start):
    def f(x, i):
        part = lax.dynamic_slice(x, (i, i), (2, 2))
        updated = lax.dynamic_update_slice(x, part * 2, (i, 1))
        return part, part.T @ x[:2], updated, updated + x, updated.sum()

    check(f, X, start)


def test_updates_are_applied_in_order():
    def f(x, i):
        x = x.at[i].set(x[i + 1]).at[i + 1].add(x[i])
        return x.at[:, 0].set(x[:, 1] * 2), x.T.at[0].set(1.0)

    check(f, X, 0)


def test_derivatives_of_indexing_agree_with_jax():
    def f(x, i):
        part = lax.dynamic_slice(x, (i[0], 0), (2, 2))
        updated = lax.dynamic_update_slice(x, part**2, (i[1], 1))
        chosen = jnp.take(jnp.sin(updated), i, axis=0, mode="clip")
        return (chosen.sum() * x.at[i].add(updated.at[i].get(mode="fill", fill_value=0))).sum()

    check(jax.grad(f), X / 10, INDICES, native=True)


def test_the_error_names_an_unsupported_mode():
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))
    f = lambda x, i: lax.gather(x, i, numbers, (1,), mode="one_hot")
    with pytest.raises(NotImplementedError, match=r"'gather' .*ONE_HOT"):
        vn.numba.compile(f, X[0], INDICES[:, None])
