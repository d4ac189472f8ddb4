"""What a run of examples of given lengths would do, in numbers; nothing compiles and nothing runs."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from . import _tables
from ._counts import BucketStatistics, Tally, bucket_name
from ._grid import Bucket
from ._plan import Job


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a run of examples of given lengths would do.

    Attributes:
      jobs: the batches, in the order in which they would start.
      buckets: what each bucket would do, in that order.
      missing: how many of the programs are not compiled yet.
      pad_ratio_squared: padded cells for each valid one where the cost grows with the square of the size, as
        in attention.
      worst_pad_ratio: the largest pad ratio of one example, or of one batch of packed rows.
      num_exact: examples with an empty or an oversize dim, which would run at their exact size.
      bucket_seconds: what the batches of each bucket are predicted to take together; None where unknown.
      bucket_bytes: memory that the program of each bucket takes, arguments and results included; None where
        unknown.
      advice: whether a finer ladder would repay its compiles; None where costs are unknown or gains small.
      layout: "padded" or "packed".
      layout_reason: why it is this layout, where there is a choice.
    """

    jobs: tuple[Job, ...]
    buckets: Mapping[Bucket, BucketStatistics]
    missing: int
    pad_ratio_squared: float
    worst_pad_ratio: float
    num_exact: int
    bucket_seconds: Mapping[Bucket, float | None] = dataclasses.field(default_factory=dict)
    bucket_bytes: Mapping[Bucket, int | None] = dataclasses.field(default_factory=dict)
    advice: str | None = None
    layout: str = "padded"
    layout_reason: str | None = None

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
    def padding_by_dim(self) -> dict[str, float]:
        """For each dim, the share of its padded sizes that is no length; filler rows included."""
        return self.total.padding_by_dim

    @property
    def pad_ratio(self) -> float:
        """Padded cells for each valid one; filler rows are not in it."""
        return self.total.pad_ratio

    @property
    def seconds(self) -> float | None:
        """What all batches are predicted to take, exact sizes apart; None if it is unknown for some."""
        known = [each for b in self.buckets if (each := self.bucket_seconds.get(b)) is not None]
        return sum(known) if known and len(known) == len(self.buckets) else None

    @property
    def peak_bytes(self) -> int | None:
        """The most that a program takes, of those for which it is known; None if it is known for none."""
        return max((each for each in self.bucket_bytes.values() if each is not None), default=None)

    def __str__(self) -> str:
        total = self.total
        exact = f", and {self.num_exact:,} examples at exact sizes" if self.num_exact else ""
        lines = [
            f"{total.examples:,} examples in {self.batches:,} batches{exact}; {self.programs} programs, "
            f"{self.missing} of them to compile; {total.padding_share:.1%} padding ({total.pad_ratio:.3f} "
            f"padded cells for each valid one, {self.worst_pad_ratio:.3f} at worst)"
        ]
        if self.layout_reason or self.layout != "padded":
            lines.append(f"layout: {self.layout}{f' ({self.layout_reason})' if self.layout_reason else ''}")
        if total.size_sums:
            lines.append(f"padding by dim: {_tables.shares(total.padding_by_dim)}")
        if self.buckets:
            predicted, peak = _tables.seconds(self.seconds), _tables.memory(self.peak_bytes)
            lines.append(f"predicted time: {predicted or 'unknown'}; peak memory: {peak or 'unknown'}")
            lines += [self.advice] if self.advice else []
            lines += ["", *self._table()]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        headers = ["bucket", "batches", "examples", "valid cells", "all cells", "padding", "time", "memory"]
        named = [(bucket_name(bucket), bucket, each) for bucket, each in self.buckets.items()]
        rows = [
            [
                *_cells(name, each),
                _tables.seconds(self.bucket_seconds.get(bucket)),
                _tables.memory(self.bucket_bytes.get(bucket)),
            ]
            for name, bucket, each in named
        ]
        if len(rows) > 1:
            last = [_tables.seconds(self.seconds), _tables.memory(self.peak_bytes)]
            rows.append([*_cells("all", self.total), *last])
        return _tables.table(headers, rows)


def _cells(name: str, each: BucketStatistics) -> list[str | None]:
    numbers = (each.batches, each.examples, each.valid_cells, each.padded_cells + each.filler_cells)
    return [name, *[f"{number:,}" for number in numbers], f"{each.padding_share:.1%}"]


def explain(
    jobs: Iterable[Job],
    lengths: np.ndarray,
    *,
    missing: int,
    num_exact: int,
    cost: Callable[[Bucket], float | None] | None = None,
    memory: Callable[[Bucket], int | None] | None = None,
) -> Explanation:
    """Return the explanation of planned jobs.

    Args:
      lengths: what the jobs were planned from, [num, num_dims].
      cost: the seconds that one batch of a bucket takes, or None where unknown.
      memory: the bytes that the program of a bucket takes, or None where unknown.
    """
    jobs = tuple(jobs)
    tallies: dict[Bucket, Tally] = {}
    padded, valid, worst = 0.0, 0.0, 1.0
    for job in jobs:
        own = lengths[np.asarray(job.indices, np.intp)]
        tallies.setdefault(job.bucket, Tally()).add(job.bucket, own, used=job.used)
        cells, sizes = own.astype(np.float64).prod(axis=1), float(job.bucket.cells // job.bucket["rows"])
        rows = len(own) if job.used is None else job.used
        padded, valid = padded + rows * sizes**2, valid + float((cells**2).sum())
        ratio = sizes / float(cells.min()) if job.used is None else rows * sizes / float(cells.sum())
        worst = max(worst, ratio)
    buckets = {bucket: tally.freeze() for bucket, tally in tallies.items()}
    each = {bucket: cost(bucket) if cost else None for bucket in buckets}
    return Explanation(
        jobs,
        buckets,
        missing,
        padded / valid if valid else 1.0,
        worst,
        num_exact,
        {b: None if one is None else one * buckets[b].batches for b, one in each.items()},
        {bucket: memory(bucket) if memory else None for bucket in buckets},
    )
