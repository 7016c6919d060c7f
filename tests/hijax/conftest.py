"""Fixtures for tests of high types: weights, comparisons and the mode itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import veneer as vn


@dataclass
class Weight:
    """An implicit array, a stack of three, and the dense arrays to compare with."""

    value: Any
    stack: Any
    dense_tangent: bool  # whether its gradient is dense

    @property
    def dense(self) -> jax.Array:
        return vn.materialise(self.value)

    @property
    def dense_stack(self) -> jax.Array:
        return vn.materialise(self.stack)

    def reference(self, transform: Callable, function: Callable, *, stacked: bool = False) -> Any:
        """Apply `transform(function)`, such as a gradient, using only dense operations."""
        value = self.stack if stacked else self.value
        if self.dense_tangent:
            return transform(function)(vn.materialise(value))
        return transform(lambda v: function(vn.materialise(v)))(value)


def lora(*batch: int) -> Any:
    key = jax.random.key(sum(batch))
    w, a, b = (jax.random.normal(key, (*batch, *shape)) for shape in ((4, 6), (4, 2), (2, 6)))
    return vn.types.LoraArray(w, a, b, scale=0.5)


def quantized(*batch: int) -> Any:
    w = jax.random.normal(jax.random.key(1), (*batch, 4, 6))
    return vn.quant.quantize(w, "int8", channelwise_axes=(*range(len(batch)), len(batch) + 1))


WEIGHTS = {
    "lora": lambda: Weight(lora(), lora(3), dense_tangent=False),
    "quantized": lambda: Weight(quantized(), quantized(3), dense_tangent=True),
}


@pytest.fixture(params=WEIGHTS)
def weight(request: pytest.FixtureRequest) -> Weight:
    return WEIGHTS[request.param]()


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(2), (3, 4))


@pytest.fixture(autouse=True)
def mode(request: pytest.FixtureRequest) -> Any:
    """Enable high types, except in tests that use the fixture `mode_off`."""
    if "mode_off" in request.fixturenames:
        yield
        return
    with vn.hijax.enabled():
        yield


@pytest.fixture
def mode_off() -> None:
    """Leave high types disabled unless the test enables them."""


@pytest.fixture
def high() -> Callable:
    """Return a function that makes a typed value of a weight by transposing it twice."""
    return lambda w: jnp.swapaxes(jnp.swapaxes(w, -1, -2), -1, -2)


@pytest.fixture
def agree() -> Callable:
    """Return a check that two trees hold almost equal numbers, once materialized.

    Rules add numbers in another order than dense code does.
    """

    def check(actual: Any, expected: Any, atol: float = 2e-5) -> None:
        actual, expected = (jax.tree.leaves(vn.materialise(t)) for t in (actual, expected))
        for x, y in zip(actual, expected, strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=atol)

    return check


@pytest.fixture
def agree_by_leaves(agree: Callable) -> Callable:
    """Return a check of derivatives that compares the leaves of implicit arrays."""
    return lambda actual, expected: agree(jax.tree.leaves(actual), jax.tree.leaves(expected))
