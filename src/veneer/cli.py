"""The command line: `veneer quantize`, `inspect`, `convert`, `plan`, `demo` and `doctor`.

The commands import what they need when they run, so that `veneer --help` is quick.
"""

import contextlib
import json
import math
import platform
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

if missing := [name for name in ("typer", "rich", "safetensors") if find_spec(name) is None]:
    raise SystemExit(
        f"veneer: error: the command line needs {missing[0]}, of the extra: "
        "pip install 'veneer[cli]'"
    )

import typer
from typer.core import TyperGroup

# typer's own copy of click's class, or click's, as its version has it.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _BadInput(Exception):
    """Something that the user can mend."""


# Arguments of functions, as their errors name them, and the options that stand for them.
_OPTION_OF = {"overwrite=True": "--overwrite", "vn.load(..., raw=True)": "--raw"}


@contextlib.contextmanager
def _bad_input(
    errors: tuple[type[Exception], ...] = (ValueError, OSError, ImportError),
    options: Mapping[str, str] = _OPTION_OF,
) -> Iterator[None]:
    """Takes these errors, where the block raises them, for something that the user can mend.

    `options` are those that the command has. By default the errors are those of reading and
    checking what the user gave. A block that also computes names `OSError` alone: that is the file
    system's, and a ValueError would be a defect of ours.
    """
    try:
        yield
    except errors as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename}: {error.strerror}"
        for argument, option in options.items():
            message = message.replace(argument, option)
        raise _BadInput(message) from error


class _OneLineErrors(TyperGroup):
    """Bad input ends in one line on stderr and exit code 2; our own defects in a traceback."""

    def main(  # type: ignore[override]  # the other parameters are among the keywords
        self, args: Sequence[str] | None = None, **kwargs: Any
    ) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(words or ["--help"], **{**kwargs, "standalone_mode": False})
        except typer.Abort:
            code = 130
        except _UsageError as error:
            code = _complain(f"{error.format_message()} (try 'veneer --help')")  # type: ignore[attr-defined]
        except _BadInput as error:
            code = _complain(str(error))
        sys.exit(code or 0)


def _complain(message: str) -> int:
    print(f"veneer: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool | None) -> None:
    if wanted:
        import jax

        import veneer as vn

        print(
            f"veneer {vn.__version__} (JAX {jax.__version__}, Python {platform.python_version()})"
        )
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool | None,  # None where it is left out
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = None,
) -> None:
    """Quantise models and look inside them."""
    del version  # which its callback has printed


def main() -> None:
    """Runs the command line."""
    app()


_RAW = typer.Option(
    "--raw",
    help="Read safetensors as they are stored: integers that could be packed codes are data.",
)


class Layout(StrEnum):
    """Which axis of a weight a matmul contracts: the last (torch) or the last but one (jax)."""

    torch = "torch"
    jax = "jax"


@app.command()
def quantize(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A safetensors file, a Hugging Face folder, or a dense GGUF file."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    format: Annotated[
        str | None,
        typer.Option(
            help="int8 to int2, ternary, int1, uint8 to uint2, fp8, fp8_e5m2, fp6_e2m3, fp6_e3m2, "
            "fp4, nf4, nf4_dq, mxfp8, mxfp8_16, mxfp8_e5m2, mxfp6, mxfp6_e3m2, mxfp4 or nvfp4."
        ),
    ] = None,
    tile: Annotated[
        int | None,
        typer.Option(
            help="Values that share a scale; without it, one scale a channel, or as many as the "
            "format is defined for (mx formats 32, nvfp4 16)."
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX",
            help="Quantise the tensors whose whole name matches, instead of all '...weight' and "
            "'...kernel'. May be repeated.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX", help="Leave these dense. May be repeated."),
    ] = None,
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="Weights are [out, in] (torch) or [in, out] (jax); without it, torch for names "
            "ending in 'weight' and jax for 'kernel'."
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='A JSON list of {"path": REGEX, "qtype": FORMAT or null, "tile_size": N, '
            '"tile_axis": N}, the first match winning, instead of the options above.',
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXT",
            help="Run the model on a text, and round by what it meets: a BERT encoder, a sentence "
            "a line, or a Llama.",
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="With --calibrate: gptq (the default) or nearest.")
    ] = None,
    raw: Annotated[bool, _RAW] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an OUT that veneer wrote.")
    ] = False,
) -> None:
    """Quantise the weights of IN into the folder OUT.

    Floating tensors of rank 2 and up whose name ends in 'weight' or 'kernel' are quantised,
    embeddings included; the others are kept as they are. Memory holds a few tensors at a time, and
    with --calibrate the model. OUT appears when it is complete.
    """
    from .interop.checkpoints.opened import open_checkpoint
    from .interop.folder import FolderWriter, TensorFolder
    from .interop.new_folder import write_aside, write_beside
    from .quant.models.checkpoint import quantize_stream

    outcomes = []
    with _kill_raises(), contextlib.ExitStack() as stack:
        with _bad_input():
            selectors = _selectors(format, tile, include or [], exclude or [], layout, rules)
            tensors = stack.enter_context(open_checkpoint(source, raw=raw, names="huggingface"))
            dense = tensors.dense_avals()
            if not isinstance(tensors, TensorFolder) and len(dense) < len(tensors):
                raise ValueError(
                    f"{source} is quantised already, by {tensors.family}: vn.load reads it packed, "
                    "'veneer inspect' shows what it holds, and 'veneer convert' writes it otherwise"
                )
            chosen = _plan(dense, selectors, in_file=rules is not None)
            made, report = _calibrated(source, calibrate, chosen, method)
            beside = _beside(source, tensors)
        with _bad_input((OSError,)), write_aside(target, overwrite=overwrite) as folder:
            writer = FolderWriter(folder, tensors, beside=write_beside(beside, folder))
            stream = quantize_stream((_read(tensors, name) for name in tensors), chosen, made)
            for value, outcome in _with_progress(stream, len(tensors)):
                writer.add(outcome.name, value)
                outcomes.append(outcome)
            writer.finish(tensors.manifest.tree if isinstance(tensors, TensorFolder) else None)
    _print_summary(outcomes)
    if report is not None:
        after, before = report.mean("after"), report.mean("before")
        print(f"on the text, outputs of products lose {after}, and {before} rounded to nearest")
    if already := len(outcomes) - len(dense):
        print(f"veneer: {already} tensors were quantised already, and are as they were")
    if damaged := [o.name for o in outcomes if o.error is not None and not math.isfinite(o.error)]:
        print(f"veneer: warning: NaN or infinity in {', '.join(damaged)}", file=sys.stderr)


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(help="A folder made by veneer, a Hugging Face folder or a file.")
    ],
    tensor: Annotated[str | None, typer.Option(metavar="NAME", help="This tensor alone.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="ORIGINAL", help="The original, to show the error of each tensor."),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare the bytes of each tensor with its checksum."),
    ] = False,
    raw: Annotated[bool, _RAW] = False,
) -> None:
    """Show what PATH holds, tensor by tensor, and which library quantised it.

    For each its format, shape, bytes, the statistics of its scales, and with --against the error
    ||original - quantised|| / ||original||. With --verify, a tensor whose checksum is not that in
    veneer.json is an error, and so is a PATH without checksums.
    """
    from rich.filesize import decimal

    from .interop.checkpoints.opened import open_checkpoint
    from .interop.inspect import inspect

    with contextlib.ExitStack() as stack, _bad_input():
        source = stack.enter_context(open_checkpoint(path, raw=raw, verify=verify))
        original = stack.enter_context(open_checkpoint(against, raw=raw)) if against else None
        reports = list(inspect(source, [tensor] if tensor else list(source), original))
    columns = ["tensor", "format", "shape", "bytes", "scale: min", "median", "max"]
    _print_table(
        columns + ["relative error"] * (against is not None),
        [
            [
                report.name,
                report.format,
                str(list(report.shape)),
                decimal(report.nbytes),
                *(f"{x:.3g}" for x in report.scale or ()),
                *[""] * (0 if report.scale else 3),
                *([] if report.relative_error is None else [f"{report.relative_error:.4f}"]),
            ]
            for report in reports
        ],
    )
    family = getattr(source, "family", None)
    if family is not None:  # another library wrote it
        total = sum(report.nbytes for report in reports)
        print(f"{family}: {len(reports)} tensors, {decimal(total)}")
    if verify:
        print(f"verified: the checksums of {len(reports)} tensors and of veneer.json")


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A folder or file that vn.load reads.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    format: Annotated[
        str, typer.Option(help="gptq, awq, compressed-tensors, mlx or gguf (a file).")
    ],
    raw: Annotated[bool, _RAW] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an OUT that veneer wrote, or a GGUF file."),
    ] = False,
) -> None:
    """Write the quantised weights of IN in the format of another library, none of them rounded.

    A tensor that the format cannot hold to the bit is an error that names it. Configuration and
    tokenizer go along. Memory holds a few tensors at a time. OUT appears when it is complete.
    """
    from .interop.checkpoints.gguf import GgufFile
    from .interop.checkpoints.opened import OnReading, open_checkpoint
    from .interop.checkpoints.writing import convert

    with _kill_raises(), contextlib.ExitStack() as stack, _bad_input():
        as_gguf = format == "gguf"
        tensors = stack.enter_context(
            open_checkpoint(source, raw=raw, names=None if as_gguf else "huggingface")
        )
        said = tensors.metadata if as_gguf and isinstance(tensors, GgufFile) else None
        beside = None if as_gguf else _beside(source, tensors)
        if as_gguf and said is None:
            print(
                f"veneer: warning: {target} has no metadata, which llama.cpp runs a model by: "
                "vn.save(..., format='gguf', names='huggingface', config=METADATA) writes them",
                file=sys.stderr,
            )
        convert(target, OnReading(tensors), format, config=said, overwrite=overwrite, beside=beside)


@app.command()
def plan(
    config: Annotated[
        Path, typer.Argument(help="A config.json of a language model, or a folder with one.")
    ],
    devices: Annotated[int, typer.Option(min=1, help="How many there are.")],
    memory: Annotated[str, typer.Option(metavar="BYTES", help="Of each, as 80GB or 16GiB.")],
    format: Annotated[
        str, typer.Option(help="Of the weights: one of 'veneer quantize', or bf16, f16 or f32.")
    ] = "int4",
    tile: Annotated[
        int | None,
        typer.Option(min=1, help="Values that share a scale; without it, as is usual."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Texts on all devices; as many as devices without it.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a text.")] = 4096,
    cache: Annotated[
        str | None, typer.Option(help="A format or a dtype of the cache; that of the model.")
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of the updates that are trained.")] = 16,
    fused: Annotated[
        bool, typer.Option("--fused", help="Scores of attention are never all in memory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All splits, as JSON.")] = False,
) -> None:
    """Show how to divide a model over devices, by its config.json, for serving and fine-tuning.

    For each split into data, expert and tensor parallelism the bytes of a device, and those that it
    receives in a step; "in parts" is fully sharded. "ms" is what reading and receiving them takes
    at least, at the rates of an H100 with 8 devices near each other; multiplying is not in it.
    """
    from . import plan as planning

    with _bad_input():
        file = config / "config.json" if config.is_dir() else config
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        room, model = _bytes_in(memory), planning.model_of(said)
        step = planning.PlannedStep(batch or devices, length, cache=cache, fused=fused)
        steps = {"serving": step, "fine-tuning": step._replace(rank=rank)}
        of = lambda step: planning.plans(model, format, step, devices, tile=tile)
        uses = {name: (step, of(step)) for name, step in steps.items()}
    print((planning.as_json if as_json else planning.as_text)(model, format, uses, room))


def _bytes_in(text: str) -> float:
    """The bytes that `80GB` or `16GiB` are."""
    units = {
        unit + end: size**i
        for end, size in (("B", 1000), ("iB", 1024))
        for i, unit in enumerate(("", "k", "M", "G", "T"))
    }
    found = re.fullmatch(r"([\d.]+) *([a-zA-Z]+)", text)
    if found is None or found[2] not in units:
        raise ValueError(f"{text!r} is no number of bytes, as 80GB or 16GiB")
    return float(found[1]) * units[found[2]]


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A BERT encoder's Hugging Face folder of your own."),
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A GGUF file of your own, of a Llama.")
    ] = None,
    ask: Annotated[str | None, typer.Option(help="A question to the language model.")] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the picture goes.")] = Path(
        "demo-output"
    ),
) -> None:
    """Run a sentence encoder and a language model packed, and show what it costs."""
    with _bad_input(options={}):
        from .demo import run, talk

        encoder, language_model = run.load(model), talk.load(gguf)
    with _bad_input((OSError,)):
        run.main(encoder, output)
        talk.main(language_model, talk.QUESTION if ask is None else ask)


@app.command()
def doctor(
    choose: Annotated[
        bool,
        typer.Option(
            "--choose",
            help="Measure which vector instructions are the fastest here, and keep that.",
        ),
    ] = False,
) -> None:
    """Show what products run by here, and how fast; exit code 1 where something is wrong."""
    from .doctor import choices, findings

    is_well = True
    with _bad_input():
        found = choices() if choose else findings()
    for finding in found:
        print(f"{finding.name:<26}{finding.text}", flush=True)
        is_well &= finding.is_well
    raise typer.Exit(not is_well)


def _selectors(
    format: str | None,
    tile: int | None,
    include: list[str],
    exclude: list[str],
    layout: Layout | None,
    rules: Path | None,
) -> list[Any]:
    from .quant import FORMATS
    from .quant.models.selection import ANY_WEIGHT, CONTRACTING_AXIS, Selector, selectors_from_json

    axis = None if layout is None else CONTRACTING_AXIS[layout]
    if rules is not None:
        options = {"--format": format, "--tile": tile, "--include": include, "--exclude": exclude}
        if given := [name for name, value in options.items() if value]:
            raise ValueError(f"{', '.join(given)} cannot go with --rules: the file says it all")
        try:
            return selectors_from_json(rules.read_text(encoding="utf-8"), tile_axis=axis)
        except ValueError as error:
            raise ValueError(f"{rules}: {error}") from error
    if format is None:
        raise ValueError(f"--format is missing: one of {', '.join(FORMATS)}, or --rules FILE")
    dense = [Selector(regex, None, stated="--exclude") for regex in exclude]
    wanted = [Selector(regex, format, tile, axis, "--include") for regex in include]
    default = Selector(ANY_WEIGHT, format, tile, axis, "--include (by default)")
    return dense + (wanted or [default])


def _plan(avals: Mapping[str, Any], selectors: list[Any], *, in_file: bool) -> dict[str, Any]:
    from .quant.models.selection import TileError, UnknownAxisError, plan

    try:
        return plan(avals, selectors)
    except UnknownAxisError as error:
        option = "--layout torch (the last axis) or jax (the one before)"
        raise ValueError(f"{error}, or give {option}") from error
    except TileError as error:
        # Not by repr, which would double the backslashes.
        exclude = f"--exclude '{re.escape(error.tensor)}'"
        way = "a rule before the others whose qtype is null" if in_file else exclude
        raise ValueError(f"{error} by {way}") from error


def _calibrated(
    source: Path, text: Path | None, rules: Mapping[str, Any], method: str | None
) -> tuple[Mapping[str, Any], Any]:
    """What is rounded by a text, and what it lost; nothing without one."""
    if text is None:
        if method is not None:
            raise ValueError("--method goes by activations: give a text, by --calibrate TEXT")
        return {}, None
    if method not in (None, "gptq", "nearest"):
        raise ValueError(f"--method {method}: what a folder holds is by gptq or nearest")
    if not text.is_file():
        raise FileNotFoundError(f"{text} is not a file: --calibrate takes a text")
    from .demo.calibrated import calibrated

    return calibrated(source, text, rules, method or "gptq", progress=sys.stderr.isatty())


def _beside(source: Path, tensors: Any) -> Any:
    """What goes along with tensors: of a folder its files, and of GGUF what they would say."""
    from .interop.checkpoints.gguf import GgufFile, tokenizer_files

    if not isinstance(tensors, GgufFile):
        return source
    files = {"config.json": json.dumps(tensors.config, indent=2) + "\n"}
    try:
        return files | tokenizer_files(tensors.metadata)
    except (ValueError, ImportError) as error:
        print(f"veneer: warning: no tokenizer goes along: {error}", file=sys.stderr)
        return files


def _read(tensors: Any, name: str) -> tuple[str, Any]:
    with _bad_input():
        return name, tensors.read(name)


@contextlib.contextmanager
def _kill_raises() -> Iterator[None]:
    """A kill or a lost terminal unwinds as Ctrl-C does: what is half done is removed."""

    def stop(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    names = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = [signal.signal(number, stop) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _with_progress(stream: Iterable[Any], total: int) -> Iterable[Any]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if not console.is_terminal:  # rich 14 and older end a disabled bar with an empty line
        return stream
    return track(stream, "Quantising", total, console=console, transient=True)


def _print_summary(outcomes: Iterable[Any]) -> None:
    from rich.filesize import decimal

    from .quant.models.checkpoint import summarise

    groups = summarise(outcomes)
    before = sum(group.bytes_before for group in groups)
    after = sum(group.bytes_after for group in groups)
    rows = [
        [
            group.name,
            str(group.tensors),
            group.format,
            decimal(group.bytes_before),
            decimal(group.bytes_after),
            "" if group.relative_error is None else f"{group.relative_error:.4f}",
        ]
        for group in groups
    ]
    count = sum(group.tensors for group in groups)
    ratio = f"{before / after:.2f} times smaller" if after else ""
    _print_table(
        ["tensors", "count", "format", "bytes before", "after", "relative error"],
        rows,
        ["total", str(count), ratio, decimal(before), decimal(after), ""],
    )


def _print_table(columns: list[str], rows: list[list[str]], total: list[str] | None = None) -> None:
    from ._report.tables import print_rich, rich_table

    text = ("tensor", "tensors", "format", "shape")
    numbers = [column for column in columns if column not in text]
    print_rich(rich_table(columns, rows, total, right=numbers))
