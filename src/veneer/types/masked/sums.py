"""Sums that know their number of entries, so that a mean which counts all of them is refused."""

from typing import Any

from jax.typing import ArrayLike

from ..._core.rules import add_rule
from ..._core.transform import redispatch
from ..._jax.known_values import known_entries
from ..._jax.primitives import find_primitive, jaxpr_as_fun
from ..._jax.tracing import is_eager
from .array import Masked


def as_sum(x: Masked, count: int | None) -> Masked:
    """Notes of how many entries a value is the sum, for as long as a program keeps that object."""
    if count is not None:
        x.__dict__["_entries"] = count
    return x


def refuse_mean(total: Any, divisor: Any) -> None:
    """Refuses a sum that is divided by the number of entries, of which some may be invalid."""
    count = getattr(total, "_entries", None)
    known = None if isinstance(divisor, Masked) else known_entries(divisor)
    if count is not None and known is not None and (known == count).all():
        raise TypeError(_counts_all("this mean", "x.mean(axis)"))


def _counts_all(what: str, instead: str) -> str:
    return (
        f"{what} of a Masked counts all entries, including invalid ones. Use {instead}, or "
        "x.sum(axis) and x.count(axis)."
    )


# Functions of jax.numpy that count all entries, or take a NaN for an invalid one.

_STATISTICS = {
    **{"_mean": "x.mean(axis)", "_var": "x.var(axis)", "_std": "x.std(axis)"},
    **{"_average": "x.mean(axis)", "nanmean": "x.mean(axis)"},
    **dict.fromkeys(("median", "quantile", "percentile"), "jnp.nanquantile of x.filled(jnp.nan)"),
}


_SMALL = 4  # equations: those of jax.numpy's sum, or its division


def _jit(*operands: Masked | ArrayLike, name: str, jaxpr: Any, **params: Any) -> Any:
    if name in _STATISTICS:
        raise TypeError(_counts_all(f"jax.numpy.{name.strip('_')}", _STATISTICS[name]))
    # Compiled for itself, a sum would come back as an object that knows nothing of its entries.
    if is_eager() and len(jaxpr.eqns) <= _SMALL:
        return redispatch(jaxpr_as_fun(jaxpr), *operands)
    return NotImplemented


add_rule(_jit, [find_primitive("jit")], structural=True, conditional=True)
