"""A checkpoint of any kind, opened: tensors by the names of the dense one, read one at a time."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from .._core.value import materialise
from ..quant import QArray
from ..quant.models.checkpoint import describe_format, error_norms, relative_error
from ..types.basis import Permuted
from .families import FamilyWeights, read_family
from .folder import TensorFolder, no_checksums
from .writing import FORMATS, write_folder


class QuantizedFolder:
    """The tensors of a folder that another library quantized; as a `TensorFolder`.

    `read` gives an array of the dense shape, packed, where a family's tensors make one weight, and
    other tensors as they are stored. Its leaves are NumPy arrays.

    **Arguments:**

    - `folder`: open, and closed with this.
    - `found`: what `read_family` found in it.
    """

    def __init__(self, folder: TensorFolder, found: FamilyWeights):
        self.path = folder.path
        self.family = found.family
        self._folder = folder
        self._weights = found.weights
        parts = {part for weight in found.weights.values() for part in weight.parts}
        self._names = [name for name in folder if name not in parts]
        self._names += found.weights

    def __enter__(self) -> "QuantizedFolder":
        return self

    def __exit__(self, *exception: object) -> None:
        self._folder.__exit__(*exception)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._weights or name in self._names

    def dense_avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each tensor that is stored dense, by name."""
        stored = self._folder.dense_avals()
        return {name: stored[name] for name in self._names if name not in self._weights}

    def read(self, name: str) -> np.ndarray | QArray | Any:
        """Reads one tensor.

        **Raises:** `ValueError` where what is stored is not what the family has.
        """
        if name not in self._weights:
            return self._folder.read(name)
        try:
            return self._weights[name].read()
        except (TypeError, ValueError, OverflowError) as error:
            what = " ".join(str(error).split())
            if what.startswith(str(self.path)):
                raise ValueError(what) from error
            raise ValueError(f"{self.path}: tensor {name!r} is damaged: {what}") from error


class LazyTensors(Mapping[str, Any]):
    """The tensors of an open checkpoint as a mapping, each read when it is looked up."""

    def __init__(self, source: Any):
        self.source = source

    def __getitem__(self, name: str) -> Any:
        return self.source.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    raw: bool = False,
    verify: bool = False,
    names: str | None = None,
) -> Any:
    """Opens a checkpoint by what is there: a context manager of tensors by name.

    **Arguments:**

    - `path`: a folder or a file: of veneer, of Hugging Face, of safetensors, or GGUF, which may be
      the only one of a folder.
    - `raw`: whether to give the tensors of safetensors as they are stored, packed codes for what
      they are, whatever the family.
    - `verify`: as for `TensorFolder`.
    - `names`: as for `GgufFile`, and of no other kind.

    **Returns:** a `TensorFolder`, a `QuantizedFolder` or a `GgufFile`.

    **Raises:** `FileNotFoundError` where there is nothing, and `ValueError`, in one line, where a
    file is not what it claims, or holds packed codes that no family explains.
    """
    path = Path(path)
    if (file := _gguf(path)) is not None:
        from .gguf import GgufFile

        if verify:
            raise no_checksums(path)
        return GgufFile(file, names=names)
    if names not in (None, "huggingface"):
        raise ValueError(f"names must be 'huggingface' or None, not {names!r}")
    folder = TensorFolder(path, verify=verify)
    try:
        if raw or verify or folder.is_ours:
            return folder
        found = read_family(folder)
    except BaseException:
        folder.__exit__()
        raise
    return folder if found is None else QuantizedFolder(folder, found)


def _gguf(path: Path) -> Path | None:
    """The GGUF file that a path is, or that is in a folder without safetensors; None for none."""
    if path.is_file():
        return path if path.suffix == ".gguf" or _starts_with(path, b"GGUF") else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    files = [file for file in files if not _LATER_PART.search(file.name)] or files
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{path} holds several models: give one of {names}")
    return files[0] if files else None


# Of a file in parts, which is opened by the name of any.
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def _starts_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


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


def convert(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    format: str,
    *,
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    beside: Path | Mapping[str, str] | None = None,
    names: str | None = None,
) -> None:
    """Writes tensors by name as another library has them: what `write_folder` does, and GGUF.

    `config` and `names` are, for GGUF, the metadata and the names of `write_gguf`.

    **Raises:** `ValueError` for a format that there is none, for names of another format than GGUF,
    and what those raise.
    """
    if format == "gguf":
        from .gguf import write_gguf

        write_gguf(path, tensors, config, names=names, overwrite=overwrite)
    elif names not in (None, "huggingface"):
        raise ValueError(f"names must be 'huggingface' or None, not {names!r}")
    elif format in FORMATS:
        write_folder(path, tensors, format, config=config, overwrite=overwrite, beside=beside)
    else:
        raise ValueError(f"format must be one of {', '.join(FORMATS)} and gguf, not {format!r}")
