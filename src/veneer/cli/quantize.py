"""`veneer quantize`: quantize the weights of a checkpoint."""

import contextlib
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from .shared import (
    OPTION_NAMES,
    OPTION_NAMES_OF_RULES,
    AsJson,
    Command,
    InputError,
    OptionError,
    Raw,
    companion_files,
    exit_on_signals,
    print_json,
    print_table,
    report_input_errors,
    warn,
)


class ScaleDtype(StrEnum):
    """The dtype of scales."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Layout(StrEnum):
    """The order of the axes of weights: `[..., out, in]` (torch) or `[..., in, out]` (jax).

    Products contract the axis "in", so scales are shared along it.
    """

    torch = "torch"
    jax = "jax"


def run(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A safetensors file, a Hugging Face folder, or a dense GGUF file."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to create.")],
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="The number format of the weights, from the table below. "
            "[required unless --rules or --for is given]",
        ),
    ] = None,
    tile: Annotated[
        str | None,
        typer.Option(
            metavar="N|channel",
            help="The group size: N values share a scale. 'channel' is one scale per output "
            "channel. The default is channel for 8 bits, 64 for 4 to 7 bits, and 32 for fewer. If "
            "the default does not divide an axis, a smaller tile or channel is used, with a "
            "warning. The mx formats have tiles of 32 (mxfp8_16: 16), and nvfp4 has tiles of 16. "
            "Weights that these do not divide are int8, with a warning.",
        ),
    ] = None,
    scale_dtype: Annotated[
        ScaleDtype | None,
        typer.Option(
            metavar="DTYPE",
            help="The dtype of the scales: float16, bfloat16 or float32. The default is the dtype "
            "of the weight.",
        ),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="LIBRARY",
            help="Choose a format, a group size and a dtype of scales that 'veneer convert' can "
            "write without rounding: gguf, mlx, gptq, awq or compressed-tensors. --format selects "
            "another number format of the library. Embeddings stay dense for the last three.",
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX",
            help="Quantize the tensors whose whole name matches. The default is all names that end "
            "in 'weight' or 'kernel'. Can be repeated.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX",
            help="Do not quantize the tensors whose whole name matches. Can be repeated.",
        ),
    ] = None,
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="The shape of weights: [out, in] (torch) or [in, out] (jax). The default is torch "
            "for names that end in 'weight', and jax for 'kernel'."
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='A JSON list of {"path": REGEX, "qtype": FORMAT or null, "tile_size": N, '
            '"tile_axis": N, "scale_dtype": DTYPE}. The first rule whose path matches applies. '
            'Without "tile_size", a rule has one scale per channel. Replaces --format, --tile, '
            "--scale-dtype, --include and --exclude.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXT",
            help="Run the model on a text file, and round the weights so that the outputs of its "
            "layers change little. For BERT encoders (one sentence per line) and Llamas. Needs the "
            "extra 'demo'.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --calibrate: gptq (the default) or nearest."),
    ] = None,
    raw: Raw = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if veneer wrote it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Quantize the weights of IN and write them to the folder OUT.

    Float tensors of rank 2 or more whose names end in 'weight' or 'kernel' are quantized,
    embeddings included. All other tensors are copied, and a warning names the matrices among them.
    Only a few tensors are in memory at a time, but --calibrate loads the whole model. OUT appears
    when all of its files are written.
    """
    from .._core.surface import some_of
    from .._report.tables import count_of
    from ..files.checkpoint import open_checkpoint
    from ..files.folder import FolderWriter, TensorFolder
    from ..files.new_folder import write_aside, write_beside
    from ..quant.models.arguments import can_be_quantized
    from ..quant.models.checkpoint import describe_adapted, quantize_stream

    outcomes = []
    with exit_on_signals(), contextlib.ExitStack() as stack:
        with report_input_errors(option_names=OPTION_NAMES if rules else OPTION_NAMES_OF_RULES):
            selectors = []
            if library is None:
                selectors = _make_selectors(
                    format, tile, scale_dtype, include or [], exclude or [], layout, rules
                )
            tensors = stack.enter_context(open_checkpoint(source, raw=raw, names="huggingface"))
            dense = tensors.dense_avals()
            if not isinstance(tensors, TensorFolder) and len(dense) < len(tensors):
                raise ValueError(
                    f"{source} is already quantized ({tensors.family}). vn.load loads it packed, "
                    "'veneer inspect' lists its tensors, and 'veneer convert' changes its format."
                )
            if library is None:
                by_name = rules is None and not include
                left_dense = _find_left_dense(source, dense, selectors) if by_name else []
                chosen = _choose_rules(dense, selectors, in_file=rules is not None)
                adapted = describe_adapted(dense, chosen, format) if format and not tile else []
            else:
                options: dict[str, Any] = {"--tile": tile, "--scale-dtype": scale_dtype}
                options |= {"--rules": rules, "--layout": layout, "--include": include}
                if extra := [name for name, value in options.items() if value]:
                    raise OptionError(f"--for {library} cannot be combined with {', '.join(extra)}")
                chosen = _choose_for(library, format, dense, exclude or [])
                matrices = [name for name, aval in dense.items() if can_be_quantized(aval)]
                left_dense = [name for name in matrices if name not in chosen]
                adapted = []
            calibrated, report = _calibrate(source, calibrate, chosen, method)
            companions = companion_files(source, tensors)
        with report_input_errors((OSError,)), write_aside(target, overwrite=overwrite) as folder:
            writer = FolderWriter(folder, tensors, beside=write_beside(companions, folder))
            stream = quantize_stream(_read_all(tensors), chosen, calibrated)
            for value, outcome in _with_progress(stream, len(tensors)):
                writer.add(outcome.name, value)
                outcomes.append(outcome)
                if library is not None and _overflows(outcome):
                    raise InputError(
                        f"{outcome.name} has values that scales in float16, for {library}, cannot "
                        "represent: leave it dense with --exclude"
                    )
            writer.finish(tensors.manifest.tree if isinstance(tensors, TensorFolder) else None)
    if left_dense and library is not None:
        warn(f"dense for {library}: {some_of(left_dense)}")
    elif left_dense:
        warn(_describe_left_dense(left_dense))
    if adapted:
        warn(
            f"the default tile of {format} does not divide the contracted axes: {some_of(adapted)}"
            ". To choose, give another --tile or --format, or --exclude their names"
        )
    already = len(outcomes) - len(dense)
    not_finite = [o.name for o in outcomes if o.error is not None and not math.isfinite(o.error)]
    if not_finite:
        warn(f"NaN or infinity in {', '.join(not_finite)}")
    if as_json:
        document = {"path": str(target)} | _summary_entries(outcomes)
        document |= {"already_quantized": already, "left_dense": left_dense}
        document |= {"not_finite": not_finite, "calibration": _calibration_entries(report)}
        print_json(document)
        return
    _print_summary(outcomes)
    if report is not None:
        after, before = report.mean("after"), report.mean("before")
        print(f"relative error of the outputs on the text: {after} (rounded to nearest: {before})")
    if already:
        print(f"{count_of(already, 'tensor')} already quantized: copied unchanged")


def _overflows(outcome: Any) -> bool:
    """Return whether a finite tensor became infinite or NaN when it was quantized."""
    is_finite = lambda x: x is None or math.isfinite(x)
    return is_finite(outcome.norm) and not is_finite(outcome.error)


def _choose_for(
    library: str, format: str | None, avals: Mapping[str, Any], exclude: list[str]
) -> dict[str, Any]:
    """Return the rules for --for: a dict from the names of the tensors to quantize.

    **Arguments:**

    - `library`: the value of --for, such as "mlx".
    - `format`: the value of --format, or None for the default of the library.
    - `avals`: a dict from the names of dense tensors to their shapes and dtypes.
    - `exclude`: the regexes of --exclude.
    """
    from ..files.targets import choose_rules
    from ..quant.models.arguments import can_be_quantized
    from ..quant.models.checkpoint import Selector

    for regex in exclude:
        selector = Selector(regex, None, stated="--exclude")  # checks the regex
        if not any(re.fullmatch(regex, name) for name in avals):
            raise ValueError(f"{selector} matches no tensor")
    shapes = {
        name: aval.shape
        for name, aval in avals.items()
        if can_be_quantized(aval) and not any(re.fullmatch(regex, name) for regex in exclude)
    }
    return choose_rules(library, shapes, format)


def _make_selectors(
    format: str | None,
    tile: str | None,
    scale_dtype: str | None,
    include: list[str],
    exclude: list[str],
    layout: Layout | None,
    rules: Path | None,
) -> list[Any]:
    """Return the `Selector`s that say which tensors to quantize, and how.

    The arguments are the options of the command with the same names. The file `rules` replaces all
    others except `layout`.

    **Raises:** `OptionError` if options contradict each other, or --format is missing.
    """
    from ..quant.models.checkpoint import (
        ANY_WEIGHT,
        CONTRACTING_AXIS,
        Selector,
        selectors_from_json,
    )

    axis = None if layout is None else CONTRACTING_AXIS[layout]
    if rules is not None:
        options = {"--format": format, "--tile": tile, "--include": include, "--exclude": exclude}
        options |= {"--scale-dtype": scale_dtype}
        if extra := [name for name, value in options.items() if value]:
            raise OptionError(
                f"{', '.join(extra)} cannot be combined with --rules: the rules file sets the "
                "format of each tensor"
            )
        try:
            return selectors_from_json(rules.read_text(encoding="utf-8"), tile_axis=axis)
        except ValueError as error:
            raise ValueError(f"{rules}: {error}") from error
    if format is None:
        raise OptionError("give --format FORMAT, e.g. --format int8, --for LIBRARY or --rules FILE")
    size = _parse_tile(tile, format)
    dense = [Selector(regex, None, stated="--exclude") for regex in exclude]
    select = partial(
        Selector, qtype=format, tile_size=size, tile_axis=axis, scale_dtype=scale_dtype
    )
    wanted = [select(regex, stated="--include") for regex in include]
    default = select(ANY_WEIGHT, stated="--include (by default)")
    return dense + (wanted or [default])


def _parse_tile(tile: str | None, format: str) -> Any:
    """Convert the value of --tile to the `tile_size` of a `Selector`.

    It is a number, None for one scale per channel, or "default" without --tile.
    """
    from ..quant import get_format

    if tile is None:
        return "default"
    if tile != "channel":
        try:
            return int(tile)
        except ValueError:
            raise OptionError(f"--tile must be a number or 'channel', not {tile!r}") from None
    if (fixed := get_format(format).tile_size) is not None:
        raise OptionError(f"{format} needs tiles of {fixed}, not channel; leave out --tile")
    return None


def _find_left_dense(source: Path, avals: Mapping[str, Any], selectors: list[Any]) -> list[str]:
    """Return the names of the matrices that stay dense because no selector matches their names.

    `avals` is a dict from the names of the tensors in the checkpoint `source` that are not
    quantized to their shapes and dtypes. `selectors` are the `Selector`s of the options.

    **Raises:** `ValueError` if nothing can be quantized.
    """
    from ..quant.models.arguments import can_be_quantized
    from ..quant.models.checkpoint import ANY_WEIGHT, find_unselected

    if not avals:
        raise ValueError(f"{source} has no dense tensors: all are already quantized")
    names = find_unselected(avals, selectors)
    by_default = [name for name, aval in avals.items() if can_be_quantized(aval)]
    if names and not any(re.fullmatch(ANY_WEIGHT, name) for name in by_default):
        raise ValueError(f"nothing is quantized: {_describe_left_dense(names)}")
    return names


def _describe_left_dense(names: list[str]) -> str:
    from .._core.surface import some_of

    stays = "1 matrix stays" if len(names) == 1 else f"{len(names)} matrices stay"
    whose = "its name does" if len(names) == 1 else "their names do"
    listed = some_of(names) + ("." if len(names) <= 4 else "")
    return (
        f"{stays} dense, because {whose} not end in 'weight' or 'kernel': {listed} Use --include "
        "REGEX (and --layout jax or torch)"
    )


def _choose_rules(
    avals: Mapping[str, Any], selectors: list[Any], *, in_file: bool
) -> dict[str, Any]:
    """Return a dict from the names of the tensors to quantize to their `vn.quant.Rule`.

    `avals` is a dict from the names of dense tensors to their shapes and dtypes. `in_file` says
    whether the selectors are from a file of rules. The advice in error messages depends on it.
    """
    from ..quant.models.checkpoint import TileError, UnknownAxisError, plan

    try:
        return plan(avals, selectors)
    except UnknownAxisError as error:
        option = "--layout torch (the last axis) or jax (the one before)"
        raise ValueError(f"{error}, or give {option}") from error
    except TileError as error:
        # Not by repr, which would double the backslashes.
        exclude = f"--exclude '{re.escape(error.tensor)}'"
        remedy = "a rule before the others whose qtype is null" if in_file else exclude
        raise ValueError(f"{error} by {remedy}") from error


def _calibrate(
    source: Path, text: Path | None, rules: Mapping[str, Any], method: str | None
) -> tuple[Mapping[str, Any], Any]:
    """Quantize weights with calibration on a text file, for --calibrate.

    **Arguments:**

    - `source`: the checkpoint.
    - `text`: the text file. Without --calibrate, it is None, and nothing is quantized.
    - `rules`: a dict from the names of the tensors to quantize to their rules.
    - `method`: the value of --method, or None.

    **Returns:** a dict from names to quantized weights, and a report of their errors. Without a
    text, an empty dict and None.
    """
    if text is None:
        if method is not None:
            raise OptionError("--method needs activations: give a text with --calibrate TEXT")
        return {}, None
    if method not in (None, "gptq", "nearest"):
        raise OptionError(f"--method {method!r} is unknown; use gptq or nearest")
    if not text.is_file():
        raise FileNotFoundError(f"{text} is not a file: --calibrate needs a text file")
    from ..demo.calibrated import calibrated

    return calibrated(source, text, rules, method or "gptq", progress=sys.stderr.isatty())


def _read_all(tensors: Any) -> Iterator[tuple[str, Any]]:
    for name in tensors:
        with report_input_errors():
            value = tensors.read(name)
        yield name, value


def _with_progress(stream: Iterable[Any], total: int) -> Iterable[Any]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if not console.is_terminal:  # rich 14 and older end a disabled bar with an empty line
        return stream
    return track(stream, "Quantizing", total, console=console, transient=True)


def _summary_entries(outcomes: Iterable[Any]) -> dict[str, Any]:
    from ..quant.models.checkpoint import summarize

    groups = [group._asdict() for group in summarize(outcomes)]
    for group in groups:
        group["count"] = group.pop("tensors")
    sums = ("count", "bytes_before", "bytes_after")
    return {"groups": groups, "total": {key: sum(group[key] for group in groups) for key in sums}}


def _calibration_entries(report: Any) -> dict[str, float] | None:
    if report is None:
        return None
    mean = lambda field: sum(getattr(row, field) for row in report.rows) / len(report.rows)
    return {"mean": mean("after"), "mean_nearest": mean("before")}


def _print_summary(outcomes: Iterable[Any]) -> None:
    from rich.filesize import decimal

    from ..quant.models.checkpoint import summarize

    groups = summarize(outcomes)
    before = sum(group.bytes_before for group in groups)
    after = sum(group.bytes_after for group in groups)
    count = sum(group.tensors for group in groups)
    ratio = f"{before / after:.2f} times smaller" if after else ""
    print_table(
        ["tensors", "count", "format", "bytes before", "after", "relative error"],
        [
            [
                group.name,
                str(group.tensors),
                group.format,
                decimal(group.bytes_before),
                decimal(group.bytes_after),
                "" if group.relative_error is None else f"{group.relative_error:.4f}",
            ]
            for group in groups
        ],
        ["total", str(count), ratio, decimal(before), decimal(after), ""],
    )


# The help.


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


COMMAND = Command(
    "quantize",
    run,
    "Quantize a checkpoint.",
    usage="[OPTIONS]",
    write_section=_write_formats,
    examples=(
        "veneer quantize model small --format int8",
        "veneer quantize model nf4 --format nf4 --exclude lm_head.weight",
        "veneer quantize model for-mlx --for mlx",
        "veneer quantize model mixed --rules rules.json",
        "veneer quantize model int4 --format int4 --tile 128 --calibrate text.txt",
        "veneer quantize model.safetensors small --format int8 --overwrite --json",
    ),
    json_keys={
        "path": "OUT.",
        "groups": "A list. Each group has the tensors whose names differ only in numbers: name "
        "(with * for numbers), count, format, bytes_before, bytes_after and relative_error.",
        "total": "count, bytes_before and bytes_after of all tensors.",
        "already_quantized": "The number of tensors that are already quantized in IN.",
        "left_dense": "The names of the tensors of rank 2 or more that stay dense, because their "
        "names do not end in 'weight' or 'kernel', or because the library of --for keeps them "
        "dense. Empty with --include or --rules.",
        "not_finite": "The names of the tensors with NaN or infinity.",
        "calibration": "With --calibrate, the relative errors of the outputs of products: mean, "
        "and mean_nearest for weights rounded to nearest. Otherwise null.",
    },
)
