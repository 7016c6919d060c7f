"""Statistics of activations: what is recorded of them, and the static range that follows."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..conversion.calibration import check_calibration
from ..conversion.quantize import quantize
from ..formats import get_format
from ..formats.tiles import Shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivationStatistics:
    """What the activations were that a weight was multiplied with.

    Arrays of NumPy, in float64. Those of channels have the shape of the weight, with the size of an
    axis where activations differ along it and 1 elsewhere: `[K, 1]` for a kernel `[K, N]`, `[1, K]`
    for a torch weight `[N, K]`, and `[L, K, 1]` for kernels stacked as `[L, K, N]` that a scan goes
    through. Those of ranges are of all the channels of a weight: `[1, 1]`, and `[L, 1, 1]`.

    **Arguments:**

    - `count`: how many values there were, of each channel.
    - `minimum`, `maximum`, `mean`, `absmean`, `mean_square`: of these, `absmean` of magnitudes.
    - `lows`, `highs`: the least and the largest value of a batch, averaged over batches: by the
      name of the average, `"mean"` or `"exponential"`.
    - `gram`: `x.T @ x / count`, the mean of products of two channels, `[..., K, K]`, with the
      contracted axes as one; None where it was not asked for.
    - `cross`: as `gram`, of products of channels with what they are where nothing is rounded, in
      `calibrate` with `propagation`; None elsewhere.
    """

    count: Any
    minimum: Any
    maximum: Any
    mean: Any
    absmean: Any
    mean_square: Any
    lows: dict[str, Any]
    highs: dict[str, Any]
    gram: Any = None
    cross: Any = None

    @property
    def absmax(self) -> Any:
        """The largest magnitude of each channel."""
        return np.maximum(np.abs(self.minimum), np.abs(self.maximum))

    def range(self, average: str) -> tuple[Any, Any]:
        """Returns the ends of the range of all channels of a weight.

        **Arguments:**

        - `average`: over the ranges of batches: `"mean"`, `"exponential"`, or `"widest"`, which is
          no average.

        **Raises:** `ValueError` for another.
        """
        if average == "widest":
            axes = self._contracted()
            ends = self.minimum.min(axes, keepdims=True), self.maximum.max(axes, keepdims=True)
            return ends
        if average not in self.lows:
            names = ", ".join([*self.lows, "widest"])
            raise ValueError(f"unknown average {average!r}; the averages are {names}")
        return self.lows[average], self.highs[average]

    def of_stacks(self, of_channels: Any) -> np.ndarray:
        """Returns an array of channels, or what is made of one, as `[S, K]`, of so many weights."""
        order = [*self.stacked_axes, *self._contracted()]
        others = [i for i in range(np.ndim(of_channels)) if i not in order]
        return np.transpose(of_channels, [*order, *others]).reshape(self.stacks, -1)

    @property
    def stacks(self) -> int:
        """Of how many weights these are, as of layers or experts, which are stacked in one."""
        return math.prod(np.shape(self.lows["mean"]))

    @property
    def stacked_axes(self) -> tuple[int, ...]:
        """The axes, from the front, along which they are."""
        return tuple(i for i, n in enumerate(np.shape(self.lows["mean"])) if n > 1)

    def _contracted(self) -> tuple[int, ...]:
        ranges = np.shape(self.lows["mean"])
        return tuple(i for i, n in enumerate(np.shape(self.minimum)) if n != ranges[i])


def static_range(
    statistics: ActivationStatistics,
    qtype: DTypeLike,
    shape: Shape,
    *,
    average: str = "mean",
    calibration_method: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scale of activations, and the zero point where the method has one.

    **Arguments:**

    - `statistics`: what was recorded.
    - `qtype`: the format of the activations.
    - `shape`: of the weight that they meet.
    - `average`: which range, as in `ActivationStatistics.range`.
    - `calibration_method`: how a range gives the scale; None is the format's own.

    **Raises:** `ValueError` for a method that takes the activations themselves, a range that is not
    finite or that has no values but 0, statistics of a weight of another shape or that lack a
    layer.
    """
    method = calibration_method or get_format(qtype).calibration
    kind = check_calibration(method, get_format(qtype)).name
    low, high = map(np.asarray, statistics.range(average))
    if low.ndim != len(shape) or any(
        n not in (1, size) for n, size in zip(low.shape, shape, strict=True)
    ):
        raise ValueError(
            f"the statistics are of a weight of other axes: ranges of shape {low.shape}, and the "
            f"weight has shape {shape}"
        )
    if kind in ("absmean", "rms"):
        moment = statistics.absmean if kind == "absmean" else statistics.mean_square
        axes = statistics._contracted()
        high = np.mean(moment, axes, keepdims=True)
        high = high if kind == "absmean" else np.sqrt(high)
        low = -high
    elif kind not in ("absmax", "minmax", "fixed"):
        raise ValueError(
            f"calibration_method {method!r} takes the activations themselves, which statistics are "
            "not: leave act_range 'dynamic', or take 'absmax', 'minmax' or 'rms'"
        )
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(
            f"the recorded range is from {low.min()} to {high.max()}, which is none: a layer met "
            "no activations, or some that are not finite"
        )
    # The two ends, as a tile, are all that the method looks at.
    ends = jnp.asarray(np.stack([low, high], -1), jnp.float32)
    tiny = np.finfo(np.float32).tiny
    if kind != "fixed" and (np.abs(np.asarray(ends)).max(-1) < tiny).any():
        raise ValueError(
            "the recorded range of a layer has no values but 0: observe batches with other "
            "activations, or leave act_range 'dynamic'"
        )
    q = quantize(
        ends, qtype, channelwise_axes=tuple(range(low.ndim)), calibration_method=calibration_method
    )
    scale = q.scales()[..., 0]
    return scale, None if q.zero_point is None else jnp.asarray(q.zero_point)[..., 0]


def save_statistics(file: str | Path, statistics: Mapping[str, ActivationStatistics]) -> None:
    """Saves what `observe` has recorded, as a file of NumPy's, `.npz`.

    **Arguments:**

    - `file`: its path.
    - `statistics`: by the paths of weights.

    >>> import tempfile, jax.numpy as jnp, veneer as vn
    >>> rules = [vn.quant.Rule("w", "int8")]
    >>> model = lambda params, x: x @ params["w"]
    >>> statistics = vn.quant.observe(model, rules, params={"w": jnp.eye(2)})([jnp.ones((3, 2))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vn.quant.save_statistics(f"{folder}/activations.npz", statistics)
    ...     vn.quant.load_statistics(f"{folder}/activations.npz")["w"].mean.ravel().tolist()
    [1.0, 1.0]
    """
    arrays: dict[str, Any] = {
        f"{path}:{field}": array
        for path, one in statistics.items()
        for field, array in arrays_of(one).items()
    }
    with Path(file).open("wb") as stream:  # savez would add a suffix to a name
        np.savez_compressed(stream, **arrays)


def load_statistics(file: str | Path) -> dict[str, ActivationStatistics]:
    """Loads what `save_statistics` has saved.

    **Arguments:**

    - `file`: its path.

    **Raises:** `ValueError` where the file holds anything else.
    """
    fields: dict[str, dict[str, Any]] = {}
    for name, array in arrays_in(file).items():
        path, _, field = name.rpartition(":")
        fields.setdefault(path, {})[field] = array
    try:
        return {path: statistics_in(arrays) for path, arrays in fields.items()}
    except TypeError as error:
        raise ValueError(f"{file} holds no statistics of activations: {error}") from None


def arrays_in(file: str | Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file of NumPy's, `.npz`, by name.

    **Raises:** `ValueError` for a file that is empty, damaged or of another kind.
    """
    with Path(file).open("rb") as stream:
        try:
            with np.load(stream) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except Exception as error:  # NumPy and zipfile raise a dozen types
            raise ValueError(f"{file} is empty, damaged or no .npz file: {error}") from None


def arrays_of(statistics: ActivationStatistics) -> dict[str, np.ndarray]:
    """Returns the arrays of statistics, by name: `lows.mean` is one of those of `lows`."""
    return {
        jax.tree_util.keystr(keys, simple=True, separator="."): np.asarray(leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(statistics)
    }


def statistics_in(arrays: Mapping[str, Any]) -> ActivationStatistics:
    """Returns the statistics of which these are the arrays, by name.

    **Raises:** `TypeError` where they are of anything else.
    """
    fields: dict[str, Any] = {"lows": {}, "highs": {}}
    for name, array in arrays.items():
        field, _, average = name.partition(".")
        if average:
            fields.setdefault(field, {})[average] = array
        else:
            fields[field] = array
    return ActivationStatistics(**fields)
