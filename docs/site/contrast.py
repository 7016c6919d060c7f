"""Find text with too little contrast to its background.

WCAG 2.1, 1.4.3 asks for a contrast of 4.5 to 1, and of 3 to 1 for large text.
"""

from pathlib import Path
from typing import Any

from browser import Page

SCRIPT = Path(__file__).with_suffix(".js").read_text("utf-8")


def faults(page: Page) -> list[dict[str, Any]]:
    """Return the visible text with too little contrast: the text, its contrast and its element."""
    return page.run(SCRIPT)
