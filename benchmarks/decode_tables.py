"""Define the formats and cells of `decode.py`, and make its tables."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpu_matmul import READING
from measure import markdown_table

import veneer as vn

MATRICES = r".*(_proj|lm_head|embed_tokens)\.weight"
PRODUCTS = r".*(_proj|lm_head)\.weight"


@dataclass(frozen=True)
class Format:
    """A format of the weights, and the file of llama.cpp that is compared with it.

    **Arguments:**

    - `rule`: the arguments of a `vn.quant.Rule`, or None for dense weights.
    - `dtype`: the dtype of dense weights.
    - `beside`: the format of llama.cpp's file. None means the same format.
    - `file_type`: the number of a file type that only llama.cpp writes, and both libraries read.
    - `target`: how many times as fast as llama.cpp decoding should be at batch 1.
    - `prompt_target`: how many times as fast as llama.cpp reading a prompt should be.
    """

    name: str
    rule: Mapping[str, Any] | None = None
    dtype: str = "float32"
    beside: str | None = None
    target: float | None = None
    prompt_target: float | None = None
    file_type: int | None = None

    def stored(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters in this format."""
        if self.rule is None:
            is_wide = lambda x: self.dtype if x.ndim > 1 else "float32"
            return {name: x.astype(is_wide(x)) for name, x in params.items()}
        is_tied = "lm_head.weight" not in params  # the embedding is also the head
        rules = [vn.quant.Rule(MATRICES if is_tied else PRODUCTS, **self.rule)]
        rows = {k: v for k, v in self.rule.items() if not k.startswith("act_")}
        rules.append(vn.quant.Rule(MATRICES, **rows))
        return vn.quant.quantize_tree(dict(params), rules)


def _blocks(qtype: str, **others: Any) -> dict[str, Any]:
    """Return the arguments of a rule with blocks of 32 values and f16 scales, as in GGUF."""
    return {"qtype": qtype, "tile_size": 32, "tile_axis": -1, "scale_dtype": "float16", **others}


def _tiles(qtype: str, tile: int | None, **others: Any) -> dict[str, Any]:
    return {"qtype": qtype, "tile_size": tile, "tile_axis": -1, **others}


#: The rounding of activations in llama.cpp.
_INT8: Mapping[str, Any] = {"act_qtype": "int8", "act_tile_size": 32}
_AS_STORED = {"qtype": None, "tile_axis": -1, **_INT8}

FORMATS = (
    Format("f32"),
    Format("bf16", dtype="bfloat16"),
    Format("Q4_0", _blocks("int4"), target=1.1),
    Format("Q4_1", _blocks("uint4", calibration_method="minmax"), target=1.1),
    Format("Q8_0", _blocks("int8"), target=1.1),
    Format("Q4_0, activations int8", _blocks("int4", **_INT8), beside="Q4_0", target=1.1),
    Format(
        "Q4_1, activations int8",
        _blocks("uint4", calibration_method="minmax", **_INT8),
        beside="Q4_1",
        target=1.1,
    ),
    Format("Q8_0, activations int8", _blocks("int8", **_INT8), beside="Q8_0", target=1.1),
    Format("Q4_K_M", file_type=15),
    Format("Q6_K", file_type=18),
    Format("Q4_K_M, activations int8", _AS_STORED, beside="Q4_K_M"),
    Format("Q6_K, activations int8", _AS_STORED, beside="Q6_K"),
    Format("int4, tile 128", _tiles("int4", 128), beside="Q4_0", target=1.1),
    Format("w4a8", _tiles("int4", 128, act_qtype="int8"), beside="Q4_0", prompt_target=2),
    Format("int8", _tiles("int8", None), beside="Q8_0", target=1.1),
    Format("w8a8", _tiles("int8", None, act_qtype="int8"), beside="Q8_0"),
)
#: The formats of SmolLM2. Tiles of 128 do not divide its shapes.
SHIPPED = (
    Format("Q4_1, as shipped", target=1.0, prompt_target=1.0),
    Format(
        "Q4_1, as shipped, activations int8",
        _AS_STORED,
        beside="Q4_1, as shipped",
        target=1.0,
        prompt_target=1.0,
    ),
    Format("int4, tile 64", _tiles("int4", 64), beside="Q4_1, as shipped"),
    Format("w4a8, tile 64", _tiles("int4", 64, act_qtype="int8"), beside="Q4_1, as shipped"),
)


@dataclass(frozen=True)
class Cell:
    """A measurement: tokens per second after a context, or while a prompt is read."""

    context: int
    batch: int
    is_prompt: bool = False

    def __str__(self) -> str:
        return f"prompt of {self.context}" if self.is_prompt else f"after {self.context:,}"


class Results:
    """The results for one model: `[ours, theirs]` by format and cell."""

    def __init__(self, kept: dict[str, Any], title: str):
        self.kept, self.title = kept, title

    def __getitem__(self, at: tuple[Format, Cell | str]) -> Any:
        """Return a result, or None."""
        return self.kept.get(self._key(*at))

    def __setitem__(self, at: tuple[Format, Cell | str], found: Any) -> None:
        self.kept[self._key(*at)] = found
        print(self._key(*at), found, file=sys.stderr, flush=True)

    def _key(self, format: Format, what: Cell | str) -> str:
        batch = f", {what.batch}" if isinstance(what, Cell) else ""
        return f"{self.title}, {format.name}{batch}, {what}"


def tables(formats: Sequence[Format], cells: Sequence[Cell], kept: Results) -> str:
    """Return a table for each batch size, and a table of the memory bandwidth of one token."""
    title, printed = kept.title, []
    every = [cell for cell in cells if any(kept[f, cell] for f in formats)]
    formats = [f for f in formats if any(kept[f, cell] for cell in every)]
    for batch in dict.fromkeys(cell.batch for cell in every):
        columns = [cell for cell in every if cell.batch == batch]
        rows = [[f.name, *(_cell(f, c, kept[f, c]) for c in columns)] for f in formats]
        rows = [row for row in rows if any(row[1:])]
        texts = "text" if batch == 1 else "texts"
        printed.append(markdown_table([f"{title}, {batch} {texts}", *map(str, columns)], rows))
    alone, bandwidth = Cell(0, 1), kept.kept[READING]
    rows = [[READING, f"{bandwidth / 1e6:,.0f}", "1", "", "", ""]]
    for format in formats:
        if (rates := kept[format, alone]) is not None:
            nbytes = kept[format, "bytes"]
            row = [format.name, f"{nbytes / 1e6:,.1f}"]
            for rate in rates:
                share = 0 if rate is None else rate * nbytes / bandwidth
                row += ["", ""] if rate is None else [f"{rate:.1f}", f"**{share:.0%}**"]
            rows.append(row)
    heading = ["tokens a second", "of bandwidth", "llama.cpp", "of bandwidth"]
    printed.append(markdown_table([f"{title}, bounds", "MB a token", *heading], rows))
    return "\n\n".join(printed)


def _cell(format: Format, cell: Cell, rates: Sequence[float | None] | None) -> str:
    """Return the tokens per second, and how many times as fast as llama.cpp that is."""
    rate, other = rates or (None, None)
    if rate is None or other is None:
        return "" if rate is None else f"{rate:.1f}"
    target = format.prompt_target if cell.is_prompt else format.target if cell.batch == 1 else None
    aim = "" if target is None else f" (≥ {target:g})"
    return f"{rate:.1f}, **{rate / other:.2f}**{aim}"
