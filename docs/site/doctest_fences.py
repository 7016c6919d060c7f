"""Show examples in docstrings, `>>>`, as code. Markdown would take them for quotations."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^[ \t]*(?:>>>|\.\.\.).*\n?(?:^(?![ \t]*$).*\n?)*)+", re.MULTILINE)


class Fences(griffe.Extension):
    """A preprocessor that puts a fence around each block of examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring and ">>>" in obj.docstring.value:
            text = EXAMPLE.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = text
