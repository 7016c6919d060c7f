"""The report of `explain`, as text and as a page."""

import html.parser
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support import arrays
from support.array_types import lora

import veneer as vn
from veneer._report.tables import wrap_text

W = lora(arrays.key(0))
X = arrays.ones((3, 6))


@pytest.fixture(scope="module")
def report():
    def model(x, w):
        for _ in range(4):
            x = x @ w
        return x + jnp.exp(w)[:3]

    return vn.explain(model)(X, W)


def test_repr_equals_str(report):
    assert repr(report) == str(report)


def test_equal_events_share_one_row_with_a_count(report, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = str(report).splitlines()
    (i,) = [i for i, line in enumerate(lines) if "dot_general" in line]
    assert lines[i].split()[:3] == ["4", "dot_general(f32[3,6],", "Lora:f32[6,6])"]
    assert lines[i + 1].split()[0] == "rule"
    assert len(report.events) == 5


def test_events_are_grouped_by_weight_intermediates_last():
    def model(layers, x):
        for layer in layers:
            x = jnp.sin(W + W)[:3] + x @ layer["kernel"]
        return vn.implicit(jnp.exp)(vn.quant.quantize(x, "int8"))

    report = vn.explain(model)([{"kernel": W}, {"kernel": W}], X)
    over = [line for line in str(report).splitlines()[1:] if not line.startswith(" ")]
    assert over[:3] == [
        "W: 576 bytes materialized",
        "layers.*.kernel",
        "intermediates: 72 bytes materialized",
    ]
    assert (report.nbytes, report.weight_nbytes) == (576 + 72, 576)


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_the_table_fits_the_terminal(report, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = str(report)
    assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize("width", [7, 20, 60])
def test_wrapping_loses_no_text(width):
    text = "  rule veneer/quant/ops/dot_general.py:83: convert codes of rhs to float, f32[128,128]"
    lines = wrap_text(text, width)
    assert max(map(len, lines)) <= width
    assert all(line.startswith("  ") for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_the_table_has_80_columns_without_a_terminal(report, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, str(report).splitlines())) <= 80


def test_paths_are_relative_to_the_folder_or_to_sys_path(report, tmp_path, monkeypatch):
    package = Path(vn.__file__).parent
    monkeypatch.chdir(tmp_path)
    rule = str(package / "quant" / "arrays" / "qarray.py") + ":1"
    lines = [f"{tmp_path}/model.py:3 (f.<locals>.g)", f"{jax.__file__}:1 (f)", "/elsewhere/f.py:1"]
    shown = str(vn.Report(tuple(vn.Event("sin", (), rule, 0, line) for line in lines)))
    assert " veneer/quant/arrays/qarray.py:1" in shown
    assert " model.py:3 (f.g)" in shown
    assert " jax/__init__.py:1 (f)" in shown
    assert " /elsewhere/f.py:1" in shown


def test_the_summary_counts_events_and_bytes(report):
    assert report.summary == (
        "5 primitives had implicit operands. 1 of them materialized 144 bytes (weights only)."
    )
    nothing = vn.explain(jnp.matmul)(X, W)
    assert nothing.summary == "1 primitive had implicit operands. None was materialized."


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(1, "1 byte"), (9999, "9,999 bytes"), (10_000, "10 kB"), (2_097_152, "2.1 MB")],
)
def test_sizes_have_suitable_units(nbytes, shown):
    report = vn.Report((vn.Event("exp", ("W:f32[]",), None, nbytes, "f.py:1"),))
    assert f"materialized {shown} (no weights)" in report.summary


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


def test_the_page_has_all_rows_and_marks_dense_ones(report):
    page = Rows()
    page.feed(report.to_html())
    over = "w144 bytes materialized"
    assert [row[0] for row in page.rows[:4]] == ["primitive", over, "dot_general", "exp"]
    assert page.classes[:4] == [None, "over", None, "dense"]
    assert report.summary in report.to_html()


def test_a_notebook_shows_an_html_table(report):
    page = Rows()
    page.feed(report._repr_html_())
    assert [row[0] for row in page.rows][-2:] == ["dot_general", "exp"]
    assert report.summary in report._repr_html_()
    assert "<table>" in vn.Report(())._repr_html_()


def test_the_page_escapes_html():
    report = vn.Report((vn.Event("<b>", ("a & b",), None, 1, "<lambda>"),))
    assert "<td>&lt;b&gt;</td><td>a &amp; b</td>" in report.to_html()
    assert "<b>&lt;lambda&gt;</b>" in report.to_html()


def test_the_page_shows_source_around_each_line(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("def f(w):\n    # <-\n    y = w + 1\n    return y\n\n\ndef g(): ...\n")
    event = vn.Event("add", ("W:f32[]",), None, 4, f"{program}:3 (f)")
    later = vn.Event("mul", ("W:f32[]",), None, 4, f"{program}:20 (f)")
    _, _, lines = vn.Report((later, event, event)).to_html().partition('<section id="lines">')
    shown = "1  def f(w):\n2      # &lt;-\n<mark>3      y = w + 1</mark>\n4      return y\n5</pre>"
    assert f"<pre>{shown}" in lines
    assert lines.index("program.py:3 (f)") < lines.index("program.py:20 (f)")
    assert lines.count("<pre>") == 1
    assert '<td class="number times" data-n="2">2</td>' in lines
    assert "<td>intermediates</td>" in lines.replace(' class="where"', "")


KRONECKER = vn.types.Kronecker(arrays.ones((2, 2)), arrays.ones((2, 2)))
DIAGONAL = vn.types.Diagonal(arrays.ones(4))


@pytest.mark.parametrize(
    ("build", "primitive", "nbytes"),
    [
        (lambda: KRONECKER + DIAGONAL, "add", 128),
        (lambda: 1.0 + DIAGONAL, "add", 64),
        (lambda: DIAGONAL.reshape(2, 8), "reshape", 64),
    ],
    ids=["sum", "reflected", "method"],
)
def test_operators_before_the_call_are_reported(build, primitive, nbytes):
    dense = build()
    for report in (vn.explain(jnp.sin)(dense), vn.explain(lambda x: x + dense)(1.0)):
        (event,) = report.events
        assert (event.primitive, event.rule, event.nbytes) == (primitive, None, nbytes)
        assert "test_report.py" in event.line
        assert "materialized before the call" in str(report)
    assert not vn.explain(jnp.sin)(jnp.array(dense)).events  # another array


def test_operators_that_run_a_rule_are_not_reported():
    assert not vn.explain(jnp.sin)(DIAGONAL @ jnp.ones((4, 2))).events
    assert not vn.explain(jnp.sin)(vn.materialise(DIAGONAL)).events


def test_a_report_keeps_no_arrays_alive():
    diagonal = vn.types.Diagonal(jnp.ones(4))
    dense = diagonal + KRONECKER
    result, operand = weakref.ref(dense), weakref.ref(diagonal.diagonal)
    del diagonal
    assert operand() is None
    del dense
    assert result() is None
