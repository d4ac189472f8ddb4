"""What a dispatcher did so far, in numbers: outcomes, batches, and where the time of requests went."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import _tables

WINDOW = 8192
"""Of how many of the latest requests times are kept, to take quantiles of."""

OUTCOMES = ("completed", "failed", "cancelled", "expired")


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """A distribution of times, in seconds.

    Attributes:
      count: how many there were; `mean` and `max` are of all of them.
      p50: the median of the latest 8192, and `p90`, `p99` likewise; 0.0 before the first.
    """

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @property
    def sum(self) -> float:
        """All times together."""
        return self.count * self.mean


@dataclasses.dataclass(frozen=True)
class DispatcherStatistics:
    """What a dispatcher did so far; a snapshot that does not change.

    Every request that was accepted is pending, in flight, or has one of the four outcomes.

    Attributes:
      submitted: requests that were accepted.
      completed: requests with a result.
      failed: requests with an error of their own, or of the dispatcher.
      cancelled: requests that were cancelled before they ran.
      expired: requests whose deadline passed before they ran.
      invalid: examples that did not match the spec or were too large; they were never accepted.
      refused: examples that were not accepted since the dispatcher was full.
      pending: requests that wait now, and `pending_cells` the padded cells of these.
      in_flight: batches that run now.
      batches: batches that ran; `failed_batches` of those that were started did not.
      rows: rows of the batches that ran, and `filled_rows` those that held an example.
      valid_cells: cells of the examples that ran, and `padded_cells` all cells of their batches.
      queued: waiting for the device, for others before, or for a program.
      waited: waiting for mates while the device was free and the program was there.
      ran: from the start, with padding, to the result on the host.
      total: from `submit` to the result.
    """

    submitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    invalid: int = 0
    refused: int = 0
    pending: int = 0
    pending_cells: int = 0
    in_flight: int = 0
    batches: int = 0
    failed_batches: int = 0
    rows: int = 0
    filled_rows: int = 0
    valid_cells: int = 0
    padded_cells: int = 0
    queued: Quantiles = Quantiles()
    waited: Quantiles = Quantiles()
    ran: Quantiles = Quantiles()
    total: Quantiles = Quantiles()

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many requests ended in each way."""
        return {name: getattr(self, name) for name in OUTCOMES}

    @property
    def fill(self) -> float:
        """The share of rows that held an example, from 0 to 1; 1.0 before the first batch."""
        return self.filled_rows / self.rows if self.rows else 1.0

    @property
    def padding_share(self) -> float:
        """The share of all cells that held no example's data, from 0 to 1."""
        return 1 - self.valid_cells / self.padded_cells if self.padded_cells else 0.0

    def __str__(self) -> str:
        ended = ", ".join(f"{num:,} {name}" for name, num in self.outcomes.items() if num)
        lines = [
            f"{self.submitted:,} submitted ({ended or 'none ended'}), {self.pending:,} pending; "
            f"{self.invalid:,} invalid, {self.refused:,} refused",
            f"{self.batches:,} batches, {self.fill:.1%} of rows filled, {self.padding_share:.1%} padding, "
            f"{self.failed_batches:,} failed, {self.in_flight} in flight",
        ]
        if self.total.count:
            rows = []
            for name in ("queued", "waited", "ran", "total"):
                each = getattr(self, name)
                times = (each.mean, each.p50, each.p90, each.p99, each.max)
                rows.append([name, *map(_tables.seconds, times)])
            lines += ["", *_tables.table(["", "mean", "p50", "p90", "p99", "max"], rows)]
        return "\n".join(lines)


class Times:
    """The latest times of one sort in bounded memory, and the mean and maximum of all."""

    def __init__(self):
        self._latest: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._count, self._sum, self._max = 0, 0.0, 0.0

    def add(self, seconds: Sequence[float]) -> None:
        """Count these times."""
        if not seconds:
            return
        self._latest.extend(seconds)
        self._count += len(seconds)
        self._sum += sum(seconds)
        self._max = max(self._max, max(seconds))

    def copy(self) -> tuple[list[float], int, float, float]:
        """Return what `quantiles` needs, quickly, so that a lock is held for a moment only."""
        return list(self._latest), self._count, self._sum, self._max


def quantiles(latest: Sequence[float], count: int, total: float, most: float) -> Quantiles:
    """Return the distribution behind a copy of `Times`."""
    if not count:
        return Quantiles()
    p50, p90, p99 = np.quantile(latest, (0.5, 0.9, 0.99)).tolist()
    return Quantiles(count, total / count, p50, p90, p99, most)


class Ledger:
    """The counts of one dispatcher, growing; its owner has the lock."""

    def __init__(self):
        self.counts: collections.Counter[str] = collections.Counter()
        self._times = {name: Times() for name in ("queued", "waited", "ran", "total")}

    def add_batch(self, rows: int, num: int, valid_cells: int, padded_cells: int) -> None:
        """Count a batch that ran."""
        counts = self.counts
        counts["batches"] += 1
        counts["rows"] += rows
        counts["filled_rows"] += num
        counts["valid_cells"] += valid_cells
        counts["padded_cells"] += padded_cells

    def add_times(
        self, queued: Sequence[float], waited: Sequence[float], ran: Sequence[float], total: Sequence[float]
    ) -> None:
        """Count the times of requests that completed."""
        for times, own in zip(self._times.values(), (queued, waited, ran, total), strict=True):
            times.add(own)

    def copy(self) -> tuple[dict[str, int], dict[str, tuple[list[float], int, float, float]]]:
        """Return what `freeze` needs."""
        return dict(self.counts), {name: times.copy() for name, times in self._times.items()}


def freeze(
    counts: Mapping[str, int],
    times: Mapping[str, tuple[list[float], int, float, float]],
    *,
    pending: int,
    pending_cells: int,
    in_flight: int,
) -> DispatcherStatistics:
    """Return the snapshot behind a copy of a `Ledger`."""
    numbers: dict[str, Any] = {"pending": pending, "pending_cells": pending_cells, "in_flight": in_flight}
    numbers |= {name: quantiles(*copied) for name, copied in times.items()}
    return DispatcherStatistics(**counts, **numbers)
