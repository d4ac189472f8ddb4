"""The report is one HTML file that needs nothing else, and its charts show the numbers of the statistics."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from ragged import normals

import jaxbatch as jb
from jaxbatch import _charts, _report
from jaxbatch._executables import CompileStatistics
from jaxbatch._statistics import Recorder
from jaxbatch._timing import BatchRecord, BatchTimes, Run

VECTOR = jb.spec("n", "float32")
VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """A page, taken apart; it raises where tags do not match."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def assert_self_contained(text: str) -> None:
    """Raise if the page would load anything."""
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in {"link", "script", "img", "iframe", "object", "use", "image", "base"}
        assert not {"src", "href", "xlink:href", "srcset", "data"} & attributes.keys()
    assert not re.search(r"https?:|//|url\(|@import", text.replace("</", "<"))


def sizes(chart: str, kind: str, attribute: str) -> list[float]:
    """Return an attribute of all rectangles of one class."""
    return [float(a[attribute] or 0) for tag, a in Page(chart).tags if tag == "rect" and a["class"] == kind]


def test_a_report_says_what_ran_and_needs_nothing_else(tmp_path):
    run = jb.batched(
        lambda x: x - x.mean(), spec=VECTOR, grid=jb.Grid(n=(4, 16), rows=[1, 4]), oversize="exact"
    )
    run(normals([3, 4, 2, 16, 9, 20, 0]))
    done = run.statistics()
    run.report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert_self_contained(text)
    page = Page(text)
    assert "jaxbatch: <lambda>" in page.text, "names are escaped"
    for heading in ("Lengths", "Padding of each bucket", "Time of each bucket", "Occupancy"):
        assert heading in page.words
    assert f"{done.examples} in {done.batches} batches" in page.text
    assert f"{done.padding_share:.1%} of all cells; by dim: n {done.padding_by_dim['n']:.1%}" in page.text
    assert f"{done.compiles} of at most {len(jb.Grid(n=(4, 16), rows=[1, 4]))}, and 2 for exact" in page.text
    assert f"{done.compile_seconds:.2f} s" in page.text and f"device busy {done.occupancy:.1%}" in page.text
    for bucket in done.buckets:
        assert f"n={bucket['n']} rows={bucket['rows']}" in page.words
    assert "exact sizes" in page.words and f"The latest {done.batches} batches" in page.words
    assert page.words.count("lengths of examples") == 0 and "Notes" not in page.words
    assert sum(tag == "svg" for tag, _ in page.tags) == 4


def test_a_report_of_two_dims_has_a_histogram_for_each(tmp_path):
    grid = jb.Grid(h=[4, 8], w=[8], rows=[2])
    run = jb.batched(lambda x: x.sum(), spec=jb.spec("h, w", "float32"), grid=grid)
    run([np.ones((3, 5), np.float32), np.ones((7, 8), np.float32)])
    run.report(str(tmp_path / "report.HTML"))
    page = Page((tmp_path / "report.HTML").read_text(encoding="utf-8"))
    assert [word for word in page.words if word in ("h", "w")] == ["h", "w"]
    assert sum(tag == "svg" for tag, _ in page.tags) == 5


def test_a_report_before_anything_ran_says_so(tmp_path):
    run = jb.batched(lambda x: x, spec=VECTOR)
    run.report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert_self_contained(text)
    assert "0 in 0 batches" in Page(text).text and "<svg" not in text


def test_a_report_of_a_function_without_ragged_dims_has_no_histogram(tmp_path):
    run = jb.batched(lambda x: x.sum(), spec=jb.spec("6", "float32"), grid=jb.Grid(rows=[4]))
    run(normals([6] * 5))
    run.report(tmp_path / "report.html")
    assert "No dim is ragged." in Page((tmp_path / "report.html").read_text(encoding="utf-8")).words


def test_notes_are_in_the_report_and_escaped():
    recorder = Recorder()
    recorder.note("single rows are faster for <n=16> & used")
    done = recorder.snapshot(CompileStatistics())
    assert "single rows are faster for <n=16> & used" in Page(_report.render("f", None, done)).words


@pytest.mark.parametrize("name", ["report.png", "report", "html"])
def test_another_ending_is_refused_before_anything_is_written(tmp_path, name):
    run = jb.batched(lambda x: x, spec=VECTOR, grid=jb.Grid(n=4))
    with pytest.raises(ValueError, match=r"jaxbatch.batched\(<lambda>\).report: path=.*must end in .html"):
        run.report(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_report_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    _report.write(path, "old")
    _report.write(path, "new")
    assert path.read_text(encoding="utf-8") == "new" and list(tmp_path.iterdir()) == [path]

    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        _report.write(path, "half")
    assert path.read_text(encoding="utf-8") == "new" and list(tmp_path.iterdir()) == [path]


# --- charts ----------------------------------------------------------------------------------------


def test_a_histogram_has_a_bar_for_each_length_that_came_and_a_line_for_each_edge():
    chart = _charts.histogram({3: 10, 4: 5, 16: 20}, [4, 8, 16])
    assert sizes(chart, "c-valid", "height") == [75, 37.5, 150]
    assert chart.count('class="edge"') == 3
    assert "length 3: 10 examples" in Page(chart).words
    lefts = sizes(chart, "c-valid", "x")
    assert lefts == sorted(lefts) and lefts[1] - lefts[0] == pytest.approx(
        (_charts.WIDTH - 80) / 17, abs=0.01
    )


def test_a_histogram_of_many_lengths_counts_neighbours_together():
    chart = _charts.histogram(dict.fromkeys(range(1, 1001), 2), [512, 1024])
    heights = sizes(chart, "c-valid", "height")
    assert len(heights) <= 64 and heights[1:-1] == [150.0] * (len(heights) - 2)
    assert "lengths 16 to 32: 34 examples" not in Page(chart).words
    assert "lengths 17 to 33: 34 examples" in Page(chart).words


def test_bars_are_as_long_as_their_amounts():
    rows = [
        ("n=4", [("c-valid", 30.0, "thirty"), ("c-padding", 10.0, "ten")], "25%"),
        ("n=8", [("c-valid", 5.0, "five"), ("c-padding", 0.0, "none")], "0%"),
    ]
    chart = _charts.bars(rows, "a chart")
    long, short = sizes(chart, "c-valid", "width")
    (padding,) = sizes(chart, "c-padding", "width")
    assert long / short == pytest.approx(6, rel=1e-3) and long / padding == pytest.approx(3, rel=1e-3)
    assert {"thirty", "ten", "five", "n=4", "n=8", "25%"} <= set(Page(chart).words)


def test_a_timeline_cuts_out_the_time_in_which_nothing_was_under_way():
    bucket = jb.Bucket(n=4, rows=2)
    first = BatchTimes(0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 5.5)
    second = BatchTimes(*(time + 1000 for time in first[:6]))
    records = [
        BatchRecord(bucket, 2, first, Run(2.0, 5.5, True)),
        BatchRecord(bucket, 1, second, Run(1002.0, 1003.0, False)),
    ]
    chart = _charts.timeline(records)
    second_long = (_charts.WIDTH - 80) / 16
    for kind, width, count in (
        ("c-padding", 1, 2),
        ("c-starting", 1, 2),
        ("c-waiting", 2, 2),
        ("c-cutting", 2, 2),
    ):
        assert sizes(chart, kind, "width") == [pytest.approx(width * second_long, abs=0.01)] * count
    assert sizes(chart, "c-device", "width") == [pytest.approx(3.5 * second_long, abs=0.01)]
    assert sizes(chart, "c-guess", "width") == [pytest.approx(second_long, abs=0.01)]
    assert sizes(chart, "c-padding", "x") == [60, pytest.approx(60 + 8 * second_long, abs=0.01)]
    assert "n=4 rows=2, 1 examples: waiting 2.00 s" in Page(chart).words and "16.00 s" in Page(chart).words
    assert chart.count('class="edge"') == 1
