"""`veneer convert`: write a quantized checkpoint in the format of another library."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .shared import (
    Command,
    Raw,
    companion_files,
    exit_on_signals,
    print_table,
    report_input_errors,
    warn,
)


def run(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A folder or file that vn.load loads.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to create. For gguf, a file.")
    ],
    format: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="gptq, awq, compressed-tensors, mlx or gguf."),
    ],
    requantize: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Round the weights that OUT cannot hold exactly to this number format, and print "
            "the error that this adds.",
        ),
    ] = None,
    raw: Raw = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace OUT if it is a folder that veneer wrote or a GGUF file."
        ),
    ] = False,
) -> None:
    """Write the quantized weights of IN in the format of another library.

    Codes and scales are copied without rounding. If the format cannot hold some weights exactly,
    the error names all of them, and --requantize rounds these weights. The configuration and the
    tokenizer are copied. A few tensors are in memory at a time. OUT is created when it is complete.
    """
    from ..files.checkpoint import LazyTensors, convert, open_checkpoint
    from ..files.gguf import GgufFile
    from ..files.targets import TARGETS, Requantized

    with exit_on_signals(), contextlib.ExitStack() as stack, report_input_errors():
        as_gguf = format == "gguf"
        source_tensors = stack.enter_context(
            open_checkpoint(source, raw=raw, names=None if as_gguf else "huggingface")
        )
        is_gguf = isinstance(source_tensors, GgufFile)
        metadata = source_tensors.metadata if as_gguf and is_gguf else None
        companions = None if as_gguf else companion_files(source, source_tensors)
        if as_gguf and metadata is None:
            warn(
                f"{target} has no metadata, and llama.cpp needs them. Write them with "
                "vn.save(..., format='gguf', names='huggingface', config=METADATA)"
            )
        tensors: Any = LazyTensors(source_tensors)
        if requantize is not None and format in TARGETS:
            tensors = Requantized(tensors, format, requantize)
        try:
            convert(
                target, tensors, format, config=metadata, overwrite=overwrite, beside=companions
            )
        except (TypeError, ValueError) as error:
            if requantize is None and (message := _describe_unsupported(format, tensors)):
                raise ValueError(message) from error
            raise
    if isinstance(tensors, Requantized):
        _print_errors(tensors.errors)
        if tensors.made_dense:
            warn(f"these weights are dense in {target}: {', '.join(tensors.made_dense)}")


def _describe_unsupported(format: str, tensors: Any) -> str | None:
    """Return an error message that names all tensors that the format of a library cannot hold.

    Return None if it can hold all of them.
    """
    from ..files.targets import TARGETS, find_unsupported

    reasons = find_unsupported(format, tensors) if format in TARGETS else {}
    if not reasons:
        return None
    name, reason = next(iter(reasons.items()))
    which = "" if len(reasons) == 1 else f"The reason for {name!r}: "
    return (
        f"format {format!r} cannot hold {', '.join(map(repr, reasons))}: {which}{reason}. "
        f"--requantize {TARGETS[format].formats[0]} rounds to what it can hold"
    )


def _print_errors(errors: Mapping[str, tuple[float, float]]) -> None:
    """Print the relative error of each rounded weight, and of all of them together.

    `errors` maps the names of weights to pairs of norms, as in `Requantized.errors`.
    """
    from ..quant.models.checkpoint import relative_error

    if not errors:
        print("no weight was rounded")
        return
    total = [math.hypot(*norms) for norms in zip(*errors.values(), strict=True)]
    rows = [[name, f"{relative_error(*norms):.4f}"] for name, norms in errors.items()]
    print_table(
        ["tensor", "relative error"],
        rows,
        [f"total of {len(errors)}", f"{relative_error(total[0], total[1]):.4f}"],
    )


COMMAND = Command(
    "convert",
    run,
    "Convert a quantized checkpoint.",
    usage="--format FORMAT [OPTIONS]",
    examples=(
        "veneer convert awq-model gptq-model --format gptq",
        "veneer convert model.gguf mlx-model --format mlx",
        "veneer convert q4_1.gguf gptq-model --format gptq --requantize int4",
    ),
)
