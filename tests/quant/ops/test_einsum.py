"""`vn.quant.einsum` and `dot`: the semantics of jax.numpy with quantized arithmetic."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays
from support.array_types import Lora
from support.arrays import normal

import veneer as vn
from veneer.quant import quantize


def events(f, *args):
    return [(event.primitive, event.how) for event in vn.explain(f)(*args).events]


def assert_close(actual, expected):
    assert isinstance(actual, jax.Array)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)


@arrays.once
def in_int8():
    return quantize(normal(2, 3, 32, seed=1), "int8", channelwise_axes=[0, 1])


@arrays.once
def in_uint4():
    return quantize(normal(32, 4, seed=2), "uint4", channelwise_axes=[1])


@arrays.once
def stacked():
    return quantize(normal(2, 32, 4, seed=3), "int4", channelwise_axes=[0, 2])


V = normal(4, 5, seed=4)
INTEGER, OUTSIDE = (
    "multiply integer codes, scale the output",
    "convert codes of rhs to float, scale the output",
)

EINSUMS = arrays.OnDemand(
    {
        "matrix product": lambda: ("abk,kn->abn", in_int8(), in_uint4()),
        "ellipsis": lambda: ("...k,kn->...n", in_int8(), in_uint4()),
        "implicit output": lambda: ("abk,kn", in_int8(), in_uint4()),
        "transposed output": lambda: ("abk,kn->nba", in_int8(), in_uint4()),
        "batch": lambda: ("abk,akn->abn", in_int8(), stacked()),
        "outer": lambda: ("ab,cd->abcd", V, V),
        "sum over two": lambda: ("abk,akn->n", in_int8(), stacked()),
        "three operands": lambda: ("abk,kn,nm->abm", in_int8(), in_uint4(), V),
        "transposed": lambda: ("kn->nk", in_uint4()),
        "sum of one": lambda: ("kn->n", in_uint4()),
    }
)


@pytest.mark.parametrize("name", EINSUMS)
def test_einsum_agrees_with_dense_arrays(name):
    subscripts, *operands = EINSUMS[name]
    run = jax.jit(
        lambda operands: (
            vn.quant.einsum(subscripts, *operands),
            jnp.einsum(subscripts, *vn.materialise(operands)),
        )
    )
    assert_close(*run(operands))


@pytest.mark.parametrize("qtype", ["int8", "fp8", "nf4"])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("rows", [3, 0])
def test_a_dense_float8_operand_is_promoted(qtype, dtype, rows):
    x, w = normal(rows, 32).astype(dtype), quantize(normal(32, 4), qtype, channelwise_axes=[1])
    run = jax.jit(
        lambda x, w: (
            vn.quant.dot(x, w),
            vn.quant.einsum("mk,kn->mn", x, w),
            vn.quant.einsum(x, [0, 1], w, [1, 2], [0, 2]),
            vn.quant.dot_general(x, w, (([1], [0]), ([], []))),
        )
    )
    for y in run(x, w):
        assert_close(y, x.astype(jnp.float32) @ w.dequantize())


def test_axes_that_are_no_multiples_raise():
    lhs, rhs = jnp.ones((2, 3, 8)), quantize(jnp.ones((3, 4, 8)), "int8")
    message = r"Cannot broadcast axis 'n' of tnh,snh->tns: of its sizes 3 and 4"
    with pytest.raises(ValueError, match=message):
        vn.quant.einsum("tnh,snh->tns", lhs, rhs)


@pytest.mark.parametrize("name", ["matrix product", "ellipsis", "transposed output", "batch"])
def test_einsum_multiplies_codes(name):
    subscripts, *operands = EINSUMS[name]
    ways = events(lambda *operands: vn.quant.einsum(subscripts, *operands), *operands)
    assert ("dot_general", INTEGER) in ways
    assert all(primitive in ("dot_general", "transpose") for primitive, _ in ways)


def heads(count, *shape, tiles=False, seed=0):
    x = normal(*shape[:-1], count, shape[-1], seed=seed)
    tiled = {x.ndim - 1: 16} if tiles else {}
    return quantize(x, "int8", channelwise_axes=range(x.ndim - 1), tiled_axes=tiled)


GROUPS = arrays.OnDemand(
    {
        "queries in groups": lambda: (
            "bthd,bshd->bhts",
            heads(6, 2, 3, 32),
            heads(2, 2, 5, 32, seed=1),
        ),
        "keys in groups": lambda: (
            "bthd,bshd->bhts",
            heads(2, 2, 3, 32),
            heads(6, 2, 5, 32, seed=1),
        ),
        "one key": lambda: ("bthd,bshd->bhts", heads(6, 2, 3, 32), heads(1, 2, 5, 32, seed=1)),
        "tiles": lambda: (
            "bthd,bshd->bhts",
            heads(6, 2, 3, 32, tiles=True),
            heads(2, 2, 5, 32, tiles=True),
        ),
        "ellipsis": lambda: ("...td,...sd->...ts", heads(3, 2, 6, 32), heads(5, 2, 2, 32, seed=1)),
        "two axes": lambda: ("hgd,hgd->gh", heads(4, 6, 32), heads(2, 3, 32, seed=1)),
        "order of results": lambda: (
            "bthd,bshd->tshb",
            heads(6, 4, 3, 32),
            heads(2, 2, 5, 32, seed=1),
        ),
    }
)


def repeated(subscripts, *operands):
    """Return the einsum of dense operands, with each entry repeated for its group."""
    terms = subscripts.split("->")[0].replace("...", "bh").split(",")
    most = {}
    for term, x in zip(terms, operands, strict=True):
        for label, size in zip(term, x.shape, strict=True):
            most[label] = max(size, most.get(label, 0))
    for i, (term, x) in enumerate(zip(terms, operands, strict=True)):
        for axis, label in enumerate(term):
            x = jnp.repeat(x, most[label] // x.shape[axis], axis)
        operands = (*operands[:i], x, *operands[i + 1 :])
    return jnp.einsum(subscripts, *operands)


@pytest.mark.parametrize("dense", [None, 0, 1])
@pytest.mark.parametrize("name", GROUPS)
def test_an_entry_is_multiplied_with_its_group(name, dense):
    subscripts, *operands = GROUPS[name]
    operands = [x.dequantize() if i == dense else x for i, x in enumerate(operands)]
    stands_for = vn.materialise(operands)
    run = lambda *operands: vn.quant.einsum(subscripts, *operands)
    run_dense = lambda *operands: repeated(subscripts, *operands)
    expected = run_dense(*stands_for)
    assert_close(run(*operands), expected)
    assert_close(jax.jit(run)(*operands), expected)
    stack = lambda operands: jax.tree.map(lambda x: jnp.stack([x, x]), operands)
    assert_close(jax.vmap(run)(*stack(operands))[1], expected)
    step = lambda carry, operands: (carry, run(*operands))
    assert_close(lax.scan(step, 0, stack(operands))[1][1], expected)
    if dense is not None:
        others = lambda x, operands: [x if i == dense else y for i, y in enumerate(operands)]
        loss = lambda f, operands: lambda x: (f(*others(x, operands)) ** 2).sum()
        gradient = jax.jit(jax.grad(loss(run, operands)))(operands[dense])
        np.testing.assert_allclose(
            gradient, jax.grad(loss(run_dense, stands_for))(stands_for[dense]), rtol=1e-4, atol=1e-2
        )
    else:
        ways = events(run, *operands)
        assert not any(event.made_dense for event in vn.explain(run)(*operands).events)
        assert any(how.startswith("multiply integer codes") for _, how in ways)


def test_groups_in_lists_of_axes_agree():
    _, q, k = GROUPS["queries in groups"]
    expected = vn.quant.einsum("bthd,bshd->bhts", q, k)
    assert_close(vn.quant.einsum(q, [0, 1, 2, 3], k, [0, 4, 2, 3], [0, 2, 1, 4]), expected)


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("hd,hd->h", [(6, 4), (4, 4)]),  # not a multiple
        ("hd,hd->h", [(6, 4), (6, 2)]),  # a contracted axis
        ("hd,hd->h", [(6, 4), (6, 4, 2)]),
        ("hd,hd->h", [(6, 4), (3, 4), (2, 4)]),
    ],
)
def test_other_sizes_raise_the_errors_of_jax(subscripts, shapes):
    with pytest.raises((ValueError, TypeError)):
        vn.quant.einsum(subscripts, *map(jnp.ones, shapes))


def test_einsum_accepts_lists_of_axes_and_options():
    expected = jnp.einsum(
        in_int8().dequantize(), [0, 1, 2], in_uint4().dequantize(), [2, 3], [3, 0, 1]
    )
    options = {"precision": "highest", "preferred_element_type": jnp.float32, "optimize": True}
    assert_close(
        vn.quant.einsum(in_int8(), [0, 1, 2], in_uint4(), [2, 3], [3, 0, 1], **options), expected
    )


@pytest.mark.parametrize("function", [vn.quant.dot, vn.quant.einsum])
def test_other_implicit_operands_are_materialized(function):
    lora = Lora(normal(4, 32), normal(4, 2), normal(2, 32))
    args = ("ij,jk->ik",) if function is vn.quant.einsum else ()
    assert_close(function(*args, lora, in_uint4()), lora.materialise() @ in_uint4().dequantize())


def test_dot_accepts_all_ranks_that_numpy_accepts():
    parameters = list(inspect.signature(vn.quant.dot).parameters)
    assert parameters == ["a", "b", "precision", "preferred_element_type", "out_sharding"]
    row = quantize(normal(32), "int8")
    for a, b in [
        (in_int8(), in_uint4()),
        (V.T, V),
        (row, in_uint4()),
        (in_int8(), row),
        (in_int8(), stacked()),
        (2.0, row),
        (row, row),
    ]:
        assert_close(vn.quant.dot(a, b), jnp.dot(*vn.materialise((a, b))))
    half = vn.quant.dot(in_int8(), in_uint4(), "highest", jnp.bfloat16)
    assert half.dtype == jnp.bfloat16


def test_dot_multiplies_codes():
    assert events(vn.quant.dot, in_int8(), in_uint4()) == [("dot_general", INTEGER)]
    assert events(vn.quant.dot, normal(2, 32), in_uint4()) == [("dot_general", OUTSIDE)]


# Programs written for dense arrays.


PROGRAMS = arrays.OnDemand(
    {
        "matmul of batches": lambda: (jnp.matmul, in_int8(), stacked()),
        "tensordot": lambda: (
            lambda x, w: jnp.tensordot(x, w, ((2,), (0,))),
            in_int8(),
            in_uint4(),
        ),
        "inner": lambda: (lambda x, w: jnp.inner(x, w.T), in_int8(), in_uint4()),
        "lax.dot": lambda: (lambda x, w: lax.dot(x[0], w), in_int8(), in_uint4()),
        "batch_matmul": lambda: (lax.batch_matmul, in_int8(), stacked()),
    }
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_use_integer_products(program):
    f, *args = PROGRAMS[program]
    assert_close(vn.materialise(vn.implicit(f)(*args)), f(*vn.materialise(args)))
    assert ("dot_general", INTEGER) in events(f, *args)
    assert not vn.explain(f)(*args).materialised


def test_a_public_function_in_implicit_runs_the_rule_once():
    run = lambda x, w: vn.quant.dot_general(x, w, (([2], [0]), ([], [])))
    assert events(run, in_int8(), in_uint4()) == [("dot_general", INTEGER)]
    assert_close(
        vn.implicit(run)(in_int8(), in_uint4()), in_int8().dequantize() @ in_uint4().dequantize()
    )
