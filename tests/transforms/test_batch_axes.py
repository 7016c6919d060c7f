"""Slicing the leaves is slicing the value only along a batch axis: never by chance."""

import jax
import jax.numpy as jnp
import pytest
from support import arrays
from support.array_types import Diagonal, assert_close, lora

import veneer as vn


class Symmetric(vn.ImplicitArray):
    x: jax.Array  # [..., n, n]

    def materialise(self):
        return self.x + jnp.swapaxes(self.x, -1, -2)


class SymmetricByT(vn.ImplicitArray):
    x: jax.Array  # [n, n]: it takes no leading axis

    def materialise(self):
        return self.x + self.x.T


SQUARE = arrays.normal(4, 4)
VALUES = {
    "symmetric": Symmetric(SQUARE),
    "symmetric, of rank 2 alone": SymmetricByT(SQUARE),
    "diagonal": Diagonal(arrays.normal(4)),
    "diagonals": Diagonal(SQUARE),
    "lora of full rank": lora(arrays.key(1), (4, 4), rank=4),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
class TestAgainstDense:
    def check(self, f, value):
        assert_close(vn.implicit(f)(value), f(vn.materialise(value)))

    def test_scan_over_rows_agrees_with_dense(self, value):
        self.check(lambda w: jax.lax.scan(lambda c, row: (c + row, row * 2), w[0], w), value)

    def test_scan_stacks_implicit_results(self, value):
        self.check(lambda w: jax.lax.scan(lambda c, _: (c, w), 0, None, length=4)[1], value)

    def test_map_over_rows_agrees_with_dense(self, value):
        self.check(lambda w: jax.lax.map(jnp.sum, w), value)


def test_a_batch_axis_keeps_the_type():
    f = lambda d: jax.lax.map(lambda one: one, d)
    assert isinstance(vn.implicit(f)(Diagonal(SQUARE)), Diagonal)
