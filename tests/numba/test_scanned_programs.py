"""Programs as users write them, with loops of JAX and of libraries on top of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import veneer as vn


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def check(f, *args, native=False, **tolerances):
    """Compare the program with JAX."""
    tolerances = {"rtol": 1e-3, "atol": 1e-4} | tolerances
    vn.numba.compare_jax_and_py(f, args, **tolerances)
    vn.numba.compare_numba_and_py(f, args, native=native, **tolerances)


def test_training_with_optax_agrees_with_jax():
    import optax

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    def f(params, state, xs):
        def step(carry, x):
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, x)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        return lax.scan(step, (params, state), xs)

    params = {"w": normal(3, 3), "b": normal(3)}
    state = jax.tree.map(np.asarray, optimizer.init(params))
    check(f, params, state, normal(4, 2, 3), native=True)


def test_a_recurrent_cell_of_equinox_agrees_with_jax():
    import equinox as eqx

    cell = eqx.nn.LSTMCell(3, 4, key=jax.random.key(0))
    arrays, rest = eqx.partition(cell, eqx.is_array)

    def f(arrays, xs):
        cell = eqx.combine(arrays, rest)
        step = lambda state, x: (cell(x, state),) * 2
        (h, c), (hs, _) = lax.scan(step, (jnp.zeros(4), jnp.zeros(4)), xs)
        return (h * hs).sum() + c.sum()

    check(jax.value_and_grad(f), jax.tree.map(np.asarray, arrays), normal(3, 3))


def test_differential_equations_of_diffrax_agree_with_jax(monkeypatch):
    import diffrax

    # As with the environment variable EQX_ON_ERROR. Otherwise errors are raised by callbacks.
    monkeypatch.setattr("equinox._errors.EQX_ON_ERROR", "nan")

    def f(y):
        term = diffrax.ODETerm(lambda t, y, args: jnp.stack([y[1], (1 - y[0] ** 2) * y[1] - y[0]]))
        solution = diffrax.diffeqsolve(
            term,
            diffrax.Tsit5(),
            *(0.0, 1.0, 0.25, y),
            stepsize_controller=diffrax.PIDController(1e-3, 1e-3),
            saveat=diffrax.SaveAt(ts=jnp.linspace(0, 1, 3)),
            max_steps=16,
            throw=False,
        )
        return solution.ys

    check(f, np.array([1, 0], np.float32))


def test_hamiltonian_monte_carlo_agrees_with_jax():
    density = lambda q: -(q**2).sum() / 2 - jnp.log1p(jnp.exp(q[0]))
    gradient = jax.grad(density)

    def f(key, q):
        def leap(_, state):
            q, p = state
            p = p + 0.05 * gradient(q)
            q = q + 0.1 * p
            return q, p + 0.05 * gradient(q)

        def step(q, key):
            first, second = jax.random.split(key)
            p = jax.random.normal(first, q.shape)
            new, moved = lax.fori_loop(0, 3, leap, (q, p))
            energy = density(new) - density(q) + ((p**2).sum() - (moved**2).sum()) / 2
            accepted = jnp.log(jax.random.uniform(second)) < energy
            q = lax.cond(accepted, lambda: new, lambda: q)
            return q, (q, accepted)

        return lax.scan(step, q, jax.random.split(key, 4))

    check(f, np.array([0, 7], np.uint32), normal(3))


def test_attention_with_a_cache_agrees_with_jax():
    def f(wq, wk, wv, x):
        def step(carry, i):
            keys, values, x = carry
            keys = keys.at[i].set(x @ wk)
            values = lax.dynamic_update_slice(values, (x @ wv)[None], (i, 0))
            weights = jax.nn.softmax(jnp.where(jnp.arange(4) <= i, keys @ (x @ wq), -jnp.inf))
            return (keys, values, weights @ values), x

        return lax.scan(step, (jnp.zeros((4, 3)), jnp.zeros((4, 3)), x), jnp.arange(4))

    check(f, normal(3, 3), normal(3, 3) / 2, normal(3, 3) / 3, normal(3))


def test_insertion_sort_agrees_with_jax():
    def f(x):
        def back(carry):
            j, x = carry
            return j - 1, x.at[j].set(x[j - 1]).at[j - 1].set(x[j])

        unsorted = lambda carry: (carry[0] > 0) & (carry[1][carry[0] - 1] > carry[1][carry[0]])
        insert = lambda i, x: lax.while_loop(unsorted, back, (i, x))[1]
        return lax.fori_loop(1, len(x), insert, x)

    check(f, normal(7))
    check(jax.vmap(f), normal(2, 5))


def test_the_viterbi_algorithm_agrees_with_jax():
    def f(moves, scores):
        def forwards(best, score):
            paths = best[:, None] + moves
            return paths.max(0) + score, paths.argmax(0)

        last, backwards = lax.scan(forwards, scores[0], scores[1:])
        follow = lambda state, before: (before[state],) * 2
        return lax.scan(follow, last.argmax(), backwards, reverse=True)

    check(f, normal(3, 3), normal(5, 3))


def test_derivatives_of_an_embedding_agree_with_jax():
    def f(embedding, weight, tokens):
        scores = jax.nn.log_softmax(embedding[tokens] @ weight)
        return scores[jnp.arange(len(tokens)), tokens].sum()

    args = normal(5, 3), normal(3, 5), np.array([1, 3, 3, 0])
    check(functools.partial(jax.value_and_grad(f, (0, 1))), *args)
