"""Open a checkpoint of any kind, report on its tensors, and convert it to another format."""

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
from .families import WRITERS, FamilyWeights, read_family, write_folder
from .folder import Checkpoint, TensorFolder, no_checksums


class QuantizedFolder(Checkpoint):
    """The tensors of a folder that another library quantized.

    `read` returns each quantized weight as one packed implicit array with the name and the shape of
    the dense weight. Its leaves are NumPy arrays. Other tensors are returned as stored.

    **Arguments:**

    - `folder`: an open folder. Closing this object closes it.
    - `weights`: the result of `read_family` for the folder.
    """

    def __init__(self, folder: TensorFolder, weights: FamilyWeights):
        self.path = folder.path
        self.family = weights.family
        self._folder = folder
        self._weights = weights.weights
        parts = {part for weight in self._weights.values() for part in weight.parts}
        names = [*(name for name in folder if name not in parts), *self._weights]
        self._names = dict.fromkeys(sorted(names))

    def close(self) -> None:
        """Close the files."""
        self._folder.close()

    def dense_avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a dict from the names of dense tensors to their shapes and dtypes."""
        stored = self._folder.dense_avals()
        return {name: stored[name] for name in self._names if name not in self._weights}

    def read(self, name: str) -> np.ndarray | QArray | Any:
        """Read one tensor: a packed array for a quantized weight, else a NumPy array.

        **Raises:** `ValueError` if the stored tensors are damaged.
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
    """A mapping from names to tensors of an open checkpoint. Each lookup reads the tensor."""

    def __init__(self, source: Checkpoint):
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
    """Open a checkpoint of any kind, as a context manager with a method `read(name)`.

    **Arguments:**

    - `path`: a safetensors or GGUF file, or a folder of `vn.save`, of Hugging Face, or with one
      GGUF file.
    - `raw`: whether to read safetensors of other libraries as stored, without decoding them.
    - `verify`: whether to compare tensors with the checksums in `veneer.json`.
    - `names`: "huggingface" to name the tensors of a GGUF file as Hugging Face does, else None.

    **Returns:** a `Checkpoint`: a `TensorFolder`, a `QuantizedFolder` or a `GgufFile`.

    **Raises:** `FileNotFoundError` if there is no checkpoint. `ValueError`, in one line, if a file
    is damaged or has packed codes of an unknown format.
    """
    path = Path(path)
    if (file := _find_gguf(path)) is not None:
        from .gguf import GgufFile

        if verify:
            raise no_checksums(path)
        return GgufFile(file, names=names)
    _check_names(names)
    folder = TensorFolder(path, verify=verify)
    try:
        if raw or verify or folder.is_ours:
            return folder
        weights = read_family(folder)
    except BaseException:
        folder.close()
        raise
    return folder if weights is None else QuantizedFolder(folder, weights)


def _check_names(names: str | None) -> None:
    if names not in (None, "huggingface"):
        raise ValueError(f"names must be 'huggingface' or None, not {names!r}")


# The later parts of a GGUF file that is split into several. Any part opens the whole file.
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def _find_gguf(path: Path) -> Path | None:
    """Return the GGUF file at `path`, or None.

    `path` can be the file, or a folder that has one GGUF model and no safetensors files.

    **Raises:** `ValueError` if the folder has several GGUF models.
    """
    if path.is_file():
        with path.open("rb") as file:
            return path if path.suffix == ".gguf" or file.read(4) == b"GGUF" else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    files = [file for file in files if not _LATER_PART.search(file.name)] or files
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{path} holds several models: give one of {names}")
    return files[0] if files else None


class TensorReport(NamedTuple):
    """The description of one tensor of a checkpoint.

    - `format`: the number format and tiles of a quantized tensor, or a dtype.
    - `shape`: the shape of the dense tensor.
    - `nbytes`: the stored bytes.
    - `scale`: the minimum, median and maximum of its scales. None for a dense tensor.
    - `relative_error`: the error relative to the original tensor. None without an original.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    scale: tuple[float, float, float] | None
    relative_error: float | None


def inspect(
    source: Checkpoint, names: Sequence[str], against: Checkpoint | None = None
) -> Iterator[TensorReport]:
    """Return an iterator over `TensorReport`s. It reads one tensor at a time.

    **Arguments:**

    - `source`: an open checkpoint.
    - `names`: the names of the tensors to report on.
    - `against`: an open checkpoint with the original tensors, to compute errors, or None.

    **Raises:** `ValueError` if a checkpoint does not have one of the tensors (before anything is
    read), or if the shapes of a tensor differ.
    """
    for folder in filter(None, (source, against)):
        if missing := [name for name in names if name not in folder]:
            some = ", ".join(map(repr, list(folder)[:3])) or "nothing"
            raise ValueError(f"{folder.path} has no tensor {missing[0]!r}; it holds {some}, ...")
    return (_report_tensor(name, source, against) for name in names)


def _report_tensor(name: str, source: Checkpoint, against: Checkpoint | None) -> TensorReport:
    value = source.read(name)
    is_permuted = isinstance(value, Permuted)
    stored = value.array if is_permuted else value
    scale = _summarize(stored.scales()) if isinstance(stored, QArray) else None
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


def _summarize(scale: ArrayLike) -> tuple[float, float, float] | None:
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
    """Write a dict of tensors in the format of another library.

    **Arguments:**

    - `format`: "gguf", or a key of `WRITERS`, such as "gptq".
    - `config`: further entries of `config.json` or, for "gguf", of the metadata.
    - `names`: for "gguf", "huggingface" if `tensors` has the names of Hugging Face, else None. See
      `write_gguf`. Other formats do not use it.
    - `path`, `tensors`, `overwrite`, `beside`: as in `write_folder`. "gguf" ignores `beside`.

    **Raises:** `ValueError` for an unknown format, and the errors of `write_folder` and
    `write_gguf`.
    """
    if format == "gguf":
        from .gguf import write_gguf

        write_gguf(path, tensors, config, names=names, overwrite=overwrite)
        return
    _check_names(names)
    if format not in WRITERS:
        raise ValueError(f"format must be one of {', '.join(WRITERS)} and gguf, not {format!r}")
    write_folder(path, tensors, format, config=config, overwrite=overwrite, beside=beside)
