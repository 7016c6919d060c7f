"""`ActivationStatistics`, the files that hold them, and the static scales computed from them."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .conversion.calibration import check_calibration
from .conversion.quantize import quantize
from .formats import get_format
from .formats.tiles import Shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivationStatistics:
    """The statistics of the activations that multiply a weight, recorded by `vn.quant.observe`.

    All arrays are NumPy arrays in float64. A channel is one index of the axes of the weight that
    the products contract. Some arrays have one value per channel. `lows` and `highs` have one value
    for all channels. For `K` channels, the shapes are:

    | weight | one value per channel | `lows`, `highs` |
    |---|---|---|
    | a kernel `[K, N]` | `[K, 1]` | `[1, 1]` |
    | a torch weight `[N, K]` | `[1, K]` | `[1, 1]` |
    | `L` stacked kernels, `[L, K, N]` | `[L, K, 1]` | `[L, 1, 1]` |

    **Arguments:**

    - `count`: the number of values per channel.
    - `minimum`, `maximum`, `mean`, `absmean`, `mean_square`: one value per channel. `absmean` is
      the mean magnitude.
    - `lows`, `highs`: the smallest and the largest value of a batch, averaged over the batches.
      Each is a dict with two averages: "mean" and "exponential" (a moving average).
    - `gram`: `[..., K, K]`, the second moments `x.T @ x / count` of the activations `x`. Several
      contracted axes are flattened into `K`. It is None unless `observe` has `gram=True`.
    - `cross`: `x.T @ y / count`, where `x` and `y` are the activations in the quantized and in the
      dense model. It is None unless `calibrate` uses `propagation`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> observer = vn.quant.observe(
    ...     lambda p, x: x @ p["w"], [vn.quant.Rule("w", "int8")], params={"w": jnp.eye(2)}
    ... )
    >>> statistics = observer([jnp.array([[1.0, -3.0]]), jnp.array([[2.0, 1.0]])])["w"]
    >>> isinstance(statistics, vn.quant.ActivationStatistics), statistics.mean.ravel().tolist()
    (True, [1.5, -1.0])
    >>> [end.item() for end in statistics.range("mean")]
    [-1.0, 1.5]
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
        """The largest magnitude per channel."""
        return np.maximum(np.abs(self.minimum), np.abs(self.maximum))

    def range(self, average: str) -> tuple[Any, Any]:
        """Return the range of the activations over all channels, as `(low, high)`.

        **Arguments:**

        - `average`: "mean" or "exponential" averages the ranges of the batches. "widest" is the
          range of all values.

        **Raises:** `ValueError` for any other `average`.
        """
        if average == "widest":
            axes = self._contracted_axes()
            return self.minimum.min(axes, keepdims=True), self.maximum.max(axes, keepdims=True)
        if average not in self.lows:
            names = ", ".join([*self.lows, "widest"])
            raise ValueError(f"unknown average {average!r}; it must be one of {names}")
        return self.lows[average], self.highs[average]

    def of_stacks(self, values: Any) -> np.ndarray:
        """Reshape `values`, one per channel, such as `mean`, to `[stacks, K]`.

        `stacks` is the number of stacked weights, and `K` the number of channels of each.
        """
        order = [*self.stacked_axes, *self._contracted_axes()]
        others = [i for i in range(np.ndim(values)) if i not in order]
        return np.transpose(values, [*order, *others]).reshape(self.stacks, -1)

    @property
    def stacks(self) -> int:
        """The number of stacked weights, such as layers or experts. 1 for a single weight."""
        return math.prod(np.shape(self.lows["mean"]))

    @property
    def stacked_axes(self) -> tuple[int, ...]:
        """The axes along which weights are stacked, counted from the front."""
        return tuple(i for i, n in enumerate(np.shape(self.lows["mean"])) if n > 1)

    def _contracted_axes(self) -> tuple[int, ...]:
        # `lows` has size 1 along contracted axes, and otherwise the shape of `minimum`.
        sizes = zip(np.shape(self.minimum), np.shape(self.lows["mean"]), strict=True)
        return tuple(axis for axis, (n, ranges) in enumerate(sizes) if n != ranges)


def static_range(
    statistics: ActivationStatistics,
    qtype: DTypeLike,
    shape: Shape,
    *,
    average: str = "mean",
    calibration_method: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the static scale and the zero point of activations, as a pair.

    The zero point is None if `calibration_method` is symmetric, such as "absmax", and the format is
    not an unsigned integer format.

    **Arguments:**

    - `statistics`: the statistics of the activations.
    - `qtype`: the format of the activations.
    - `shape`: the shape of the weight that multiplies the activations.
    - `average`: the range to use: "mean", "exponential" or "widest".
    - `calibration_method`: the method that turns the range into a scale. None selects the default
      of the format.

    **Raises:** `ValueError` if the method needs the activations themselves, if the range is not
    finite or is 0, or if the statistics belong to a weight of another shape.
    """
    method = calibration_method or get_format(qtype).calibration
    kind = check_calibration(method, get_format(qtype)).name
    low, high = map(np.asarray, statistics.range(average))
    if low.ndim != len(shape) or any(
        n not in (1, size) for n, size in zip(low.shape, shape, strict=True)
    ):
        raise ValueError(
            f"the statistics have ranges of shape {low.shape}, which do not fit a weight of shape "
            f"{shape}. Pass the statistics of this model"
        )
    contracted = statistics._contracted_axes()
    if kind == "absmean":
        high = np.mean(statistics.absmean, contracted, keepdims=True)
        low = -high
    elif kind == "rms":
        high = np.sqrt(np.mean(statistics.mean_square, contracted, keepdims=True))
        low = -high
    elif kind not in ("absmax", "minmax", "fixed"):
        raise ValueError(
            f"calibration_method {method!r} needs the activations themselves, not statistics. Use "
            "act_range='dynamic', or 'absmax', 'minmax' or 'rms'"
        )
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(
            f"the recorded range is not finite ({low.min()} to {high.max()}): a layer had no "
            "activations, or some that are not finite. Observe other batches"
        )
    # These methods use only the ends of a range. So quantize an array of the ends for its scale.
    ends = jnp.asarray(np.stack([low, high], -1), jnp.float32)
    tiny = np.finfo(np.float32).tiny
    if kind != "fixed" and (np.abs(np.asarray(ends)).max(-1) < tiny).any():
        raise ValueError(
            "the recorded range of a layer is 0. Observe other batches, or use act_range='dynamic'"
        )
    q = quantize(
        ends, qtype, channelwise_axes=tuple(range(low.ndim)), calibration_method=calibration_method
    )
    zero_point = None if q.zero_point is None else jnp.asarray(q.zero_point)[..., 0]
    return q.scales()[..., 0], zero_point


def save_statistics(file: str | Path, statistics: Mapping[str, ActivationStatistics]) -> None:
    """Save the result of `observe` as an `.npz` file of NumPy.

    **Arguments:**

    - `file`: the path of the file. An existing file is replaced.
    - `statistics`: a dict from paths of weights to `ActivationStatistics`.

    **Raises:** `OSError` if the file cannot be written.

    >>> import tempfile, jax.numpy as jnp, veneer as vn
    >>> model, rules = lambda p, x: x @ p["w"], [vn.quant.Rule("w", "int8")]
    >>> statistics = vn.quant.observe(model, rules, params={"w": jnp.eye(2)})([jnp.ones((3, 2))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vn.quant.save_statistics(f"{folder}/activations.npz", statistics)
    ...     vn.quant.load_statistics(f"{folder}/activations.npz")["w"].mean.ravel().tolist()
    [1.0, 1.0]
    """
    arrays: dict[str, Any] = {
        f"{path}:{field}": array
        for path, x in statistics.items()
        for field, array in statistics_to_arrays(x).items()
    }
    with Path(file).open("wb") as stream:  # NumPy would add a suffix to a file name
        np.savez_compressed(stream, **arrays)


def load_statistics(file: str | Path) -> dict[str, ActivationStatistics]:
    """Load a file written by `save_statistics`.

    **Arguments:**

    - `file`: the path of the file.

    **Returns:** a dict from paths of weights to `ActivationStatistics`.

    **Raises:** `OSError` if the file cannot be read, and `ValueError` if it does not contain
    statistics.

    >>> import tempfile, veneer as vn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vn.quant.save_statistics(f"{folder}/activations.npz", {})
    ...     vn.quant.load_statistics(f"{folder}/activations.npz")
    {}
    """
    fields: dict[str, dict[str, Any]] = {}
    for name, array in read_npz(file).items():
        path, _, field = name.rpartition(":")
        fields.setdefault(path, {})[field] = array
    try:
        return {path: statistics_from_arrays(arrays) for path, arrays in fields.items()}
    except TypeError as error:
        raise ValueError(f"{file} contains no activation statistics: {error}") from None


def read_npz(file: str | Path) -> dict[str, np.ndarray]:
    """Read the arrays of an `.npz` file.

    **Raises:** `ValueError` if the file is empty, damaged or of another kind.
    """
    with Path(file).open("rb") as stream:
        try:
            with np.load(stream) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except Exception as error:  # NumPy and zipfile raise a dozen types
            raise ValueError(f"{file} is empty, damaged or not an .npz file: {error}") from None


def statistics_to_arrays(statistics: ActivationStatistics) -> dict[str, np.ndarray]:
    """Return the arrays of statistics, by field: "count" or "lows.mean", for example."""
    return {
        jax.tree_util.keystr(keys, simple=True, separator="."): np.asarray(leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(statistics)
    }


def statistics_from_arrays(arrays: Mapping[str, Any]) -> ActivationStatistics:
    """Create statistics from arrays by field, such as "count" or "lows.mean".

    **Raises:** `TypeError` if the names are not the fields of statistics.
    """
    fields: dict[str, Any] = {"lows": {}, "highs": {}}
    for name, array in arrays.items():
        field, _, average = name.partition(".")
        if average:
            fields.setdefault(field, {})[average] = array
        else:
            fields[field] = array
    return ActivationStatistics(**fields)
