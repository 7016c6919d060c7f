"""Shared by the commands: their description, common options, errors, JSON and tables."""

import contextlib
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer


class Command(NamedTuple):
    """A command of the program.

    **Arguments:**

    - `name`: its name on the command line.
    - `run`: the function that runs it. Its parameters are the options, and its docstring is the
      description in the help.
    - `summary`: its line in `veneer --help`.
    - `examples`: command lines that the help shows.
    - `json_keys`: the keys of the document that `--json` prints, with their meanings.
    - `usage`: the options in the usage line of the help.
    - `write_section`: a function that writes one more section of the help to a click formatter.
    """

    name: str
    run: Callable[..., None]
    summary: str
    examples: tuple[str, ...]
    json_keys: Mapping[str, str] = {}
    usage: str = "[OPTIONS]"
    write_section: Callable[[Any], None] | None = None


Raw = Annotated[
    bool,
    typer.Option(
        "--raw", help="Read safetensors as stored. Do not interpret integers as packed codes."
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document. Its keys are listed below.")
]


class InputError(Exception):
    """An input that the user can correct. The message becomes one line on stderr."""


class OptionError(InputError):
    """An option that the user can correct. The program adds a hint at the help of the command."""


#: Texts of error messages that name Python arguments, and the names for the command line.
OPTION_NAMES = {
    "overwrite=True": "--overwrite",
    "vn.load(..., raw=True)": "--raw",
    "vn.quant.FORMATS has all formats": "'veneer quantize --help' lists the formats",
}
#: The same for commands that make a rule from --format and --tile.
OPTION_NAMES_OF_RULES = OPTION_NAMES | {
    "with tile_size=": "with --tile ",
    "leave out tile_size": "leave out --tile",
    "tile_size must": "--tile must",
    "path_regex=": "--include or --exclude ",
    "to keep a weight dense, write None as the format of its rule": "--exclude keeps tensors dense",
}


@contextlib.contextmanager
def report_input_errors(
    errors: tuple[type[Exception], ...] = (ValueError, OSError, ImportError),
    option_names: Mapping[str, str] = OPTION_NAMES,
) -> Iterator[None]:
    """Raise the errors of a `with` block as `InputError`, which the user sees as one line.

    The default `errors` suit a block that reads and checks input. A block that also computes
    should pass `(OSError,)`, because a ValueError in a computation is a bug and needs a traceback.
    `option_names` replaces the names of Python arguments in the messages.
    """
    try:
        yield
    except errors as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename}: {error.strerror}"
        for argument, option in option_names.items():
            message = message.replace(argument, option)
        raise InputError(message) from error


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM and SIGHUP, so that half-written files are removed."""

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


def warn(message: str) -> None:
    """Print a warning to stderr."""
    print(f"veneer: warning: {message}", file=sys.stderr)


def print_json(document: dict[str, Any]) -> None:
    """Print a document as JSON. NaN and infinity, which JSON does not have, become null."""
    print(json.dumps(_without_nan(document), indent=2, allow_nan=False))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], total: Sequence[str] | None = None
) -> None:
    """Print a table with rich. `total` is its last row. Columns of numbers are right-aligned."""
    from .._report.tables import print_rich, rich_table

    text = ("tensor", "tensors", "format", "shape")
    numbers = [column for column in columns if column not in text]
    print_rich(rich_table(columns, rows, total, right=numbers))


def companion_files(source: Path, tensors: Any) -> Path | dict[str, str]:
    """Return the config and tokenizer files to copy with the tensors of a checkpoint.

    For a GGUF file, they are made from its metadata: a dict from file names to contents. For other
    checkpoints, `source` is returned, the folder or file whose companions are copied.
    """
    from ..files.gguf import GgufFile, tokenizer_files

    if not isinstance(tensors, GgufFile):
        return source
    files = {"config.json": json.dumps(tensors.config, indent=2) + "\n"}
    try:
        return files | tokenizer_files(tensors.metadata)
    except (ValueError, ImportError) as error:
        warn(f"the tokenizer is not copied: {error}")
        return files
