"""A report of what ran, as one HTML file that needs nothing else: no scripts, no fonts, no network."""

import html
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import _charts, _tables
from ._counts import BucketStatistics, bucket_name
from ._grid import Grid
from ._statistics import Statistics

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --soft: #667085; --paper: #ffffff; --line: #d5d9e0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ec; --soft: #9aa3b2; --paper: #16191f; --line: #3a404b; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p, li { max-width: 46rem; } .soft { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .8rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; color: var(--soft); }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 12px; fill: var(--ink); }
.edge { stroke: var(--soft); stroke-dasharray: 3 3; } .axis { stroke: var(--line); }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 1em; border-radius: 2px; }
.key:first-child { margin-left: 0; }
"""

_COLOURS = {
    "valid": "#3b7dd8",
    "padding": "#e8963c",
    "filler": "#9aa3b2",
    "starting": "#c15fb0",
    "waiting": "#c3c8d1",
    "cutting": "#5aa469",
    "device": "#3b7dd8",
    "guess": "#a3c4ef",
}


def write(path: str | os.PathLike[str], page: str) -> None:
    """Write a page to a path that ends in ".html"; a reader never sees half of it.

    Raises:
      ValueError: the path has another ending.
    """
    path = Path(path)
    if path.suffix.lower() != ".html":
        raise ValueError(f"path={str(path)!r}; a report is one HTML file, so its name must end in .html.")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def render(name: str, grid: Grid | None, done: Statistics) -> str:
    """Return the page.

    Args:
      name: of the function.
      grid: whose sizes are shown as the edges of buckets; None to show the sizes that were used.
    """
    sections = [_summary(grid, done)]
    if done.notes:
        notes = "\n".join(f"<li>{html.escape(note)}</li>" for note in done.notes)
        sections.append(f"<h2>Notes</h2>\n<ul>\n{notes}\n</ul>")
    if done.batches:
        sections += [_lengths(grid, done), _padding(done), _times(done), _occupancy(done)]
    title = html.escape(f"jaxbatch: {name}")
    colours = "\n".join(f".c-{key} {{ fill: {c}; background: {c}; }}" for key, c in _COLOURS.items())
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>\n<style>{_STYLE}{colours}\n</style>\n</head>\n<body>",
            f"<h1>{title}</h1>",
            *sections,
            "</body>\n</html>\n",
        ]
    )


# --- sections --------------------------------------------------------------------------------------


def _summary(grid: Grid | None, done: Statistics) -> str:
    exact = f", and {done.exact_compiles} for exact sizes" if done.exact_compiles else ""
    bound = f" of at most {len(grid)}" if grid is not None else ""
    by_dim = _tables.shares(done.padding_by_dim) or "no dims"
    busy = "unknown" if done.occupancy is None else f"{done.occupancy:.1%}"
    facts = {
        "examples": f"{done.examples:,} in {done.batches:,} batches",
        "padding": f"{done.padding_share:.1%} of all cells; by dim: {by_dim}",
        "programs compiled": f"{done.compiles}{bound}{exact}, in {done.compile_seconds:.2f} s",
        "program look-ups": f"{done.hits:,} hits, {done.evictions:,} evictions",
        "time in calls": f"{_tables.seconds(done.time.wall)}, device busy {busy}",
        "grid": "none" if grid is None else repr(grid),
    }
    rows = "\n".join(f"<tr><th>{key}</th><td>{html.escape(text)}</td></tr>" for key, text in facts.items())
    return f'<div class="scroll"><table>\n{rows}\n</table></div>'


def _lengths(grid: Grid | None, done: Statistics) -> str:
    parts = ["<h2>Lengths</h2>\n<p>How many examples had each length. Dashed lines are the padded sizes.</p>"]
    for dim, counts in done.lengths.items():
        used = {bucket[dim] for bucket in done.buckets if dim in bucket}
        edges = sorted(used) if grid is None or dim not in grid.sizes else list(grid.sizes[dim])
        parts.append(f"<h3>{html.escape(dim)}</h3>\n{_charts.histogram(counts, edges)}")
    if len(parts) == 1:
        parts.append("<p>No dim is ragged.</p>")
    return "\n".join(parts)


def _padding(done: Statistics) -> str:
    rows = []
    for name, each in _named(done):
        own = each.padded_cells - each.valid_cells
        segments = [
            ("c-valid", each.valid_cells, f"{each.valid_cells:,} cells of examples"),
            ("c-padding", own, f"{own:,} cells of padding"),
            ("c-filler", each.filler_cells, f"{each.filler_cells:,} cells in rows that fill batches up"),
        ]
        rows.append((name, segments, f"{each.padding_share:.1%}"))
    return "\n".join(
        [
            "<h2>Padding of each bucket</h2>",
            _legend({"valid": "examples", "padding": "padding", "filler": "rows that fill a batch up"}),
            _charts.bars(rows, "cells of each bucket, and the share that is padding"),
        ]
    )


def _times(done: Statistics) -> str:
    named, total = _named(done), done.total
    bars = [
        (name, [("c-valid", each.seconds, f"host time {_tables.seconds(each.seconds)}")], _per(each))
        for name, each in named
    ]
    headers = [
        "bucket",
        "batches",
        "examples",
        "padding",
        "host time",
        "device time, median",
        "timed batches",
    ]
    rows = [
        [
            name,
            f"{each.batches:,}",
            f"{each.examples:,}",
            f"{each.padding_share:.1%}",
            _tables.seconds(each.seconds),
            _tables.seconds(each.median_run_seconds),
            f"{each.timed:,}",
        ]
        for name, each in [*named, ("all", total)]
    ]
    return "\n".join(
        [
            "<h2>Time of each bucket</h2>",
            "<p>Host time is spent on padding, starting, waiting for and cutting results. Device time is "
            "that of one batch, where it is known exactly.</p>",
            _charts.bars(bars, "host time of each bucket"),
            _table(headers, rows),
        ]
    )


def _occupancy(done: Statistics) -> str:
    time, wall = done.time, done.time.wall or 1.0
    names = ("padding", "starting", "waiting", "cutting", "other")
    parts = {"device busy": time.device} | {f"host {name}": getattr(time, name) for name in names}
    rows = [[name, _tables.seconds(value), f"{value / wall:.1%}"] for name, value in parts.items()]
    keys = {name: name for name in names[:4]} | {"device": "device", "guess": "device, estimated"}
    return "\n".join(
        [
            "<h2>Occupancy</h2>",
            '<p>Shares of the time in calls. "Other" is checking, planning, tracing and compiling, and what '
            "the consumer of a <code>map</code> does.</p>",
            _table(["what", "time", "share"], rows),
            f"<h3>The latest {len(done.timeline)} batches</h3>",
            _legend(keys),
            _charts.timeline(done.timeline),
        ]
    )


# --- parts -----------------------------------------------------------------------------------------


def _named(done: Statistics) -> list[tuple[str, BucketStatistics]]:
    named = [(bucket_name(bucket), each) for bucket, each in done.buckets.items()]
    return [*named, ("exact sizes", done.exact)] if done.exact.batches else named


def _per(each: BucketStatistics) -> str:
    """Say how long one example took."""
    return f"{_tables.seconds(each.seconds / each.examples)} an example" if each.examples else ""


def _legend(entries: Mapping[str, str]) -> str:
    keys = "".join(f'<span class="key c-{key}"></span>{html.escape(text)}' for key, text in entries.items())
    return f'<p class="soft">{keys}</p>'


def _table(headers: Sequence[str], rows: Sequence[Sequence[str | None]]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in headers)
    lines = ["".join(f"<td>{html.escape(each or '-')}</td>" for each in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
