"""Stage the pages for the site, which have other links than the pages in the repository.

    python docs/site/stage.py

Pages in docs have links for GitHub. This copies them to build/site, with the files outside of docs
that they link to, each as a page, and with a reference of the public names. mkdocs.yml builds that
folder.
"""

import ast
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from notebooks import NOTEBOOKS, notebook, offered

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUT = ROOT / "build" / "site"

# The paths of pages on the site that differ from their paths in docs.
MOVED = {
    "docs/README.md": "contents.md",
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "docs/types/README.md": "types/index.md",
    "docs/site/index.md": "index.md",
}
REFERENCE = (
    "veneer",
    *(f"veneer.{name}" for name in "quant types tree hijax numba lora distributed testing".split()),
    *(f"veneer.interop.{name}" for name in ("quax", "qwix", "jaximus", "pytensor")),
)
LINK = re.compile(
    r"(```.*?```|`[^`\n]*`)|\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)]*)?\)", re.DOTALL
)


# Lines of the README with images of another host, which the site does not load.
BADGE = re.compile(r"^\[?!\[[^\]]*\]\(https://img\.shields\.io/.*\n", re.MULTILINE)


class Site:
    """The pages of the site. Pages that links lead to are added."""

    def __init__(self) -> None:
        self.done: set[Path] = set()

    def place(self, source: Path) -> str:
        """Return the path of a file on the site. Add the file if it is missing."""
        name = source.relative_to(ROOT).as_posix()
        if source.is_dir():
            readme = source / "README.md"
            return self.place(readme) if readme.exists() else self.listing(source)
        inside = name.removeprefix("docs/")
        if source.suffix in (".md", ".png", ".svg"):
            target = MOVED.get(name, inside.replace("README.md", "index.md"))
        else:
            target = f"sources/{name}.md"
        if source not in self.done:
            self.done.add(source)
            self.lay(source, OUT / target)
        return target

    def lay(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            text = self.linked(source, lambda page: os.path.relpath(OUT / page, target.parent))
            for notebook, (page, _) in NOTEBOOKS.items():
                if ROOT / page == source:
                    up = os.path.relpath(OUT / "notebooks", target.parent)
                    title, _, rest = text.partition("\n")
                    text = f"{title}\n\n{offered(notebook, up)}\n{rest}"
            target.write_text(f"{found_last(target)}{text}", "utf-8")
        elif source.suffix in (".png", ".svg"):
            shutil.copyfile(source, target)
        else:
            name = source.relative_to(ROOT).as_posix()
            code = source.read_text("utf-8")
            text = f"# {name}\n\n````python\n{code}````\n"
            target.write_text(f"{found_last(target)}{text}", "utf-8")

    def listing(self, folder: Path) -> str:
        name = folder.relative_to(ROOT).as_posix()
        target = f"sources/{name}/index.md"
        if folder not in self.done:
            self.done.add(folder)
            rows = [f"# {name}", ""]
            for path in sorted(folder.glob("*.py")):
                link = os.path.relpath(self.place(path), f"sources/{name}")
                rows.append(f"- [{path.name}]({link})")
            (OUT / target).parent.mkdir(parents=True, exist_ok=True)
            (OUT / target).write_text("\n".join(rows) + "\n", "utf-8")
        return target

    def linked(self, source: Path, address: Callable[[str], str]) -> str:
        """Return the text of a page, with the addresses of its links on the site."""

        def replaced(match: re.Match[str]) -> str:
            code, link, anchor = match.groups()
            if code:
                return code
            path = Path(os.path.normpath(source.parent / link))
            if not path.exists():
                raise SystemExit(f"{source.relative_to(ROOT)}: {link} leads nowhere")
            return f"]({address(self.place(path))}{anchor or ''})"

        return LINK.sub(replaced, included(BADGE.sub("", source.read_text("utf-8"))))


def found_last(page: Path) -> str:
    """Return front matter that hides sources from the search and ranks project pages low."""
    name = page.relative_to(OUT).as_posix()
    if name.startswith("sources/"):
        return "---\nsearch:\n  exclude: true\n---\n\n"
    if name.startswith(("project/", "architecture", "contents", "examples/", "benchmarks/")):
        return "---\nsearch:\n  boost: 0.3\n---\n\n"
    return ""


def elsewhere(page: str) -> str:
    """Return the public address of a page, or `#` if it is unknown."""
    site = os.environ.get("SITE_URL", "").rstrip("/")
    page = re.sub(r"(^|/)index\.md$", r"\1", page)
    page = re.sub(r"\.md$", "/", page)
    return f"{site}/{page}" if site else "#"


def included(text: str) -> str:
    """Replace `<!-- docs/demo.md: the first line of a table -->` by that table."""

    def table(match: re.Match[str]) -> str:
        readme = (ROOT / match[1]).read_text("utf-8")
        start = readme.index(match[2])
        return readme[start : readme.index("\n\n", start)]

    return re.sub(r"<!-- (\S+): (.+?) -->", table, text)


def public_names(module: str) -> list[str]:
    """Return the public names of a module from its source: `__all__`, or its definitions."""
    path = ROOT / "src" / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names: list[str] = []
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
        if isinstance(node, ast.ImportFrom):
            names += [a.name for a in node.names if a.asname == a.name and node.level]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    return [name for name in names if not name.startswith("_")]


def reference() -> None:
    rows = ["# Reference", "", "Every public name, by the module that offers it.", ""]
    for module in REFERENCE:
        modules = {name.rpartition(".")[2] for name in REFERENCE if name.startswith(f"{module}.")}
        names = [n for n in public_names(module) if n not in modules and n != "ArrayLike"]
        names.sort(key=str.lower)
        links = ", ".join(f"[`{n}`]({module}.md#{module}.{n})" for n in names)
        rows += [f"## [{module}]({module}.md)", "", links, ""]
        page = [f"# {module}", ""]
        for name in names:
            page += [f"::: {module}.{name}", ""]
        target = OUT / "reference" / f"{module}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(page), "utf-8")
    (OUT / "reference" / "index.md").write_text("\n".join(rows), "utf-8")


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    site = Site()
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        site.place(ROOT / name)
    for folder in (DOCS, DOCS / "types", DOCS / "your_model", DOCS / "site"):
        for page in sorted(folder.glob("*.md")):
            site.place(page)
    site.place(ROOT / "examples")
    site.place(ROOT / "benchmarks")
    (OUT / "notebooks").mkdir()
    for name, (page, needs) in NOTEBOOKS.items():
        made = notebook(site.linked(ROOT / page, elsewhere), needs)
        text = json.dumps(made, indent=1, ensure_ascii=False)
        (OUT / "notebooks" / f"{name}.ipynb").write_text(f"{text}\n", "utf-8")
    reference()
    shutil.copyfile(DOCS / "site" / "veneer.css", OUT / "veneer.css")


if __name__ == "__main__":
    main()
