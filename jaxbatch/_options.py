"""The ways to run one lane: which there are, which is best now, and how long it should wait for mates.

An option is a bucket that has a program. The best one runs most examples a second for as many as wait. An
idle device waits for further ones while that makes the sum of latencies smaller (`worth_waiting`).
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

from ._estimates import Estimate, Seconds
from ._grid import Bucket
from ._lanes import Lane

OVERHEAD = 1e-4  # seconds that each batch costs the host, whatever it holds
_CLOSE = 0.97  # of two batches whose examples per second differ less than this, the shorter is taken
_FULL = 0.9  # a batch that runs as many examples per second as this part of the best does counts as full
_BETTER = 1.1  # by how much a new program must be faster than those that exist
_HOPE = 0.2  # the power of the rows by which a guess is shortened
_SLACK = 2e-3  # how long before a deadline an example stops to wait for mates
_LATE = 1.5  # after so many times the usual seconds nobody is expected to come again any more


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the planner may do.

    Attributes:
      max_delay: the longest that an example waits for mates while the device is free, in seconds.
      target_latency: seconds from arrival to result that batches should keep; None for none. While they can,
        batches have only so many rows that one can be waited for and another be run in this time.
      aging: seconds of waiting that count as much as one step of priority.
      in_flight: batches on the device at the same time, at most.
      patient: whether an idle device waits for mates where that pays.
      compiles: whether programs that are missing may be asked for, where others could do.
    """

    max_delay: float | int = 2e-3
    target_latency: float | int | None = None
    aging: float | int = 1.0
    in_flight: int = 2
    patient: bool = True
    compiles: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """A way to run a lane: `rows` of `bucket`."""

    bucket: Bucket
    rows: int
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """The expected seconds; where nothing is known, cells stand for them.

        A guess follows the cells, by which no batch would be faster than its examples one by one, and none
        would ever be tried. So it counts less, the more so the more rows there are.
        """
        estimate = self.estimate
        if estimate.seconds is None:
            return 1e-7 * self.bucket.cells
        return estimate.seconds * (1 if estimate.observed else self.rows**-_HOPE)

    def rate(self, num: int) -> float:
        """Return how many examples a second it runs if `num` wait."""
        return min(num, self.rows) / (self.seconds + OVERHEAD)


class Table:
    """The ways to run a lane, by rows, with what a decision needs of them at once.

    Attributes:
      most: the most examples a second that any of them runs when it is full.
    """

    def __init__(self, options: Sequence[Option]):
        self.options = options
        self._rows = [option.rows for option in options]
        self._seconds = [option.seconds for option in options]
        self._least = list(itertools.accumulate(reversed(self._seconds), min))[::-1]
        self.most = max(map(self._rate, self._seconds, self._rows), default=0.0)

    def best(self, num: int) -> Option:
        """Return the option that runs most examples a second if `num` wait."""
        rates = [self._rate(s, min(num, rows)) for s, rows in zip(self._seconds, self._rows, strict=True)]
        enough = _CLOSE * max(rates)
        return next(option for option, rate in zip(self.options, rates, strict=True) if rate >= enough)

    def least(self, num: int) -> float:
        """Return the seconds of the shortest batch that holds `num` examples, or of the largest one."""
        i = bisect.bisect_left(self._rows, num)
        return self._least[i] if i < len(self._rows) else self._seconds[-1]

    def shortest(self, num: int) -> Option:
        """Return the option behind `least`."""
        i = bisect.bisect_left(self._rows, num)
        return (
            self.options[self._seconds.index(self._least[i], i)] if i < len(self._rows) else self.options[-1]
        )

    @property
    def rows(self) -> int:
        """The most rows."""
        return self._rows[-1]

    @staticmethod
    def _rate(seconds: float, num: int) -> float:
        return num / (seconds + OVERHEAD)


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """What a lane would run now: `num` of those that wait, and whether that is a full batch."""

    lane: Lane
    table: Table
    option: Option
    num: int
    waiting: int
    full: bool


@dataclasses.dataclass(frozen=True)
class Coming:
    """Callers who are expected to come again after a batch.

    Attributes:
      num: how many.
      done: when the batch is done, or was.
      seconds: how long after that all should be there.
    """

    num: int
    done: float
    seconds: float


class Options:
    """The options of lanes.

    Args:
      seconds: what batches take.
    """

    def __init__(self, rules: Rules, seconds: Seconds):
        self._rules = rules
        self._seconds = seconds
        self._known: dict[Lane, tuple[int, int, Table]] = {}

    def best(self, lane: Lane, now: float) -> Candidate | None:
        """Return what a lane would run now; None where it has no program."""
        table, waiting = self.allowed(lane, now), lane.count
        if not table.options:
            return None
        option = table.best(waiting)
        num = min(waiting, option.rows)
        full = num == option.rows and (option.rate(num) >= _FULL * table.most or option is table.options[-1])
        return Candidate(lane, table, option, num, waiting, full)

    def allowed(self, lane: Lane, now: float) -> Table:
        """Return the ways to run a lane now; a target for the latency may leave out long ones."""
        known = self._known.get(lane)
        if known is None or known[0] != lane.kind.version or known[1] != self._seconds.version:
            found = [Option(bucket, bucket["rows"], self._estimate(lane, bucket)) for bucket in lane.buckets]
            known = self._known[lane] = lane.kind.version, self._seconds.version, Table(found)
        table, target = known[2], self._rules.target_latency
        if target is None or now - lane.oldest > target:  # late already: as fast as can be
            return table
        short = [option for option in table.options if 2 * option.seconds <= target]
        return table if len(short) == len(table.options) else Table(short or table.options[:1])

    def due(self, candidate: Candidate, now: float, coming: Coming | None) -> tuple[float, int]:
        """Return until when a batch waits for mates while the device is free, and for how many."""
        lane, option, table = candidate.lane, candidate.option, candidate.table
        rules, num = self._rules, candidate.waiting
        if candidate.full or not rules.patient or rules.max_delay <= 0 or option.estimate.seconds is None:
            return -math.inf, 1
        mates, limits = 0, [lane.deadline - _SLACK]
        if rules.target_latency is not None:
            limits.append(lane.oldest + rules.target_latency - option.seconds)
        patience = worth_waiting((num, table.least(num)), (1, table.least(1)), table.least(num + 1))
        if lane.gap is not None and lane.gap < patience:
            mates, until = 1, min(lane.last_arrival + patience, lane.oldest + rules.max_delay)
        else:
            until = -math.inf
        if coming is not None and (more := min(coming.num, table.rows - num)) > 0:
            patience = worth_waiting(
                (num, table.least(num)), (more, table.least(more)), table.least(num + more)
            )
            if max(coming.done + coming.seconds - max(now, coming.done), 0.0) < patience:
                later = coming.done + min(_LATE * coming.seconds, rules.max_delay)
                if later > until:
                    mates, until = more, later
        return min(until, *limits), max(mates, 1)

    def missing(self, lane: Lane, option: Option | None) -> Bucket | None:
        """Return the program that would suit a lane best, unless those that exist are nearly as good.

        Args:
          option: what the lane would run now, if anything.
        """
        if lane.is_complete or not lane.kind.is_open:
            return None
        if lane.buckets and (option is None or not self._rules.compiles):
            return None
        bucket = lane.own(lane.count)
        if bucket in lane.kind.programs or (option is not None and bucket in lane.kind.refused):
            return None
        if option is not None:
            new = Option(bucket, bucket["rows"], self._estimate(lane, bucket))
            if new.rate(lane.count) < _BETTER * option.rate(lane.count):
                return None
        return bucket

    def forget(self, lane: Lane) -> None:
        """Drop what is kept of a lane."""
        self._known.pop(lane, None)

    def _estimate(self, lane: Lane, bucket: Bucket) -> Estimate:
        return self._seconds.of(lane.kind, bucket)


def worth_waiting(first: tuple[int, float], second: tuple[int, float], joint: float) -> float:
    """Return below what time it pays to wait for mates: then the sum of latencies is smaller.

    If they come after a time `t`, starting now gives latencies of `num * seconds` and, since they wait for
    this batch and run after it, `more * (seconds - t + later)`. Waiting gives `num * (t + joint) + more *
    joint`. What is returned is the `t` of equal sums; at 0.0 or less, waiting never pays.

    Args:
      first: how many examples wait, and the seconds of a batch of them; `second` likewise of the mates.
      joint: seconds of a batch of all.
    """
    (num, seconds), (more, later) = first, second
    return seconds + more / (num + more) * later - joint
