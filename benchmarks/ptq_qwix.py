"""Qwix's GPTQ and AWQ of single matrices, by what `vn.quant.observe` records here.

Qwix's own calibration finds weights in Flax modules; its functions of a matrix take second moments,
or mean magnitudes. Scales are those of its default, "absmax".
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from veneer.quant import ActivationStatistics

try:
    from qwix._src.core import qarray
    from qwix.contrib import awq_core, gptq_core
except ImportError:  # a peer, which is left out then
    qarray = None


def _gptq(w: Any, statistics: ActivationStatistics, how: Any) -> Any:
    q, _ = gptq_core.quantize_weight(w, jnp.asarray(statistics.gram, jnp.float32), how)
    return qarray.dequantize(q)


def _awq(w: Any, statistics: ActivationStatistics, how: Any) -> Any:
    absmean = jnp.asarray(statistics.absmean, jnp.float32).ravel()
    q, factors = awq_core.quantize_weight(w, absmean, how)
    return qarray.dequantize(q) / factors


#: By what each column is called.
WAYS: dict[str, Callable[[Any, ActivationStatistics, Any], Any]] = (
    {} if qarray is None else {"Qwix's AWQ": _awq, "Qwix's GPTQ": _gptq}
)


def rounded(
    params: Mapping[str, Any],
    statistics: Mapping[str, ActivationStatistics],
    qtype: str,
    tile: int | None,
    way: str,
) -> Iterator[tuple[str, Any]]:
    """Paths of torch weights `[N, K]` that met activations, with what they are worth as rounded."""
    how = qarray.HowToQuantize(
        qtype=getattr(jnp, qtype),
        channelwise_axes=[0],
        tiled_axes={} if tile is None else {1: tile},
    )
    for path, of_weight in statistics.items():
        yield path, WAYS[way](params[path], of_weight, how)
