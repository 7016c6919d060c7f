"""New folders, which are there whole or not at all, and what a model has in one besides weights."""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import manifest
from .shards import INDEX_NAME, WRITTEN_WITH
from .tensor_file import TensorFile

# What makes a folder a model besides its weights: configuration, tokenizer, vocabulary, ...
_SIDECAR_SUFFIXES = (".json", ".jsonl", ".txt", ".model", ".tiktoken", ".jinja", ".md", ".yaml")
_SIDECAR_BYTES = 64 * 2**20


@contextlib.contextmanager
def write_aside(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Makes a new folder that becomes `path` when the block ends, and vanishes when it fails.

    Whatever stops the block (an error, Ctrl-C), `path` is whole or absent. What is there already is
    never replaced, but with `overwrite` a folder of which each file is one that is written here;
    until the block ends, it stays.

    **Raises:** `FileExistsError` where `path` exists. Other errors of the file system name `path`,
    and not the folder aside.
    """
    path = Path(path)
    exists = os.path.lexists(path)
    if exists and not overwrite:
        raise FileExistsError(
            f"{path} exists already and is left as it is: choose another name, or overwrite=True"
        )
    if exists and (foreign := _not_written_here(path)):
        raise FileExistsError(
            f"{path} is not overwritten, for {foreign} was not saved by veneer: choose another name"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # A sibling is on the same file system, so the rename is atomic. `tempfile` would make a folder
    # that only its owner may read.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        aside.mkdir()
        yield aside
        if exists:
            # No file system exchanges two folders for us; whole ones are there at every moment.
            replaced = path.with_name(f".{path.name}.{secrets.token_hex(4)}.replaced")
            os.rename(path, replaced)
            os.rename(aside, path)
            shutil.rmtree(replaced)
        else:
            os.rename(aside, path)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError) and str(aside) in str(error):
            what = error.strerror or str(error).replace(str(aside), str(path))
            raise type(error)(f"{path} cannot be written: {what}") from error
        raise


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
