"""The HTML page of a report, used in a headless Chromium as a reader would."""

import browser
import contrast
import pytest
import screenshots

import veneer as vn

pytestmark = pytest.mark.skipif(
    browser.found() is None,
    reason="needs Chromium: apt-get install chromium",
)

PROGRAM = """\
def layer(w, x):
    w = w / 2
    return x @ w

def model(params, x):
    return layer(params, x)
"""


@pytest.fixture(scope="module")
def chromium():
    with browser.started(browser.found()) as running:
        yield running


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    program = folder / "program.py"
    program.write_text(PROGRAM)

    def event(primitive, nbytes, line, weight, rule=None):
        operands, place = ("QArray:f32[256,256]", "f32[]"), f"{program}:{line}"
        return vn.Event(primitive, operands, rule, nbytes, place, "", ((weight,), ()), (nbytes, 0))

    events = (
        event("dot_general", 0, "3 (layer)", "params.a", "rules.py:1"),
        event("div", 1000, "2 (layer)", "params.b"),
        event("sqrt", 9000, "2 (layer)", "params.b"),
        event("exp", 70_000, "6 (model)", "params.c"),
    )
    page = folder / "report.html"
    page.write_text(vn.Report(events).to_html())
    return page.as_uri()


@pytest.fixture
def page(chromium, address):
    return chromium.open(address)


def shown(page, what=".over b"):
    """Return the texts of the visible elements that a selector matches."""
    return page.run(
        f"[...document.querySelectorAll('{what}')].filter(e => e.checkVisibility())"
        ".map(e => e.textContent)"
    )


def click(page, text, within="#weights "):
    page.run(
        f"[...document.querySelectorAll({within!r} + 'button')]"
        f".find(b => b.textContent.startsWith({text!r})).click()"
    )


def test_clicking_a_heading_sorts_groups_and_rows(page):
    assert shown(page) == ["params.a", "params.b", "params.c"]
    click(page, "dense")
    assert shown(page) == ["params.c", "params.b", "params.a"]
    assert shown(page, "td:first-child") == ["exp", "sqrt", "div", "dot_general"]
    assert page.run("document.querySelector('[aria-sort]').ariaSort") == "descending"
    click(page, "dense")
    assert shown(page) == ["params.a", "params.b", "params.c"]
    assert shown(page, "td:first-child") == ["dot_general", "div", "sqrt", "exp"]
    click(page, "primitive")
    assert shown(page, "td:first-child") == ["div", "sqrt", "dot_general", "exp"]
    click(page, "primitive")
    click(page, "primitive")  # back to the order of the program
    assert shown(page, "td:first-child") == ["dot_general", "div", "sqrt", "exp"]
    assert page.run("document.querySelector('[aria-sort]')") is None


def test_clicking_a_weight_folds_its_rows(page):
    click(page, "params.b")
    assert shown(page, "td:first-child") == ["dot_general", "exp"]
    assert shown(page) == ["params.a", "params.b", "params.c"]
    assert page.run("document.querySelectorAll('[aria-expanded=false]').length") == 1
    click(page, "params.b")
    assert len(shown(page, "td:first-child")) == 4
    click(page, "Fold all", "")
    assert shown(page, "td:first-child") == []
    click(page, "Unfold all", "")
    assert len(shown(page, "td:first-child")) == 4


def test_the_table_by_line_shows_source_code(page):
    assert shown(page, "pre") == []
    page.run("document.querySelector('[value=lines]').click()")
    names = [name.rpartition("/")[2] for name in shown(page)]
    assert names == ["program.py:2 (layer)", "program.py:3 (layer)", "program.py:6 (model)"]
    assert shown(page, "mark") == [
        "2      w = w / 2",
        "3      return x @ w",
        "6      return layer(params, x)",
    ]
    click(page, "dense", "#lines ")
    assert shown(page)[0].rpartition("/")[2] == "program.py:6 (model)"


def test_only_materialized_rows_can_be_shown(page):
    page.run("document.querySelector('[name=dense]').click()")
    assert shown(page, "td:first-child") == ["div", "sqrt", "exp"]
    assert shown(page) == ["params.b", "params.c"]


def test_without_scripts_both_tables_are_shown(chromium, address):
    page = chromium.open(address, scripts=False)
    assert len(shown(page, "table")) == 2
    assert len(shown(page, "td:first-child")) == 8
    assert len(shown(page, "pre")) == 3
    assert shown(page, "#controls") == []


def test_the_page_loads_nothing_else(page, address):
    assert set(page.requests) == {address}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [browser.DESKTOP, browser.PHONE])
def test_the_page_has_contrast_and_fits_the_width(chromium, address, width, dark):
    page = chromium.open(address, width=width, dark=dark)
    for by in ("weights", "lines"):
        page.run(f"document.querySelector('[value={by}]').click()")
        assert contrast.faults(page) == []
        assert page.run("document.documentElement.scrollWidth") <= width


def test_the_check_finds_low_contrast(page):
    page.run("document.querySelector('h1').style = 'font-size: 14px; color: #808080'")
    (fault,) = contrast.faults(page)
    assert (fault["text"], fault["ratio"]) == ("What happened to implicit arrays", 3.95)


def test_the_screenshots_of_the_documentation_can_be_made(chromium, tmp_path):
    screenshots.of_report(chromium, tmp_path)
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {"report.png", "report_dark.png"}
    page = (screenshots.DOCS / "what_materialised.md").read_text("utf-8")
    assert all(f"]({name})" in page and (screenshots.DOCS / name).exists() for name in pictures)
