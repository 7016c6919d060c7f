"""The command line: the program `veneer` and its commands, such as `veneer quantize`.

    program     the program `veneer`: its commands, its help, its errors and its exit codes
    shared      what several commands use: options, errors, tables and JSON
    quantize, inspect, convert, chat, compare, plan, demo, doctor      one command per module

A module of a command has a function `run`, whose parameters are the options, and a `COMMAND` with
the rest of the help. To add a command, write such a module and add a row to `program.COMMANDS`.
The modules import other packages when a command runs, so that `veneer --help` starts quickly.
"""

from importlib.util import find_spec

from .._core.errors import install_command

if missing := [name for name in ("typer", "rich") if find_spec(name) is None]:
    raise SystemExit(
        f"veneer: error: the command line needs {missing[0]}: {install_command('cli')}"
    )

from .program import app as app
from .program import main as main
