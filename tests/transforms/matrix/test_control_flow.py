"""scan, while, fori, cond, switch, map, associative_scan, with a value in each position."""

import jax
import jax.numpy as jnp
from jax import lax
from support import arrays
from support.matrix import OTHERS, Refusal, cells, matrix

empty = lambda ws: jax.tree.map(lambda x: x[:0], ws)


def over(m, **options):
    """A scan over a stack of values."""
    return lambda c, ws: lax.scan(lambda c, w: (m.step(c, w), c), c, ws, **options)


def repeated(m, **options):
    """A scan with the value as a constant."""
    return lambda c, w: lax.scan(lambda c, _: (m.step(c, w), None), c, None, length=3, **options)[0]


def carried(m):
    """A scan with the value in the carry."""

    def run(c, w):
        step = lambda carry, _: ((m.step(*carry), carry[1]), None)
        return lax.scan(step, (c, w), None, length=2)[0]

    return run


SCAN = {
    **cells(
        "c",
        {
            "scan, constant": lambda m: m.implicit(repeated(m))(m.c, m.w),
            "scan, xs": lambda m: m.implicit(over(m))(m.c, m.ws),
            "scan, xs, reverse": lambda m: m.implicit(over(m, reverse=True))(m.c, m.ws),
            "scan, xs, unroll": lambda m: m.implicit(over(m, unroll=2))(m.c, m.ws),
            "scan, xs, length 0": lambda m: m.implicit(over(m))(m.c, empty(m.ws)),
            "scan, constant, length 0": lambda m: m.implicit(
                lambda c, w: lax.scan(lambda c, _: (m.step(c, w), None), c, None, length=0)[0]
            )(m.c, m.w),
            "jit of implicit of scan": lambda m: jax.jit(m.implicit(over(m)))(m.c, m.ws),
            "implicit of jit of scan": lambda m: m.implicit(jax.jit(over(m)))(m.c, m.ws),
            "implicit of vmap of scan": lambda m: m.implicit(jax.vmap(over(m), (0, None)))(
                m.cs, m.ws
            ),
            "vmap of implicit of scan": lambda m: jax.vmap(m.implicit(over(m)), (0, None))(
                m.cs, m.ws
            ),
            "implicit of vmap of scan, constant": lambda m: m.implicit(
                jax.vmap(repeated(m), (None, 0))
            )(m.c, m.ws),
            "scan in scan": lambda m: m.implicit(
                lambda c, ws: lax.scan(lambda c, w: (repeated(m)(c, w), None), c, ws)[0]
            )(m.c, m.ws),
        },
    ),
    **cells(
        ("c", "w"),
        {
            "scan, carry": lambda m: m.implicit(carried(m))(m.c, m.w),
            "scan, ys": lambda m: m.implicit(
                lambda c, w: lax.scan(lambda c, _: (m.step(c, w), w), c, None, length=2)
            )(m.c, m.w),
            "scan, xs and ys": lambda m: m.implicit(
                lambda c, ws: lax.scan(lambda c, w: (m.step(c, w), w), c, ws)
            )(m.c, m.ws),
        },
    ),
    **cells(
        None,
        {
            "scan of implicit": lambda m: lax.scan(
                lambda c, w: (m.scalar(m.step)(m.wrap(c), w), None), m.unwrap(m.c), m.ws
            )[0],
            "grad of implicit of scan": lambda m: jax.grad(
                m.scalar(lambda c, ws: m.loss_of(over(m)(c, ws)[0], c)), 1, allow_int=True
            )(m.c, m.ws),
            "grad of implicit of scan, by the dense": lambda m: jax.grad(
                m.scalar(lambda c, ws: m.loss_of(over(m)(c, ws)[0], c))
            )(m.c, m.ws),
            "grad of scan of implicit": lambda m: jax.grad(
                lambda c, ws: lax.scan(lambda c, w: (m.scalar(m.step)(m.wrap(c), w), None), c, ws)[
                    0
                ].sum(),
                1,
                allow_int=True,
            )(m.unwrap(m.c), m.ws),
        },
    ),
    **cells(
        "dloss",
        {
            "implicit of grad of scan": lambda m: m.implicit(
                jax.grad(lambda c, ws: m.loss_of(over(m)(c, ws)[0], c), 1)
            )(m.c, m.ws),
            "implicit of grad of scan, by the dense": lambda m: m.implicit(
                jax.grad(lambda c, ws: m.loss_of(over(m)(c, ws)[0], c))
            )(m.c, m.ws),
            "implicit of grad of scan, constant": lambda m: m.implicit(
                jax.grad(lambda c, w: m.loss_of(repeated(m)(c, w), c), 1)
            )(m.c, m.w),
        },
    ),
    **cells(
        ("c", "c"),
        {
            "implicit of jvp of scan": lambda m: m.implicit(
                lambda c, w: jax.jvp(repeated(m), (c, w), (c, w))
            )(m.c, m.w),
        },
    ),
}

OF_EVERY_TYPE = ("scan, xs", "scan, carry", "scan, ys", "grad of implicit of scan, by the dense")

test_scan = matrix(SCAN)
test_scan_of_other_types = matrix({name: SCAN[name] for name in OF_EVERY_TYPE}, OTHERS)


def fori(m):
    return lambda c, w: lax.fori_loop(0, 3, lambda i, c: m.step(c, w), c)


def until(m):
    """A while loop that counts."""

    def run(c, w):
        step = lambda state: (m.step(state[0], w), state[1] + 1)
        return lax.while_loop(lambda state: state[1] < 3, step, (c, 0))[0]

    return run


def until_large(m):
    """A while loop whose condition depends on the result."""
    grow = lambda c, w: lambda s: s + c + m.step(c, w) * 0
    return lambda c, w: lax.while_loop(lambda s: (s / c).max() < 3, grow(c, w), c)


def indexed(m):
    """A loop that indexes a stack of values."""
    return lambda c, ws: lax.fori_loop(0, 2, lambda i, c: m.step(c, ws[i]), c)


def times(m):
    """A loop whose number of iterations differs within a batch."""
    return lambda n, c, w: lax.fori_loop(0, n, lambda i, c: m.step(c, w), c)


counts = arrays.array([0, 2])

LOOPS = {
    **cells(
        "c",
        {
            "while": lambda m: m.implicit(until(m))(m.c, m.w),
            "while, a condition of the carry": lambda m: m.implicit(until_large(m))(m.c, m.w),
            "jit of implicit of while": lambda m: jax.jit(m.implicit(until(m)))(m.c, m.w),
            "implicit of vmap of while": lambda m: m.implicit(jax.vmap(until(m), (None, 0)))(
                m.c, m.ws
            ),
            "vmap of implicit of while": lambda m: jax.vmap(m.implicit(until(m)), (None, 0))(
                m.c, m.ws
            ),
            "implicit of vmap of while, by element": lambda m: m.implicit(
                lambda c, w: jax.vmap(times(m), (0, None, None))(counts, c, w)
            )(m.c, m.w),
            "vmap of implicit of while, by element": lambda m: jax.vmap(
                m.implicit(times(m)), (0, None, None)
            )(counts, m.c, m.w),
            "fori": lambda m: m.implicit(fori(m))(m.c, m.w),
            "fori, no steps": lambda m: m.implicit(
                lambda c, w: lax.fori_loop(0, 0, lambda i, c: m.step(c, w), c)
            )(m.c, m.w),
            "fori, indexed": lambda m: m.implicit(indexed(m))(m.c, m.ws),
            "map": lambda m: m.implicit(lambda c, ws: lax.map(lambda w: m.step(c, w), ws))(
                m.c, m.ws
            ),
            "map, in batches": lambda m: m.implicit(
                lambda c, ws: lax.map(lambda w: m.step(c, w), ws, batch_size=2)
            )(m.c, m.ws),
            "map of the carry": lambda m: m.implicit(
                lambda cs, w: lax.map(lambda c: m.step(c, w), cs)
            )(m.cs, m.w),
            "associative_scan": lambda m: m.implicit(
                lambda cs, ws: lax.associative_scan(jnp.add, jnp.concatenate([cs, ws]))
            )(m.cs, m.ws),
            "associative_scan, along axis 1": lambda m: m.implicit(
                lambda cs: lax.associative_scan(jnp.maximum, cs, axis=1, reverse=True)
            )(m.cs),
        },
    ),
    **cells(
        ("c", "w"),
        {
            "while, carry": lambda m: m.implicit(
                lambda c, w: lax.while_loop(
                    lambda s: s[2] < 2, lambda s: (m.step(s[0], s[1]), s[1], s[2] + 1), (c, w, 0)
                )[:2]
            )(m.c, m.w),
            "fori, carry": lambda m: m.implicit(
                lambda c, w: lax.fori_loop(0, 2, lambda i, s: (m.step(*s), s[1]), (c, w))
            )(m.c, m.w),
        },
    ),
    **cells(
        "dloss",
        {
            "implicit of grad of fori": lambda m: m.implicit(
                jax.grad(lambda c, w: m.loss_of(fori(m)(c, w), c), 1)
            )(m.c, m.w),
        },
    ),
    **cells(
        ("c", "c"),
        {
            "implicit of jvp of while": lambda m: m.implicit(
                lambda c, w: jax.jvp(until(m), (c, w), (c, w))
            )(m.c, m.w),
        },
    ),
    **cells(
        None,
        {
            "grad of implicit of fori": lambda m: jax.grad(
                m.scalar(lambda c, w: m.loss_of(fori(m)(c, w), c)), 1, allow_int=True
            )(m.c, m.w),
            "jvp of implicit of while": lambda m: jax.jvp(
                lambda c: m.scalar(until(m))(c, m.w), (m.c,), (m.c,)
            ),
        },
    ),
}

test_loops = matrix(LOOPS)


def chosen(m):
    return lambda i, c, w: lax.cond(i == 0, m.step, lambda c, w: m.step(m.step(c, w), w), c, w)


def switched(m):
    branches = [m.step, lambda c, w: c, lambda c, w: m.step(c * 2, w)]
    return lambda i, c, w: lax.switch(i, branches, c, w)


two = arrays.array([0, 1])

BRANCHES = {
    **cells(
        "c",
        {
            "cond": lambda m: m.implicit(chosen(m))(jnp.array(0), m.c, m.w),
            "cond, the other": lambda m: m.implicit(chosen(m))(jnp.array(1), m.c, m.w),
            "cond, a Python bool": lambda m: m.implicit(
                lambda c, w: lax.cond(True, m.step, lambda c, w: c, c, w)
            )(m.c, m.w),
            "cond, captured": lambda m: m.implicit(
                lambda c, w: lax.cond(jnp.array(True), lambda: m.step(c, w), lambda: c)
            )(m.c, m.w),
            "switch": lambda m: m.implicit(switched(m))(jnp.array(2), m.c, m.w),
            "jit of implicit of switch": lambda m: jax.jit(m.implicit(switched(m)))(
                jnp.array(0), m.c, m.w
            ),
            "implicit of vmap of cond": lambda m: m.implicit(
                lambda c, w: jax.vmap(chosen(m), (0, None, None))(two, c, w)
            )(m.c, m.w),
            "implicit of vmap of cond, values": lambda m: m.implicit(
                lambda c, ws: jax.vmap(chosen(m), (0, None, 0))(two, c, ws)
            )(m.c, m.ws),
            "vmap of implicit of switch": lambda m: jax.vmap(m.implicit(switched(m)), (0, None, 0))(
                two, m.c, m.ws
            ),
        },
    ),
    **cells(
        "w",
        {
            "cond, a value that passes": lambda m: m.implicit(
                lambda w: lax.cond(jnp.array(True), lambda w: w, lambda w: w, w)
            )(m.w),
            "switch between values": lambda m: m.implicit(
                lambda i, ws: lax.switch(i, [lambda ws: ws, lambda ws: ws[::1]], ws)
            )(jnp.array(0), m.ws),
        },
    ),
    **cells(
        "dloss",
        {
            "implicit of grad of cond": lambda m: m.implicit(
                jax.grad(lambda c, w: m.loss_of(chosen(m)(jnp.array(1), c, w), c), 1)
            )(m.c, m.w),
            "implicit of grad of switch": lambda m: m.implicit(
                jax.grad(lambda c, w: m.loss_of(switched(m)(jnp.array(1), c, w), c), 1)
            )(m.c, m.w),
        },
    ),
    **cells(
        None,
        {
            "grad of implicit of cond": lambda m: jax.grad(
                m.scalar(lambda c, w: m.loss_of(chosen(m)(jnp.array(1), c, w), c)),
                1,
                allow_int=True,
            )(m.c, m.w),
        },
    ),
}

SHARED_SLOT = Refusal(
    "JAX keeps what the branches save for the backward pass in the same slots, by shape, whatever "
    "the units",
    r"output \d of cond is .*unit",
    of_dense_too=False,
)

SHARES_SLOTS = jax.__version_info__ >= (0, 11)

test_branches = matrix(
    BRANCHES,
    refused={("implicit of grad of switch", "quantity"): SHARED_SLOT} if SHARES_SLOTS else {},
)
