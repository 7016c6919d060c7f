"""Take the screenshots of the documentation, with a headless Chromium.

python docs/site/screenshots.py
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import browser

DOCS = Path(__file__).parents[1]


def of_report(chromium: browser.Browser, out: Path) -> None:
    """Capture the report of the first program of docs/what_materialised.md, in light and dark."""
    page = (DOCS / "what_materialised.md").read_text("utf-8")
    program = re.search(r"```python\n(.*?)^print", page, re.DOTALL | re.MULTILINE)
    assert program
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "example.py"
        path.write_text(program[1], "utf-8")
        names: dict = {"__name__": "example"}
        exec(compile(program[1], str(path), "exec"), names)
        sys.path.insert(0, folder)  # from where files are named
        try:
            (Path(folder) / "report.html").write_text(names["report"].to_html(), "utf-8")
        finally:
            sys.path.remove(folder)
        for name, dark in (("report.png", False), ("report_dark.png", True)):
            shown = chromium.open((Path(folder) / "report.html").as_uri(), width=960, dark=dark)
            shown.run("document.querySelector('[value=lines]').click()")
            shown.screenshot(out / name, whole=True)


if __name__ == "__main__":
    executable = browser.found()
    if executable is None:
        sys.exit("there is no Chromium: apt-get install chromium")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with browser.started(executable) as chromium:
        of_report(chromium, DOCS)
