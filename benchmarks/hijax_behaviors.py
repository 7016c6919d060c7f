"""List the programs that work on implicit arrays with high types.

    python benchmarks/hijax_behaviors.py            # print the rows, in two minutes
    python benchmarks/hijax_behaviors.py --write    # also write them into docs/hijax.md

A row is a function of an operand x and a weight w. It runs with a LoRA weight, an int8 weight and a
LoRA weight over int8. "works" means that the result agrees with the one for the dense weight.
Otherwise the row shows the error. The results go to the column of the installed version of JAX.
"""

import argparse
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from report import fill

import veneer as vn

PAGE = Path(__file__).parent.parent / "docs" / "hijax.md"
OLD = jax.__version_info__ < (0, 12)

KEYS = jax.random.split(jax.random.key(0), 5)
X = jax.random.normal(KEYS[0], (3, 4))


def lora(*batch: int) -> Any:
    shapes = (4, 6), (4, 2), (2, 6)
    leaves = [jax.random.normal(k, (*batch, *s)) for k, s in zip(KEYS[1:4], shapes, strict=True)]
    return vn.types.LoraArray(*leaves, scale=0.5)


def int8(*batch: int) -> Any:
    w = jax.random.normal(KEYS[4], (*batch, 4, 6))
    return vn.quant.quantize(w, "int8", channelwise_axes=(*range(len(batch)), len(batch) + 1))


def qlora(*batch: int) -> Any:
    update = lora(*batch)
    return vn.types.LoraArray(int8(*batch), update.a, update.b, scale=0.5)


WEIGHTS = {"LoRA": lora, "int8": int8, "LoRA of int8": qlora}


def typed(w: Any) -> Any:
    """Return the weight as a computed value with a high type, not as an argument."""
    return jnp.swapaxes(jnp.swapaxes(w, -1, -2), -1, -2)


def dot(x: Any, w: Any) -> Any:
    return jnp.dot(x, typed(w))


def total(f: Callable) -> Callable:
    return lambda x, w: jnp.sum(jnp.sin(f(x, w)))


def over_rows(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, row: (c, dot(row, w)), 0.0, x)[1]


def carried(x: Any, w: Any) -> Any:
    return jnp.dot(x, lax.scan(lambda c, _: (typed(c), None), typed(w), None, length=2)[0])


def branched(x: Any, w: Any) -> Any:
    return lax.cond(x[0, 0] > -9, lambda w: dot(x, w), lambda w: x @ w, typed(w))


def looped(x: Any, w: Any) -> Any:
    step = lambda c: (c[0] + 1, typed(c[1]))
    return jnp.dot(x, lax.while_loop(lambda c: c[0] < 3, step, (0, typed(w)))[1])


def counted(x: Any, w: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: c + dot(x, w), jnp.zeros((3, 6)))


@jax.custom_jvp
def doubled(x: Any, w: Any) -> Any:
    return jnp.dot(x, w)


doubled.defjvp(lambda p, t: (doubled(*p), 2 * jnp.dot(t[0], p[1])))


@jax.custom_vjp
def tripled(x: Any, w: Any) -> Any:
    return jnp.dot(x, w)


tripled.defvjp(
    lambda x, w: (tripled(x, w), w), lambda w, ct: (3 * jnp.dot(ct, jnp.transpose(w)), None)
)


@vn.hijax.primitive
def scaled(x, w, *, factor):
    return factor * jnp.dot(x, w)


def by_x(f: Callable) -> Callable:
    return lambda x, w: jax.grad(lambda x: total(f)(x, w))(x)


def exported(x: Any, w: Any) -> Any:
    program = jax.export.export(jax.jit(dot))(x, w)
    return jax.export.deserialize(program.serialize()).call(x, w)


def mesh() -> Any:
    return jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))


def mapped_over_devices(x: Any, w: Any) -> Any:
    mapped = jax.shard_map(dot, mesh=mesh(), in_specs=(P("d"), P()), out_specs=P("d"))
    return jax.jit(mapped)(x, w)


everywhere = lambda: NamedSharding(mesh(), P())

# Functions of x and w. Their results should agree with the results for a dense w.
VALUES = {
    "operators and `jax.numpy`, outside of `jit`": lambda x, w: (x @ w, jnp.sin(w), 2 * w.T),
    "`jit`: arguments, results, closures, nested": lambda x, w: (
        jax.jit(dot)(x, w),
        jax.jit(jnp.transpose)(w),
        jax.jit(lambda x: dot(x, w))(x),
        jax.jit(lambda x, w: jax.jit(jnp.dot)(x, typed(w)))(x, w),
    ),
    "primitives with several results": lambda x, w: (lax.top_k(w, 2), jnp.split(w, 2, axis=1)),
    "`vmap`, of either operand, along other axes": lambda x, w: (
        jax.vmap(lambda row, w: dot(row, w), (0, None))(x, w),
        jax.vmap(lambda row, w: dot(row, w), (1, None))(x.T, w),
    ),
    "`scan`: constants": jax.jit(over_rows),
    "`scan`: carries": jax.jit(carried),
    "`cond`": jax.jit(branched),
    "`while_loop`, `fori_loop`": jax.jit(lambda x, w: (looped(x, w), counted(x, w))),
    "`checkpoint`": jax.jit(lambda x, w: jax.checkpoint(dot)(x, typed(w))),
    "`checkpoint` with a typed result": lambda x, w: jnp.dot(x, jax.checkpoint(typed)(typed(w))),
    "`custom_jvp`": lambda x, w: (doubled(x, typed(w)), by_x(doubled)(x, typed(w))),
    "`custom_vjp`": lambda x, w: (tripled(x, typed(w)), by_x(tripled)(x, typed(w))),
    "gradient by the other operand": lambda x, w: jax.jit(by_x(dot))(x, w),
    "second derivative by the other operand": lambda x, w: jax.hessian(total(dot))(x, w),
    "`shard_map`": mapped_over_devices,
    "`device_put`, `in_shardings`": lambda x, w: (
        jax.jit(dot)(x, jax.device_put(w, everywhere())),
        jax.jit(dot, in_shardings=everywhere())(x, w),
    ),
    "`jax.export`": exported,
    "compiled ahead of time": lambda x, w: jax.jit(dot).lower(x, w).compile()(x, w),
    "a primitive of one's own": lambda x, w: jax.jit(
        lambda x, w: (scaled(x, w, factor=2.0), by_x(lambda x, w: scaled(x, w, factor=2.0))(x, w))
    )(x, w),
}

# Functions of x and a stack of weights.
STACKED = {
    "`vmap` over weights": lambda x, ws: jax.vmap(lambda w: dot(x, w))(ws),
    "`scan`: inputs, of inferred length": lambda x, ws: lax.scan(
        lambda c, w: (c, jnp.dot(x, w)), 0.0, jax.vmap(typed)(ws)
    )[1],
    "`scan`: results": lambda x, ws: lax.scan(lambda c, w: (c, typed(w)), 0.0, ws)[1],
    "`lax.map`": lambda x, ws: lax.map(lambda w: dot(x, w), ws),
}

# Derivatives of a function by the weight.
DERIVATIVES = {
    "`grad`, `value_and_grad`": lambda f: lambda w: (jax.grad(f)(w), jax.value_and_grad(f)(w)),
    "`jit` of `grad`, `grad` of `jit`": lambda f: (
        lambda w: (
            jax.jit(jax.grad(f))(w),
            jax.grad(jax.jit(f))(w),
        )
    ),
    "`vjp`": lambda f: lambda w: jax.vjp(f, w)[1](1.0),
    "`hessian`": jax.hessian,
    "`grad` of `checkpoint`": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
}
PROGRAMS = {
    "`grad` of `scan`": (over_rows, carried),
    "`grad` of `cond`": (branched,),
    "`grad` of `vmap`": (lambda x, w: jax.vmap(lambda row: dot(row, w))(x),),
}


def dense_leaf(w: Any) -> bool:
    return isinstance(w, vn.Value) and w.dense_tangent


def reference(transform: Callable, f: Callable, w: Any) -> Any:
    """Return a derivative of `f` by dense arrays.

    A quantized array is one dense array. Any other implicit array is replaced by its leaves.
    """
    parts, treedef = jax.tree.flatten(w, is_leaf=dense_leaf)
    parts = [vn.materialise(part) for part in parts]
    if dense_leaf(w):
        return transform(f)(parts[0])
    return transform(lambda parts: f(vn.materialise(jax.tree.unflatten(treedef, parts))))(parts)


def agree(found: Any, expected: Any) -> None:
    """Raise an `AssertionError` unless two trees have equal numbers."""
    found, expected = (jax.tree.leaves(vn.materialise(t)) for t in (found, expected))
    if len(found) != len(expected):
        raise AssertionError(f"{len(found)} arrays, not {len(expected)}")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-3, atol=2e-4)


def value_agrees(f: Callable, w: Any) -> None:
    agree(f(X, w), f(X, vn.materialise(w)))


def derivative_agrees(transform: Callable, program: Callable, w: Any) -> None:
    f = lambda w: total(program)(X, w)
    found, expected = transform(f)(w), reference(transform, f, w)
    agree(jax.tree.leaves(found), jax.tree.leaves(expected))


def forward_agrees(w: Any) -> None:
    """Compare `jvp` and `linearize`, with the weight itself as its tangent."""
    f = lambda w: total(dot)(X, w)
    parts, treedef = jax.tree.flatten(w, is_leaf=dense_leaf)
    dense = [vn.materialise(part) for part in parts]
    of_parts = lambda parts: f(vn.materialise(jax.tree.unflatten(treedef, parts)))
    tangent = dense[0] if dense_leaf(w) else jax.tree.unflatten(treedef, dense)
    expected = jax.jvp(of_parts, (dense,), (dense,))
    agree(jax.jvp(f, (w,), (tangent,)), expected)
    agree(jax.linearize(f, w)[1](tangent), expected[1])


def jaxpr_shows_types(w: Any) -> None:
    text = str(jax.make_jaxpr(dot)(X, w))
    name = "q8" if dense_leaf(w) else "lora"
    assert f"{name}[6,4] = transpose" in text, text


def program_is_that_of_implicit(w: Any) -> None:
    """Compare the lowered program with the one of `vn.implicit`, line by line."""
    program = lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ())))
    text = lambda f: jax.jit(f).lower(X, w).as_text().split("\n", 1)[1]
    assert text(program) == text(vn.implicit(program))


def called_from_c(w: Any) -> None:
    """Check that a second call runs no Python, also with typed results."""
    for program in (jax.jit(lambda x, w: dot(x, w)), jax.jit(lambda x, w: typed(w))):
        program(X, w)
        with jax.no_tracing():
            program(X, w)
        assert program._cache_size() == 1


def checks() -> dict[str, Callable[[Callable], None]]:
    """Return the checks by the name of a row. A check takes the constructor of a weight."""
    found: dict[str, Callable] = {}
    for name, f in VALUES.items():
        found[name] = lambda make, f=f: value_agrees(f, make())
    for name, f in STACKED.items():
        found[name] = lambda make, f=f: value_agrees(f, make(3))
    found["a jaxpr shows the types"] = lambda make: jaxpr_shows_types(make())
    found["the compiled program is that of the rules"] = lambda m: program_is_that_of_implicit(m())
    found["calls stay in C++"] = lambda make: called_from_c(make())
    for name, transform in DERIVATIVES.items():
        found[name] = lambda make, t=transform: derivative_agrees(t, dot, make())
    found["`jvp`, `linearize`"] = lambda make: forward_agrees(make())
    for name, programs in PROGRAMS.items():
        found[name] = lambda make, programs=programs: [
            derivative_agrees(lambda f: jax.jit(jax.grad(f)), p, make()) for p in programs
        ]
    return found


# Boxes: each row is a function that raises an error if a result is wrong.


def box_argument() -> None:
    box = vn.hijax.Box(X)
    jax.jit(lambda box: box.set(2 * box.get()))(box)
    agree(box.get(), 2 * X)


def box_closure() -> None:
    box = vn.hijax.Box(jnp.zeros(()))
    step = jax.jit(lambda x: box.update(lambda total: total + jnp.sum(x)))
    step(X), step(X)
    agree(box.get(), 2 * jnp.sum(X))


def box_changes_type(jit: Callable) -> None:
    box = vn.hijax.Box()
    jit(lambda x: box.set({"x": x}))(X)
    agree(box.get()["x"], X)
    jit(lambda: box.set(vn.quant.quantize(box.get()["x"], "int8")))()
    assert type(box.get()) is vn.quant.QArray


def box_gradient(transform: Callable, *content: Any) -> None:
    box = vn.hijax.Box(*content)

    def f(x: Any) -> Any:
        y = jnp.sin(x)
        box.set(y)
        return jnp.sum(y)

    agree(transform(f)(X), jnp.cos(X))
    agree(box.get(), jnp.sin(X))


def box_scan() -> None:
    box = vn.hijax.Box(jnp.zeros(4))

    def body(c: Any, row: Any) -> Any:
        box.update(lambda total: total + row)
        return c, None

    jax.jit(lambda x: lax.scan(body, 0.0, x))(X)
    agree(box.get(), X.sum(0))


def box_cond() -> None:
    box = vn.hijax.Box(X)
    jax.jit(lambda p: lax.cond(p, lambda: box.set(2 * box.get()), lambda: None))(True)
    agree(box.get(), 2 * X)


def box_checkpoint() -> None:
    box = vn.hijax.Box(jnp.zeros(()))

    def f(x: Any) -> Any:
        box.update(lambda n: n + 1)
        return jnp.sum(jnp.sin(x))

    agree(jax.grad(jax.checkpoint(f))(X), jnp.cos(X))
    agree(box.get(), 1.0)


def box_while() -> None:
    box = vn.hijax.Box(X)

    def body(i: Any) -> Any:
        box.set(2 * box.get())
        return i + 1

    jax.jit(lambda: lax.while_loop(lambda i: i < 3, body, 0))()
    agree(box.get(), 8 * X)


def box_vmap() -> None:
    box = vn.hijax.Box(X)
    jax.jit(jax.vmap(lambda box, row: box.set(box.get() + row)))(box, X)
    agree(box.get(), 2 * X)


def box_grad_of_scan() -> None:
    box = vn.hijax.Box(jnp.zeros(()))

    def body(c: Any, row: Any) -> Any:
        box.update(lambda total: total + row.sum())
        return c + jnp.sum(jnp.sin(row)), None

    agree(jax.jit(jax.grad(lambda x: lax.scan(body, 0.0, x)[0]))(X), jnp.cos(X))
    agree(box.get(), X.sum())


def box_in_backward() -> None:
    """Read in the backward pass a Box that the forward pass wrote."""
    box = vn.hijax.Box(jnp.zeros_like(X))
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), box.set(jnp.cos(x))), lambda _, ct: (ct * box.get(),))
    agree(jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(X), jnp.cos(X))


def box_of_weights() -> None:
    box = vn.hijax.Box(int8())
    f = jax.jit(jax.grad(lambda x: jnp.sum(dot(x, box.get()))))
    agree(f(X), jax.grad(lambda x: jnp.sum(x @ vn.materialise(box.get())))(X))


def box_aliased() -> None:
    box = vn.hijax.Box(X)
    jax.jit(lambda one, other: one.set(other.get()))(box, box)


def box_checks() -> dict[str, Callable]:
    """Return the checks of a Box by the name of a row."""
    rows = {
        "Box: an argument of `jit`": box_argument,
        "Box: a closure of `jit`": box_closure,
        "Box: contents that change structure and type, in `jit`": lambda: box_changes_type(jax.jit),
        "Box: the same in `vn.jit`": lambda: box_changes_type(vn.jit),
        "Box: `jit` of `grad`": lambda: box_gradient(lambda f: jax.jit(jax.grad(f)), X),
        "Box: `grad` of `jit`": lambda: box_gradient(lambda f: jax.grad(jax.jit(f)), X),
        "Box: filled in `jit` of `grad`": lambda: box_gradient(lambda f: jax.jit(jax.grad(f))),
        "Box: filled in `grad` of `jit`": lambda: box_gradient(lambda f: jax.grad(jax.jit(f))),
        "Box: `scan`": box_scan,
        "Box: `grad` of `scan`": box_grad_of_scan,
        "Box: `cond`": box_cond,
        "Box: `while_loop`": box_while,
        "Box: `vmap` over one": box_vmap,
        "Box: a backward pass reads what the forward pass wrote": box_in_backward,
        "Box: with a quantized array": box_of_weights,
        "Box: `grad` of `checkpoint`, written once": box_checkpoint,
        "Box: the same one passed twice": box_aliased,
    }
    return {name: (lambda make, run=run: run()) for name, run in rows.items()}


def outcome(check: Callable, make: Callable) -> str:
    """Run a check. Return "works" or the error."""
    try:
        with vn.hijax.enabled():
            check(make)
    except AssertionError as error:
        return f"wrong: {_brief(error)}"
    except Exception as error:
        return f"refused: {type(error).__name__}: {_brief(error)}"
    return "works"


def _brief(error: Exception) -> str:
    """Return the beginning of a message, without text that differs between machines."""
    text = re.sub(r" at /\S+", "", " ".join(str(error).split("\n---")[0].split()))
    words = textwrap.shorten(text, 140, placeholder=" ...")
    return words.replace("|", "\\|")


def outcomes() -> dict[str, str]:
    """Run all checks. Return the text of each row."""
    rows = {}
    for name, check in {**checks(), **box_checks()}.items():
        kinds = WEIGHTS if name in checks() else {"": None}
        ends = {kind: outcome(check, make) for kind, make in kinds.items()}
        if len(set(ends.values())) == 1:
            rows[name] = next(iter(ends.values()))
        else:
            rows[name] = "; ".join(f"{kind}: {end}" for kind, end in ends.items())
        print(f"{name}: {rows[name]}", flush=True)
    return rows


ROW = re.compile(r"^\| (.*?) ?\| (.+?) \| (.+?) \|$", re.MULTILINE)


def table(page: str, rows: dict[str, str]) -> str:
    """Return the table of the page with `rows` in the column of this JAX."""
    mine = 0 if OLD else 1
    found = {name: cells for name, *cells in ROW.findall(page)}
    lines = []
    for name, mark in {"": f"JAX {jax.__version__}", **rows}.items():
        cells = [*found.get(name, ["?", "?"])]
        cells[mine] = mark
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([lines[0], "| --- | --- | --- |", *lines[1:]])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", action="store_true", help="write into docs/hijax.md")
    rows = outcomes()
    if options.parse_args().write:
        page = PAGE.read_text("utf-8")
        before = page.partition("<!-- hijax_behaviors.py -->")[2]
        PAGE.write_text(fill(page, "hijax_behaviors.py", table(before, rows)), "utf-8")


if __name__ == "__main__":
    main()
