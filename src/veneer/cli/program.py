"""The program `veneer`: the table of its commands, its help, its errors and its exit codes."""

import difflib
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from . import chat, compare, convert, demo, doctor, inspect, plan, quantize
from .shared import InputError, OptionError

#: The commands and their names, in the order of `veneer --help`.
COMMANDS = {
    command.name: command
    for command in (
        quantize.COMMAND,
        inspect.COMMAND,
        convert.COMMAND,
        chat.COMMAND,
        compare.COMMAND,
        plan.COMMAND,
        demo.COMMAND,
        doctor.COMMAND,
    )
}

#: Command lines at the end of `veneer --help`.
EXAMPLES = (
    "veneer quantize model small --format int8",
    "veneer inspect small --against model",
    "veneer chat small",
    "veneer quantize --help",
)

# The class of usage errors. Some versions of typer have their own copy of click.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class HelpCommand(TyperCommand):
    """A command whose help ends with its own section, its examples and its JSON keys."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the end of the help of this command, after its options, to a click formatter."""
        command = COMMANDS[self.name or ""]
        if command.write_section is not None:
            command.write_section(formatter)
        _write_examples(formatter, command.examples)
        if command.json_keys:
            with formatter.section("JSON keys"):
                formatter.write_dl(list(command.json_keys.items()))


class CommandGroup(TyperGroup):
    """A group of commands that prints bad input as one line on stderr, with exit code 2.

    Other exceptions are bugs, and end with a traceback. The help ends with examples.
    """

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the end of the help of `veneer`, after its commands, to a click formatter."""
        _write_examples(formatter, EXAMPLES)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that `args` begin with. If it is unknown, suggest the closest one."""
        if args[0] not in COMMANDS:
            close = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"commands: {', '.join(COMMANDS)}"
            ctx.fail(f"unknown command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]  # the other parameters are among the keywords
        self, args: Sequence[str] | None = None, **kwargs: Any
    ) -> NoReturn:
        """Run the command that `args` begin with, and exit. Without arguments, print the help.

        `args` are the words of the command line. None takes them from `sys.argv`.
        """
        words = list(sys.argv[1:] if args is None else args)
        try:
            options = {"prog_name": "veneer", "standalone_mode": False}
            code = super().main(words or ["--help"], **{**kwargs, **options})
        except typer.Abort:
            code = 130
        except _UsageError as error:
            path = error.ctx.command_path if error.ctx else "veneer"  # type: ignore[attr-defined]
            code = _print_error(f"{error.format_message()} (try '{path} --help')")  # type: ignore[attr-defined]
        except OptionError as error:
            command = next(word for word in words if word in COMMANDS)
            code = _print_error(f"{error} (try 'veneer {command} --help')")
        except InputError as error:
            code = _print_error(str(error))
        sys.exit(code or 0)


def _write_examples(formatter: Any, examples: Iterable[str]) -> None:
    # Line by line, because `write_text` would join and wrap the lines.
    with formatter.section("Examples"):
        for line in examples:
            formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def _print_error(message: str) -> int:
    """Print an error as one line on stderr, and return the exit code for bad input."""
    print(f"veneer: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _command in COMMANDS.values():
    app.command(
        _command.name,
        cls=HelpCommand,
        short_help=_command.summary,
        options_metavar=_command.usage,
    )(_command.run)


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
        bool | None,  # None if the option is missing
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = None,
) -> None:
    """Quantize, inspect and convert the checkpoints of models."""
    del version  # its callback has printed it


def main() -> None:
    """Run the command line with the arguments of the process, and exit."""
    app()
