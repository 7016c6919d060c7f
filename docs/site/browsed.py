"""Find faults of the site that only a browser shows.

These are text that is hard to read, pages that are too wide for a phone, requests to other hosts,
and questions that the search answers with the wrong page.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import browser
import contrast

#: Questions for the search. One of the pages must be its first or second result.
QUESTIONS = {
    "quantize a Flax model": {"your_model/flax_nnx", "your_model/flax_linen"},
    "quantize flax": {"your_model/flax_nnx", "your_model/flax_linen"},
    "what nf4 costs": {"formats"},
    "write a rule": {"your_own_array_type"},
    "why something was made dense": {"what_materialised"},
    "materialised": {"what_materialised"},
    "which JAX versions work": {"releasing"},
    "quantize_tree": {"reference/veneer.quant"},
    "install": {""},
    "QLoRA": {"training"},
    "GGUF": {"checkpoints"},
}


def not_found(address: str, chromium: browser.Browser) -> Iterator[str]:
    """Yield the questions that the search of the site answers with the wrong pages."""
    page = chromium.open(address)
    for question, wanted in QUESTIONS.items():
        page.go(f"{address}/?{urlencode({'q': question})}")
        links = "[...document.querySelectorAll('.md-search-result__item > a')]"
        page.wait(f"{links}.length > 0")
        found = list(dict.fromkeys(page.run(f"{links}.map(a => a.pathname.slice(1, -1))")))[:2]
        if not wanted & set(found):
            yield f"the search for {question!r} finds {' and '.join(found)}"


def faults(root: Path, executable: str) -> Iterator[str]:
    """Yield the faults of every page, in light on a desktop and in dark on a phone."""
    paths = sorted(path.parent for path in root.rglob("index.html"))
    with browser.started(executable) as chromium, browser.served(root) as address:
        if (root / "search").exists():
            yield from not_found(address, chromium)
        for width, dark in ((browser.DESKTOP, False), (browser.PHONE, True)):
            page = chromium.open(address, width=width, dark=dark)
            page.send("Network.setBlockedURLs", urls=["*/search_index.json"])  # takes a second
            for path in paths:
                name = path.relative_to(root).as_posix()
                page.go(f"{address}/{name}/")
                shown = f"{name}, {'dark' if dark else 'light'}"
                unreadable = Counter(
                    (fault["of"], fault["ratio"]) for fault in contrast.faults(page)
                )
                for (of, ratio), count in unreadable.items():
                    yield f"{shown}: {count} of {of} have a contrast of {ratio}"
                wide = page.run("document.documentElement.scrollWidth")
                if wide > width:
                    yield f"{shown}: {wide} pixels wide on a screen of {width}"
            outside = {url for url in page.requests if not url.startswith((address, "data:"))}
            yield from (f"{url} is fetched from another host" for url in outside)
