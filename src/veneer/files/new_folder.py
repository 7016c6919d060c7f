"""Write a file or folder so that it appears complete or not at all, also if the process is killed.

`write_aside` writes to a hidden folder and moves it to its path. `write_beside` copies the other
files of a model, such as its configuration and its tokenizer.
"""

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

# The files of a model other than weights: configuration, tokenizer, vocabulary, ...
_SIDECAR_SUFFIXES = (".json", ".jsonl", ".txt", ".model", ".tiktoken", ".jinja", ".md", ".yaml")
_SIDECAR_BYTES = 64 * 2**20


@contextlib.contextmanager
def write_aside(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder, and move it to `path` when the block ends.

    If the block fails, for example by an error or Ctrl-C, `path` stays unchanged.

    **Arguments:**

    - `overwrite`: whether to replace a folder at `path`, if all its files were written by this
      package. The old folder stays until the new one is complete.

    **Raises:** the errors of `replacing`.
    """

    def refusal(path: Path) -> str | None:
        foreign = _find_foreign_file(path)
        return foreign and f"{foreign} was not saved by veneer"

    with replacing(Path(path), overwrite=overwrite, refusal=refusal) as aside:
        aside.mkdir()
        yield aside


@contextlib.contextmanager
def replacing(
    path: Path, *, overwrite: bool, refusal: Callable[[Path], str | None]
) -> Iterator[Path]:
    """Yield a path to write to, and move it to `path` when the block ends.

    The yielded path is in a hidden folder next to `path`, so on the same file system. An old file
    or folder at `path` stays until the block ends, and is put back if it cannot be replaced. If a
    process was killed here, the next save removes its partial files and puts the old version back.

    **Arguments:**

    - `overwrite`: whether something at `path` may be replaced.
    - `refusal`: takes `path`, and returns why it must not be replaced, or None if it may be.

    **Raises:** `FileExistsError` if `path` exists and must not be replaced. `BlockingIOError` if
    another process or thread is saving to `path`. Other errors of the file system name `path`, not
    the hidden folder.
    """
    _check_free(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _hidden_folder(path) as hidden:
        # Not `tempfile`, whose folders only their owner may read.
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
    """Move the file or folder `new` to `path`.

    A file at `path` is replaced. A folder there is exchanged with `new` if the file system can
    exchange folders. Otherwise it is first moved to `old`.
    """
    if not path.is_dir():
        os.replace(new, path)
    elif not _exchange(new, path):
        os.rename(path, old)
        os.rename(new, path)


def _restore(old: Path, path: Path) -> None:
    """Move `old` back to `path` if `path` does not exist. Otherwise, remove `old`."""
    if os.path.lexists(old) and not os.path.lexists(path):
        os.rename(old, path)
    _remove(old)


def _remove(path: Path) -> None:
    """Remove a file or a folder if it exists. Ignore errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


# By platform: the C function that exchanges two paths, its arguments before each path, and its
# flag.
_EXCHANGES = {"linux": ("renameat2", (-100,), 2), "darwin": ("renamex_np", (), 2)}


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths atomically. Return False if the file system cannot."""
    name, folder, flag = _EXCHANGES.get(sys.platform, ("", (), 0))
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # musl has no renameat2; Windows has no C library
        return False
    first, second = os.fsencode(one), os.fsencode(other)
    return function(*folder, first, *folder, second, flag) == 0


@contextlib.contextmanager
def _hidden_folder(path: Path) -> Iterator[Path]:
    """Make a hidden folder next to `path`, and remove it when the block ends.

    A file in it is locked, so that only one save at a time uses the folder. The system releases the
    lock of a killed process. Where locks are not available, as on Windows and some network file
    systems, each save has its own folder, and the folders of killed processes are left behind.

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
    """Return an open, locked file in `hidden`, or None if locks are not available."""
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


def _find_foreign_file(path: Path) -> str | None:
    """Return the name of a file that this package did not write, in the folder `path`.

    Return None if this package wrote all of them. Return "it", for error messages, if `path` is not
    a folder that this package wrote.
    """
    if path.is_symlink() or not path.is_dir():
        return "it"
    names = sorted(
        file.relative_to(path).as_posix() for pattern in ("*", "*/*") for file in path.glob(pattern)
    )
    shard = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
    shards = [name for name in names if shard.fullmatch(name)]
    listed = [_read_written_with(path / name) for name in shards]
    is_ours = manifest.FILE_NAME in names or (listed and None not in listed)
    written = {manifest.FILE_NAME, INDEX_NAME, *shards}
    written |= {name for files in listed for name in files or ()}
    written |= {part for name in written for part in Path(name).parts[:1]}
    foreign = [name for name in names if name not in written]
    return foreign[0] if foreign else None if is_ours else "it"


def _read_written_with(file: Path) -> list[str] | None:
    """Return the names of the files that this package wrote next to a safetensors file.

    The metadata of the safetensors file lists them. Return None if it does not, or is damaged.
    """
    try:
        with TensorFile(file) as tensors:
            names = json.loads(tensors.metadata[WRITTEN_WITH])
    except (KeyError, ValueError, OSError):
        return None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else None


def write_beside(source: "Path | Mapping[str, str] | None", target: Path) -> list[str]:
    """Write the files of a model other than weights into the folder `target`. Return their names.

    **Arguments:**

    - `source`: a dict from file names to contents, or a folder to copy from. Small files with the
      usual suffixes are copied, and `config.json` of the module folders of sentence-transformers,
      such as `1_Pooling`. For a file or None, nothing is written.
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
            # `copyfile` does not copy the mode bits: a copy of a read-only file is writable.
            shutil.copyfile(file, copied)
            names.append(copied.relative_to(target).as_posix())
    return names
