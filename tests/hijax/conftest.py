"""Weights for the tests of high types, with the mode on in each test."""

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
    """An implicit array, and what a function of it must agree with."""

    value: Any
    stack: Any  # three of them
    dense_tangent: bool

    @property
    def dense(self) -> jax.Array:
        return vn.materialise(self.value)

    @property
    def dense_stack(self) -> jax.Array:
        return vn.materialise(self.stack)

    def reference(self, transform: Callable, function: Callable, *, stacked: bool = False) -> Any:
        """`transform(function)` at the weight by dense arrays alone: `jax.grad`, say."""
        value = self.stack if stacked else self.value
        if self.dense_tangent:
            return transform(function)(vn.materialise(value))
        return transform(lambda v: function(vn.materialise(v)))(value)


def lora(*batch: int) -> Any:
    key = jax.random.key(sum(batch))
    w, a, b = (jax.random.normal(key, (*batch, *shape)) for shape in ((4, 6), (4, 2), (2, 6)))
    return vn.types.LoraArray(w, a, b, scale=0.5)


def quantised(*batch: int) -> Any:
    w = jax.random.normal(jax.random.key(1), (*batch, 4, 6))
    return vn.quant.quantize(w, "int8", channelwise_axes=(*range(len(batch)), len(batch) + 1))


WEIGHTS = {
    "lora": lambda: Weight(lora(), lora(3), dense_tangent=False),
    "quantised": lambda: Weight(quantised(), quantised(3), dense_tangent=True),
}


@pytest.fixture(params=WEIGHTS)
def weight(request: pytest.FixtureRequest) -> Weight:
    return WEIGHTS[request.param]()


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(2), (3, 4))


@pytest.fixture(autouse=True)
def mode(request: pytest.FixtureRequest) -> Any:
    """The mode is on, but in tests that are marked as seeing to it themselves."""
    if "mode_off" in request.fixturenames:
        yield
        return
    with vn.hijax.enabled():
        yield


@pytest.fixture
def mode_off() -> None:
    """The mode is as the test sets it."""


@pytest.fixture
def high() -> Callable:
    """Makes of a weight a value of a high type, which is no argument: by transposing it twice."""
    return lambda w: jnp.swapaxes(jnp.swapaxes(w, -1, -2), -1, -2)


@pytest.fixture
def agree() -> Callable:
    """Asserts that two trees are the same numbers. Rules sum in another order than dense code."""

    def check(found: Any, expected: Any, atol: float = 2e-5) -> None:
        found, expected = (jax.tree.leaves(vn.materialise(t)) for t in (found, expected))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=atol)

    return check


@pytest.fixture
def agree_by_leaves(agree: Callable) -> Callable:
    """The same of derivatives, of whose implicit arrays the leaves are compared."""
    return lambda found, expected: agree(jax.tree.leaves(found), jax.tree.leaves(expected))
