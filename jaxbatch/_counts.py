"""What batches consist of, counted: cells, rows and sizes of each bucket, and how often each length came.

A cell is one element of the product of an example's ragged dims. Valid cells are the example's own, padded
cells are what its row has in the bucket, and filler cells belong to rows that only fill a batch up.
"""

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from ._grid import Bucket

SAMPLES = 16
"""How many of the latest device times of a bucket are kept."""

MAX_LENGTHS = 4096
"""How many different lengths of a dim are told apart; with more, neighbours are counted together."""


@dataclasses.dataclass(frozen=True)
class BucketStatistics:
    """What one bucket did, or will do.

    Attributes:
      seconds: host time spent on its batches: padding, starting, waiting for and cutting results.
      length_sums: for each dim, the sum of the lengths of its examples.
      size_sums: for each dim, the sum of the padded sizes of its rows, those that only fill up included.
      timed: of how many batches the device time is known exactly.
      median_run_seconds: device time of a batch, the median of the last 16 that are known exactly; None if
        there are none, and in sums over buckets.
    """

    batches: int = 0
    examples: int = 0
    valid_cells: int = 0
    padded_cells: int = 0
    filler_cells: int = 0
    seconds: float = 0.0
    length_sums: Mapping[str, int] = dataclasses.field(default_factory=dict)
    size_sums: Mapping[str, int] = dataclasses.field(default_factory=dict)
    timed: int = 0
    median_run_seconds: float | None = None

    @property
    def pad_ratio(self) -> float:
        """Padded cells for each valid one, 1.0 where nothing is padded; filler rows are not in it."""
        return self.padded_cells / self.valid_cells if self.valid_cells else 1.0

    @property
    def padding_share(self) -> float:
        """The share of all cells that hold no example's data, from 0 to 1; filler rows included."""
        total = self.padded_cells + self.filler_cells
        return 1 - self.valid_cells / total if total else 0.0

    @property
    def padding_by_dim(self) -> dict[str, float]:
        """For each dim, the share of its padded sizes that is no length; filler rows included."""
        return {
            dim: 1 - self.length_sums[dim] / size if size else 0.0 for dim, size in self.size_sums.items()
        }

    def __add__(self, other: "BucketStatistics") -> "BucketStatistics":
        if not (self.batches and other.batches):
            return self if self.batches else other
        return BucketStatistics(
            self.batches + other.batches,
            self.examples + other.examples,
            self.valid_cells + other.valid_cells,
            self.padded_cells + other.padded_cells,
            self.filler_cells + other.filler_cells,
            self.seconds + other.seconds,
            _sums(self.length_sums, other.length_sums),
            _sums(self.size_sums, other.size_sums),
            self.timed + other.timed,
        )


class Tally:
    """The counts of one bucket, growing; not safe for several threads."""

    def __init__(self):
        self._batches = self._examples = 0
        self._valid = self._padded = self._filler = 0  # cells
        self._seconds = 0.0
        self._length_sums: dict[str, int] = {}
        self._size_sums: dict[str, int] = {}
        self._samples: collections.deque[float] = collections.deque(maxlen=SAMPLES)
        self._timed = 0

    def add(self, bucket: Bucket, lengths: np.ndarray, seconds: float = 0.0, used: int | None = None) -> None:
        """Count a batch.

        Args:
          lengths: those of its examples, [num, num_dims], in the bucket's order.
          seconds: of the host.
          used: how many rows hold examples, if that is not one for each.
        """
        rows, num, sums = bucket["rows"], len(lengths), lengths.sum(axis=0).tolist()
        cells = bucket.cells // rows
        valid = sums[0] if len(sums) == 1 else int(lengths.prod(axis=1, dtype=np.int64).sum())
        self._batches += 1
        self._examples += num
        self._valid += valid
        used = num if used is None else used
        self._padded += used * cells
        self._filler += (rows - used) * cells
        self._seconds += seconds
        for (dim, size), total in zip(bucket.sizes.items(), sums, strict=True):
            self._length_sums[dim] = self._length_sums.get(dim, 0) + total
            self._size_sums[dim] = self._size_sums.get(dim, 0) + rows * size

    def add_run(self, seconds: float) -> None:
        """Note the device time of a batch, known exactly."""
        self._samples.append(seconds)
        self._timed += 1

    @property
    def typical(self) -> float | None:
        """The median of the latest device times."""
        return statistics.median(self._samples) if self._samples else None

    def freeze(self) -> BucketStatistics:
        """Return the counts so far."""
        return BucketStatistics(
            self._batches,
            self._examples,
            self._valid,
            self._padded,
            self._filler,
            self._seconds,
            dict(self._length_sums),
            dict(self._size_sums),
            self._timed,
            self.typical,
        )


class Histogram:
    """How often each length came, in bounded memory."""

    def __init__(self):
        self._width = 1
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, lengths: Sequence[int]) -> None:
        """Count these lengths."""
        width = self._width
        self._counts.update(lengths if width == 1 else [length - length % width for length in lengths])
        while len(self._counts) > MAX_LENGTHS:
            self._width = width = 2 * self._width
            merged: collections.Counter[int] = collections.Counter()
            for length, num in self._counts.items():
                merged[length - length % width] += num
            self._counts = merged

    def freeze(self) -> dict[int, int]:
        """Return the counts by length, ascending."""
        return dict(sorted(self._counts.items()))


def bucket_name(bucket: Bucket) -> str:
    """Return what tables call a bucket: "n=16 rows=4"."""
    return " ".join(f"{name}={size}" for name, size in bucket.items())


def by_size(bucket: Bucket) -> tuple[int, int]:
    """Return what buckets are sorted by: cells of a row, then rows."""
    return bucket.cells // bucket["rows"], bucket["rows"]


def _sums(one: Mapping[str, int], two: Mapping[str, int]) -> dict[str, int]:
    return {dim: one.get(dim, 0) + two.get(dim, 0) for dim in {**one, **two}}
