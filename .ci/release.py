"""Check that a tag may be released, and write its release notes: `make release-notes TAG=v0.1.0`.

The tag, `veneer.__version__`, the CHANGELOG and CITATION.cff must name the same version, and the
last two the same day.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Write the notes of the tag in the first argument to the file in the second."""
    tag, target = sys.argv[1:]
    if problems := problems_of(tag):
        sys.exit("\n".join(problems))
    notes = section(tag.removeprefix("v"))
    assert notes
    Path(target).write_text(f"{notes[1].strip()}\n", "utf-8")
    print(f"{tag} may be released; its notes are in {target}")


def problems_of(tag: str) -> list[str]:
    """Return what does not agree with a tag, one sentence for each problem."""
    version = find(r'^__version__ = "(.+)"$', "src/veneer/__init__.py")
    if tag != f"v{version}":
        return [f"the tag must be v{version}, as veneer.__version__ says, and not {tag!r}"]
    citation = tuple(find(f"^{key}: (.+)$", "CITATION.cff") for key in ("version", "date-released"))
    notes = section(version)
    if notes is None:
        return [f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`"]
    if citation != (version, notes[0]):
        return [f"CITATION.cff must have the version {version} and the day {notes[0]}"]
    return []


def section(version: str) -> tuple[str, str] | None:
    """Return the day and the text of a version in the CHANGELOG, or None if it has no section."""
    heading = rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$(.*?)(?=^## |\Z)"
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    match = re.search(heading, text, re.MULTILINE | re.DOTALL)
    return match and (match[1], match[2])


def find(pattern: str, name: str) -> str:
    """Return the group of a pattern in a file, or an empty text."""
    match = re.search(pattern, (ROOT / name).read_text("utf-8"), re.MULTILINE)
    return match[1] if match else ""


if __name__ == "__main__":
    main()
