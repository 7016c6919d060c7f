"""Programs of random lines, and their transformations, as texts."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .lines import line, lines_within
from .operands import ENVIRONMENT, KINDS, made, operand, with_dense_parts

#: Transformations of a function `f`, as expressions in the array `x` or the stack `xs`. `m` is
#: `vn.implicit`, the identity (with high types), or a materializing wrapper (in reference runs).
TRANSFORMATIONS: dict[str, str] = {
    "implicit": "m(f)(x)",
    "jit of implicit": "jax.jit(m(f))(x)",
    "implicit of jit": "m(jax.jit(f))(x)",
    "vmap of implicit": "jax.vmap(m(f))(xs)",
    "implicit of vmap": "m(jax.vmap(f))(xs)",
    "implicit of scan": "m(lambda xs: lax.scan(lambda c, x: (c, f(x)), 0, xs)[1])(xs)",
    "implicit of map": "m(lambda xs: lax.map(f, xs))(xs)",
    "grad by another": (
        "jax.grad(lambda s: undressed("
        "m(lambda x, s: jnp.sum(jax.nn.softplus(f(x) * s)))(x, s)))(0.5)"
    ),
    "implicit of grad": "m(jax.grad(lambda x: jnp.sum(jax.nn.softplus(f(x)))))(x)",
    "implicit without jit": "without_jit(m(f))(x)",
    "implicit exported": "exported(jax.vmap(m(f)))(xs)",
    "implicit on a mesh": "on_a_mesh(jax.vmap(m(f)))(xs)",
    "implicit of jvp": "m(lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1])(x)",
}
#: The transformations with high types. Some are omitted: there a gradient by an array may be one by
#: its leaves. And JAX cannot export a program with high types while it traces another one.
HIGH = {
    f"high: {name.replace(' of implicit', '').replace('implicit of ', '')}": text
    for name, text in TRANSFORMATIONS.items()
    if name not in ("implicit of grad", "implicit of jvp", "implicit of jit", "implicit exported")
}
BY_LEAVES = "high: grad by leaves"
HIGH[BY_LEAVES] = "by_leaves(m(lambda x: jnp.sum(jax.nn.softplus(f(x)))), x)"


class Program(NamedTuple):
    """An operand, a chain of lines, and a transformation."""

    kind: str
    operand: str  # an expression in i
    lines: tuple[str, ...]
    transformation: str
    x64: bool = False

    def f(self, x: Any) -> Any:
        """Return the result of the last line."""
        return self.results(x)[-1]

    def results(self, x: Any) -> list[Any]:
        """Return the array and the result of each line."""
        results = [x]
        for text in self.lines:
            results.append(eval(text, ENVIRONMENT | {"x": results[-1]}))
        return results

    @property
    def is_stacked(self) -> bool:
        """Return whether the transformation takes a stack of operands, `xs`."""
        return "xs" in self.text

    @property
    def text(self) -> str:
        """Return the source text of the transformation."""
        return (TRANSFORMATIONS | HIGH)[self.transformation]

    def operands(self) -> tuple[Any, Any]:
        """Return the operand, or a stack of operands, and its dense array."""
        return made(self.operand, self.is_stacked, self.x64)

    def reference(self) -> Any:
        """Return the operand of the reference run.

        This is the dense array with high types, or a value with dense parts for `BY_LEAVES`. For
        other programs it is the operand itself, which `m` materializes.
        """
        x, dense = self.operands()
        if self.transformation == BY_LEAVES:
            return with_dense_parts(x)
        return dense if self.transformation in HIGH else x

    def run(self, m: Callable[[Callable], Callable], x: Any) -> Any:
        """Return the result for an operand or a stack `x`, with `m` as in `TRANSFORMATIONS`."""
        return eval(self.text, ENVIRONMENT | {"f": self.f, "m": m, "x": x, "xs": x})

    def __str__(self) -> str:
        x = f"stacked(lambda i: {self.operand})" if self.is_stacked else self.operand
        body = [f"    x = {text}" for text in self.lines]
        m = "lambda f: f" if self.transformation in HIGH else "vn.implicit"
        head = [f"from fuzz.operands import *  # {self.transformation}", f"i, m = 0, {m}"]
        head += ["jax.config.update('jax_enable_x64', True)"] if self.x64 else []
        head += ["vn.hijax.install()"] if self.transformation in HIGH else []
        lines = ["def f(x):", *body, "    return x", f"x = xs = {x}", self.text]
        return "\n".join([*head, *lines])

    def smaller(self) -> Iterator["Program"]:
        """Yield programs that are slightly simpler."""
        for n in range(len(self.lines)):
            yield self._replace(lines=(*self.lines[:n], *self.lines[n + 1 :]))
        names = list(HIGH if self.transformation in HIGH else TRANSFORMATIONS)
        for name in names[: names.index(self.transformation)]:
            yield self._replace(transformation=name)
        for n, text in enumerate(self.lines):
            for within in lines_within(text):
                yield self._replace(lines=(*self.lines[:n], within, *self.lines[n + 1 :]))
        if self.x64:
            yield self._replace(x64=False)


MODES = {"implicit": TRANSFORMATIONS, "high": HIGH, "both": TRANSFORMATIONS | HIGH}


def program(random: Random, kinds: Sequence[str] = KINDS, mode: str = "both") -> Program:
    """Return a random program with an operand of one of these types and formats."""
    kind, x64 = random.choice(kinds), random.random() < 0.2
    dtype = random.choice(["float32"] * 4 + ["bfloat16", "float16"] + ["float64"] * 4 * x64)
    with jax.enable_x64(x64):
        text = operand(random, kind, dtype)
        _, x = made(text, False, x64)
        aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
        lines = []
        for _ in range(random.randint(1, 4)):
            one, result = line(random, aval)
            if result is None or not jnp.issubdtype(result.dtype, jnp.floating):
                break
            lines.append(one)
            aval = result
    return Program(kind, text, tuple(lines), random.choice([*MODES[mode]]), x64)
