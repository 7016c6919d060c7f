"""The report of `explain`, as text and as a page."""

import html.parser

import jax
import jax.numpy as jnp
import pytest
from support.array_types import lora

import veneer as vn

W = lora(jax.random.key(0))
X = jnp.ones((3, 6))


@pytest.fixture(scope="module")
def report():
    def model(x, w):
        for _ in range(4):
            x = x @ w
        return x + jnp.exp(w)[:3]

    return vn.explain(model)(X, W)


def test_it_shows_itself(report):
    assert repr(report) == str(report)


def test_equal_events_are_shown_once_with_their_number(report):
    lines = str(report).splitlines()
    (line,) = [line for line in lines if line.startswith("dot_general")]
    assert line.split()[1:5] == ["f32[3,6],", "Lora:f32[6,6]", "4", "rule"]
    assert len(report.events) == 5


def test_the_summary_counts(report):
    assert report.summary == (
        "5 primitives met an implicit array, and 1 of them made it dense: 144 bytes in all."
    )
    nothing = vn.explain(jnp.matmul)(X, W)
    assert nothing.summary == "1 primitive met an implicit array, and none made it dense."


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(1, "1 byte"), (9999, "9,999 bytes"), (10_000, "10 kB"), (2_097_152, "2.1 MB")],
)
def test_sizes(nbytes, shown):
    report = vn.Report((vn.Event("exp", ("W:f32[]",), None, nbytes, "f.py:1"),))
    assert f"made it dense: {shown} in all" in str(report)


class Rows(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.classes = [], []

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
            self.classes.append(dict(attributes).get("class"))
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def test_the_page_has_the_rows_and_marks_the_dense_ones(report):
    page = Rows()
    page.feed(report.to_html())
    assert [row[0] for row in page.rows] == ["primitive", "dot_general", "exp"]
    assert page.classes == [None, None, "dense"]
    assert report.summary in report.to_html()


def test_the_page_escapes_what_it_shows():
    report = vn.Report((vn.Event("<b>", ("a & b",), None, 1, "<lambda>"),))
    assert "<td>&lt;b&gt;</td><td>a &amp; b</td>" in report.to_html()
    assert "<td>&lt;lambda&gt;</td>" in report.to_html()
