"""Make implicit arrays for the weights of a layer, of any shape."""

from collections.abc import Iterable
from typing import Any

import jax
import pytest

import veneer as vn
from veneer.types.lora import LoraArray


def int8(w: jax.Array, in_ndim: int = 1) -> vn.quant.QArray:
    return vn.quant.quantize(w, "int8", channelwise_axes=[-1])


def nf4(w: jax.Array, in_ndim: int = 1) -> vn.quant.QArray:
    tile = 2 if w.shape[0] % 2 == 0 else 1
    return vn.quant.quantize(w, "nf4", channelwise_axes=range(1, w.ndim), tiled_axes={0: tile})


def lora(w: jax.Array | vn.ImplicitArray, in_ndim: int = 1) -> LoraArray:
    """Return a weight with a nonzero update. Its first `in_ndim` axes are the input axes."""
    new = LoraArray.init(
        w, 2, key=jax.random.key(0), alpha=1.0, in_ndim=in_ndim, out_ndim=w.ndim - in_ndim
    )
    return new.changed(b=0.3 * jax.random.normal(jax.random.key(1), new.b.shape))


def qlora(w: jax.Array, in_ndim: int = 1) -> LoraArray:
    return lora(nf4(w), in_ndim)


WEIGHTS = (int8, nf4, lora, qlora)


def cases(layers: Iterable[str]) -> list[Any]:
    """Return each layer with each kind of weight. A vector (LayerNorm) has no low-rank update."""
    return [
        pytest.param((name, make), id=f"{name}-{make.__name__}")
        for name in layers
        for make in WEIGHTS
        if name != "LayerNorm" or make in (int8, nf4)
    ]
