"""Which examples share a row, and which rows a batch: a pure decision, as `_plan` is for padded rows.

`_packer` fills rows of the grid's sizes. Rows of one size then go into batches by what these cost, each with
as many segments as its fullest row needs. Where costs are known, it is also decided by them which of the
smaller sizes to use at all.
"""

import dataclasses

import numpy as np

from ._grid import Grid
from ._packer import PackedRow, pack
from ._plan import Job, Means
from ._search import Tables, by_cells, by_seconds

NOTHING_KNOWN = Means()


def plan_packed(lengths: np.ndarray, grid: Grid, means: Means = NOTHING_KNOWN) -> list[Job]:
    """Return the batches that run examples of these lengths, each in the order in which they lie in rows.

    Args:
      lengths: integers of shape [num, 1], from 1 to the grid's largest size.
      means: `ready` has packed buckets.

    Example:
      >>> for job in plan_packed(np.array([[3], [9], [5], [14]]), Grid(n=[16], rows=(1, 2), segments=4)):
      ...     print(job)
      Job(bucket=Bucket(n=16, rows=2, segments=4), indices=(3, 1, 2))
      Job(bucket=Bucket(n=16, rows=1, segments=4), indices=(0,))
    """
    own = np.asarray(lengths, np.int64).reshape(-1)
    if not len(own):
        return []
    options = _Options.of(grid, means, int(own.max()))
    sizes = options.sizes
    if not means.costs:
        return options.batches(own, sizes)
    ends = range(1, len(sizes) + 1)
    ladders = [sizes[i:j] for j in ends for i in range(j) if sizes[j - 1] >= own.max()]
    return min((options.batches(own, ladder) for ladder in reversed(ladders)), key=options.cost)


@dataclasses.dataclass(frozen=True, eq=False)
class _Options:
    """The batches that there may be.

    Attributes:
      tables: what rows cost; an entry for each size and number of segments.
      entries: for each size its numbers of segments, ascending, with their places in the tables.
    """

    tables: Tables
    entries: dict[int, dict[int, int]]

    @classmethod
    def of(cls, grid: Grid, means: Means, longest: int) -> "_Options":
        if means.costs:
            tables = by_seconds(grid, means.costs, means.ready, frozen=means.frozen, packed=True)
        else:
            tables = by_cells(grid, means.ready if means.frozen else None, packed=True)
        entries: dict[int, dict[int, int]] = {}
        for place, buckets in enumerate(tables.buckets):
            (size,) = buckets[0].sizes.values()
            segments = buckets[0].segments
            assert segments is not None
            entries.setdefault(size, {})[segments] = place
        if means.frozen:
            warm = {
                size: {most: place for most, place in own.items() if tables.warm[place]}
                for size, own in entries.items()
            }
            warm = {size: own for size, own in warm.items() if own}
            if warm and max(warm) >= longest:  # otherwise something is missing, and the call will say what
                entries = warm
        return cls(tables, entries)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.entries)

    def batches(self, lengths: np.ndarray, sizes: tuple[int, ...]) -> list[Job]:
        """Return the batches in rows of these sizes."""
        packed = pack(lengths, sizes, tuple(max(self.entries[size]) for size in sizes))
        return [job for size, rows in packed.items() for job in self._jobs(size, rows)]

    def cost(self, jobs: list[Job]) -> float:
        """Return what batches cost, programs that do not exist yet included."""
        counts: dict[int, int] = {}
        for job in jobs:
            (size,) = job.bucket.sizes.values()
            assert job.bucket.segments is not None and job.used is not None
            place = self.entries[size][job.bucket.segments]
            counts[place] = counts.get(place, 0) + job.used
        return self._cost(counts)

    def _cost(self, counts: dict[int, int]) -> float:
        """Return what rows cost, counted by their place in the tables."""
        places, num = np.array(list(counts), np.intp), np.array(list(counts.values()), np.int64)
        return float(self.tables.cost(places, num).sum())

    def _jobs(self, size: int, rows: list[PackedRow]) -> list[Job]:
        """Return the batches of rows of one size: all with the most segments needed, or grouped by them."""
        entries = self.entries[size]
        groups: dict[int, list[PackedRow]] = {}
        for row in rows:
            groups.setdefault(next(most for most in entries if most >= len(row.indices)), []).append(row)
        together = {max(groups): rows}
        chosen = groups if self._price(size, groups) < self._price(size, together) else together
        return [job for most in sorted(chosen) for job in self._of_segments(entries[most], chosen[most])]

    def _price(self, size: int, groups: dict[int, list[PackedRow]]) -> float:
        return self._cost({self.entries[size][most]: len(rows) for most, rows in groups.items()})

    def _of_segments(self, place: int, rows: list[PackedRow]) -> list[Job]:
        jobs, start = [], 0
        for bucket in self.tables.batches(place, len(rows)):
            part = rows[start : start + bucket["rows"]]
            start += len(part)
            jobs.append(Job(bucket, tuple(i for row in part for i in row.indices), len(part)))
        return jobs
