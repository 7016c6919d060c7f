"""The families of quantized folders, a row each, and which of them a folder is of.

`config.json` says it, or else the names of the tensors. Packed codes that no row explains are never
taken for data.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..quant.formats import FORMATS
from . import awq, bitsandbytes, block_floats, compressed_tensors, gptq, manifest, mlx, torchao
from .folder import TensorFolder
from .stored_tensors import StoredTensors, Weight, describe

RAW = "vn.load(..., raw=True) loads the stored tensors"


class Family(NamedTuple):
    """A row: what it is called in `quant_method`, how its tensors are known, and its weights."""

    name: str
    methods: tuple[str, ...]
    recognizes: Callable[[StoredTensors], bool]
    weights: Callable[[StoredTensors], Iterator[Weight]]


def _has(suffix: str, is_stored: Callable[[StoredTensors, str], bool] | None = None) -> Any:
    """Whether a folder has a tensor of that name, which lies as that family's do."""
    return lambda source: any(
        is_stored is None or is_stored(source, module) for module in source.modules(suffix)
    )


def _is_mlx(source: StoredTensors, module: str) -> bool:
    header = source.headers.get(f"{module}.weight")
    return header is not None and header.dtype.name == "uint32"


FAMILIES = (
    Family("gptq", ("gptq",), _has(".qweight", gptq.is_stored), gptq.weights),
    Family("awq", ("awq",), _has(".qweight", awq.is_stored), awq.weights),
    Family(
        "compressed-tensors",
        ("compressed-tensors", "compressed_tensors"),
        _has(".weight_packed"),
        compressed_tensors.weights,
    ),
    Family(
        "fp8",
        ("fp8", "fbgemm_fp8"),
        lambda source: any(block_floats.pairs(source)),
        block_floats.weights,
    ),
    Family("bitsandbytes", ("bitsandbytes",), bitsandbytes.is_stored, bitsandbytes.weights),
    Family(
        "mxfp4",
        ("mxfp4",),
        _has("_blocks", lambda source, name: f"{name}_scales" in source.headers),
        block_floats.mxfp4_weights,
    ),
    Family("torchao", ("torchao",), _has("_qdata"), torchao.weights),
    Family("mlx", ("mlx",), _has(".scales", _is_mlx), mlx.weights),
)

# What nothing but a part of a packed weight is called.
_PARTS = (
    *(".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_g_idx", "_scale_inv", ".SCB"),
    *(".absmax", ".quant_map", ".nested_absmax", "_qdata", ".W_q"),
)
_CODES = {format.storage_dtype.name for format in FORMATS.values()}
_INTEGERS = ("int8", "uint8", "int32", "uint32")


class FamilyWeights(NamedTuple):
    """The family of a folder, and its weights by their names in the dense checkpoint."""

    family: str
    weights: Mapping[str, Weight]
    source: StoredTensors


def read_family(folder: TensorFolder) -> FamilyWeights | None:
    """Finds the weights of a folder that are packed; None where all are dense.

    **Raises:** `ValueError`, in one line, where the configuration names a method of no family,
    where a weight is not stored as its family has it, and where codes belong to none.
    """
    unreadable = None
    try:
        config = _config(folder.path)
    except ValueError as error:  # which is of no consequence where all is dense
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
    family = _family(source, stated.get("quant_method"))
    if family is not None and unreadable is not None:
        raise unreadable
    weights: dict[str, Weight] = {}
    for weight in () if family is None else family.weights(source):
        if weight.name in weights or (weight.name in source.headers and not _is_part(weight)):
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
        dotted = f".{name}"  # a part may have the name of no module before its own
        packed = dotted.endswith(".weight") and len(header.shape) > 1
        packed = packed and header.dtype.name in _INTEGERS
        if name not in parts and (packed or dotted.endswith(_PARTS)):
            known = "an unknown format" if family is None else f"no weight of {family.name}"
            raise source.error(
                name,
                f"({describe(header)}) looks like a part of a packed weight of {known}. {RAW}",
            )
    return None if family is None else FamilyWeights(family.name, weights, source)


def _is_saved_codes(name: str, headers: Mapping[str, Any]) -> bool:
    """Return whether a tensor is named as `vn.save` names the codes of a `QArray`."""
    array, dot, part = name.rpartition(".")
    if not dot or part != "packed" or headers[name].dtype.name not in _CODES:
        return False
    return not {f"{array}.scale", f"{array}.scale.packed"}.isdisjoint(headers)


def _is_part(weight: Weight) -> bool:
    return weight.name in weight.parts


def _family(source: StoredTensors, method: Any) -> Family | None:
    if method is not None:
        for family in FAMILIES:
            if method in family.methods:
                return family
        known = ", ".join(family.name for family in FAMILIES)
        said = " ".join(str(method).split())  # in one line, whatever it is
        raise ValueError(
            f"{source.folder.path} is quantized with {said:.40}, which is not supported. Supported "
            f"methods: {known}. {RAW}"
        )
    return next((family for family in FAMILIES if family.recognizes(source)), None)


def _config(path: Path) -> Mapping[str, Any]:
    """What is said of a model next to its tensors, in the files that there are for it."""
    folder = path if path.is_dir() else path.parent
    content = _object(folder / "config.json")
    # Before config.json had it, AutoGPTQ wrote a file of its own.
    if "quantization_config" not in content and (folder / "quantize_config.json").is_file():
        stated = {"quant_method": "gptq", **_object(folder / "quantize_config.json")}
        content = {**content, "quantization_config": stated}
    return content


def _object(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    content = manifest.read_json(file)
    return content if isinstance(content, Mapping) else {}
