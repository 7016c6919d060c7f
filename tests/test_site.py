"""The site's pages as they are laid out, before a tool makes HTML of them: `make docs` does."""

import importlib

import pytest
import stage


def test_every_page_is_laid_out_with_the_sources_that_it_leads_to(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "OUT", tmp_path)
    stage.main()  # raises for a link that leads nowhere
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert {"index.md", "contents.md", "types/lora_array.md", "project/readme.md"} <= pages
    assert "sources/examples/llama.py.md" in pages
    assert "| nf4, tile 64 |" in (tmp_path / "index.md").read_text("utf-8")  # the README's table
    assert "(../sources/examples/llama.py.md)" in (tmp_path / "project/readme.md").read_text(
        "utf-8"
    )


@pytest.mark.parametrize("module", [m for m in stage.REFERENCE if not m.endswith("pytensor")])
def test_the_reference_has_the_public_names(module):
    names = stage.public_names(module)
    offers = importlib.import_module(module)
    assert names
    assert not [name for name in names if not hasattr(offers, name)]
    assert set(getattr(offers, "__all__", ())) <= set(names)
