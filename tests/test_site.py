"""The staged pages of the site, before `make docs` converts them to HTML."""

import importlib

import browsed
import browser
import check
import pytest
import stage


def test_staged_pages_include_the_sources_they_link_to(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "OUT", tmp_path)
    stage.main()  # raises for a link that leads nowhere
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert {"index.md", "contents.md", "types/lora_array.md", "project/readme.md"} <= pages
    assert "sources/src/veneer/models/llama.py.md" in pages
    assert "| nf4, tile 64 |" in (tmp_path / "index.md").read_text("utf-8")  # the demo's table
    assert "(sources/src/veneer/models/llama.py.md)" in (tmp_path / "demo.md").read_text("utf-8")


@pytest.mark.parametrize("module", [m for m in stage.REFERENCE if not m.endswith("pytensor")])
def test_the_reference_has_the_public_names(module):
    names = stage.public_names(module)
    offers = importlib.import_module(module)
    assert names
    assert not [name for name in names if not hasattr(offers, name)]
    assert set(getattr(offers, "__all__", ())) <= set(names)


FAULTY = """<!doctype html><meta name="viewport" content="width=device-width">
<body style="margin: 0"><img src="a.png"><svg role="img"></svg><script src="https://elsewhere.example/a.js"></script>
<a href="../nowhere/">x</a><a href="../right/">x</a>
<p style="color: #999; background: #fff">pale</p><div style="width: 780px">wide</div>"""
RIGHT = '<!doctype html><meta name="viewport" content="width=device-width"><img src="" alt="x">'


@pytest.fixture
def site(tmp_path):
    for name, text in (("faulty", FAULTY), ("right", RIGHT)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(text)
    return tmp_path


def test_the_check_finds_faults_in_html(site, capsys):
    assert check.main(site, look=False) == 5
    assert capsys.readouterr().out.splitlines() == [
        "faulty/index.html: a.png has no alternative text",
        "faulty/index.html: a.png leads nowhere",
        "faulty/index.html: a drawing has no label",
        "faulty/index.html: https://elsewhere.example/a.js is fetched from another host",
        "faulty/index.html: ../nowhere/ leads nowhere",
    ]


@pytest.mark.skipif(
    browser.found() is None, reason="there is no Chromium: apt-get install chromium"
)
def test_the_browser_check_finds_visible_faults(site):
    assert set(browsed.faults(site, browser.found())) == {
        "faulty, dark: 1 of p. have a contrast of 2.85",
        "faulty, dark: 780 pixels wide on a screen of 390",
        "faulty, light: 1 of p. have a contrast of 2.85",
        "https://elsewhere.example/a.js is fetched from another host",
    }


def test_a_missing_browser_is_reported(site, monkeypatch, capsys):
    monkeypatch.setattr(browser, "found", lambda: None)
    check.main(site, look=True)
    assert "There is no Chromium" in capsys.readouterr().out
