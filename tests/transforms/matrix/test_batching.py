"""vmap inside and outside other transformations, over each axis, with collectives over its axis."""

import jax
import jax.numpy as jnp
from jax import lax
from support.matrix import OTHERS, cells, matrix

last = lambda c: jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), c)  # move the batch axis to the end
OVER_WS = (None, 0)

CELLS = cells(
    "c",
    {
        "vmap of implicit": lambda m: jax.vmap(m.implicit(m.step), OVER_WS)(m.c, m.ws),
        "implicit of vmap": lambda m: m.implicit(jax.vmap(m.step, OVER_WS))(m.c, m.ws),
        "vmap of implicit, over both": lambda m: jax.vmap(m.implicit(m.step))(m.cs[:2], m.ws),
        "implicit of vmap, over both": lambda m: m.implicit(jax.vmap(m.step))(m.cs[:2], m.ws),
        "over the carry": lambda m: m.implicit(jax.vmap(m.step, (0, None)))(m.cs, m.w),
        "jit of vmap of implicit": lambda m: jax.jit(jax.vmap(m.implicit(m.step), OVER_WS))(
            m.c, m.ws
        ),
        "implicit of vmap of jit": lambda m: m.implicit(jax.vmap(jax.jit(m.step), OVER_WS))(
            m.c, m.ws
        ),
        "vmap of vmap of implicit": lambda m: jax.vmap(
            jax.vmap(m.implicit(m.step), (0, None)), OVER_WS
        )(m.cs, m.ws),
        "vmap of implicit of vmap": lambda m: jax.vmap(
            m.implicit(jax.vmap(m.step, (0, None))), OVER_WS
        )(m.cs, m.ws),
        "implicit of vmap of vmap": lambda m: m.implicit(
            jax.vmap(jax.vmap(m.step, (0, None)), OVER_WS)
        )(m.cs, m.ws),
        "vmap of implicit, axes": lambda m: jax.vmap(m.implicit(m.step), (-1, None), out_axes=1)(
            last(m.cs), m.w
        ),
        "implicit of vmap, axes": lambda m: m.implicit(jax.vmap(m.step, (-1, None), out_axes=1))(
            last(m.cs), m.w
        ),
        "implicit of vmap, axes of the value": lambda m: m.implicit(
            jax.vmap(m.step, (None, 1), out_axes=-1)
        )(m.c, m.ws.swapaxes(0, 1)),
        "implicit of vmap, a column at a time": lambda m: m.implicit(
            jax.vmap(lambda c, w: c + w, (1, 1))
        )(m.c, m.w),
    },
)
CELLS |= cells(
    "w",
    {
        "vmap of implicit, a value that passes": lambda m: jax.vmap(m.implicit(lambda w: w))(m.ws),
        "implicit of vmap, a value that passes": lambda m: m.implicit(jax.vmap(lambda w: w))(m.ws),
    },
)
CELLS |= cells(
    "dloss",
    {
        "implicit of vmap of grad": lambda m: m.implicit(jax.vmap(jax.grad(m.loss, 1), OVER_WS))(
            m.c, m.ws
        ),
    },
)
CELLS |= cells(
    None,
    {
        "vmap of grad of implicit": lambda m: jax.vmap(
            jax.grad(m.scalar(m.loss), 1, allow_int=True), OVER_WS
        )(m.c, m.ws),
        "grad of implicit of vmap": lambda m: jax.grad(
            m.scalar(lambda c, w: jax.vmap(m.loss, OVER_WS)(c, w).sum()), 1, allow_int=True
        )(m.c, m.ws),
    },
)

COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmean": lambda x: x - lax.pmean(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "all_to_all": lambda x: lax.all_to_all(x[:2], "i", 0, 0),
    "psum_scatter": lambda x: lax.psum_scatter(x[:2], "i"),
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1), (1, 0)]),
    "axis_index": lambda x: x * (1.0 + lax.axis_index("i")),
}


def named(function):
    return jax.vmap(function, OVER_WS, axis_name="i")


OF_EVERY_TYPE = ("vmap of implicit", "implicit of vmap", "implicit of vmap of jit")

for _name, _collect in COLLECTIVES.items():
    of_step = lambda m, collect=_collect: lambda c, w: collect(m.step(c, w))
    CELLS |= cells(
        "c",
        {
            f"vmap of implicit, {_name}": lambda m, f=of_step: named(m.implicit(f(m)))(m.c, m.ws),
            f"implicit of vmap, {_name}": lambda m, f=of_step: m.implicit(named(f(m)))(m.c, m.ws),
        },
    )
CELLS |= cells(
    "c",
    {
        "implicit of vmap, psum of the value": lambda m: m.implicit(
            named(lambda c, w: m.step(c, lax.psum(w, "i")))
        )(m.c, m.ws),
        "vmap of implicit, psum of the value": lambda m: named(
            m.implicit(lambda c, w: m.step(c, lax.psum(w, "i")))
        )(m.c, m.ws),
    },
)

test_cell = matrix(CELLS)
test_other_types = matrix({name: CELLS[name] for name in OF_EVERY_TYPE}, OTHERS)
