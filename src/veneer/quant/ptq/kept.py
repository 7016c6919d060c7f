"""What a calibration has found so far, kept in a folder from which the same one goes on."""

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
from ..._jax.primitives import constants_in
from ..._jax.source_lines import warn_user
from ..models.programs import abstract_arrays
from ..observation.statistics import (
    ActivationStatistics,
    read_npz,
    statistics_from_arrays,
    statistics_to_arrays,
)
from .weight import RoundedWeight


class KeptCalibration:
    """What is known of weights after each stage, in a folder; of one calibration alone.

    **Arguments:**

    - `folder`: made where there is none. None keeps nothing.
    - `identity`: returns digests of everything that the result depends on, by name.

    **Raises:** `ValueError` for a folder of another calibration, or of anything else.
    """

    def __init__(self, folder: str | Path | None, identity: Callable[[], Mapping[str, str]]):
        self._folder = None if folder is None else Path(folder)
        if self._folder is None:
            return
        file = self._folder / "calibration.json"
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"{folder} is not a folder. Choose another one for resume")
        if file.is_file():
            self._check(file, identity())
            return
        if self._folder.exists() and any(x.suffix != _BEGUN for x in self._folder.iterdir()):
            raise ValueError(f"{folder} has no calibration to resume. Choose another folder")
        self._folder.mkdir(parents=True, exist_ok=True)
        begun = file.with_suffix(_BEGUN)
        begun.write_text(json.dumps(dict(identity()), indent=1), encoding="utf-8")
        begun.replace(file)

    def _check(self, file: Path, identity: Mapping[str, str]) -> None:
        try:
            known = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise ValueError(
                f"{file} is empty or damaged, so its calibration is unknown. Delete "
                f"{self._folder}, or choose another folder"
            ) from None
        if others := [name for name, digest in identity.items() if known.get(name) != digest]:
            raise ValueError(
                f"{self._folder} belongs to a calibration with other {' and '.join(others)}. "
                "Choose another folder, or delete it"
            )

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
        met = statistics_to_arrays(statistics)
        arrays: dict[str, Any] = {f"{_MET}{name}": array for name, array in met.items()}
        arrays |= {} if weight is None else weight.state()
        file = self._file(stage, path)
        begun = file.with_suffix(_BEGUN)
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
            try:
                state = read_npz(self._file(stage, path))
                names = [name for name in state if name.startswith(_MET)]
                met[path] = statistics_from_arrays(
                    {name[len(_MET) :]: state.pop(name) for name in names}
                )
            except (ValueError, TypeError) as error:
                warn_user(f"{path} is calibrated again, because {error}")
                continue
            if weight is not None:
                weight.restore(state)
        return met

    def _file(self, stage: int, path: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{stage:05}-{hashlib.sha256(path.encode()).hexdigest()[:16]}.npz"


_MET = "met:"  # before the names of statistics
_BEGUN = ".begun"  # the suffix of a file that is being written


def identity_of(
    called: object, program: Callable, params: Any, args: Sequence[Any], batches: Iterable[Any]
) -> dict[str, str]:
    """Return digests of a calibration, by what of it they are.

    **Arguments:**

    - `called`: the arguments of the calibration, as they are printed.
    - `program`: the model, a function of the parameters and of `args`.
    - `batches`: all of them.
    """
    return {
        "rules or options": _digest([repr(called)]),
        "model": _digest(_described(program, params, args)),
        "parameters": _digest(jax.tree.leaves(params)),
        "batches": _digest(x for batch in batches for x in ("batch", *jax.tree.leaves(batch))),
    }


def _described(program: Callable, params: Any, args: Sequence[Any]) -> list[Any]:
    """Return the text of a program and its constants, the same in each process."""

    def run(params: Any, args: Any) -> list[Any]:
        out = jax.tree.leaves(implicit(program)(params, *args))
        return [x for x in out if isinstance(x, jax.Array | np.ndarray)]

    of_arrays, avals = abstract_arrays(run, params, tuple(args))
    jaxpr = jax.make_jaxpr(of_arrays)(avals)
    text = re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr))
    ordered = lambda match: ", ".join(sorted(match[0].split(", ")))
    return [re.sub(r"(?<=frozenset\(\{)[^}]*", ordered, text), *constants_in(jaxpr)]


def _digest(parts: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for part in parts:
        if not isinstance(part, str) and jnp.issubdtype(jnp.result_type(part), jax.dtypes.prng_key):
            part = jax.random.key_data(part)
        array = np.asarray(part)
        if array.dtype.kind in "OUS":
            array = np.frombuffer(repr(part).encode(), np.uint8)
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
