"""The notebooks that the site makes from pages: their contents, and that they run."""

import doctest
import json
from pathlib import Path

import notebooks
import pytest
import stage

ROOT = Path(__file__).parent.parent


@pytest.fixture
def laid_out(tmp_path, monkeypatch):
    """Return a function that stages the site, and returns its folder of notebooks."""
    monkeypatch.setattr(stage, "OUT", tmp_path / "site")

    def lay(**environment):
        for name in ("GITHUB_REPOSITORY", "SITE_URL", "SITE_VERSION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        stage.main()
        return tmp_path / "site"

    return lay


def cells(site, name, kind):
    made = json.loads((site / "notebooks" / f"{name}.ipynb").read_text("utf-8"))
    return [cell for cell in made["cells"] if cell["cell_type"] == kind]


def test_a_notebook_has_the_programs_and_output_of_its_page(laid_out):
    site = laid_out()
    for name, (page, _) in notebooks.NOTEBOOKS.items():
        programs = [source for source, _ in notebooks.PROGRAM.findall((ROOT / page).read_text())]
        made = cells(site, name, "code")
        assert [cell["source"] + "\n" for cell in made] == programs
    printed = [output["text"] for cell in made for output in cell["outputs"]]
    assert printed[1] == "1792 of 12736\nNone None\n"
    words = "".join(cell["source"] for cell in cells(site, "qlora", "markdown"))
    assert "```python" not in words
    assert "](" not in words.replace("](http", "")  # the address of the site is unknown


def test_a_known_site_address_gives_links_to_colab(laid_out):
    site = laid_out(
        GITHUB_REPOSITORY="a/b", SITE_URL="https://a.github.io/b/1.0", SITE_VERSION="1.0"
    )
    words = "".join(cell["source"] for cell in cells(site, "write_an_array_type", "markdown"))
    assert "(https://a.github.io/b/1.0/redispatch/)" in words
    install = cells(site, "quantize_your_model", "code")[0]["source"]
    assert '"veneer[examples] @ git+https://github.com/a/b" flax' in install
    page = (site / "training.md").read_text("utf-8")
    colab = "https://colab.research.google.com/github/a/b/blob/gh-pages/1.0/notebooks/qlora.ipynb"
    assert f"[As a notebook](notebooks/qlora.ipynb), or [in Colab]({colab})" in page
    assert "(../notebooks/start_here.ipynb)" in (site / "project/readme.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", notebooks.NOTEBOOKS)
def test_a_notebook_runs_and_prints_its_recorded_output(name, laid_out, tmp_path, monkeypatch):
    import nbclient
    import nbformat

    path = laid_out() / "notebooks" / f"{name}.ipynb"
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    shown = [[output.text for output in cell.get("outputs", ())] for cell in book.cells]
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    resources = {"metadata": {"path": str(tmp_path / "work")}}
    nbclient.NotebookClient(book, timeout=600, resources=resources).execute()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for cell, expected in zip(book.cells, shown, strict=True):
        printed = [o.text for o in cell.get("outputs", ()) if o.get("name") == "stdout"]
        if expected and "example.py" not in expected[0]:  # a cell has another name
            assert doctest.OutputChecker().check_output(expected[0], "".join(printed), flags)
