"""What batches take and when a device will be free, as far as that is known. All times are float seconds."""

import collections
import dataclasses
import math
from collections.abc import Hashable

from ._costs import Costs
from ._grid import Bucket
from ._lanes import Kind

_WEIGHT = 0.3  # of a new time in the running mean of a bucket's times
_USUAL = 0.7  # the share of deliveries after which as many came again, from which on that is expected
_NOTED = 0.05  # by which share such a mean changes before decisions are based on the new one


@dataclasses.dataclass(eq=False)
class Estimate:
    """The seconds of a batch in one bucket; None before anything is known.

    Attributes:
      observed: whether this bucket itself was measured; otherwise it is a guess from others.
      noted: the seconds when the version of all estimates last grew because of this one.
    """

    seconds: float | None
    observed: bool = False
    noted: float = 0.0


class Seconds:
    """What batches take: costs that are given, replaced by what is observed.

    Args:
      costs: those measured beforehand, if any.

    Attributes:
      version: grows when an estimate changed by more than a few percent.
    """

    def __init__(self, costs: Costs):
        self._costs = costs
        self.version = 0

    def of(self, kind: Kind, bucket: Bucket) -> Estimate:
        """Return the estimate of a bucket; the same object follows what is observed later."""
        known = kind.estimates.get(bucket)
        if known is None:
            known = kind.estimates[bucket] = Estimate(
                self._guess(kind, bucket), self._is_measured(kind, bucket)
            )
        return known

    def observe(self, kind: Kind, bucket: Bucket, seconds: float) -> None:
        """Learn from a batch that took so long."""
        estimate = self.of(kind, bucket)
        if estimate.observed and estimate.seconds:
            estimate.seconds += _WEIGHT * (seconds - estimate.seconds)
            if abs(estimate.seconds - estimate.noted) > _NOTED * estimate.noted:
                estimate.noted = estimate.seconds
                self.version += 1
            return
        estimate.seconds, estimate.observed = max(seconds, 1e-9), True
        estimate.noted = estimate.seconds
        self.version += 1
        for other, each in kind.estimates.items():
            if not each.observed:
                each.seconds = self._guess(kind, other)

    def _is_measured(self, kind: Kind, bucket: Bucket) -> bool:
        return not kind.is_passing and bucket in self._costs.measured

    def _guess(self, kind: Kind, bucket: Bucket) -> float | None:
        if kind.is_passing:  # what was measured was measured in buckets of the grid
            return None
        own = {b: e.seconds for b, e in kind.estimates.items() if e.observed and e.seconds}
        measured = {**self._costs.measured, **own}
        return dataclasses.replace(self._costs, measured=measured).seconds(bucket)


class Returns:
    """How soon callers come again after their results.

    Actors, simulators and benchmarks ask for one thing, wait for it, and ask for the next. After a batch of
    theirs about as many come again shortly; who cannot know that runs them in two halves that take turns, at
    half the speed. What comes between two deliveries is compared with what the first one delivered.
    """

    def __init__(self):
        self._begin, self._num, self._came = -math.inf, 0, 0
        self._took: float | None = None  # until as many had come as were delivered
        self._share = self._seconds = 0.0
        # A full device is told of arrivals after the delivery that they came before.
        self._deliveries: collections.deque[tuple[int, float]] = collections.deque()

    def arrived(self, now: float) -> None:
        """Note an arrival; they come in order."""
        self._begin_windows(now)
        if self._came < self._num and now > self._begin:
            self._came += 1
            if self._came == self._num:
                self._took = now - self._begin

    def delivered(self, num: int, now: float) -> None:
        """Note that so many examples have their results."""
        self._deliveries.append((num, now))

    @property
    def seconds(self) -> float:
        """Within how many seconds after a delivery as many come again; `inf` where they usually do not."""
        self._begin_windows()
        return self._seconds if self._share >= _USUAL else math.inf

    @property
    def latest(self) -> tuple[int, float]:
        """How many have not come again after the latest delivery, and when that was."""
        self._begin_windows()
        return self._num - self._came, self._begin

    def _begin_windows(self, until: float = math.inf) -> None:
        while self._deliveries and self._deliveries[0][1] <= until:
            num, now = self._deliveries.popleft()
            if self._num:
                self._share += _WEIGHT * ((self._took is not None) - self._share)
                if self._took is not None:
                    self._seconds += (_WEIGHT if self._seconds else 1.0) * (self._took - self._seconds)
            self._begin, self._num, self._came, self._took = now, num, 0, None


class Device:
    """What is known of a device that runs one batch after another: what it has, and when it will be free."""

    def __init__(self):
        self._flights: dict[Hashable, tuple[float, float | None]] = {}
        self._done = -math.inf
        self.idle_since = -math.inf
        self.last_seconds = 0.0  # what the latest batch was expected to take; 0.0 if that was not known

    @property
    def in_flight(self) -> int:
        """How many batches it has."""
        return len(self._flights)

    def start(self, flight: Hashable, now: float, seconds: float | None) -> None:
        """Note that a batch was given to it."""
        self._flights[flight] = now, seconds
        self.last_seconds = seconds or 0.0

    def finish(self, flight: Hashable, now: float) -> float:
        """Note that a batch is done, and return how long the device was busy with it."""
        started, _ = self._flights.pop(flight)
        busy = now - max(started, self._done)
        self._done = max(self._done, now)
        if not self._flights:
            self.idle_since = now
        return max(busy, 0.0)

    def free_at(self, now: float) -> float:
        """Return when it will have run all it has: `now` if it is idle, `inf` if that is not known."""
        free = -math.inf
        for started, seconds in self._flights.values():
            if seconds is None:
                return math.inf
            free = max(free, started, self._done) + seconds
        return max(free, now)
