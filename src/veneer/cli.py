"""The command line: `veneer quantize`, `inspect`, `convert`, `plan`, `demo` and `doctor`.

The commands import what they need when they run, so that `veneer --help` is quick.
"""

import contextlib
import difflib
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

from ._install import install_command

if missing := [name for name in ("typer", "rich") if find_spec(name) is None]:
    raise SystemExit(
        f"veneer: error: the command line needs {missing[0]}: {install_command('cli')}"
    )

import typer

from .cli_help import HelpCommand, HelpGroup

# typer's own copy of click's class, or click's, as its version has it.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _BadInput(Exception):
    """Input that the user can correct."""


class _BadOption(_BadInput):
    """An option that the user can correct. The message names the help of the command."""


# Arguments of functions, as their errors name them, and the options that stand for them.
_OPTION_OF = {
    "overwrite=True": "--overwrite",
    "vn.load(..., raw=True)": "--raw",
    "vn.quant.FORMATS has all formats": "'veneer quantize --help' lists the formats",
}
# The same for commands that make a rule of --format and --tile.
_OPTION_OF_RULE = _OPTION_OF | {
    "with tile_size=": "with --tile ",
    "leave out tile_size": "leave out --tile",
    "tile_size must": "--tile must",
    "path_regex=": "--include or --exclude ",
    "to keep a weight dense, write None as the format of its rule": "--exclude keeps tensors dense",
}


@contextlib.contextmanager
def _bad_input(
    errors: tuple[type[Exception], ...] = (ValueError, OSError, ImportError),
    options: Mapping[str, str] = _OPTION_OF,
) -> Iterator[None]:
    """Turn errors that the block raises into one line for the user.

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


class _OneLineErrors(HelpGroup):
    """Bad input ends in one line on stderr and exit code 2; our own defects in a traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command, or raise an error that suggests the closest one."""
        names = list(self.commands)
        if args[0] not in names:
            close = difflib.get_close_matches(args[0], names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"commands: {', '.join(names)}"
            ctx.fail(f"unknown command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]  # the other parameters are among the keywords
        self, args: Sequence[str] | None = None, **kwargs: Any
    ) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        try:
            options = {"prog_name": "veneer", "standalone_mode": False}
            code = super().main(words or ["--help"], **{**kwargs, **options})
        except typer.Abort:
            code = 130
        except _UsageError as error:
            path = error.ctx.command_path if error.ctx else "veneer"  # type: ignore[attr-defined]
            code = _complain(f"{error.format_message()} (try '{path} --help')")  # type: ignore[attr-defined]
        except _BadOption as error:
            command = next(word for word in words if word in self.commands)
            code = _complain(f"{error} (try 'veneer {command} --help')")
        except _BadInput as error:
            code = _complain(str(error))
        sys.exit(code or 0)


def _complain(message: str) -> int:
    print(f"veneer: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _warn(message: str) -> None:
    print(f"veneer: warning: {message}", file=sys.stderr)


app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _command(summary: str, usage: str = "[OPTIONS]") -> Any:
    """Return a decorator that adds a command. `summary` is its line in the help of the program."""
    return app.command(cls=HelpCommand, short_help=summary, options_metavar=usage)


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
    """Quantize, inspect and convert the checkpoints of models."""
    del version  # its callback has printed it


def main() -> None:
    """Runs the command line."""
    app()


_RAW = typer.Option(
    "--raw",
    help="Read safetensors as stored. Do not interpret integers as packed codes.",
)
_JSON = typer.Option("--json", help="Print one JSON document. Its keys are listed below.")


class Layout(StrEnum):
    """The axis of a weight that a matmul contracts: the last (torch) or the last but one (jax)."""

    torch = "torch"
    jax = "jax"


@_command("Quantize a checkpoint.", "--format FORMAT [OPTIONS]")
def quantize(
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
            "[required unless --rules is given]",
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
            '"tile_axis": N}. The first rule whose path matches applies. Without "tile_size", a '
            "rule has one scale per channel. Replaces --format, --tile, --include and --exclude.",
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
    raw: Annotated[bool, _RAW] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if veneer wrote it.")
    ] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Quantize the weights of IN and write them to the folder OUT.

    Float tensors of rank 2 or more whose names end in 'weight' or 'kernel' are quantized,
    embeddings included. All other tensors are copied, and a warning names the matrices among them.
    Only a few tensors are in memory at a time, but --calibrate loads the whole model. OUT appears
    when all of its files are written.
    """
    from ._report.tables import count_of
    from .files.checkpoint import open_checkpoint
    from .files.folder import FolderWriter, TensorFolder
    from .files.new_folder import write_aside, write_beside
    from .quant.models.checkpoint import describe_adapted, quantize_stream
    from .quant.models.matching import some_of

    outcomes = []
    with _kill_raises(), contextlib.ExitStack() as stack:
        with _bad_input(options=_OPTION_OF if rules else _OPTION_OF_RULE):
            selectors = _selectors(format, tile, include or [], exclude or [], layout, rules)
            tensors = stack.enter_context(open_checkpoint(source, raw=raw, names="huggingface"))
            dense = tensors.dense_avals()
            if not isinstance(tensors, TensorFolder) and len(dense) < len(tensors):
                raise ValueError(
                    f"{source} is already quantized ({tensors.family}). vn.load loads it packed, "
                    "'veneer inspect' lists its tensors, and 'veneer convert' changes its format."
                )
            by_name = rules is None and not include
            left_dense = _left_dense(source, dense, selectors) if by_name else []
            chosen = _plan(dense, selectors, in_file=rules is not None)
            adapted = describe_adapted(dense, chosen, format) if format and not tile else []
            made, report = _calibrated(source, calibrate, chosen, method)
            beside = _beside(source, tensors)
        with _bad_input((OSError,)), write_aside(target, overwrite=overwrite) as folder:
            writer = FolderWriter(folder, tensors, beside=write_beside(beside, folder))
            stream = quantize_stream((_read(tensors, name) for name in tensors), chosen, made)
            for value, outcome in _with_progress(stream, len(tensors)):
                writer.add(outcome.name, value)
                outcomes.append(outcome)
            writer.finish(tensors.manifest.tree if isinstance(tensors, TensorFolder) else None)
    if left_dense:
        _warn(_why_dense(left_dense))
    if adapted:
        _warn(
            f"the default tile of {format} does not divide the contracted axes: {some_of(adapted)}"
            ". To choose, give another --tile or --format, or --exclude their names"
        )
    already = len(outcomes) - len(dense)
    damaged = [o.name for o in outcomes if o.error is not None and not math.isfinite(o.error)]
    if damaged:
        _warn(f"NaN or infinity in {', '.join(damaged)}")
    if as_json:
        tensors_of_note = {"left_dense": left_dense, "not_finite": damaged}
        document = {"path": str(target)} | _summary_entries(outcomes)
        document |= {"already_quantized": already} | tensors_of_note
        _print_json(document | {"calibration": _calibration_entries(report)})
        return
    _print_summary(outcomes)
    if report is not None:
        after, before = report.mean("after"), report.mean("before")
        print(f"relative error of the outputs on the text: {after} (rounded to nearest: {before})")
    if already:
        print(f"{count_of(already, 'tensor')} already quantized: copied unchanged")


@_command("List the tensors of a checkpoint.")
def inspect(
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
    raw: Annotated[bool, _RAW] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """List the tensors of PATH, and name the library that quantized them.

    Shows the format, shape and bytes of each tensor, and the minimum, median and maximum of its
    scales. The relative error is ||original - quantized|| / ||original||.
    """
    from rich.filesize import decimal

    from ._report.tables import count_of
    from .files.checkpoint import inspect, open_checkpoint

    with contextlib.ExitStack() as stack, _bad_input():
        source = stack.enter_context(open_checkpoint(path, raw=raw, verify=verify))
        original = stack.enter_context(open_checkpoint(against, raw=raw)) if against else None
        reports = list(inspect(source, [tensor] if tensor else list(source), original))
    family = getattr(source, "family", None)
    total = sum(report.nbytes for report in reports)
    if as_json:
        document = {"path": str(path), "family": family, "bytes": total, "verified": verify}
        _print_json(document | {"tensors": list(map(_tensor_entries, reports))})
        return
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
    if family is not None:  # another library wrote it
        print(f"{family}: {len(reports)} tensors, {decimal(total)}")
    if verify:
        print(f"verified: {count_of(len(reports), 'tensor')} and veneer.json match their checksums")


@_command("Convert a quantized checkpoint.", "--format FORMAT [OPTIONS]")
def convert(
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
    raw: Annotated[bool, _RAW] = False,
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
    from .files.checkpoint import LazyTensors, convert, open_checkpoint
    from .files.gguf import GgufFile

    with _kill_raises(), contextlib.ExitStack() as stack, _bad_input():
        as_gguf = format == "gguf"
        tensors = stack.enter_context(
            open_checkpoint(source, raw=raw, names=None if as_gguf else "huggingface")
        )
        metadata = tensors.metadata if as_gguf and isinstance(tensors, GgufFile) else None
        beside = None if as_gguf else _beside(source, tensors)
        if as_gguf and metadata is None:
            _warn(
                f"{target} has no metadata, and llama.cpp needs them. Write them with "
                "vn.save(..., format='gguf', names='huggingface', config=METADATA)"
            )
        convert(
            target,
            LazyTensors(tensors),
            format,
            config=metadata,
            overwrite=overwrite,
            beside=beside,
        )


@_command("Plan how to shard a language model.", "--devices N --memory BYTES [OPTIONS]")
def plan(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="The config.json of a language model, or its folder."
        ),
    ],
    devices: Annotated[int, typer.Option(min=1, metavar="N", help="The number of devices.")],
    memory: Annotated[
        str, typer.Option(metavar="BYTES", help="The memory per device, e.g. 80GB or 16GiB.")
    ],
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="The format of the weights: one of 'veneer quantize', or bf16, f16 or f32.",
        ),
    ] = "int4",
    tile: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="The group size. The default is the tile of the format. For formats without one, "
            "it is a channel for 8 bits, 64 values for 4 to 7 bits, and 32 for fewer.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Global batch size. The default is the number of devices."
        ),
    ] = None,
    length: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sequence length in tokens.")
    ] = 4096,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Format or dtype of the KV cache. The default is the dtype of the model.",
        ),
    ] = None,
    rank: Annotated[
        int, typer.Option(min=1, metavar="N", help="Rank of the LoRA updates for fine-tuning.")
    ] = 16,
    fused: Annotated[
        bool,
        typer.Option("--fused", help="Assume flash attention: scores are never all in memory."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print all splits as one JSON document. Its keys are listed below."
        ),
    ] = False,
) -> None:
    """Plan how to shard a language model for serving and fine-tuning, from its config.json.

    Lists splits into data, expert and tensor parallelism, with the bytes that each device holds and
    the bytes that it receives per step. "parts" means fully sharded. "ms" is a lower bound: the
    time to read and receive these bytes at the rates of an H100 with 8 devices per node.
    Multiplication is not included.
    """
    from . import plan as planning

    with _bad_input(options=_OPTION_OF_RULE | {"--exclude keeps tensors dense": "write f16"}):
        file = config / "config.json" if config.is_dir() else config
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist: CONFIG is a config.json or its folder")
        try:
            entries = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(entries, dict):
            raise ValueError(f"{file} is not a JSON object")
        room, model = _bytes_in(memory), planning.model_of(entries)
        step = planning.PlannedStep(batch or devices, length, cache=cache, fused=fused)
        steps = {"serving": step, "fine-tuning": step._replace(rank=rank)}
        plans_of = lambda step: planning.plans(model, format, step, devices, tile=tile)
        uses = {name: (step, plans_of(step)) for name, step in steps.items()}
    print((planning.as_json if as_json else planning.as_text)(model, format, uses, room))


def _bytes_in(text: str) -> float:
    """Parse a number of bytes such as `80GB` or `16GiB`."""
    units = {
        unit + end: size**i
        for end, size in (("B", 1000), ("iB", 1024))
        for i, unit in enumerate(("", "k", "M", "G", "T"))
    }
    parts = re.fullmatch(r"(\d+|\d*\.\d+) *([a-zA-Z]+)", text)
    if parts is None or parts[2] not in units:
        raise _BadOption(f"--memory {text!r} is not a number of bytes, such as 80GB or 16GiB")
    return float(parts[1]) * units[parts[2]]


@_command("Run the demo: two models, dense and quantized.")
def demo(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The Hugging Face folder of a BERT encoder. The default is all-MiniLM-L6-v2.",
        ),
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The GGUF file of a Llama. The default is SmolLM2-135M-Instruct.",
        ),
    ] = None,
    ask: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A question for the language model.")
    ] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the picture.")] = Path(
        "demo-output"
    ),
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Quantize a sentence encoder and a language model, and compare them with the dense models.

    Prints sizes, errors and times, a search, and an answer of the language model. Downloads the
    default models on the first run (180 MB). Needs the extra 'demo'.
    """
    from rich.console import Console

    console = Console(stderr=as_json)
    with _bad_input(options={}):
        from .demo import run, talk

        encoder, language_model = run.load(model, console), talk.load(gguf, console)
    with _bad_input((OSError,)):
        question = talk.QUESTION if ask is None else ask
        document = {
            "encoder": run.main(encoder, output, console),
            "language_model": talk.main(language_model, question, console),
        }
    if as_json:
        _print_json(document)


@_command("Check the kernels of this machine.")
def doctor(
    choose: Annotated[
        bool,
        typer.Option(
            "--choose",
            help="Measure the vector instruction sets of this CPU, and use the fastest from now "
            "on.",
        ),
    ] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Check which kernels this machine uses, whether they are correct, and how fast they are.

    The exit code is 1 if a finding is a problem.
    """
    from .doctor import choices, findings

    with _bad_input():
        results = choices() if choose else findings()
    shown = []
    for finding in results:
        shown.append(finding)
        if not as_json:
            print(f"{finding.name:<26}{finding.text}", flush=True)
    is_well = all(finding.is_well for finding in shown)
    if as_json:
        _print_json({"is_well": is_well, "findings": [finding._asdict() for finding in shown]})
    raise typer.Exit(not is_well)


def _selectors(
    format: str | None,
    tile: str | None,
    include: list[str],
    exclude: list[str],
    layout: Layout | None,
    rules: Path | None,
) -> list[Any]:
    from .quant.models.checkpoint import ANY_WEIGHT, CONTRACTING_AXIS, Selector, selectors_from_json

    axis = None if layout is None else CONTRACTING_AXIS[layout]
    if rules is not None:
        options = {"--format": format, "--tile": tile, "--include": include, "--exclude": exclude}
        if given := [name for name, value in options.items() if value]:
            raise _BadOption(
                f"{', '.join(given)} cannot be combined with --rules: the rules file sets the "
                "format of each tensor"
            )
        try:
            return selectors_from_json(rules.read_text(encoding="utf-8"), tile_axis=axis)
        except ValueError as error:
            raise ValueError(f"{rules}: {error}") from error
    if format is None:
        raise _BadOption("give --format FORMAT, e.g. --format int8, or --rules FILE")
    size = _tile_size(tile, format)
    dense = [Selector(regex, None, stated="--exclude") for regex in exclude]
    wanted = [Selector(regex, format, size, axis, "--include") for regex in include]
    default = Selector(ANY_WEIGHT, format, size, axis, "--include (by default)")
    return dense + (wanted or [default])


def _tile_size(tile: str | None, format: str) -> Any:
    """Return the `tile_size` of a `Selector` for the value of --tile."""
    from .quant import get_format

    if tile is None:
        return "default"
    if tile != "channel":
        try:
            return int(tile)
        except ValueError:
            raise _BadOption(f"--tile must be a number or 'channel', not {tile!r}") from None
    if (fixed := get_format(format).tile_size) is not None:
        raise _BadOption(f"{format} needs tiles of {fixed}, not channel; leave out --tile")
    return None


def _left_dense(source: Path, avals: Mapping[str, Any], selectors: list[Any]) -> list[str]:
    """Return the names of the matrices that stay dense because of their names.

    **Raises:** `ValueError` if there are no other tensors to quantize.
    """
    from .quant.models.checkpoint import ANY_WEIGHT, find_unselected
    from .quant.models.matching import can_be_quantized

    if not avals:
        raise ValueError(f"{source} has no dense tensors: all are already quantized")
    names = find_unselected(avals, selectors)
    by_default = [name for name, aval in avals.items() if can_be_quantized(aval)]
    if names and not any(re.fullmatch(ANY_WEIGHT, name) for name in by_default):
        raise ValueError(f"nothing is quantized: {_why_dense(names)}")
    return names


def _why_dense(names: list[str]) -> str:
    from .quant.models.matching import some_of

    stays = "1 matrix stays" if len(names) == 1 else f"{len(names)} matrices stay"
    whose = "its name does" if len(names) == 1 else "their names do"
    listed = some_of(names) + ("." if len(names) <= 4 else "")
    return (
        f"{stays} dense, because {whose} not end in 'weight' or 'kernel': {listed} Use --include "
        "REGEX (and --layout jax or torch)"
    )


def _plan(avals: Mapping[str, Any], selectors: list[Any], *, in_file: bool) -> dict[str, Any]:
    from .quant.models.checkpoint import TileError, UnknownAxisError, plan

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


def _calibrated(
    source: Path, text: Path | None, rules: Mapping[str, Any], method: str | None
) -> tuple[Mapping[str, Any], Any]:
    """Calibrate on a text. Return the quantized weights and a report; nothing without a text."""
    if text is None:
        if method is not None:
            raise _BadOption("--method needs activations: give a text with --calibrate TEXT")
        return {}, None
    if method not in (None, "gptq", "nearest"):
        raise _BadOption(f"--method {method!r} is unknown; use gptq or nearest")
    if not text.is_file():
        raise FileNotFoundError(f"{text} is not a file: --calibrate needs a text file")
    from .demo.calibrated import calibrated

    return calibrated(source, text, rules, method or "gptq", progress=sys.stderr.isatty())


def _beside(source: Path, tensors: Any) -> Any:
    """Return the files beside the tensors: of the folder, or made of a GGUF file's metadata."""
    from .files.gguf import GgufFile, tokenizer_files

    if not isinstance(tensors, GgufFile):
        return source
    files = {"config.json": json.dumps(tensors.config, indent=2) + "\n"}
    try:
        return files | tokenizer_files(tensors.metadata)
    except (ValueError, ImportError) as error:
        _warn(f"the tokenizer is not copied: {error}")
        return files


def _read(tensors: Any, name: str) -> tuple[str, Any]:
    with _bad_input():
        return name, tensors.read(name)


@contextlib.contextmanager
def _kill_raises() -> Iterator[None]:
    """Handle a kill or a lost terminal like Ctrl-C, so that half-written files are removed."""

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
    return track(stream, "Quantizing", total, console=console, transient=True)


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(_without_nan(document), indent=2, allow_nan=False))


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summary_entries(outcomes: Iterable[Any]) -> dict[str, Any]:
    from .quant.models.checkpoint import summarize

    groups = [group._asdict() for group in summarize(outcomes)]
    for group in groups:
        group["count"] = group.pop("tensors")
    sums = ("count", "bytes_before", "bytes_after")
    total = {key: sum(group[key] for group in groups) for key in sums}
    return {"groups": groups, "total": total}


def _calibration_entries(report: Any) -> dict[str, float] | None:
    if report is None:
        return None
    mean = lambda field: sum(getattr(row, field) for row in report.rows) / len(report.rows)
    return {"mean": mean("after"), "mean_nearest": mean("before")}


def _tensor_entries(report: Any) -> dict[str, Any]:
    scale = report.scale and dict(zip(("min", "median", "max"), report.scale, strict=True))
    entries = report._asdict() | {"scale": scale, "bytes": report.nbytes}
    del entries["nbytes"]
    return entries


def _print_summary(outcomes: Iterable[Any]) -> None:
    from rich.filesize import decimal

    from .quant.models.checkpoint import summarize

    groups = summarize(outcomes)
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
