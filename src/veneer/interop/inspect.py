"""What a file or folder of tensors holds, tensor by tensor."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from .._core.value import materialise
from ..quant import QArray
from ..quant.models.checkpoint import describe_format, error_norms, relative_error
from ..types.basis import Permuted


class TensorReport(NamedTuple):
    """One tensor: `scale` is the minimum, median and maximum of its scales, None if it is dense.

    `relative_error` is that of its dense form against the original, None if none was given.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    scale: tuple[float, float, float] | None
    relative_error: float | None


def inspect(source: Any, names: Sequence[str], against: Any = None) -> Iterator[TensorReport]:
    """Reports on the tensors `names` of `source`, reading one at a time.

    `source` and `against` are checkpoints that `open_checkpoint` opened.

    **Raises:** `ValueError` where `source` or `against` lacks a name, before anything is read, and
    where a tensor has another shape in `against`.
    """
    for folder in filter(None, (source, against)):
        if missing := [name for name in names if name not in folder]:
            some = ", ".join(map(repr, list(folder)[:3])) or "nothing"
            raise ValueError(f"{folder.path} has no tensor {missing[0]!r}; it holds {some}, ...")
    return (_report(name, source, against) for name in names)


def _report(name: str, source: Any, against: Any) -> TensorReport:
    value = source.read(name)
    is_permuted = isinstance(value, Permuted)
    stored = value.array if is_permuted else value
    scale = _statistics(stored.scales()) if isinstance(stored, QArray) else None
    format = describe_format(stored) + ", permuted" * is_permuted
    error = None
    if against is not None:
        original = against.read(name)
        if original.shape != value.shape:
            raise ValueError(
                f"{name!r} has shape {list(value.shape)} in {source.path}, but "
                f"{list(original.shape)} in {against.path}: they are not the same model"
            )
        error = relative_error(
            *error_norms(*(np.asarray(materialise(x)) for x in (original, value)))
        )
    return TensorReport(name, format, value.shape, value.nbytes, scale, error)


def _statistics(scale: ArrayLike) -> tuple[float, float, float] | None:
    values = np.asarray(scale, np.float64)
    if not values.size:
        return None
    return float(values.min()), float(np.median(values)), float(values.max())
