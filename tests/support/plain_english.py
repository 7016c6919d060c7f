"""Find words that make a text hard to read, and read the texts that users see."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# Phrases that point at a thing instead of naming it, and words that JAX or NumPy call otherwise.
PHRASES = [
    r"\bof which\b",
    r"\b(those|that) of\b",
    r"\b[Ww]hat (is|it|they|there|the|are|was|a|an|has|goes|comes)\b",
    r"\bas (it|they) (is|are|lie|lies|was|does)\b",
    r"\b(is|are) told\b",
    r"\bso many\b",
    r"\b(made|makes?|becomes?) dense\b",
    r"\bin the place of\b",
    r"\bbears?\b",
    r"\bno more\b",
    r"\bwhere that is\b",
    r"\bof its own\b",
    r"\bthere (is|are) (none|some)\b",
    r"\b(bits|bytes|scales?|calls?) a (value|token|row|channel|product|layer|tile)\b",
    r"\bby and by\b",
    r"\bfor it (is|has|was)\b",
    r"\bbut for\b",
    r"\b(stands?|stood) for\b",
    r"\bby name\b",
    r"\bis (one|none)\b[,.;:]",
    r"^(What|Whether|Of|Where|By|Has|Have)\b",
]
BRITISH = (
    *("quantis", "optimis", "initialis", "normalis", "serialis", "parallelis", "recognis"),
    *("factoris", "summaris", "colour", "behaviour", "neighbour"),
)
_HARD = [re.compile(phrase, re.MULTILINE) for phrase in PHRASES]
_BRITISH = re.compile(rf"\b\w*(?:{'|'.join(BRITISH)})\w*", re.IGNORECASE)


def hard_words(text: str) -> list[str]:
    """Return the phrases of a text that make it hard to read."""
    return [match.group(0) for phrase in _HARD for match in phrase.finditer(text)]


def british_words(text: str) -> list[str]:
    """Return the words in British spelling. Names such as `materialise` keep theirs."""
    return _BRITISH.findall(text)


def public_objects(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the functions, classes and instances that `__all__` of a module names."""
    for name in module.__all__:
        if not inspect.ismodule(getattr(module, name)):
            yield name, getattr(module, name)


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the functions behind the public methods and properties that a class defines."""
    for name, member in vars(cls).items():
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        elif isinstance(member, property):
            member = member.fget
        if not name.startswith("_") and inspect.isfunction(member):
            yield name, member


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each sentence in a source file that is no docstring.

    Most are errors, warnings, reports and help texts.
    """
    tree = ast.parse(path.read_text("utf-8"))
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr | ast.JoinedStr):  # docstrings, and the parts of f-strings
            skipped.update(map(id, ast.iter_child_nodes(node)))
    for node in ast.walk(tree):
        text = _text(node)
        if id(node) not in skipped and len(text.split()) > 4 and "\n" not in text.strip():
            yield node.lineno, text


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else ""
