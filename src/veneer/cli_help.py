"""The help of the command line: its layout, examples, table of formats and JSON keys."""

from typing import Any, NamedTuple

from typer.core import TyperCommand, TyperGroup


class FormatCost(NamedTuple):
    """A row of the table of formats: bits per value, and the relative error of two models' weights.

    The numbers are from docs/formats.md.
    """

    name: str
    tile: str
    bits: str
    gaussian: str
    minilm: str


FORMAT_COSTS = (
    FormatCost("int8", "channel", "8.03", "0.78%", "0.99%"),
    FormatCost("int6", "64", "6.25", "2.44%", "2.62%"),
    FormatCost("int4", "128", "4.12", "11.08%", "12.05%"),
    FormatCost("int4", "64", "4.25", "10.28%", "10.96%"),
    FormatCost("int4", "32", "4.50", "9.47%", "9.94%"),
    FormatCost("uint4", "64", "4.38", "9.10%", "9.51%"),
    FormatCost("uint4", "32", "4.75", "8.08%", "8.31%"),
    FormatCost("nf4", "64", "4.25", "9.19%", "9.39%"),
    FormatCost("nf4_dq", "64", "4.13", "9.24%", "9.43%"),
    FormatCost("fp8", "channel", "8.03", "2.64%", "2.61%"),
    FormatCost("mxfp8", "32", "8.25", "2.65%", "2.65%"),
    FormatCost("mxfp6", "32", "6.25", "2.83%", "2.86%"),
    FormatCost("mxfp4", "32", "4.25", "11.54%", "11.95%"),
    FormatCost("nvfp4", "16", "4.50", "9.50%", "9.44%"),
    FormatCost("int3", "32", "3.50", "20.29%", "21.26%"),
    FormatCost("int2", "32", "2.50", "47.17%", "48.65%"),
    FormatCost("ternary", "32", "2.10", "50.41%", "52.39%"),
)
#: The formats that the table leaves out.
MORE_FORMATS = (
    *("int7", "int5", "int1", "uint8", "uint7", "uint6", "uint5", "uint3", "uint2"),
    *("fp8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e4m3b11fnuz", "fp6_e2m3", "fp6_e3m2", "fp4", "fp4_bnb", "iq4_nl", "dynamic8"),
    *("mxfp8_16", "mxfp8_e5m2", "mxfp6_e3m2"),
)

EXAMPLES = {
    "veneer": (
        "veneer quantize model small --format int8",
        "veneer inspect small --against model",
        "veneer quantize --help",
    ),
    "quantize": (
        "veneer quantize model small --format int8",
        "veneer quantize model nf4 --format nf4 --exclude lm_head.weight",
        "veneer quantize model mixed --rules rules.json",
        "veneer quantize model int4 --format int4 --tile 128 --calibrate text.txt",
        "veneer quantize model.safetensors small --format int8 --overwrite --json",
    ),
    "inspect": (
        "veneer inspect small",
        "veneer inspect small --against model",
        "veneer inspect small --verify",
        "veneer inspect model.gguf --json",
    ),
    "convert": (
        "veneer convert awq-model gptq-model --format gptq",
        "veneer convert model.gguf mlx-model --format mlx",
    ),
    "plan": (
        "veneer plan model --devices 8 --memory 80GB",
        "veneer plan config.json --devices 64 --memory 80GB --format nf4 --fused",
        "veneer plan model --devices 8 --memory 16GiB --json",
    ),
    "demo": (
        "veneer demo",
        'veneer demo --gguf model.gguf --ask "Why is the sky blue?"',
        "veneer demo --json",
    ),
    "doctor": (
        "veneer doctor",
        "veneer doctor --choose",
        "veneer doctor --json",
    ),
}

JSON_KEYS = {
    "quantize": {
        "path": "OUT.",
        "groups": "A list. Each group has the tensors whose names differ only in numbers: name "
        "(with * for numbers), count, format, bytes_before, bytes_after and relative_error.",
        "total": "count, bytes_before and bytes_after of all tensors.",
        "already_quantized": "The number of tensors that are already quantized in IN.",
        "left_dense": "The names of the tensors of rank 2 or more that stay dense, because their "
        "names do not end in 'weight' or 'kernel'. Empty with --include or --rules.",
        "not_finite": "The names of the tensors with NaN or infinity.",
        "calibration": "With --calibrate, the relative errors of the outputs of products: mean, "
        "and mean_nearest for weights rounded to nearest. Otherwise null.",
    },
    "inspect": {
        "path": "PATH.",
        "family": "The library that quantized PATH, or null.",
        "tensors": "A list: name, format, shape, bytes, scale (min, median and max; null for a "
        "dense tensor) and relative_error (null without --against).",
        "bytes": "The sum of the bytes of the tensors.",
        "verified": "true if --verify compared the checksums.",
    },
    "plan": {
        "architecture": "model_type of config.json.",
        "parameters": "The number of parameters.",
        "format": "The format of the weights.",
        "serving": "step (batch, length, rank, cache, fused), and splits, a list with the fastest "
        "first: fits, split (data, expert, tensor, in_parts), held (bytes per device), received "
        "(bytes per step and device), seconds, shardings (regex to spec), whole (weights that "
        "cannot be divided, with the reason) and total (bytes per device).",
        "fine-tuning": "The same for training updates of rank --rank.",
    },
    "demo": {
        "encoder": "variants, a list: name, bytes, cosine, neighbor_kept, batch_ms and single_ms; "
        "picture (its path); query; and nearest, a list of score and sentence.",
        "language_model": "variants, a list: name, bytes, perplexity and tokens_per_second; "
        "question; answer; operations (the number in a step that have packed operands); and "
        "largest_materialized (bytes of the largest array that a step materializes).",
    },
    "doctor": {
        "is_well": "false if a finding is a problem. Then the exit code is 1.",
        "findings": "A list: name, text and is_well.",
    },
}


class HelpCommand(TyperCommand):
    """A command whose help ends with its examples, and explains its formats and its JSON."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the sections after the options."""
        name = self.name or ""
        if name == "quantize":
            _write_formats(formatter)
        _write_examples(formatter, name)
        if name in JSON_KEYS:
            with formatter.section("JSON keys"):
                formatter.write_dl(list(JSON_KEYS[name].items()))


class HelpGroup(TyperGroup):
    """A program whose help ends with examples."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples after the commands."""
        _write_examples(formatter, "veneer")


def _write_examples(formatter: Any, name: str) -> None:
    # Line by line, because `write_text` would join and wrap them.
    with formatter.section("Examples"):
        for line in EXAMPLES[name]:
            formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def _write_formats(formatter: Any) -> None:
    with formatter.section("Formats"):
        indent = " " * formatter.current_indent
        headings = FormatCost("--format", "--tile", "bits", "Gaussian", "MiniLM")
        for row in (headings, *FORMAT_COSTS):
            cells = f"{row.name:<10}{row.tile:>8}{row.bits:>7}{row.gaussian:>10}{row.minilm:>9}"
            formatter.write(f"{indent}{cells}\n")
        formatter.write("\n")
        formatter.write_text(
            "bits: bits per value, including bfloat16 scales. Gaussian, MiniLM: the relative error "
            "of Gaussian weights and of the linear layers of all-MiniLM-L6-v2, measured with this "
            "--tile. channel: one scale per output channel. Without --tile, the tile is channel "
            "for 8 bits, 64 for 4 to 7 bits, and 32 for fewer. The mx formats and nvfp4 have no "
            "other tile."
        )
        formatter.write("\n")
        formatter.write_text(f"Further formats: {', '.join(MORE_FORMATS)}.")
