"""What ran so far, in numbers: a `Recorder` counts each batch, and its snapshots are `Statistics`."""

import collections
import dataclasses
import threading
from collections.abc import Mapping

import numpy as np

from . import _tables
from ._counts import BucketStatistics, Histogram, Tally, bucket_name, by_size
from ._executables import CompileStatistics
from ._grid import Bucket
from ._timing import BatchRecord, BatchTimes, Coverage, DeviceClock, TimeStatistics

TIMELINE = 64
"""How many of the latest batches are kept with their times."""

MAX_NOTES = 100


@dataclasses.dataclass(frozen=True)
class Statistics(CompileStatistics):
    """What a batched function did so far; a snapshot that does not change.

    Attributes:
      buckets: what each bucket did, largest sizes first.
      exact: what ran at exact sizes.
      time: where the time of the calls went.
      lengths: for each dim, how many examples had each length, ascending. Beyond 4096 different lengths,
        neighbours are counted together, under the smallest that they may have.
      timeline: the latest batches with their times, in the order of delivery.
      notes: what was decided on the way and may be worth knowing, such as a fall-back.
      layouts: how many examples were planned in padded and in packed rows, where lists may be packed.
      layout_reason: why the latest of them took their layout, where there was a choice.
      run_again: examples of packed rows that ran again, padded, since something in the row was not finite.
    """

    buckets: Mapping[Bucket, BucketStatistics] = dataclasses.field(default_factory=dict)
    exact: BucketStatistics = BucketStatistics()
    time: TimeStatistics = TimeStatistics()
    lengths: Mapping[str, Mapping[int, int]] = dataclasses.field(default_factory=dict, repr=False)
    timeline: tuple[BatchRecord, ...] = dataclasses.field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    layouts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    layout_reason: str | None = None
    run_again: int = 0

    @property
    def total(self) -> BucketStatistics:
        """The sum over all buckets and exact sizes."""
        return sum(self.buckets.values(), self.exact)

    @property
    def batches(self) -> int:
        """Batches run."""
        return self.total.batches

    @property
    def examples(self) -> int:
        """Examples of batches that ran to their end; those whose batch failed are not in it."""
        return self.total.examples

    @property
    def valid_cells(self) -> int:
        """Cells of the examples' own."""
        return self.total.valid_cells

    @property
    def padded_cells(self) -> int:
        """Cells that the examples' rows had in their buckets, valid ones included."""
        return self.total.padded_cells

    @property
    def filler_cells(self) -> int:
        """Cells of rows that only filled a batch up."""
        return self.total.filler_cells

    @property
    def padding_share(self) -> float:
        """The share of all cells that held no example's data, from 0 to 1; filler rows included."""
        return self.total.padding_share

    @property
    def padding_by_dim(self) -> dict[str, float]:
        """For each dim, the share of its padded sizes that was no length; filler rows included."""
        return self.total.padding_by_dim

    @property
    def pad_ratio(self) -> float:
        """Padded cells for each valid one; filler rows are not in it."""
        return self.total.pad_ratio

    @property
    def occupancy(self) -> float | None:
        """The share of the calls' time in which the device was busy; None before anything ran."""
        return self.time.occupancy

    def __str__(self) -> str:
        total = self.total
        lines = [
            f"{total.examples:,} examples in {total.batches:,} batches, {total.padding_share:.1%} padding "
            f"({total.pad_ratio:.3f} padded cells for each valid one)",
            f"{self.compiles} programs ({self.exact_compiles} more for exact sizes) compiled in "
            f"{self.compile_seconds:.2f} s, {self.hits:,} hits, {self.evictions:,} evictions",
        ]
        if total.size_sums:
            lines.append(f"padding by dim: {_tables.shares(total.padding_by_dim)}")
        if self.time.wall:
            parts = ("padding", "starting", "waiting", "cutting", "other")
            host = ", ".join(f"{part} {getattr(self.time, part) / self.time.wall:.1%}" for part in parts)
            lines.append(
                f"{_tables.seconds(self.time.wall)} in calls: device busy {self.occupancy:.1%}; host {host}"
            )
        if "packed" in self.layouts or self.layout_reason:
            lines.append(self._layouts())
        lines += [f"note: {note}" for note in self.notes]
        if total.batches:
            lines += ["", *self._table()]
        return "\n".join(lines)

    def _layouts(self) -> str:
        counts = ", ".join(f"{num:,} examples {layout}" for layout, num in self.layouts.items())
        again = f", {self.run_again:,} run again, padded" if self.run_again else ""
        return f"layout: {counts}{again}{f' ({self.layout_reason})' if self.layout_reason else ''}"

    def _table(self) -> list[str]:
        headers = ["bucket", "batches", "examples", "valid cells", "all cells", "padding"]
        named = [(bucket_name(bucket), each) for bucket, each in self.buckets.items()]
        if self.exact.batches:
            named.append(("exact sizes", self.exact))
        if len(named) > 1:
            named.append(("all", self.total))
        rows = []
        for name, each in named:
            counts = (each.batches, each.examples, each.valid_cells, each.padded_cells + each.filler_cells)
            run = _tables.seconds(each.median_run_seconds)
            rows.append([name, *[f"{count:,}" for count in counts], f"{each.padding_share:.1%}"])
            rows[-1] += [_tables.seconds(each.seconds), run, f"{each.timed:,}"]
        return _tables.table([*headers, "host time", "device, median", "timed"], rows)


class Recorder:
    """The owner of the counts; any thread may add to it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._tallies: dict[Bucket, Tally] = collections.defaultdict(Tally)
        self._exact = Tally()
        self._lengths: dict[str, Histogram] = collections.defaultdict(Histogram)
        self._host = [0.0] * 4
        self._wall, self._device = Coverage(), Coverage()
        self._clock = DeviceClock()
        self._timeline: collections.deque[BatchRecord] = collections.deque(maxlen=TIMELINE)
        self._notes: dict[str, None] = {}
        self._layouts: dict[str, int] = {}
        self._layout_reason: str | None = None
        self._run_again = 0

    def add(
        self,
        bucket: Bucket,
        lengths: np.ndarray,
        times: BatchTimes,
        *,
        exact: bool,
        call: object,
        since: float,
        used: int | None = None,
    ) -> None:
        """Count a batch.

        Args:
          lengths: those of its examples, [num, num_dims], columns in the order of the bucket's sizes.
          exact: whether it ran at an exact size.
          call: the same object for all batches of one call, which are added in the order of their start.
          since: when the call began, or delivered its previous batch.
          used: how many rows hold examples, if that is not one for each.
        """
        with self._lock:
            tally = self._exact if exact else self._tallies[bucket]
            tally.add(bucket, lengths, times.host_seconds, used)
            for dim, column in zip(bucket.sizes, lengths.T.tolist(), strict=True):
                self._lengths[dim].add(column)
            run = self._clock.run(times, call, None if exact or times.ready is not None else tally.typical)
            if run.is_exact and not exact:  # exact sizes differ, so that their times cannot be compared
                tally.add_run(run.end - run.begin)
            self._device.add(run.begin, run.end)
            self._wall.add(since, times.delivered)
            begun, padded, started, waited, fetched, delivered, _ = times
            parts = (padded - begun, started - padded, fetched - waited, delivered - fetched)
            self._host = [old + new for old, new in zip(self._host, parts, strict=True)]
            self._timeline.append(BatchRecord(bucket, len(lengths), times, run))

    def note(self, text: str) -> None:
        """Add a sentence to the notes, once."""
        with self._lock:
            if len(self._notes) < MAX_NOTES:
                self._notes[text] = None

    def add_layout(self, layout: str, num: int, reason: str | None) -> None:
        """Count examples that were planned in a layout."""
        with self._lock:
            self._layouts[layout] = self._layouts.get(layout, 0) + num
            self._layout_reason = reason or self._layout_reason

    def add_again(self, num: int) -> None:
        """Count examples that run again."""
        with self._lock:
            self._run_again += num

    def snapshot(self, compiled: CompileStatistics) -> Statistics:
        """Return all counts so far, together with those of the programs."""
        with self._lock:
            buckets = {bucket: tally.freeze() for bucket, tally in self._tallies.items()}
            exact = self._exact.freeze()
            time = TimeStatistics(self._wall.seconds, self._device.seconds, *self._host)
            lengths = {dim: histogram.freeze() for dim, histogram in self._lengths.items()}
            timeline, notes = tuple(self._timeline), tuple(self._notes)
            layouts, reason, again = dict(self._layouts), self._layout_reason, self._run_again
        return Statistics(
            **{field.name: getattr(compiled, field.name) for field in dataclasses.fields(compiled)},
            buckets=dict(sorted(buckets.items(), key=lambda item: by_size(item[0]), reverse=True)),
            exact=exact,
            time=time,
            lengths=lengths,
            timeline=timeline,
            notes=notes,
            layouts=layouts,
            layout_reason=reason,
            run_again=again,
        )
