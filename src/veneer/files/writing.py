"""Folders as other libraries write them: `write_folder`, by a table of formats."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core.value import Value
from . import awq, compressed_tensors, gptq, mlx
from .affine import Stored, UnsupportedByFormat, most_common
from .new_folder import write_aside, write_beside
from .tensor_file import DTYPES, METADATA, WRITTEN_WITH, ShardWriter


class FolderFormat(NamedTuple):
    """A row: how a weight is stored, what the configuration says of all, and under what name.

    `stored` takes a weight and options, and `configuration` what it said of each, by module, the
    modules that are dense matrices, and the options; `options` looks at all weights beforehand.
    """

    stored: Callable[..., Stored]
    configuration: Callable[..., dict[str, Any]]
    key: str = "quantization_config"
    options: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda tensors: {}


def _version(tensors: Mapping[str, Any]) -> dict[str, Any]:
    weights = (tensors[name] for name in tensors)
    fits = all(gptq.fits_first_version(x) for x in weights if isinstance(x, Value))
    return {"plus_one": fits}


FORMATS = {
    "gptq": FolderFormat(
        gptq.stored,
        lambda stated, dense, **options: gptq.configuration(stated, **options),
        options=_version,
    ),
    "awq": FolderFormat(
        awq.stored,
        lambda stated, dense: awq.configuration(stated) | {"modules_to_not_convert": dense},
    ),
    "compressed-tensors": FolderFormat(
        compressed_tensors.stored,
        lambda stated, dense: compressed_tensors.configuration(stated, dense=dense),
    ),
    "mlx": FolderFormat(
        mlx.stored, lambda stated, dense: mlx.configuration(stated), key="quantization"
    ),
}


def write_folder(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    format: str,
    *,
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    beside: Path | Mapping[str, str] | None = None,
) -> None:
    """Writes the folder `path` as another library has it, so that `vn.load` gives the same again.

    **Arguments:**

    - `path`: the folder to make. It appears when it is complete.
    - `tensors`: by name; each is looked up when it is written. Quantized ones are matrices
      `[out, in]` whose names end in `.weight`.
    - `format`: a row of `FORMATS`.
    - `config`: what else `config.json` says.
    - `overwrite`: as for `write_aside`.
    - `beside`: a folder whose configuration and tokenizer go along, or the contents of such files;
      as for `write_beside`.

    **Raises:** `ValueError` naming the tensor that the format cannot hold, and why; `TypeError` for
    one that is no array, and for a `config` that is no JSON. Nothing is written then.
    """
    row = FORMATS[format]
    try:
        json.dumps(dict(config or {}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"config cannot be written as JSON: {error}") from None
    with write_aside(path, overwrite=overwrite) as folder:
        written = {"config.json", *write_beside(beside, folder)}
        # Hugging Face's loader asks for which library a file is, and takes none that does not say.
        metadata = {"format": "mlx" if format == "mlx" else "pt"}
        metadata[WRITTEN_WITH] = json.dumps(sorted(written))
        writer = ShardWriter(folder, metadata=metadata)
        stated: dict[str, dict[str, Any]] = {}
        dense: list[str] = []
        dtypes: list[str] = []
        taken: set[str] = set()
        options = row.options(tensors)
        for name in tensors:
            value = tensors[name]
            if isinstance(value, Value):
                module, stored = _stored(name, value, format, options)
                stated[module] = stored.stated
                dtypes.append(np.dtype(value.aval().dtype).name)
                arrays = {module + suffix: np.asarray(x) for suffix, x in stored.tensors.items()}
            else:
                arrays = {name: _dense(name, value)}
                if name.endswith(".weight") and np.ndim(arrays[name]) == 2:
                    dense.append(name.removesuffix(".weight"))
            if twice := taken & arrays.keys():
                raise ValueError(f"two tensors would be stored as {min(twice)!r}")
            taken |= arrays.keys()
            writer.add(arrays)
        writer.finish()
        if not stated:
            raise ValueError(f"format {format!r} needs a quantized tensor, but all are dense")
        try:
            said = row.configuration(stated, dense, **options)
        except UnsupportedByFormat as error:
            raise ValueError(f"format {format!r} cannot hold it: {error}") from None
        _write_config(folder / "config.json", {row.key: said}, config, most_common(dtypes))


def _stored(name: str, value: Any, format: str, options: Mapping[str, Any]) -> tuple[str, Stored]:
    module = name.removesuffix(".weight")
    if module == name:
        raise ValueError(
            f"format {format!r} cannot hold {name!r}: names of quantized tensors end in '.weight'"
        )
    try:
        return module, FORMATS[format].stored(value, **options)
    except UnsupportedByFormat as error:
        raise ValueError(f"format {format!r} cannot hold {name!r}: {error}") from None


def _dense(name: str, value: Any) -> np.ndarray:
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{name!r} is a {type(value).__name__}, not an array")
    if isinstance(value, jax.core.Tracer) or value.dtype.name not in DTYPES.values():
        what = f"a {type(value).__name__} of {value.dtype}"
        raise TypeError(
            f"{name!r} is {what}, which cannot be saved: tracers and other dtypes cannot"
        )
    if name == METADATA:
        raise ValueError(f"safetensors cannot hold a tensor with the name {name!r}")
    return np.asarray(value)


def _write_config(
    file: Path, said: dict[str, Any], config: Mapping[str, Any] | None, dtype: str
) -> None:
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    content = {**before, **(config or {})}
    for key in ("quantization_config", "quantization"):
        content.pop(key, None)
    if not content.keys() & {"dtype", "torch_dtype"}:
        content["torch_dtype"] = dtype
    file.write_text(json.dumps({**content, **said}, indent=2) + "\n", encoding="utf-8")
