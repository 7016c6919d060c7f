"""Convert pages to notebooks: programs become cells, with their output.

The notebooks are made with the site and are not committed. The site offers them as downloads. If
GitHub builds the site ($GITHUB_REPOSITORY) for a branch gh-pages with a folder per version
($SITE_VERSION), a page also links to its notebook in Colab.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

#: The page of each notebook, and the packages that it needs beside veneer[examples].
NOTEBOOKS = {
    "start_here": ("README.md", ""),
    "quantize_your_model": ("docs/your_model/flax_nnx.md", "flax"),
    "write_an_array_type": ("docs/your_own_array_type.md", ""),
    "qlora": ("docs/training.md", ""),
}
PROGRAM = re.compile(r"^```python\n(.*?)^```(?:\n+```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)

# Colab has JAX and NumPy. Elsewhere, the reader installs them.
INSTALL = """\
try:
    import veneer
except ImportError:
    %pip install --quiet "veneer[examples] @ git+https://github.com/{repository}" {needs}"""


def notebook(text: str, needs: str = "") -> dict[str, Any]:
    """Return a page as a notebook of format 4.5."""
    repository = os.environ.get("GITHUB_REPOSITORY")
    cells = list(cells_of(text))
    if repository:
        source = INSTALL.format(repository=repository, needs=needs).strip()
        cells.insert(1, code(source, ""))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def cells_of(text: str) -> Iterator[dict[str, Any]]:
    title, _, text = text.partition("\n")
    yield prose(title)
    end = 0
    for match in PROGRAM.finditer(text):
        if before := text[end : match.start()].strip():
            yield prose(before)
        yield code(match[1].rstrip(), match[2] or "")
        end = match.end()
    if after := text[end:].strip():
        yield prose(after)


def prose(source: str) -> dict[str, Any]:
    """Return a text cell. Links within the page become plain words."""
    source = re.sub(r"(!?)\[([^\]]*)\]\(#[^)]*\)", lambda m: "" if m[1] else m[2], source)
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def code(source: str, printed: str) -> dict[str, Any]:
    outputs = [{"output_type": "stream", "name": "stdout", "text": printed}] if printed else []
    cell = {"cell_type": "code", "metadata": {}, "source": source, "outputs": outputs}
    return cell | {"execution_count": None}


def offered(name: str, folder: str) -> str:
    """Return the line of a page that links to its notebook."""
    links = [f"[As a notebook]({folder}/{name}.ipynb)"]
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        version = os.environ.get("SITE_VERSION", "dev")
        place = f"{repository}/blob/gh-pages/{version}/notebooks/{name}.ipynb"
        links.append(f"[in Colab](https://colab.research.google.com/github/{place})")
    return ", or ".join(links)
