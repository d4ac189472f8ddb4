"""What ran and what will run, in numbers: `Statistics` of the past, `Explanation` of the future.

A cell is one element of the product of an example's ragged dims. Valid cells are the example's own, padded
cells are what its row has in the bucket, and filler cells belong to rows that only fill a batch up.
"""

import dataclasses
import threading
from collections.abc import Iterable, Mapping

import numpy as np

from ._executables import CompileStatistics
from ._grid import Bucket
from ._plan import Job


@dataclasses.dataclass(frozen=True)
class BucketStatistics:
    """What one bucket did, or will do.

    Attributes:
      seconds: host time spent on its batches: padding, starting, waiting for and cutting results.
    """

    batches: int = 0
    examples: int = 0
    valid_cells: int = 0
    padded_cells: int = 0
    filler_cells: int = 0
    seconds: float = 0.0

    @property
    def pad_ratio(self) -> float:
        """Padded cells for each valid one, 1.0 where nothing is padded; filler rows are not in it."""
        return self.padded_cells / self.valid_cells if self.valid_cells else 1.0

    @property
    def padding_share(self) -> float:
        """The share of all cells that hold no example's data, from 0 to 1; filler rows included."""
        total = self.padded_cells + self.filler_cells
        return 1 - self.valid_cells / total if total else 0.0

    def __add__(self, other: "BucketStatistics") -> "BucketStatistics":
        return BucketStatistics(
            self.batches + other.batches,
            self.examples + other.examples,
            self.valid_cells + other.valid_cells,
            self.padded_cells + other.padded_cells,
            self.filler_cells + other.filler_cells,
            self.seconds + other.seconds,
        )


@dataclasses.dataclass(frozen=True)
class Statistics(CompileStatistics):
    """What a batched function did so far; a snapshot that does not change.

    Attributes:
      buckets: what each bucket did, largest sizes first.
      exact: what ran at exact sizes.
    """

    buckets: Mapping[Bucket, BucketStatistics] = dataclasses.field(default_factory=dict)
    exact: BucketStatistics = BucketStatistics()

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
    def pad_ratio(self) -> float:
        """Padded cells for each valid one; filler rows are not in it."""
        return self.total.pad_ratio

    def __str__(self) -> str:
        head = (
            f"{self.examples} examples in {self.batches} batches, {self.padding_share:.1%} padding; "
            f"{self.compiles} programs ({self.exact_compiles} more for exact sizes) compiled "
            f"in {self.compile_seconds:.2f} s, {self.hits} hits, {self.evictions} evictions"
        )
        rows = [(_name(bucket), each) for bucket, each in self.buckets.items()]
        if self.exact.batches:
            rows.append(("exact sizes", self.exact))
        return "\n".join([head, *_table(rows, seconds=True)])


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a run of examples of given lengths would do.

    Attributes:
      jobs: the batches, in the order in which they would start.
      buckets: what each bucket would do, in that order.
      missing: how many of the programs are not compiled yet.
      pad_ratio_squared: padded cells for each valid one where the cost grows with the square of the size, as
        in attention.
      worst_pad_ratio: the largest pad ratio of one example.
      num_exact: examples with an empty or an oversize dim, which would run at their exact size.
    """

    jobs: tuple[Job, ...]
    buckets: Mapping[Bucket, BucketStatistics]
    missing: int
    pad_ratio_squared: float
    worst_pad_ratio: float
    num_exact: int

    @property
    def total(self) -> BucketStatistics:
        """The sum over all buckets."""
        return sum(self.buckets.values(), BucketStatistics())

    @property
    def programs(self) -> int:
        """How many programs the run uses, exact sizes apart."""
        return len(self.buckets)

    @property
    def batches(self) -> int:
        """How many batches run."""
        return len(self.jobs)

    @property
    def padding_share(self) -> float:
        """The share of all cells that hold no example's data, from 0 to 1; filler rows included."""
        return self.total.padding_share

    @property
    def pad_ratio(self) -> float:
        """Padded cells for each valid one; filler rows are not in it."""
        return self.total.pad_ratio

    def __str__(self) -> str:
        exact = f", and {self.num_exact} examples at exact sizes" if self.num_exact else ""
        head = (
            f"{self.total.examples} examples in {self.batches} batches{exact}; {self.programs} programs, "
            f"{self.missing} of them to compile; {self.padding_share:.1%} padding ({self.pad_ratio:.3f} "
            f"padded cells for each valid one, {self.worst_pad_ratio:.3f} at worst)"
        )
        return "\n".join(
            [head, *_table([(_name(b), each) for b, each in self.buckets.items()], seconds=False)]
        )


class Recorder:
    """The owner of the counts; any thread may add to it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._buckets: dict[Bucket, BucketStatistics] = {}
        self._exact = BucketStatistics()

    def add(self, bucket: Bucket, lengths: np.ndarray, *, exact: bool, seconds: float) -> None:
        """Count a batch: its bucket, and [num, num_dims] lengths of its examples."""
        batch = count(bucket, lengths, seconds)
        with self._lock:
            if exact:
                self._exact += batch
            else:
                self._buckets[bucket] = self._buckets.get(bucket, BucketStatistics()) + batch

    def snapshot(self, compiled: CompileStatistics) -> Statistics:
        """Return all counts so far, together with those of the programs."""
        with self._lock:
            buckets, exact = dict(self._buckets), self._exact
        ordered = dict(sorted(buckets.items(), key=lambda item: _order(item[0]), reverse=True))
        return Statistics(**dataclasses.asdict(compiled), buckets=ordered, exact=exact)


def count(bucket: Bucket, lengths: np.ndarray, seconds: float = 0.0) -> BucketStatistics:
    """Return the counts of one batch."""
    num, cells = len(lengths), bucket.cells // bucket["rows"]
    valid = int(lengths.prod(axis=1, dtype=np.int64).sum())
    return BucketStatistics(1, num, valid, num * cells, (bucket["rows"] - num) * cells, seconds)


def explain(jobs: Iterable[Job], lengths: np.ndarray, *, missing: int, num_exact: int) -> Explanation:
    """Return the explanation of planned jobs; `lengths` is what they were planned from."""
    jobs = tuple(jobs)
    buckets: dict[Bucket, BucketStatistics] = {}
    padded, valid, worst = 0.0, 0.0, 1.0
    for job in jobs:
        own = lengths[list(job.indices)]
        buckets[job.bucket] = buckets.get(job.bucket, BucketStatistics()) + count(job.bucket, own)
        cells, sizes = own.astype(np.float64).prod(axis=1), float(job.bucket.cells // job.bucket["rows"])
        padded, valid = padded + len(own) * sizes**2, valid + float((cells**2).sum())
        worst = max(worst, sizes / float(cells.min()))
    return Explanation(jobs, buckets, missing, padded / valid if valid else 1.0, worst, num_exact)


def _order(bucket: Bucket) -> tuple[int, int]:
    return bucket.cells // bucket["rows"], bucket["rows"]


def _name(bucket: Bucket) -> str:
    return " ".join(f"{name}={size}" for name, size in bucket.items())


def _table(rows: list[tuple[str, BucketStatistics]], *, seconds: bool) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [
        f"  {name:<{width}}  {each.batches:>5} batches {each.examples:>7} examples "
        + f"{each.padding_share:>6.1%} padding"
        + (f" {each.seconds:>8.3f} s" if seconds else "")
        for name, each in rows
    ]
