"""English sentences that are the same everywhere: the prose of NetworkX's documentation.

It is fetched as data, of one version, and its docstrings are read: no data set of our own.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .fetch import PROSE, fetch

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# A sentence opens with a capital, ends with a full stop, and holds words and the marks of prose;
# operators, stars and brackets are code and footnotes.
_PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'’()-]*[a-z]{2}\.")
_WORDS = range(6, 33)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def _paragraphs(file: Path) -> Iterator[str]:
    """Yields a file's paragraphs on a line each: blocks of lines that share one indentation."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        docstring = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        for block in (docstring or "").split("\n\n"):
            lines = block.strip("\n").splitlines()
            if len({len(line) - len(line.lstrip()) for line in lines}) == 1:
                yield " ".join(line.strip() for line in lines)


@cache
def all_sentences() -> tuple[str, ...]:
    """Returns all of its sentences of 6 to 32 words without code, each once, in its order.

    **Raises:** what `fetch` raises.
    """
    folder = fetch(PROSE)
    files = (file for file in sorted(folder.rglob("*.py")) if "tests" not in file.parts)
    return tuple(
        dict.fromkeys(  # a dict is a set that remembers the order
            sentence
            for file in files
            for paragraph in _paragraphs(file)
            for sentence in _SENTENCE_END.split(paragraph)
            if _PROSE.fullmatch(sentence) and len(sentence.split()) in _WORDS
        )
    )


def sentences(count: int = 512) -> list[str]:
    """Returns `count` of the sentences, evenly spread from the first to the last.

    **Raises:** `ValueError` where there are fewer than `count`; and what `fetch` raises.
    """
    found = all_sentences()
    if len(found) < count:
        raise ValueError(f"{PROSE.name} holds {len(found)} sentences, fewer than {count}.")
    return [found[i * len(found) // count] for i in range(count)]


def other_sentences(count: int = 256) -> list[str]:
    """Returns `count` others than `sentences()` has, evenly spread.

    **Raises:** what `sentences` raises.
    """
    taken = set(sentences())
    found = [sentence for sentence in all_sentences() if sentence not in taken]
    return [found[i * len(found) // count] for i in range(count)]
