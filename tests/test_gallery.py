"""The plots of the pages: their data are on the pages, and their colors differ enough."""

import itertools
import re

import gallery
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tables
from matplotlib.colors import to_rgb

DOCS = tables.ROOT / "docs"
NAMES = [*gallery.TABLES, *gallery.PROGRAMS]


@pytest.mark.parametrize("name", NAMES)
def test_plots_are_drawn_from_the_current_pages(name):
    plot = (gallery.GALLERY / f"{name}.svg").read_text("utf-8")
    how = "what it is drawn from has changed: python docs/site/gallery.py"
    assert f"<!-- {gallery.source(name)} -->" in plot, how


def test_every_plot_is_in_a_page():
    pages = [*DOCS.rglob("*.md"), tables.ROOT / "README.md"]
    text = "".join(page.read_text("utf-8") for page in pages)
    shown = set(re.findall(r"\]\((?:docs/|\.\./)?gallery/(\w+)\.svg\)", text))
    assert shown == set(NAMES) == {path.stem for path in gallery.GALLERY.glob("*")}


@pytest.mark.parametrize("name", gallery.TABLES)
def test_a_plot_names_rows_of_its_table(name, tmp_path):
    gallery.main([name], tmp_path)
    plot = (tmp_path / f"{name}.svg").read_text("utf-8")
    written = re.findall(r"<text[^>]*>([^<]+)</text>", plot)
    named = [row for row in tables.Table(*gallery.TABLES[name][1:]).rows if row in written]
    assert named or name in ("rows", "fidelity")  # where names are others, or broken in two
    assert (
        "http"
        not in re.sub(
            r'xmlns[:\w]*="[^"]*"|<metadata>.*?</metadata>', "", plot, flags=re.S
        ).partition("<svg")[2]
    )
    assert not [color for color in gallery.DARK if f": {color}" in plot]  # they follow the page


def test_a_table_of_a_page_is_parsed(tmp_path, monkeypatch):
    page = "words\n\n|  | MB | ms, n = 2 |\n| --- | ---: | ---: |\n| a, b | **1,234** | |\n\n| c |"
    (tmp_path / "page.md").write_text(page)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    table = tables.Table("page.md", "|  | MB")
    assert table.headings == ["", "MB", "ms, n = 2"]
    np.testing.assert_array_equal(table.numbers("a, b", "MB", "ms, n = 2"), [1234, np.nan])


def test_held_bytes_agree_with_xla():
    def step(weights, x):
        loss = lambda weights: sum(jnp.sum(jnp.tanh(x @ w) ** 2) for w in weights)
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    weights = [jnp.ones((256, 256))] * 4
    program = jax.jit(step, donate_argnums=0).lower(weights, jnp.ones((512, 256))).compile()
    held = np.array(gallery.megabytes_held(program))
    memory = program.memory_analysis()
    assert held[0] == held[-1] == memory.argument_size_in_bytes / 1e6
    np.testing.assert_allclose(held.max() - held[0], memory.temp_size_in_bytes / 1e6, rtol=0.2)


def contrast(*colors):
    linear = [np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for c in colors]
    lights = sorted(float(c @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in linear)
    return lights[1] / lights[0]


@pytest.mark.parametrize("paper", ["#ffffff", "#1e2129"], ids=["light", "dark"])
def test_lines_have_contrast_on_light_and_dark_pages(paper):
    of = [contrast(np.array(to_rgb(color)), np.array(to_rgb(paper))) for color in gallery.COLORS]
    assert min(of) >= 3  # WCAG 2.1, 1.4.11


# The colors that color-blind people see: Machado, Oliveira and Fernandes 2009, table 1.
SEEN = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("kind", SEEN)
def test_colors_differ_for_color_blind_readers(kind):
    seen = [np.array(SEEN[kind]) @ to_rgb(color) for color in gallery.COLORS]
    apart = [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
    assert min(apart) > 0.15
