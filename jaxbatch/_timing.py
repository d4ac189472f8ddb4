"""When batches were where: what the clock showed on their way, and what follows from it about the device.

Nothing here reads a clock. All times are float seconds of `time.perf_counter`. A device is seen from outside
only: a batch is known to be done at an exact time if somebody waited for it, or if it was done as soon as it
was started (small programs on a CPU). All else is an estimate, and is marked as one.
"""

import dataclasses
from typing import NamedTuple

from ._grid import Bucket

NEVER = float("-inf")


class BatchTimes(NamedTuple):
    """When one batch passed each point, in ascending order (`ready` apart).

    Attributes:
      begun: padding began.
      padded: the arrays were padded, and the program was called.
      started: the call returned, and the device had the batch.
      waited: the host turned to its results.
      fetched: the results were on the host.
      delivered: the results were cut and in their places.
      ready: when the device was done; None if it was done at an unknown time between `started` and `waited`.
    """

    begun: float
    padded: float
    started: float
    waited: float
    fetched: float
    delivered: float
    ready: float | None = None

    @property
    def host_seconds(self) -> float:
        """Time that the host spent on the batch: padding, starting, waiting for results and cutting them."""
        return self.started - self.begun + self.delivered - self.waited


class Run(NamedTuple):
    """When the device ran a batch.

    Attributes:
      is_exact: whether both ends are known; otherwise a typical time of its bucket is assumed, or none.
    """

    begin: float
    end: float
    is_exact: bool


@dataclasses.dataclass(frozen=True)
class BatchRecord:
    """One batch of the latest ones.

    Attributes:
      examples: how many; the other rows only filled the batch up.
      run: when the device ran it, as far as that is known.
    """

    bucket: Bucket
    examples: int
    times: BatchTimes
    run: Run


@dataclasses.dataclass(frozen=True)
class TimeStatistics:
    """Where the time of the calls went, in seconds.

    Attributes:
      wall: from the beginning of each call to its last result; of calls at the same time, once. It includes
        what is not listed here: checking and planning, tracing and compiling, and in a `map` the consumer.
      device: the device is known, or estimated from its bucket's typical time, to have run a batch.
      padding: the host padded and stacked.
      starting: the host called programs, which may include transfers, and small programs on a CPU.
      waiting: the host waited for results, and copied them from the device.
      cutting: the host cut results to their sizes.
    """

    wall: float = 0.0
    device: float = 0.0
    padding: float = 0.0
    starting: float = 0.0
    waiting: float = 0.0
    cutting: float = 0.0

    @property
    def occupancy(self) -> float | None:
        """The share of the wall time in which the device was busy; None before anything ran."""
        return min(self.device / self.wall, 1.0) if self.wall > 0 else None

    @property
    def other(self) -> float:
        """Wall time in which the host did nothing that is listed here; 0.0 at least."""
        return max(self.wall - self.padding - self.starting - self.waiting - self.cutting, 0.0)


class Coverage:
    """The length of the union of intervals that arrive roughly in order."""

    def __init__(self):
        self._closed = 0.0
        self._open: list[tuple[float, float]] = []

    def add(self, begin: float, end: float) -> None:
        """Add an interval; what of it was covered before is not counted again."""
        if end <= begin:
            return
        apart = []
        for low, high in self._open:
            if high < begin or low > end:
                apart.append((low, high))
            else:
                begin, end = min(begin, low), max(end, high)
        self._open = sorted([*apart, (begin, end)])
        while len(self._open) > 8:  # as many as threads could plausibly reach back over
            low, high = self._open.pop(0)
            self._closed += high - low

    @property
    def seconds(self) -> float:
        """The total length."""
        return self._closed + sum(high - low for low, high in self._open)


class DeviceClock:
    """Tells when the device ran each batch, from times that are given in the order of delivery.

    A device runs batches one after another, so a batch begins when it was started or, if that is later, when
    the one before it was done. Both ends are exact only if that moment is known too, and if no other call
    had a batch on the device at the same time.
    """

    def __init__(self):
        self._call: object = None
        self._done = NEVER  # when the call's previous batch was done: known, or estimated and `_at_latest`
        self._at_latest: float | None = None
        self._fetched = self._others = NEVER  # when anything, and anything of another call, was last fetched

    def run(self, times: BatchTimes, call: object, typical: float | None) -> Run:
        """Return when a batch ran.

        Args:
          call: the same object for all batches of a call.
          typical: the seconds that such a batch is known to take, to estimate with.
        """
        if call is not self._call:
            self._call, self._others = call, self._fetched
            self._done, self._at_latest = NEVER, None
        self._fetched = max(self._fetched, times.fetched)
        begin, ready = max(times.started, self._done), times.ready
        if ready is None:
            begin = min(begin, times.waited)
            self._done = min(begin + (typical or 0.0), times.waited)
            self._at_latest = times.waited
            return Run(begin, self._done, False)
        if ready <= times.started:  # it ran inside the call of its program
            run = Run(times.padded, times.started, False)
        else:
            known = self._at_latest is None or self._at_latest <= times.started
            run = Run(begin, max(ready, begin), known and self._others <= times.started)
        self._done, self._at_latest = max(self._done, ready), None
        return run
