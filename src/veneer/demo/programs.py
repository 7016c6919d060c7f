"""The programs of `examples/` that the demo runs: they know nothing of veneer."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def program(name: str) -> ModuleType:
    """Imports a program of `examples/`, of a checkout or of the installed package.

    **Raises:** `FileNotFoundError` where there is none of this name.

    >>> from veneer.demo.programs import program
    >>> program("sentence_encoder").encode.__name__
    'encode'
    """
    here = Path(__file__).parent
    installed, checkout = here, here.parents[2] / "examples"
    for folder in (installed, checkout):
        path = folder / f"{name}.py"
        if path.is_file():
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # where dataclasses look for the module of a class
            spec.loader.exec_module(module)
            return module
    raise FileNotFoundError(f"{name}.py is neither in {installed} nor in {checkout}.")
