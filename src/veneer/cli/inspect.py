"""`veneer inspect`: list the tensors of a checkpoint."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from .shared import AsJson, Command, Raw, print_json, print_table, report_input_errors


def run(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A folder that veneer wrote, a Hugging Face folder, or a file."
        ),
    ],
    tensor: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show only this tensor.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="ORIGINAL",
            help="The dense checkpoint. Adds the relative error of each tensor.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare all tensors with the checksums in veneer.json. A difference is an error, "
            "and so is a PATH without checksums.",
        ),
    ] = False,
    raw: Raw = False,
    as_json: AsJson = False,
) -> None:
    """List the tensors of PATH, and name the library that quantized them.

    Shows the format, shape and bytes of each tensor, and the minimum, median and maximum of its
    scales. The relative error is ||original - quantized|| / ||original||.
    """
    from rich.filesize import decimal

    from .._report.tables import count_of
    from ..files.checkpoint import inspect, open_checkpoint

    with contextlib.ExitStack() as stack, report_input_errors():
        source = stack.enter_context(open_checkpoint(path, raw=raw, verify=verify))
        original = stack.enter_context(open_checkpoint(against, raw=raw)) if against else None
        reports = list(inspect(source, [tensor] if tensor else list(source), original))
    family = getattr(source, "family", None)
    total = sum(report.nbytes for report in reports)
    if as_json:
        document = {"path": str(path), "family": family, "bytes": total, "verified": verify}
        print_json(document | {"tensors": list(map(_tensor_entries, reports))})
        return
    columns = ["tensor", "format", "shape", "bytes", "scale: min", "median", "max"]
    print_table(
        columns + ["relative error"] * (against is not None),
        [
            [
                report.name,
                report.format,
                str(list(report.shape)),
                decimal(report.nbytes),
                *([f"{x:.3g}" for x in report.scale] if report.scale else [""] * 3),
                *([] if report.relative_error is None else [f"{report.relative_error:.4f}"]),
            ]
            for report in reports
        ],
    )
    if family is not None:  # another library wrote the checkpoint
        print(f"{family}: {len(reports)} tensors, {decimal(total)}")
    if verify:
        print(f"verified: {count_of(len(reports), 'tensor')} and veneer.json match their checksums")


def _tensor_entries(report: Any) -> dict[str, Any]:
    scale = report.scale and dict(zip(("min", "median", "max"), report.scale, strict=True))
    entries = report._asdict() | {"scale": scale, "bytes": report.nbytes}
    del entries["nbytes"]
    return entries


COMMAND = Command(
    "inspect",
    run,
    "List the tensors of a checkpoint.",
    examples=(
        "veneer inspect small",
        "veneer inspect small --against model",
        "veneer inspect small --verify",
        "veneer inspect model.gguf --json",
    ),
    json_keys={
        "path": "PATH.",
        "family": "The library that quantized PATH, or null.",
        "tensors": "A list: name, format, shape, bytes, scale (min, median and max; null for a "
        "dense tensor) and relative_error (null without --against).",
        "bytes": "The sum of the bytes of the tensors.",
        "verified": "true if --verify compared the checksums.",
    },
)
