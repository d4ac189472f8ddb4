"""Charts as inline SVG: pure functions from numbers to text, without a style sheet of their own.

Colours are classes (`c-valid`, `c-padding` ...) that the page defines. Every mark says its numbers in a
`<title>`, which browsers show as a tooltip.
"""

import html
import itertools
import math
from collections.abc import Mapping, Sequence

from . import _tables
from ._counts import bucket_name
from ._timing import BatchRecord

WIDTH = 900
_LEFT, _RIGHT = 60, 20
_BINS = 64

Number = int | float

Segment = tuple[str, Number, str]
"""A part of a bar: class, amount, tooltip."""


def histogram(counts: Mapping[int, int], edges: Sequence[int]) -> str:
    """Draw how often each length came, with the sizes that hold them as dashed lines."""
    top = max([*counts, *edges], default=1)
    width = max(math.ceil((top + 1) / _BINS), 1)
    bins = [0] * (top // width + 1)
    for length, num in counts.items():
        bins[length // width] += num
    high, bottom = max(max(bins), 1), 190
    scale = (WIDTH - _LEFT - _RIGHT) / (len(bins) * width)
    parts = []
    for i, num in enumerate(bins):
        if num:
            low, size = i * width, 150 * num / high
            name = f"length {low}" if width == 1 else f"lengths {low} to {low + width - 1}"
            x, across = _LEFT + low * scale, max(width * scale - 1, 1)
            parts.append(_rect("c-valid", x, bottom - size, across, size, f"{name}: {num:,} examples"))
    label_end = float("-inf")
    for edge in edges:
        x = _LEFT + (edge + 1) * scale  # after the bar of the longest that it holds
        parts.append(f'<line class="edge" x1="{x:.1f}" y1="24" x2="{x:.1f}" y2="{bottom}"/>')
        if x - label_end > 6 + 4 * len(str(edge)):
            parts.append(_text(x, 18, str(edge), "middle"))
            label_end = x + 4 * len(str(edge))
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{WIDTH - _RIGHT}" y2="{bottom}"/>')
    parts += [_text(_LEFT - 6, bottom, "0", "end"), _text(_LEFT - 6, 44, f"{high:,}", "end")]
    for length in (0, top // 2, top):
        parts.append(_text(_LEFT + (length + 0.5) * scale, bottom + 16, f"{length:,}", "middle"))
    return _svg(bottom + 24, parts, "how many examples have each length")


def bars(rows: Sequence[tuple[str, Sequence[Segment], str]], label: str) -> str:
    """Draw one bar for each row, from its segments, on one scale.

    Args:
      rows: name, segments from left to right, and what stands behind the bar.
      label: what the chart shows, for those who cannot see it.
    """
    left = 20 + 7 * max((len(name) for name, _, _ in rows), default=0)
    right = 20 + 7 * max((len(note) for _, _, note in rows), default=0)
    most = max((sum(amount for _, amount, _ in segments) for _, segments, _ in rows), default=0.0)
    scale = max(WIDTH - left - right, 100) / (most or 1.0)
    parts = []
    for i, (name, segments, note) in enumerate(rows):
        x, y = float(left), 6 + 22 * i
        parts.append(_text(left - 8, y + 12, name, "end"))
        for kind, amount, title in segments:
            if amount:
                parts.append(_rect(kind, x, y, amount * scale, 16, title))
                x += amount * scale
        parts.append(_text(x + 8, y + 12, note, "start"))
    return _svg(12 + 22 * len(rows), parts, label)


def timeline(records: Sequence[BatchRecord]) -> str:
    """Draw what the host and the device did during these batches; time in which there was none is cut out."""
    spans = _merged([(each.times.begun, each.times.delivered) for each in records])
    total = sum(end - begin for begin, end in spans) or 1.0
    scale = (WIDTH - _LEFT - _RIGHT) / total
    lefts = [_LEFT, *itertools.accumulate(((end - begin) * scale for begin, end in spans), initial=_LEFT)]

    def place(time: float) -> float:
        for (begin, end), left in zip(spans, lefts[1:], strict=False):
            if time <= end:
                return left + max(time - begin, 0.0) * scale
        return WIDTH - _RIGHT

    parts = [_text(_LEFT - 8, 28, "host", "end"), _text(_LEFT - 8, 62, "device", "end")]
    for each in records:
        name = f"{bucket_name(each.bucket)}, {each.examples} examples"
        t, run = each.times, each.run
        marks = [
            ("c-padding", t.begun, t.padded, "padding", 14),
            ("c-starting", t.padded, t.started, "starting", 14),
            ("c-waiting", t.waited, t.fetched, "waiting", 14),
            ("c-cutting", t.fetched, t.delivered, "cutting", 14),
            ("c-device" if run.is_exact else "c-guess", run.begin, run.end, "running", 48),
        ]
        for kind, begin, end, what, y in marks:
            if end > begin:
                x, title = place(begin), f"{name}: {what} {_tables.seconds(end - begin)}"
                parts.append(_rect(kind, x, y, max(place(end) - x, 0.3), 20, title))
    for left in lefts[2:-1]:
        parts.append(f'<line class="edge" x1="{left:.1f}" y1="6" x2="{left:.1f}" y2="76"/>')
    parts += [_text(_LEFT, 92, "0", "start"), _text(WIDTH - _RIGHT, 92, str(_tables.seconds(total)), "end")]
    return _svg(100, parts, "what the host and the device did during the latest batches")


def _merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as ascending ones that do not touch."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _svg(height: Number, parts: Sequence[str], label: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(label)}">'
    return "\n".join([head, *parts, "</svg>"])


def _rect(kind: str, x: Number, y: Number, width: Number, height: Number, title: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def _text(x: Number, y: Number, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
