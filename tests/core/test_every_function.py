"""Every public function of JAX that takes arrays accepts an array that cannot be materialized.

One array operand after the other is an `Opaque`, and the others are dense. All results that are
arrays must be `Opaque` and equal the dense results, so no operation falls back to dense arrays.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_functions import FUNCTIONS, LISTED, NEEDS_VALUES, STATIC, Example, example_of
from support.probes import Opaque, bare

import veneer as vn


def operands(example: Example) -> list[int]:
    leaves = jax.tree.leaves(example)
    return [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]


def with_opaque(example: Example, i: int) -> Example:
    leaves, treedef = jax.tree.flatten(example)
    leaves[i] = Opaque(leaves[i])
    return jax.tree.unflatten(treedef, leaves)


CALLED = [name for name in FUNCTIONS if name not in {*LISTED, *NEEDS_VALUES}]


@pytest.mark.parametrize("name", CALLED)
def test_no_function_materializes_its_operand(name):
    example = example_of(name)
    function = example.make(FUNCTIONS[name])
    expected = function(*example.args, **example.kwargs)
    arrays = operands(example)
    assert arrays
    for i in arrays:
        args, kwargs, _ = with_opaque(example, i)
        out = vn.implicit(function)(*args, **kwargs)
        check(out, expected)
        if i == arrays[0]:
            assert any(map(is_opaque, jax.tree.leaves(out, is_leaf=is_opaque))) != (name in STATIC)


def is_opaque(x: Any) -> bool:
    return isinstance(x, Opaque)


def check(out: Any, expected: Any) -> None:
    # A result that is dense does not depend on the operand: an Opaque has no way to become so.
    found = jax.tree.leaves(out, is_leaf=is_opaque)
    for x, y in zip(map(bare, found), jax.tree.leaves(expected), strict=True):
        if not isinstance(x, jax.Array):
            assert x == y
            continue
        assert (x.shape, x.dtype) == (jnp.shape(y), jnp.result_type(y))
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", NEEDS_VALUES)
def test_functions_that_need_concrete_values_raise(name):
    args, kwargs, _ = with_opaque(NEEDS_VALUES[name], operands(NEEDS_VALUES[name])[0])
    with pytest.raises((RuntimeError, TypeError), match=r"refuses|concrete|traced|must have"):
        vn.implicit(FUNCTIONS[name])(*args, **kwargs)
