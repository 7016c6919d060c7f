"""`SavedProgress`: a folder with results of a calibration, from which the same call continues."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.surface.implicit import implicit
from ..._jax.frames import warn_user
from ..._jax.primitives import constants_in
from ..models.arguments import abstract_arrays
from ..statistics import (
    ActivationStatistics,
    read_npz,
    statistics_from_arrays,
    statistics_to_arrays,
)
from .weight import RoundedWeight

#: The prefix of the names of statistics in a file.
_STATISTICS = "met:"
#: The suffix of a file that is not yet complete.
_PARTIAL = ".begun"


class SavedProgress:
    """A folder with the weights and statistics after each stage of a calibration.

    A stage is a group of weights that are rounded at the same time.

    **Arguments:**

    - `folder`: the folder, which is created if needed. None saves nothing.
    - `digests`: a function that returns hashes of the inputs of the calibration, as in
      `digest_calibration`. The folder stores these hashes. A later calibration can use the folder
      only if its hashes are equal.

    **Raises:** `ValueError` if the folder belongs to another calibration, or holds other files.
    """

    def __init__(self, folder: str | Path | None, digests: Callable[[], Mapping[str, str]]):
        self._folder = None if folder is None else Path(folder)
        if self._folder is None:
            return
        file = self._folder / "calibration.json"
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"{folder} is not a folder. Choose another one for resume")
        if file.is_file():
            self._check_digests(file, digests())
            return
        # Start a new calibration. Incomplete files are from an interrupted start.
        if self._folder.exists() and any(x.suffix != _PARTIAL for x in self._folder.iterdir()):
            raise ValueError(f"{folder} has no calibration to resume. Choose another folder")
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(_PARTIAL)
        partial.write_text(json.dumps(dict(digests()), indent=1), encoding="utf-8")
        partial.replace(file)

    def _check_digests(self, file: Path, digests: Mapping[str, str]) -> None:
        try:
            saved = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise ValueError(
                f"{file} is empty or damaged, so its calibration is unknown. Delete "
                f"{self._folder}, or choose another folder"
            ) from None
        if others := [name for name, digest in digests.items() if saved.get(name) != digest]:
            raise ValueError(
                f"{self._folder} belongs to a calibration with other {' and '.join(others)}. "
                "Choose another folder, or delete it"
            )

    def save(
        self, stage: int, path: str, statistics: ActivationStatistics, weight: RoundedWeight | None
    ) -> None:
        """Save the state of the weight at `path` after a stage, and its activation statistics.

        `stage` is the index of the stage.
        If `weight` is None, save only the statistics. An interruption leaves the file complete or
        absent.
        """
        if self._folder is None:
            return
        fields = statistics_to_arrays(statistics)
        arrays: dict[str, Any] = {f"{_STATISTICS}{name}": x for name, x in fields.items()}
        arrays |= {} if weight is None else weight.state()
        file = self._file(stage, path)
        partial = file.with_suffix(_PARTIAL)
        with partial.open("wb") as stream:
            np.savez(stream, **arrays)
        partial.replace(file)

    def restore(
        self, stage: int, weights: Mapping[str, RoundedWeight | None]
    ) -> dict[str, ActivationStatistics]:
        """Restore the weights that are saved for a stage, in place.

        `stage` is the index of the stage. `weights` is a dict from each path of the stage to the
        `RoundedWeight` whose state to restore. If the value is None, only statistics are restored.
        Damaged files are ignored, with a warning.

        Return a dict from the path of each saved weight to the statistics of its activations.
        """
        statistics = {}
        for path, weight in weights.items():
            if self._folder is None or not self._file(stage, path).is_file():
                continue
            try:
                # The names of statistics have a prefix. The other arrays are the weight's state.
                state = read_npz(self._file(stage, path))
                names = [name for name in state if name.startswith(_STATISTICS)]
                fields = {name.removeprefix(_STATISTICS): state.pop(name) for name in names}
                statistics[path] = statistics_from_arrays(fields)
            except (ValueError, TypeError) as error:
                warn_user(f"{path} is calibrated again, because {error}")
                continue
            if weight is not None:
                weight.restore(state)
        return statistics

    def _file(self, stage: int, path: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{stage:05}-{hashlib.sha256(path.encode()).hexdigest()[:16]}.npz"


def digest_calibration(
    options: object, program: Callable, params: Any, args: Sequence[Any], batches: Iterable[Any]
) -> dict[str, str]:
    """Return hashes of the inputs of a calibration: its options, model, parameters and batches.

    **Arguments:**

    - `options`: the options of the calibration. The hash is of their `repr`.
    - `program`, `params`, `args`: the model, a function that is called as `program(params, *args)`.
    - `batches`: all batches.
    """
    return {
        "rules or options": _digest([repr(options)]),
        "model": _digest(_describe_program(program, params, args)),
        "parameters": _digest(jax.tree.leaves(params)),
        "batches": _digest(x for batch in batches for x in ("batch", *jax.tree.leaves(batch))),
    }


def _describe_program(program: Callable, params: Any, args: Sequence[Any]) -> list[Any]:
    """Return the jaxpr of a program as a text without process-specific parts, and its constants."""

    def run(params: Any, args: Any) -> list[Any]:
        out = jax.tree.leaves(implicit(program)(params, *args))
        return [x for x in out if isinstance(x, jax.Array | np.ndarray)]

    run_on_arrays, avals = abstract_arrays(run, params, tuple(args))
    jaxpr = jax.make_jaxpr(run_on_arrays)(avals)
    # Memory addresses and the order of frozensets differ between processes.
    text = re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr))
    sort_items = lambda match: ", ".join(sorted(match[0].split(", ")))
    return [re.sub(r"(?<=frozenset\(\{)[^}]*", sort_items, text), *constants_in(jaxpr)]


def _digest(parts: Iterable[Any]) -> str:
    """Return the SHA-256 digest of strings, arrays and numbers."""
    digest = hashlib.sha256()
    for part in parts:
        if not isinstance(part, str) and jnp.issubdtype(jnp.result_type(part), jax.dtypes.prng_key):
            part = jax.random.key_data(part)
        array = np.asarray(part)
        if array.dtype.kind in "OUS":  # an object or a string: hash its text
            array = np.frombuffer(repr(part).encode(), np.uint8)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
