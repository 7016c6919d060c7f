"""`veneer convert`: write a quantized checkpoint in the format of another library."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from .shared import Command, Raw, companion_files, exit_on_signals, report_input_errors, warn


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
    raw: Raw = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace OUT if it is a folder that veneer wrote or a GGUF file."
        ),
    ] = False,
) -> None:
    """Write the quantized weights of IN in the format of another library, without rounding.

    A tensor that the format cannot hold exactly is an error that names the tensor. The
    configuration and the tokenizer are copied. A few tensors are in memory at a time. OUT is
    created when it is complete.
    """
    from ..files.checkpoint import LazyTensors, convert, open_checkpoint
    from ..files.gguf import GgufFile

    with exit_on_signals(), contextlib.ExitStack() as stack, report_input_errors():
        as_gguf = format == "gguf"
        tensors = stack.enter_context(
            open_checkpoint(source, raw=raw, names=None if as_gguf else "huggingface")
        )
        metadata = tensors.metadata if as_gguf and isinstance(tensors, GgufFile) else None
        companions = None if as_gguf else companion_files(source, tensors)
        if as_gguf and metadata is None:
            warn(
                f"{target} has no metadata, and llama.cpp needs them. Write them with "
                "vn.save(..., format='gguf', names='huggingface', config=METADATA)"
            )
        convert(
            target,
            LazyTensors(tensors),
            format,
            config=metadata,
            overwrite=overwrite,
            beside=companions,
        )


COMMAND = Command(
    "convert",
    run,
    "Convert a quantized checkpoint.",
    usage="--format FORMAT [OPTIONS]",
    examples=(
        "veneer convert awq-model gptq-model --format gptq",
        "veneer convert model.gguf mlx-model --format mlx",
    ),
)
