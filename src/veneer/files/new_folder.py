"""New folders, which are there whole or not at all, and what a model has in one besides weights."""

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from . import manifest
from .tensor_file import INDEX_NAME, WRITTEN_WITH, TensorFile

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# What makes a folder a model besides its weights: configuration, tokenizer, vocabulary, ...
_SIDECAR_SUFFIXES = (".json", ".jsonl", ".txt", ".model", ".tiktoken", ".jinja", ".md", ".yaml")
_SIDECAR_BYTES = 64 * 2**20


@contextlib.contextmanager
def write_aside(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Makes a new folder that becomes `path` when the block ends, and vanishes when it fails.

    Whatever stops the block (an error, Ctrl-C), `path` is whole or absent. What is there already is
    never replaced, but with `overwrite` a folder of which each file is one that is written here;
    until the block ends, it stays.

    **Raises:** what `replacing` does.
    """

    def refusal(path: Path) -> str | None:
        foreign = _not_written_here(path)
        return foreign and f"{foreign} was not saved by veneer"

    with replacing(Path(path), overwrite=overwrite, refusal=refusal) as aside:
        aside.mkdir()
        yield aside


@contextlib.contextmanager
def replacing(
    path: Path, *, overwrite: bool, refusal: Callable[[Path], str | None]
) -> Iterator[Path]:
    """Yield a path to write to, and move it to `path` when the block ends.

    A file or a folder that is at `path` already stays there until then, and is put back if it
    cannot be replaced. The yielded path is in a hidden folder next to `path`, on the same file
    system. The next save removes what a killed one left there, and puts back an old version.

    **Arguments:**

    - `overwrite`: whether something at `path` may be replaced.
    - `refusal`: returns why something at `path` is not replaced, or None.

    **Raises:** `FileExistsError` where `path` exists and is not replaced; `BlockingIOError` while
    another process or thread saves it. Other errors of the file system name `path` and not the
    hidden folder.
    """
    _check_free(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _hidden_folder(path) as hidden:
        # `tempfile` would make a folder that only its owner may read.
        new, old = hidden / "new", hidden / "old"
        try:
            _restore(old, path)
            _remove(new)
            _check_free(path, overwrite)
            if os.path.lexists(path) and (why := refusal(path)):
                raise FileExistsError(
                    f"{path} was not overwritten, because {why}: use another name"
                )
            try:
                yield new
                _check_free(path, overwrite)
                _move(new, path, old)
            except OSError as error:
                # A full disk is reported without the name of a file.
                is_nameless = error.errno is not None and error.filename is None
                if str(new) not in str(error) and not is_nameless:
                    raise
                what = error.strerror or str(error).replace(str(new), str(path))
                raise type(error)(f"{path} cannot be written: {what}") from error
        finally:
            _restore(old, path)
            _remove(new)


def _check_free(path: Path, overwrite: bool) -> None:
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(
            f"{path} already exists and was not changed: use another name, or overwrite=True"
        )


def _move(new: Path, path: Path, old: Path) -> None:
    """Move `new` to `path`. A folder that is there is afterwards at `new` or at `old`."""
    if not path.is_dir():
        os.replace(new, path)
    elif not _exchange(new, path):
        os.rename(path, old)
        os.rename(new, path)


def _restore(old: Path, path: Path) -> None:
    """Move an old version back if nothing is at `path`, or remove it."""
    if os.path.lexists(old) and not os.path.lexists(path):
        os.rename(old, path)
    _remove(old)


def _remove(path: Path) -> None:
    """Remove a file or a folder if it exists. The next save tries again if that fails."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


# By platform: the function that exchanges two paths, its arguments for paths that are not relative
# to an open folder, and its flag.
_EXCHANGES = {"linux": ("renameat2", (-100,), 2), "darwin": ("renamex_np", (), 2)}


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths at once. Return False if the system or the file system cannot."""
    name, folder, flag = _EXCHANGES.get(sys.platform, ("", (), 0))
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # musl has no renameat2; Windows has no C library
        return False
    first, second = os.fsencode(one), os.fsencode(other)
    return function(*folder, first, *folder, second, flag) == 0


@contextlib.contextmanager
def _hidden_folder(path: Path) -> Iterator[Path]:
    """Make a hidden folder next to `path`, for one save at a time, and remove it afterwards.

    A lock on a file in it tells a save that runs from one that was killed, whose lock the system
    released. Without locks, as on Windows and some network file systems, each save has a folder of
    its own, and what killed ones left stays.

    **Raises:** `BlockingIOError` if another save holds the lock.
    """
    hidden = path.with_name(f".{path.name}.partial")
    try:
        lock = _lock(hidden)
        if lock is None:
            hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
            hidden.mkdir()
    except BlockingIOError:
        raise BlockingIOError(
            f"another process or thread is saving {path}: wait until it ends, or use another name"
        ) from None
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {error.strerror or error}") from error
    with lock or contextlib.nullcontext():
        try:
            yield hidden
        finally:
            _remove(hidden / "lock")
            with contextlib.suppress(OSError):  # another save may use it by now
                hidden.rmdir()


def _lock(hidden: Path) -> BinaryIO | None:
    """Return the file of a lock in a folder, to be closed, or None if there are no locks here."""
    if fcntl is None:
        return None
    for _ in range(100):  # while other saves end, and remove the folder
        with contextlib.suppress(FileExistsError):
            hidden.mkdir()
        try:
            lock = (hidden / "lock").open("ab")
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(hidden / "lock")):
                    return lock
        except BlockingIOError:
            lock.close()
            raise
        except OSError:
            lock.close()
            _remove(hidden / "lock")
            with contextlib.suppress(OSError):
                hidden.rmdir()
            return None
        lock.close()
    raise BlockingIOError


def _not_written_here(path: Path) -> str | None:
    """Names something at `path` that is not written here; None if there is nothing."""
    if path.is_symlink() or not path.is_dir():
        return "it"
    names = sorted(
        file.relative_to(path).as_posix() for of in ("*", "*/*") for file in path.glob(of)
    )
    shard = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
    shards = [name for name in names if shard.fullmatch(name)]
    beside = [_written_with(path / name) for name in shards]
    is_ours = manifest.FILE_NAME in names or (beside and None not in beside)
    written = {manifest.FILE_NAME, INDEX_NAME, *shards}
    written |= {name for of in beside for name in of or ()}
    written |= {part for name in written for part in Path(name).parts[:1]}
    foreign = [name for name in names if name not in written]
    return foreign[0] if foreign else None if is_ours else "it"


def _written_with(file: Path) -> list[str] | None:
    """The files that were written with one of tensors; None where another library wrote it."""
    try:
        with TensorFile(file) as tensors:
            names = json.loads(tensors.metadata[WRITTEN_WITH])
    except (KeyError, ValueError, OSError):
        return None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else None


def write_beside(source: "Path | Mapping[str, str] | None", target: Path) -> list[str]:
    """Writes into the folder `target` what a model has besides weights: `config.json`, ...

    **Arguments:**

    - `source`: the contents of files by their names; or a folder, of which small files of the usual
      suffixes are copied, and sentence-transformers' module folders (`1_Pooling/config.json`). A
      file and None have nothing beside them.

    **Returns:** the names of the files.
    """
    if isinstance(source, Mapping):
        for name, content in source.items():
            (target / name).write_text(content, encoding="utf-8")
        return [*source]
    names: list[str] = []
    if source is None or not source.is_dir():
        return names
    for file in [*source.iterdir(), *source.glob("[0-9]_*/config.json")]:
        ours = file.name == manifest.FILE_NAME or file.name.endswith(".index.json")
        small = file.is_file() and file.stat().st_size <= _SIDECAR_BYTES
        if small and not ours and file.suffix in _SIDECAR_SUFFIXES:
            copied = target / file.relative_to(source)
            copied.parent.mkdir(exist_ok=True)
            # Not the mode bits: a file of a read-only model folder becomes an ordinary one.
            shutil.copyfile(file, copied)
            names.append(copied.relative_to(target).as_posix())
    return names
