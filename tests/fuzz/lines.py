"""Texts that compute with an array whose shape and dtype are known.

Each text is an expression in `x`. The functions amplify errors only a little, and no result depends
on which of two close numbers is larger.
"""

import math
from collections.abc import Iterator
from random import Random
from typing import Any

import jax
import jax.numpy as jnp

from .operands import CACHE_FORMATS, ENVIRONMENT, KINDS, building_dense, operand, shape_of

ELEMENTWISE = (
    "-x",
    "x * 2",
    "x * x",
    "x + x",
    "x - 0.25",
    "0.5 * x",
    "x / (2 + x * x)",
    "jnp.abs(x)",
    "jnp.sin(x)",
    "jnp.tanh(x)",
    "jnp.exp(-jnp.abs(x))",
    "jnp.maximum(x, 0.3715)",
    "jnp.clip(x, -0.3715, 0.3715)",
    "jnp.where(x > 0.3715, x, 0.5)",
    "jax.nn.sigmoid(x)",
    "jax.nn.gelu(x)",
    "jax.nn.relu(x)",
    "jnp.zeros_like(x) + x",
    "jax.lax.stop_gradient(x)",
    "jnp.conj(x)",
    "x.astype('float32')",
    "x.astype('bfloat16')",
    "jnp.cbrt(2 + jnp.abs(x))",
    "(x, x)[1]",
)
ALONG = (  # an axis, of any size
    "jnp.flip(x, {axis})",
    "jnp.roll(x, 1, {axis})",
    "jnp.cumsum(x, {axis})",
    "jnp.sum(x, {axis})",
    "jnp.sum(x, {axis}, keepdims=True)",
    "jnp.sum(x, {axis}, dtype='float32')",
    "jnp.mean(x, {axis})",
    "jnp.concatenate([x, x], {axis})",
    "jnp.concatenate([x, jnp.ones_like(x)], {axis})",
    "jnp.stack([x, x], {axis})",
    "jnp.repeat(x, 2, {axis})",
    "jnp.expand_dims(x, {axis})",
    "jnp.moveaxis(x, {axis}, 0)",
    "jnp.sort(x, {axis})",
    "jax.nn.softmax(x, {axis})",
    "lax.associative_scan(jnp.add, x, axis={axis})",
)
ALONG_ENTRIES = (  # an axis that has some
    "jnp.max(x, {axis})",
    "jnp.min(x, {axis}, keepdims=True)",
    "jnp.prod(x, {axis})",
    "jax.nn.logsumexp(x, {axis})",
    "jnp.take(x, 0, {axis})",
    "jnp.take(x, jnp.array([0, -1, 0]), {axis})",
    "jnp.take(x, jnp.array([7, 0]), {axis}, mode='fill', fill_value=0.5)",
    "lax.index_in_dim(x, 0, {axis})",
    "lax.dynamic_index_in_dim(x, jnp.int32(1), {axis}, False)",
    "lax.slice_in_dim(x, 0, 1, axis={axis})",
    "lax.slice_in_dim(x, 0, {size}, 2, axis={axis})",
    "jnp.split(x, [1], {axis})[1]",
    "jnp.delete(x, 0, {axis})",
)
OF_MATRICES = (  # of any number of them
    "jnp.swapaxes(x, -1, -2)",
    "x.mT @ x",
    "jnp.tril(x)",
    "jnp.triu(x, 1)",
    "jnp.trace(x, axis1=-2, axis2=-1)",
    "jnp.diagonal(x, axis1=-2, axis2=-1)",
    "x @ jnp.ones(({columns}, 2), x.dtype)",
    "jnp.ones((2, {rows}), x.dtype) @ x",
    "x @ jnp.linspace(-1, 1, {columns}, dtype=x.dtype)",
    "jnp.einsum('...ij,jk->...ik', x, jnp.full(({columns}, 3), 0.5, x.dtype))",
    "jnp.einsum('...ij,...kj->...ik', x, x)",
    "jnp.einsum('...ij->...j', x)",
    "jnp.tensordot(x, jnp.ones(({columns}, 2), x.dtype), 1)",
)
OF_SQUARES = ("x @ x", "x + x.mT", "x * jnp.eye({columns}, dtype=x.dtype)", "x @ x.mT @ x")
OF_VECTORS = ("jnp.outer(x, x)", "x @ x", "jnp.diag(x)", "jnp.linspace(0, 1, {size}) @ x")
OF_ALL = (
    "jnp.ravel(x)",
    "x.T",
    "x[None]",
    "x[..., None]",
    "jnp.squeeze(x)",
    "jnp.sum(x)",
    "jnp.mean(x)",
    "jnp.broadcast_to(x, (2, *x.shape))",
    "jnp.pad(x, 1)",
    "x.reshape(*x.shape[::-1])",
    "x[...]",
)
OF_ENTRIES = ("x[0]", "x[-1]", "x[::-1]", "x[:, None]", "x[jnp.array([0, 0])]", "jnp.array([*x])")
# Not for a scalar: XLA ends the process ("Invalid binary instruction opcode map").
OF_ENTRIES += (
    "x.at[0].set(0.5)",
    "x.at[:].set(0.5)",
    "x.at[...].add(x)",
    "lax.dynamic_update_slice_in_dim(x, x[:1], 1, 0)",
)

# Indexing by any dtype, in range and out of range, along the first axis or any other.
BY_INDEX = (
    "x[{index}]",
    "x.at[{index}].get(mode='fill', fill_value=0.5)",
    "jnp.take(x, {index}, {axis}, mode='clip')",
    "jnp.take(x, {index}, {axis}, mode='wrap')",
    "lax.dynamic_index_in_dim(x, {index}, {axis}, False)",
    "lax.dynamic_slice_in_dim(x, {index}, 1, {axis})",
    "lax.dynamic_update_slice_in_dim(x, x[:1], {index}, 0)",
    "lax.dynamic_update_index_in_dim(x, 0.5 * x[0], {index}, 0)",
    "x.at[{index}].set(0.5)",
    "x.at[{index}].add(x[0])",
    "jnp.take_along_axis(x, jnp.full_like(x, {index} % 2, dtype={index}.dtype), {axis})",
)
INDEX_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32")

# Lines with an array that the program builds: {other} is its text.
BUILT = (
    "jnp.asarray(x * built({other}))",
    "jnp.asarray(built({other}) * x)",
    "jnp.asarray(x + built({other}))",
    "jnp.asarray(built({other}) - x)",
    "jnp.asarray(x @ built({other}))",
    "jnp.asarray(built({other}) @ x)",
    "jnp.asarray(built({other}).dot(x))",
    "jnp.asarray(jnp.multiply(x, built({other})))",
    "jnp.asarray(jnp.matmul(built({other}), x))",
    "jnp.asarray(jnp.where(x > 0.3715, x, built({other})))",
    "jnp.asarray(jnp.maximum(built({other}), x))",
    "jnp.asarray(jnp.concatenate([x, built({other})]))",
    "jnp.asarray((built({other}) * 2) * (x + 0))",
    "jnp.asarray(built({other}).sum() * x)",
    "jnp.asarray(x * built(with_numpy_leaves({other})))",
    "jnp.asarray(lax.fori_loop(0, 2, lambda _, x: x * built({other}), x))",
    "jnp.asarray(jax.jit(lambda x: built({other}) * x)(x))",
)
# Lines that build an array with the operand as a leaf.
BUILT_OF_X = (
    "jnp.asarray(built(vn.freeze(x)) * x)",
    "jnp.asarray(built(vn.types.Diagonal(x)) @ jnp.ones((x.shape[-1], 2), x.dtype))",
    "jnp.asarray(built(vn.types.Diagonal(x)) @ built(vn.types.Diagonal(x + 1)))",
    "jnp.asarray(built(vn.types.Toeplitz(x, x)).sum(0))",
    "jnp.asarray(built(vn.types.LowRank(x, x.mT)) @ x)",
    "jnp.asarray(built(vn.types.Kronecker(x, x[..., :1])) * 0.5)",
    "jnp.asarray(x + built(vn.types.LowRank(x, jnp.ones((x.shape[-1], x.shape[-1]), x.dtype))))",
)

# Write values back to a cache as they were read. The cache must not change.
REWRITTEN = tuple(
    f"x + drift(x, {{format!r}}, lambda c, y: {write})"
    for write in (
        "lax.dynamic_update_slice(c, y, (0,) * y.ndim)",
        "lax.dynamic_update_slice(c, jnp.where(y == jnp.inf, 2 * y, c), (0,) * y.ndim)",
        "lax.dynamic_update_slice_in_dim(c, y[-1:], len(y) - 1, 0)",
        "c.at[0].set(y[0])",
        "c.at[::2].set(y[::2])",
        "c.at[jnp.arange(len(y))].set(y)",
        "jnp.concatenate([c[:1], y[1:]])",
        "lax.fori_loop(0, 3, lambda i, c: c.at[i % len(y)].set(y[i % len(y)]), c)",
    )
)

OF_KEYS = (
    "jax.random.normal(x, (3, 2))",
    "jax.random.uniform(jax.random.split(x)[0], (2,))",
    "jax.random.normal(jax.random.fold_in(x, 3), (4,))",
    "jax.vmap(lambda x: jax.random.normal(x, (2,)))(jax.random.split(x, 3))",
    "lax.map(lambda x: jax.random.uniform(x, (2,)), jax.random.split(x, (2,)))",
    "jax.random.normal(lax.fori_loop(0, 2, lambda i, x: jax.random.fold_in(x, i), x), (3,))",
    "jax.random.normal(jnp.stack([x, x])[::-1][1], (3,))",
    "jax.random.normal(lax.cond(True, lambda x: x, lambda x: jax.random.fold_in(x, 1), x), (3,))",
    "jax.random.key_data(x) * 2.0**-32",
)

# Functions of another line: {body} keeps the shape and dtype, {of} is any line.
KEEPING = (
    "lax.fori_loop(0, 2, lambda _, x: {body}, x)",
    "lax.scan(lambda x, _: ({body}, None), x, None, length=2)[0]",
    "lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, (lambda x: {body})(c[1])), (0, x))[1]",
    "lax.cond(jnp.sum(x) > 0.3715, lambda x: {body}, lambda x: x, x)",
    "lax.cond(jnp.sum(x) > 0.3715, lambda x: x * 0.5, lambda x: {body}, x)",
    "lax.switch(1, [lambda x: x, lambda x: {body}], x)",
)
INSIDE = (
    "jax.jit(lambda x: {of})(x)",
    "jax.checkpoint(lambda x: {of})(x)",
    "jax.jvp(lambda s: without_leaves((lambda x: {of})(s * x)), (0.5,), (1.0,))[1]",
    "jax.grad(lambda s: jnp.sum(jax.nn.softplus((lambda x: {of})(s * x))))(0.5)",
    "jax.vjp(lambda s: (lambda x: {of})(x + s), 0.5)[0]",
    "jax.custom_jvp(lambda x: {of})(x)",
    "with_jvp(lambda x: {of})(x)",
    "with_vjp(lambda x: {of})(x)",
    "with_vjp(lambda x: {of})(2 * x)",
    "(lambda y: y + jnp.ones_like(y))({of})",
)
# Maps over an axis: {each} is any line.
MAPPED = (
    "jax.vmap(lambda x: {each}, in_axes={axis})(x)",
    "jax.vmap(lambda x: {each}, in_axes={axis}, out_axes=-1)(x)",
)
MAPPED += tuple(
    f"jax.vmap(lambda x: {combined}, axis_name='i', in_axes={{axis}})(x)"
    for combined in ("lax.psum({each}, 'i')", "x - lax.pmean(x, 'i')", "lax.all_gather(x, 'i')")
)
# Halves along an axis: {half} is any line.
OVER_DEVICES = tuple(
    f"over_devices(lambda x: {combined}, x, {{axis}})"
    for combined in (
        "lax.psum({half}, 'i')",
        "lax.all_gather({half}, 'i')",
        "lax.all_gather(x, 'i', axis={axis}, tiled=True)",
        "lax.pmax({half}, 'i')",
        "lax.psum(x * (lax.axis_index('i') + 1).astype(x.dtype), 'i')",
    )
)
MAPPED_FIRST = (
    "lax.map(lambda x: {each}, x)",
    "lax.scan(lambda c, x: (c + 1, {each}), 0, x)[1]",
    "lax.scan(lambda c, x: (c + jnp.sum(x), None), jnp.zeros((), x.dtype), x)[0]",
)


_FUNCTION = "lambda x: "


def lines_within(text: str) -> Iterator[str]:
    """Yield the body of each lambda in a line."""
    start = text.find(_FUNCTION)
    while start >= 0:
        start += len(_FUNCTION)
        depth, end = 0, start
        while end < len(text) and depth >= 0 and not (depth == 0 and text[end] == ","):
            depth += (text[end] in "([{") - (text[end] in ")]}")
            end += depth >= 0
        yield text[start:end]
        start = text.find(_FUNCTION, start)


def result_type(text: str, aval: Any) -> Any:
    """Return the shape and dtype of a line's dense result, or None if it raises an error."""
    try:
        with building_dense():
            out = jax.eval_shape(lambda x: eval(text, ENVIRONMENT | {"x": x}), aval)
    except Exception:  # a line that does not fit is none
        return None
    return out if hasattr(out, "shape") and math.prod(out.shape) <= 2000 else None


def line(random: Random, aval: Any, depth: int = 2) -> tuple[str, Any]:
    """Return a line, and the shape and dtype of its result."""
    shape = aval.shape
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        text = random.choice(OF_KEYS)
        return text, result_type(text, aval)
    choices: list[tuple[str, ...]] = [ELEMENTWISE, OF_ALL]
    if shape:
        choices += [ALONG, ALONG]
        choices += [ALONG_ENTRIES] if 0 not in shape else []
        choices += [OF_ENTRIES, BY_INDEX] if shape[0] else []
    if len(shape) >= 2:
        choices += [OF_MATRICES, OF_MATRICES]
        choices += [OF_SQUARES] if shape[-1] == shape[-2] else []
    choices += [OF_VECTORS] if len(shape) == 1 else []
    choices += [BUILT, BUILT_OF_X] if shape and 0 not in shape else []
    choices += [REWRITTEN] if len(shape) >= 2 and 0 not in shape else []
    if depth:
        choices += [KEEPING, INSIDE]
        choices += [MAPPED] if shape and 0 not in shape else []
        choices += [MAPPED_FIRST] if shape and shape[0] else []
        choices += [OVER_DEVICES] if any(size and size % 2 == 0 for size in shape) else []
    text = random.choice(random.choice(choices))
    axis = random.randrange(len(shape)) if shape else 0
    fields: dict[str, Any] = {"axis": axis, "size": shape[axis] if shape else 1}
    fields["format"] = random.choice(CACHE_FORMATS)
    if len(shape) >= 2:
        fields |= {"rows": shape[-2], "columns": shape[-1]}
    if "{index}" in text:
        dtype = random.choice(INDEX_DTYPES)
        size = shape[axis] if "{axis}" in text else shape[0]
        index = random.choice([random.randint(-2 * size, 2 * size), random.randint(-300, 300)])
        bounds = jnp.iinfo(dtype)
        index = min(max(index, int(bounds.min)), int(bounds.max))
        fields["index"] = f"jnp.{dtype}({index})"
    if "{body}" in text:
        fields["body"] = _keeping(random, aval)
    if "{of}" in text:
        fields["of"] = line(random, aval, depth - 1)[0]
    if "{each}" in text:
        along = axis if "{axis}" in text else 0
        of_one = jax.ShapeDtypeStruct((*shape[:along], *shape[along + 1 :]), aval.dtype)
        fields["each"] = line(random, of_one, depth - 1)[0]
    if text in OVER_DEVICES:
        axis = random.choice([a for a, size in enumerate(shape) if size and size % 2 == 0])
        block = jax.ShapeDtypeStruct(
            (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :]), aval.dtype
        )
        fields |= {"axis": axis, "half": line(random, block, 0)[0]}
    if "{other}" in text:
        text = _with_other(random, text, aval)
    text = text.format(**fields)
    result = result_type(text, aval)
    return (text, result) if result is not None else ("x * 2", aval)


def _with_other(random: Random, text: str, aval: Any) -> str:
    """Return a line with the text of another array, which fits by its shape in most cases."""
    texts = [operand(random, kind, jnp.dtype(aval.dtype).name) for kind in random.sample(KINDS, 6)]
    fits = [other for other in texts if _may_meet(shape_of(other), aval.shape)]
    line = text.replace("{other}", random.choice(fits or texts))
    return line.replace("{", "{{").replace("}", "}}")


def _may_meet(other: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    is_product = len(other) == 2 == len(shape) and (other[0] == shape[1] or other[1] == shape[0])
    pairs = zip(other, shape, strict=False)
    is_broadcast = len(other) == len(shape) and all(n == m or 1 in (n, m) for n, m in pairs)
    return is_broadcast or is_product


def _keeping(random: Random, aval: Any) -> str:
    """Return a line whose result has the shape and dtype of its operand."""
    text, result = line(random, aval, 0)
    same = (result.shape, result.dtype) == (aval.shape, aval.dtype)
    return text if same else "0.5 * x"
