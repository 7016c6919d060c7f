"""Choose formats that other libraries can hold, for `veneer quantize --for` and `--requantize`."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.value import Value, materialise
from ..quant import QArray, Rule, get_format
from ..quant.models.checkpoint import error_norms
from .codes import UnsupportedByFormat
from .families import WRITERS
from .gguf_tensors import encode


class Target(NamedTuple):
    """The formats in which another library, such as MLX, can hold a weight `[out, in]`.

    - `encode`: converts a quantized weight to the layout of the library, or raises `ValueError`.
    - `formats`: the number formats that can be written, such as "int4". The first is the default.
    - `tiles`: the group sizes, in the order of preference. Formats such as mxfp4 have their own.
    - `outputs`: returns a number from the bits of a code. The number of outputs of a weight must be
      a multiple of it, so that the codes fill words.
    - `dense`: a regex of the names of weights that the library keeps dense.
    """

    encode: Callable[[Any], Any]
    formats: tuple[str, ...]
    tiles: tuple[int, ...]
    outputs: Callable[[int], int] = lambda bits: 1
    dense: str | None = None


# Libraries that quantize linear layers only.
_EMBEDDINGS = r".*(embed\w*|wte|wpe|lm_head|norm\w*)\.weight"


def _encode_gguf(value: Any) -> Any:
    if not isinstance(value, QArray):
        raise UnsupportedByFormat(f"it is a {type(value).__name__}, not a QArray")
    return encode(value)


TARGETS = {
    "gguf": Target(_encode_gguf, ("int4", "int5", "int8", "iq4_nl", "mxfp4"), (32,)),
    "mlx": Target(
        WRITERS["mlx"].encode,
        ("int4", "int2", "int3", "int5", "int6", "int8", "mxfp4", "mxfp8"),
        (64, 32),
    ),
    "gptq": Target(
        WRITERS["gptq"].encode,
        ("int4", "int2", "int3", "int8"),
        (128, 64, 32),
        lambda bits: 32 // math.gcd(32, bits),
        _EMBEDDINGS,
    ),
    "awq": Target(
        WRITERS["awq"].encode, ("uint4", "int4"), (128, 64, 32), lambda bits: 8, _EMBEDDINGS
    ),
    "compressed-tensors": Target(
        WRITERS["compressed-tensors"].encode,
        ("int4", "int2", "int3", "int5", "int6", "int7", "int8", "mxfp4"),
        (128, 64, 32),
        dense=_EMBEDDINGS,
    ),
}


def choose_rules(
    target: str, shapes: Mapping[str, tuple[int, ...]], qtype: str | None = None
) -> dict[str, Rule]:
    """Return the rules that quantize the weights of a model so that another library can hold them.

    All weights get the same group size, and scales in float16, which all of these libraries read.

    **Arguments:**

    - `target`: the library: a key of `TARGETS`, such as "mlx".
    - `shapes`: a dict from the names of the dense tensors to their shapes. Names of weights end in
      ".weight", and their shapes are `[out, in]`.
    - `qtype`: the number format. None selects the default of the library.

    **Returns:** a dict from the names of the weights to quantize to their rules. Other tensors stay
    dense: embeddings and output heads, if the library keeps these dense, and weights whose number
    of outputs is not a multiple of `Target.outputs`.

    **Raises:** `ValueError` if the library does not have the number format, if there is no weight,
    or if no group size divides the inputs of all weights.
    """
    chosen, qtype = _target(target), _check_format(target, qtype)
    names = [x for x, shape in shapes.items() if not _is_kept_dense(target, qtype, x, shape)]
    if not names:
        raise ValueError(
            f"no tensor can be quantized for {target}: it needs matrices [out, in] whose names end "
            "in '.weight'"
        )
    own = get_format(qtype).tile_size
    tiles = chosen.tiles if own is None else (own,)
    fits = lambda tile: all(shapes[name][1] % tile == 0 for name in names)
    tile = next(filter(fits, tiles), None)
    if tile is None:
        smallest = min(tiles)
        name = next(name for name in names if shapes[name][1] % smallest)
        raise ValueError(
            f"{target} needs groups of {' or '.join(map(str, tiles))} values, which do not divide "
            f"the {shapes[name][1]} inputs of {name}. Leave it dense (--exclude)"
        )
    return {name: _rule(name, qtype, tile) for name in names}


def _check_format(target: str, qtype: str | None) -> str:
    """Return the name of a number format that the library `target` has. None is its default."""
    formats = _target(target).formats
    qtype = formats[0] if qtype is None else get_format(qtype).name
    if qtype not in formats:
        raise ValueError(f"{target} has the formats {', '.join(formats)}, but not {qtype}")
    return qtype


def _is_kept_dense(target: str, qtype: str, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor stays dense for the library `target`, by its name and its shape.

    It does so if the tensor is no matrix, if its number of outputs does not fit the format `qtype`,
    or if the library does not quantize such weights.
    """
    chosen = _target(target)
    is_matrix = len(shape) == 2 and name.endswith(".weight")
    fits = is_matrix and shape[0] % chosen.outputs(int(get_format(qtype).bits)) == 0
    return not fits or bool(chosen.dense and re.fullmatch(chosen.dense, name))


def _target(name: str) -> Target:
    if name not in TARGETS:
        raise ValueError(f"unknown library {name!r}: choose from {', '.join(TARGETS)}")
    return TARGETS[name]


def _rule(name: str, qtype: str, tile: int) -> Rule:
    own_scales = get_format(qtype).tile_size is not None
    scale_dtype = None if own_scales else "float16"
    return Rule(re.escape(name), qtype, tile_size=tile, tile_axis=-1, scale_dtype=scale_dtype)


def find_unsupported(target: str, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Find the quantized tensors that another library cannot hold exactly.

    **Arguments:**

    - `target`: the library: a key of `TARGETS`, such as "mlx".
    - `tensors`: a dict from names to arrays, dense or quantized. Each is looked up once.

    **Returns:** a dict from the names of these tensors to the reasons. Dense tensors are skipped.
    """
    encode, reasons = _target(target).encode, {}
    for name in tensors:
        value = tensors[name]
        if isinstance(value, Value):
            try:
                encode(value)
            except (UnsupportedByFormat, ValueError) as error:
                reasons[name] = str(error)
    return reasons


class Requantized(Mapping[str, Any]):
    """A dict of tensors that quantizes again, on lookup, the weights that a library cannot hold.

    If the library keeps such a weight dense, as it may keep embeddings, lookup materializes it.
    Other tensors are returned unchanged.

    **Arguments:**

    - `tensors`: a dict from names to arrays, which are looked up when they are needed.
    - `target`: the library: a key of `TARGETS`, such as "mlx".
    - `qtype`: the number format for the weights that are quantized again.

    **Attributes:**

    - `made_dense`: the names of the weights that are materialized.
    - `errors`: a dict from the names of the weights quantized so far to pairs: the Frobenius norm
      of the change, and of the weight before.

    **Raises:** `ValueError` if the library does not have the number format, or if no group size
    divides the inputs of a weight. Lookup raises it if the scales of a weight overflow float16.
    """

    def __init__(self, tensors: Mapping[str, Any], target: str, qtype: str):
        self._tensors, qtype = tensors, _check_format(target, qtype)
        reasons = find_unsupported(target, tensors)
        shapes = {name: tuple(tensors[name].shape) for name in reasons}
        can_stay = all(_is_kept_dense(target, qtype, *each) for each in shapes.items())
        self._rules = {} if can_stay else choose_rules(target, shapes, qtype)
        self.made_dense = [name for name in shapes if name not in self._rules]
        self.errors: dict[str, tuple[float, float]] = {}

    def __getitem__(self, name: str) -> Any:
        value = self._tensors[name]
        if name not in self._rules and name not in self.made_dense:
            return value
        dense = materialise(jax.tree.map(jnp.asarray, value))
        if name in self.made_dense:
            return dense
        changed = self._rules[name].quantize(dense)
        error, norm = error_norms(np.asarray(dense), changed)
        if math.isfinite(norm) and not math.isfinite(error):
            raise ValueError(f"the scales of {name} overflow float16, which this library needs")
        self.errors[name] = error, norm
        return changed

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
