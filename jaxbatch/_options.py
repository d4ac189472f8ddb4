"""The ways to run one lane: which there are, which is best now, and how long it should wait for mates.

An option is a bucket that has a program. The best one runs most examples a second for as many as wait. An
idle device waits for further ones while that makes the sum of latencies smaller (`worth_waiting`).
"""

import dataclasses
import math

from ._estimates import Estimate, Seconds
from ._grid import Bucket
from ._lanes import Lane

_OVERHEAD = 1e-4  # seconds that each batch costs the host, whatever it holds
_CLOSE = 0.97  # of two batches whose examples per second differ less than this, the shorter is taken
_FULL = 0.9  # a batch that runs as many examples per second as this part of the best does counts as full
_BETTER = 1.1  # by how much a new program must be faster than those that exist
_HOPE = 0.2  # the power of the rows by which a guess is shortened
_SLACK = 2e-3  # how long before a deadline an example stops to wait for mates


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
        return min(num, self.rows) / (self.seconds + _OVERHEAD)


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """What a lane would run now; `due` is when it need not wait for mates any longer."""

    lane: Lane
    option: Option
    num: int
    full: bool
    due: float


class Options:
    """The options of lanes.

    Args:
      seconds: what batches take.
    """

    def __init__(self, rules: Rules, seconds: Seconds):
        self._rules = rules
        self._seconds = seconds
        self._known: dict[Lane, tuple[int, tuple[Option, ...]]] = {}

    def best(self, lane: Lane, now: float) -> Candidate | None:
        """Return what a lane would run now; None where it has no program."""
        options = self.allowed(lane, now)
        if not options:
            return None
        most = max(option.rate(option.rows) for option in options)
        rates = [option.rate(lane.count) for option in options]
        top = max(rates)
        option = next(o for o, rate in zip(options, rates, strict=True) if rate >= _CLOSE * top)
        num = min(lane.count, option.rows)
        full = num == option.rows and (option.rate(num) >= _FULL * most or option is options[-1])
        return Candidate(lane, option, num, full, -math.inf if full else self.due(lane, options, option))

    def allowed(self, lane: Lane, now: float) -> tuple[Option, ...]:
        """Return the ways to run a lane now, by rows; a target for the latency may leave out long ones."""
        known = self._known.get(lane)
        if known is None or known[0] != lane.kind.version:
            found = [Option(bucket, bucket["rows"], self._estimate(lane, bucket)) for bucket in lane.buckets]
            known = self._known[lane] = lane.kind.version, tuple(found)
        options, target = known[1], self._rules.target_latency
        if target is None or not options or now - lane.oldest > target:  # late already: as fast as can be
            return options
        short = tuple(option for option in options if 2 * option.seconds <= target)
        return short or options[:1]

    def due(self, lane: Lane, options: tuple[Option, ...], option: Option) -> float:
        """Return until when a batch that is not full waits for mates, on an idle device."""
        if not self._rules.patient or self._rules.max_delay <= 0 or lane.gap is None:
            return -math.inf
        patience = worth_waiting(lane.count, *[_least(options, n) for n in (1, lane.count, lane.count + 1)])
        if option.estimate.seconds is None or lane.gap >= patience:
            return -math.inf
        limits = [lane.oldest + self._rules.max_delay, lane.deadline - _SLACK, lane.last_arrival + patience]
        if self._rules.target_latency is not None:
            limits.append(lane.oldest + self._rules.target_latency - option.seconds)
        return min(limits)

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


def worth_waiting(num: int, one: float, now: float, more: float) -> float:
    """Return the gap until the next arrival below which `num` examples on an idle device gain by waiting.

    If the next example comes after a gap `t`, starting now gives latencies of `num * now + now - t + one`
    (the next one waits for this batch and runs alone), and waiting gives `num * (t + more) + more`. Waiting
    makes the sum smaller if t is less than what is returned; 0.0 or below means never.

    Args:
      one: seconds of a batch of one example.
      now: seconds of a batch of `num`.
      more: seconds of a batch of `num + 1`.
    """
    return (now + one - more - num * (more - now)) / (num + 1)


def _least(options: tuple[Option, ...], num: int) -> float:
    """Return the seconds of the shortest batch that holds `num` examples, or of the largest one."""
    return min((o.seconds for o in options if o.rows >= num), default=options[-1].seconds)
