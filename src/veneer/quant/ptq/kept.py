"""What a calibration has found so far, kept in a folder from which the same one goes on."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..observation.statistics import ActivationStatistics, arrays_of, statistics_in
from .weight import RoundedWeight


class KeptCalibration:
    """What is known of weights after each stage, in a folder; of one calibration alone.

    **Arguments:**

    - `folder`: made where there is none. None keeps nothing.
    - `called`: what the calibration is called with, as it is printed.
    - `tree`: the parameters and a batch.

    **Raises:** `ValueError` for a folder of another calibration, or of anything else.
    """

    def __init__(self, folder: str | Path | None, called: object, tree: Any):
        self._folder = None if folder is None else Path(folder)
        if self._folder is None:
            return
        fingerprint, name = _fingerprint(called, tree), self._folder / "calibration.sha256"
        if not name.is_file() and self._folder.exists() and any(self._folder.iterdir()):
            raise ValueError(f"{folder} holds no calibration to resume: name another folder")
        if name.is_file() and name.read_text(encoding="utf-8") != fingerprint:
            raise ValueError(
                f"{folder} keeps what a calibration of other parameters, rules or batches has "
                "found: name another folder, or delete it"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        name.write_text(fingerprint, encoding="utf-8")

    def save(
        self,
        stage: int,
        path: str,
        statistics: ActivationStatistics,
        weight: RoundedWeight | None,
    ) -> None:
        """Keeps what is known of a weight after a stage, whole or not at all."""
        if self._folder is None:
            return
        met = arrays_of(statistics)
        arrays: dict[str, Any] = {f"{_MET}{name}": array for name, array in met.items()}
        arrays |= {} if weight is None else weight.state()
        file = self._file(stage, path)
        begun = file.with_suffix(".begun")
        with begun.open("wb") as stream:
            np.savez(stream, **arrays)
        begun.replace(file)

    def restored(
        self, stage: int, weights: Mapping[str, RoundedWeight | None]
    ) -> dict[str, ActivationStatistics]:
        """Restores the weights of which a stage is kept, and returns what they met, by path."""
        met = {}
        for path, weight in weights.items():
            if self._folder is None or not self._file(stage, path).is_file():
                continue
            with np.load(self._file(stage, path)) as arrays:
                state = dict(arrays)
            names = [name for name in state if name.startswith(_MET)]
            met[path] = statistics_in({name[len(_MET) :]: state.pop(name) for name in names})
            if weight is not None:
                weight.restore(state)
        return met

    def _file(self, stage: int, path: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{stage:05}-{hashlib.sha256(path.encode()).hexdigest()[:16]}.npz"


_MET = "met:"  # before the names of statistics


def _fingerprint(called: object, tree: Any) -> str:
    found = hashlib.sha256(repr(called).encode())
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
