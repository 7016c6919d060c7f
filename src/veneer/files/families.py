"""Read and write folders in the formats of other libraries, by one table of families.

A family is a format of quantized weights, such as GPTQ. `config.json` names it, or else the names
of the tensors decide. Packed codes that belong to no family are rejected, never read as numbers.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core.value import Value
from ..quant.formats import FORMATS
from . import awq, bitsandbytes, block_floats, compressed_tensors, gptq, manifest, mlx, torchao
from .codes import EncodedWeight, UnsupportedByFormat, most_common
from .folder import TensorFolder
from .new_folder import write_aside, write_beside
from .stored_tensors import StoredTensors, Weight, describe
from .tensor_file import DTYPES, METADATA, WRITTEN_WITH, ShardWriter

RAW = "vn.load(..., raw=True) loads the stored tensors"


class WeightWriter(NamedTuple):
    """The functions that write the weights of a family.

    - `encode`: takes a quantized array and the `options` as keywords. Returns its `EncodedWeight`,
      or raises `UnsupportedByFormat`.
    - `config`: takes a dict from modules to `EncodedWeight.settings`, the modules with a dense
      matrix, and the `options` as keywords. Returns the entry of `config.json` that describes the
      quantization.
    - `key`: the name of this entry.
    - `options`: takes all tensors of the model. Returns keyword arguments that depend on all of
      them, such as the version of the format.
    """

    encode: Callable[..., EncodedWeight]
    config: Callable[..., dict[str, Any]]
    key: str = "quantization_config"
    options: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda tensors: {}


class Family(NamedTuple):
    """A format of quantized weights, and the functions that read it and write it.

    - `methods`: the values of `quant_method` in `config.json` that mean this format.
    - `recognizes`: a function that returns whether the tensors of a folder have this format. It
      decides if `config.json` has no `quant_method`.
    - `weights`: a function that returns the quantized weights of a folder.
    - `writer`: the functions that write the format. None for a format that is only read.
    """

    name: str
    methods: tuple[str, ...]
    recognizes: Callable[[StoredTensors], bool]
    weights: Callable[[StoredTensors], Iterator[Weight]]
    writer: WeightWriter | None = None


def _has(
    suffix: str, fits: Callable[[StoredTensors, str], bool] = lambda source, name: True
) -> Any:
    """Return a function that decides whether a folder has a suitable tensor, by its name.

    The name must end in `suffix`. `fits(source, module)` must be true, where `module` is the name
    without the suffix.
    """
    return lambda source: any(fits(source, module) for module in source.modules(suffix))


def _is_mlx(source: StoredTensors, module: str) -> bool:
    header = source.headers.get(f"{module}.weight")
    return header is not None and header.dtype.name == "uint32"


FAMILIES = (
    Family(
        "gptq",
        ("gptq",),
        _has(".qweight", gptq.has_layout),
        gptq.find_weights,
        WeightWriter(gptq.encode_weight, gptq.make_config, options=gptq.choose_version),
    ),
    Family(
        "awq",
        ("awq",),
        _has(".qweight", awq.has_layout),
        awq.find_weights,
        WeightWriter(awq.encode_weight, awq.make_config),
    ),
    Family(
        "compressed-tensors",
        ("compressed-tensors", "compressed_tensors"),
        _has(".weight_packed"),
        compressed_tensors.find_weights,
        WeightWriter(compressed_tensors.encode_weight, compressed_tensors.make_config),
    ),
    Family(
        "fp8",
        ("fp8", "fbgemm_fp8"),
        lambda source: any(block_floats.pair_scales(source)),
        block_floats.find_weights,
    ),
    Family("bitsandbytes", ("bitsandbytes",), bitsandbytes.is_present, bitsandbytes.find_weights),
    Family(
        "mxfp4",
        ("mxfp4",),
        _has("_blocks", lambda source, name: f"{name}_scales" in source.headers),
        block_floats.find_mxfp4_weights,
    ),
    Family("torchao", ("torchao",), _has("_qdata"), torchao.find_weights),
    Family(
        "mlx",
        ("mlx",),
        _has(".scales", _is_mlx),
        mlx.find_weights,
        WeightWriter(mlx.encode_weight, mlx.make_config, key="quantization"),
    ),
)
WRITERS = {family.name: family.writer for family in FAMILIES if family.writer is not None}

# Only parts of packed weights have names with these endings.
_PARTS = (
    *(".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_g_idx", "_scale_inv", ".SCB"),
    *(".absmax", ".quant_map", ".nested_absmax", "_qdata", ".W_q"),
)
_CODES = {format.storage_dtype.name for format in FORMATS.values()}
_INTEGERS = ("int8", "uint8", "int32", "uint32")


class FamilyWeights(NamedTuple):
    """The quantized weights of a folder.

    - `family`: the name of their format, such as "gptq".
    - `weights`: a dict from the names of the dense weights.
    """

    family: str
    weights: Mapping[str, Weight]


def read_family(folder: TensorFolder) -> FamilyWeights | None:
    """Find the quantized weights of a folder. Return None if all tensors are dense.

    **Raises:** `ValueError`, in one line, if `config.json` names an unknown method, if a weight
    does not have the layout of its family, or if packed codes belong to no family.
    """
    unreadable = None
    try:
        config = _read_config(folder.path)
    except ValueError as error:  # raised below, unless all tensors are dense
        config, unreadable = {}, error
    stated = config.get("quantization_config")
    text = config.get("text_config")
    if not isinstance(stated, Mapping) and isinstance(text, Mapping):
        stated = text.get("quantization_config")
    stated = stated if isinstance(stated, Mapping) else {}
    of_mlx = config.get("quantization")
    if isinstance(of_mlx, Mapping):
        stated = {**of_mlx, "quant_method": "mlx"}
    source = StoredTensors(folder, config, stated)
    family = _find_family(source, stated.get("quant_method"))
    if family is not None and unreadable is not None:
        raise unreadable
    weights: dict[str, Weight] = {}
    for weight in () if family is None else family.weights(source):
        is_also_dense = weight.name in source.headers and weight.name not in weight.parts
        if weight.name in weights or is_also_dense:
            raise source.error(weight.name, "is stored twice, packed and dense: remove one of them")
        weights[weight.name] = weight
    parts = {part for weight in weights.values() for part in weight.parts}
    for name, header in source.headers.items():
        if name not in parts and _is_saved_codes(name, source.headers):
            described = folder.path.with_name(manifest.FILE_NAME)
            remedy = f"Restore the {manifest.FILE_NAME} that vn.save wrote next to it"
            if folder.path.is_file() and described.exists():
                remedy = f"Load the folder, which has a {manifest.FILE_NAME}"
            raise source.error(
                name,
                f"({describe(header)}) is a part of a quantized array. {remedy}. {RAW}",
            )
        dotted = f".{name}"  # a name may be only the suffix, without a module
        packed = dotted.endswith(".weight") and len(header.shape) > 1
        packed = packed and header.dtype.name in _INTEGERS
        if name not in parts and (packed or dotted.endswith(_PARTS)):
            known = "an unknown format" if family is None else f"no weight of {family.name}"
            raise source.error(
                name,
                f"({describe(header)}) looks like a part of a packed weight of {known}. {RAW}",
            )
    return None if family is None else FamilyWeights(family.name, weights)


def _is_saved_codes(name: str, headers: Mapping[str, Any]) -> bool:
    """Return whether a tensor looks like the codes of a `QArray` that `vn.save` wrote.

    Its name ends in ".packed", it has a dtype for codes, and there is a tensor with its scales.
    `headers` is a dict from the names of all stored tensors to their shapes and dtypes.
    """
    array, dot, part = name.rpartition(".")
    if not dot or part != "packed" or headers[name].dtype.name not in _CODES:
        return False
    return not {f"{array}.scale", f"{array}.scale.packed"}.isdisjoint(headers)


def _find_family(source: StoredTensors, method: Any) -> Family | None:
    if method is not None:
        for family in FAMILIES:
            if method in family.methods:
                return family
        known = ", ".join(family.name for family in FAMILIES)
        one_line = " ".join(str(method).split())
        raise ValueError(
            f"{source.folder.path} is quantized with {one_line:.40}, which is not supported. "
            f"Supported methods: {known}. {RAW}"
        )
    return next((family for family in FAMILIES if family.recognizes(source)), None)


def _read_config(path: Path) -> Mapping[str, Any]:
    """Return the content of the `config.json` next to a checkpoint, or {} if it is missing.

    If it has no entry `quantization_config`, AutoGPTQ's `quantize_config.json` becomes this entry.
    """
    folder = path if path.is_dir() else path.parent
    content = _read_object(folder / "config.json")
    # Old versions of AutoGPTQ wrote quantize_config.json instead of an entry of config.json.
    if "quantization_config" not in content and (folder / "quantize_config.json").is_file():
        stated = {"quant_method": "gptq", **_read_object(folder / "quantize_config.json")}
        content = {**content, "quantization_config": stated}
    return content


def _read_object(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    content = manifest.read_json(file)
    return content if isinstance(content, Mapping) else {}


def write_folder(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    format: str,
    *,
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    beside: Path | Mapping[str, str] | None = None,
) -> None:
    """Write a folder in the format of another library. `vn.load` reads the same arrays from it.

    **Arguments:**

    - `path`: the folder to create. It appears only when it is complete.
    - `tensors`: a dict of arrays. Each is looked up once, when it is written. Quantized arrays are
      matrices `[out, in]`, and their names end in ".weight".
    - `format`: the name of a family in `WRITERS`.
    - `config`: further entries of `config.json`.
    - `overwrite`: whether to replace a folder that this package wrote.
    - `beside`: a folder whose configuration and tokenizer are copied, or a dict from file names to
      contents. See `write_beside`.

    **Raises:** `ValueError`, naming the tensor, if the format cannot hold it. `TypeError` for a
    value that is not an array, or a `config` that is not JSON. Then no folder is written.
    """
    writer = WRITERS[format]
    try:
        json.dumps(dict(config or {}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"config cannot be written as JSON: {error}") from None
    with write_aside(path, overwrite=overwrite) as folder:
        written = {"config.json", *write_beside(beside, folder)}
        # The loader of Hugging Face rejects files without this entry.
        metadata = {"format": "mlx" if format == "mlx" else "pt"}
        metadata[WRITTEN_WITH] = json.dumps(sorted(written))
        shards = ShardWriter(folder, metadata=metadata)
        settings: dict[str, dict[str, Any]] = {}
        dense: list[str] = []
        dtypes: list[str] = []
        written_names: set[str] = set()
        options = writer.options(tensors)
        for name in tensors:
            value = tensors[name]
            if isinstance(value, Value):
                module, encoded = _encode(name, value, format, options)
                settings[module] = encoded.settings
                dtypes.append(np.dtype(value.aval().dtype).name)
                arrays = {module + suffix: np.asarray(x) for suffix, x in encoded.tensors.items()}
            else:
                arrays = {name: _check_dense(name, value)}
                if name.endswith(".weight") and np.ndim(arrays[name]) == 2:
                    dense.append(name.removesuffix(".weight"))
            if twice := written_names & arrays.keys():
                raise ValueError(f"two tensors would be stored as {min(twice)!r}")
            written_names |= arrays.keys()
            shards.add(arrays)
        shards.finish()
        if not settings:
            raise ValueError(f"format {format!r} needs a quantized tensor, but all are dense")
        try:
            entry = writer.config(settings, dense, **options)
        except UnsupportedByFormat as error:
            raise ValueError(f"format {format!r} cannot hold it: {error}") from None
        _write_config(folder / "config.json", {writer.key: entry}, config, most_common(dtypes))


def _encode(
    name: str, value: Any, format: str, options: Mapping[str, Any]
) -> tuple[str, EncodedWeight]:
    module = name.removesuffix(".weight")
    if module == name:
        raise ValueError(
            f"format {format!r} cannot hold {name!r}: names of quantized tensors end in '.weight'"
        )
    try:
        return module, WRITERS[format].encode(value, **options)
    except UnsupportedByFormat as error:
        raise ValueError(f"format {format!r} cannot hold {name!r}: {error}") from None


def _check_dense(name: str, value: Any) -> np.ndarray:
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
    file: Path, quantization: dict[str, Any], config: Mapping[str, Any] | None, dtype: str
) -> None:
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    content = {**before, **(config or {})}
    for key in ("quantization_config", "quantization"):
        content.pop(key, None)
    if not content.keys() & {"dtype", "torch_dtype"}:
        content["torch_dtype"] = dtype
    file.write_text(json.dumps({**content, **quantization}, indent=2) + "\n", encoding="utf-8")
