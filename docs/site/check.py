"""Check the built site, without a network.

    python docs/site/check.py build/html [--look]

Images have descriptions. Pages load nothing from other hosts. Links within the site work, also in
HTML. No example of a docstring became a quotation. `--look` opens every page in a headless
Chromium, if it is installed: text has enough contrast in light and in dark, no page is wider than a
phone, and the search finds the right pages.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browsed
import browser

FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The faults of an HTML page."""

    def __init__(self, path: Path, root: Path) -> None:
        super().__init__()
        self.path, self.root = path, root
        self.faults: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "img" and not attributes.get("alt"):
            self.faults.append(f"{attributes.get('src')} has no alternative text")
        if attributes.get("role") == "img" and not attributes.get("aria-label"):
            self.faults.append("a drawing has no label")
        address = attributes.get(FETCHED.get(tag, ""))
        if address and urlsplit(address).netloc and attributes.get("rel") != "canonical":
            self.faults.append(f"{address} is fetched from another host")
        if tag == "a":
            address = attributes.get("href")
        link = urlsplit(address or "")
        if link.path and not link.scheme and not link.netloc and not link.path.startswith("/"):
            target = self.path.parent / unquote(link.path)
            if not (target / "index.html").exists() and not target.is_file():
                self.faults.append(f"{address} leads nowhere")

    def handle_data(self, data: str) -> None:
        if data.lstrip().startswith(">>> ") and self.get_starttag_text() == "<p>":
            self.faults.append(f"an example is no code: {data.strip()[:60]}")


def main(root: Path, *, look: bool) -> int:
    """Print the faults of every page, and return their number."""
    pages = [Page(path, root) for path in sorted(root.rglob("*.html")) if path.name != "404.html"]
    faults = [f"{page.path.relative_to(root)}: {fault}" for page in pages for fault in page.faults]
    done = "pictures, links and hosts"
    if look and (executable := browser.found()):
        faults += browsed.faults(root, executable)
        done += ", contrast, widths and the search"
    elif look:
        print("There is no Chromium, so contrast, widths and the search are not looked at")
    print("\n".join(faults) or f"{len(pages)} pages: {done} are as they should be")
    return len(faults)


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]), look="--look" in sys.argv[2:])))
