"""Which waiting examples run now, in which bucket, and when to ask again: without a clock or a thread.

A `Planner` is told what arrives, what is cancelled, which programs exist and what the device does, each with
the time. `decide(now)` answers with batches to start, examples whose deadline has passed, programs that are
wanted, and when to ask again if nothing happens before. So every question of policy is a test with a table.

The policy in short. An idle device starts at once, unless another example is expected so soon that starting
together makes the sum of latencies smaller (`worth_waiting`); it waits for `max_delay` at most. A busy device
is given another batch only if that is full, or if the device will be free in a moment: meanwhile batches
fill by themselves, the more so the higher the load. Among lanes the higher priority comes first, aged by
waiting, then who would miss a deadline, then who has many examples for each second of the device and has
waited for long.
"""

import dataclasses
import math
from collections.abc import Callable

from ._costs import Costs
from ._estimates import Device, Estimate, Seconds
from ._grid import Bucket
from ._lanes import Kind, Lane, Waiter

_OVERHEAD = 1e-4  # seconds that each batch costs the host, whatever it holds
_CLOSE = 0.97  # of two batches whose examples per second differ less than this, the shorter is taken
_FULL = 0.9  # a batch that runs as many examples per second as this part of the best does counts as full
_BETTER = 1.1  # by how much a new program must be faster than those that exist
# How long before the device is free the next batch is prepared: so many seconds, but at most a quarter of the
# batch that runs, since short batches are better filled; or this part of it, if that is more.
_LEAD, _LEAD_SHARE = 1e-3, 0.1
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
class Batch:
    """Examples to start now; `seconds` is what they are expected to take, None if that is not known."""

    kind: Kind
    bucket: Bucket
    waiters: tuple[Waiter, ...]
    seconds: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What to do now.

    Attributes:
      batches: to be started, in this order.
      expired: examples whose deadline has passed; they are not to be run.
      wanted: programs to compile, each asked for once; none of them is needed for `batches`.
      wake: when to ask again if nothing is reported before; `inf` where only a report changes anything.
    """

    batches: tuple[Batch, ...] = ()
    expired: tuple[Waiter, ...] = ()
    wanted: tuple[tuple[Kind, Bucket], ...] = ()
    wake: float = math.inf


# --- the decision ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Option:
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
class _Candidate:
    """What a lane would run now; `due` is when it need not wait for mates any longer."""

    lane: Lane
    option: _Option
    num: int
    full: bool
    due: float


class Planner:
    """The examples that wait, and the decision which of them run.

    Args:
      rows_for: returns the numbers of rows that may be used for a kind at these sizes, ascending.
      device: what the planner looks at; whoever starts and finishes batches tells it.
    """

    def __init__(
        self,
        rules: Rules,
        rows_for: Callable[[Kind, tuple[int, ...]], tuple[int, ...]],
        costs: Costs | None = None,
        device: Device | None = None,
    ):
        self.rules = rules
        self.device = Device() if device is None else device
        self.seconds = Seconds(costs or Costs())
        self._rows_for = rows_for
        self._lanes: dict[tuple[Kind, tuple[int, ...]], Lane] = {}
        self._active: dict[Lane, None] = {}  # those in which somebody waits
        self._options: dict[Lane, tuple[int, tuple[_Option, ...]]] = {}
        self._asked: set[tuple[Kind, Bucket]] = set()

    @property
    def count(self) -> int:
        """How many examples wait."""
        return sum(lane.count for lane in self._active)

    # --- reports ---

    def add(self, waiter: Waiter) -> None:
        """Let an example wait."""
        key = waiter.kind, waiter.sizes
        lane = self._lanes.get(key)
        if lane is None:
            lane = Lane(*key, self._rows_for(*key), self.rules.aging)
            self._lanes[key] = lane
        lane.add(waiter)
        self._active[lane] = None

    def discard(self, waiter: Waiter) -> None:
        """Forget an example that was cancelled; one that does not wait is left alone."""
        lane = self._lanes.get((waiter.kind, waiter.sizes))
        if lane is not None and not waiter.gone:
            lane.remove(waiter)
            self._settle(lane)

    def take(self, kind: Kind | None = None) -> list[Waiter]:
        """Remove and return all examples that wait, or those of one kind."""
        lanes = [lane for lane in self._active if kind is None or lane.kind is kind]
        taken = [waiter for lane in lanes for waiter in lane.take(lane.count)]
        for lane in lanes:
            self._settle(lane)
        return taken

    def take_stuck(self, kind: Kind, bucket: Bucket) -> list[Waiter]:
        """Remove and return the examples that no program can run, of a kind and the sizes of a bucket."""
        lanes = [lane for lane in self._active if lane.kind is kind and not lane.buckets]
        stuck = [lane for lane in lanes if lane.own(1).sizes == bucket.sizes]
        taken = [waiter for lane in stuck for waiter in lane.take(lane.count)]
        for lane in stuck:
            self._settle(lane)
        return taken

    def compiled(self, kind: Kind, programs: frozenset[Bucket]) -> None:
        """Report which programs a kind has now."""
        kind.programs = programs
        kind.version += 1
        self._asked -= {(kind, bucket) for bucket in programs}

    def refuse(self, kind: Kind, bucket: Bucket) -> None:
        """Report that there is no program for a bucket; it is not asked for again while others serve."""
        kind.refused.add(bucket)
        kind.version += 1
        self._asked.discard((kind, bucket))

    def exhaust(self, kind: Kind, bucket: Bucket) -> None:
        """Report that a bucket does not fit into memory; neither it nor larger ones are used again."""
        kind.exhausted.append(bucket)
        kind.version += 1
        self._asked.discard((kind, bucket))

    # --- the question ---

    def decide(self, now: float) -> Decision:
        """Return what to do now; what it names no longer waits."""
        expired = [waiter for lane in list(self._active) for waiter in lane.expired(now)]
        for lane in list(self._active):
            self._settle(lane)
        batches: list[Batch] = []
        wanted: list[tuple[Kind, Bucket]] = []
        wake = min((lane.deadline for lane in self._active), default=math.inf)
        free, in_flight, last = self.device.free_at(now), self.device.in_flight, self.device.last_seconds
        while self._active and in_flight < self.rules.in_flight:
            candidates = [c for lane in self._active if (c := self._candidate(lane, now, free, wanted))]
            soon = free - max(min(_LEAD, last / 4), _LEAD_SHARE * last)
            if in_flight and now < soon:  # the device is busy for longer: only what need not grow
                wake = min(wake, soon)
                candidates = [c for c in candidates if c.full]
            ready = [c for c in candidates if c.due <= now]
            if not ready:
                wake = min([wake, *(c.due for c in candidates)])
                break
            batch = self._batch(self._first(ready, now))
            batches.append(batch)
            in_flight += 1
            last = batch.seconds or 0.0
            free = math.inf if batch.seconds is None else max(free, now) + last
        if in_flight >= self.rules.in_flight:
            for lane in self._active:
                self._want(lane, lane.count, None, wanted)
        return Decision(tuple(batches), tuple(expired), tuple(wanted), wake)

    # --- one lane ---

    def _candidate(
        self, lane: Lane, now: float, free: float, wanted: list[tuple[Kind, Bucket]]
    ) -> _Candidate | None:
        options = self._allowed(lane, now)
        if not options:
            self._want(lane, lane.count, None, wanted)
            return None
        num = lane.count
        best = max(option.rate(option.rows) for option in options)
        rates = [option.rate(num) for option in options]
        top = max(rates)
        option = next(o for o, rate in zip(options, rates, strict=True) if rate >= _CLOSE * top)
        self._want(lane, num, option, wanted)
        num = min(num, option.rows)
        full = num == option.rows and (option.rate(num) >= _FULL * best or option is options[-1])
        if full:
            return _Candidate(lane, option, num, True, -math.inf)
        return _Candidate(lane, option, num, False, self._due(lane, options, option))

    def _due(self, lane: Lane, options: tuple[_Option, ...], option: _Option) -> float:
        """Return until when a batch that is not full waits for mates, on an idle device."""
        if not self.rules.patient or self.rules.max_delay <= 0 or lane.gap is None:
            return -math.inf
        patience = worth_waiting(lane.count, *[_least(options, n) for n in (1, lane.count, lane.count + 1)])
        if option.estimate.seconds is None or lane.gap >= patience:
            return -math.inf
        limits = [lane.oldest + self.rules.max_delay, lane.deadline - _SLACK, lane.last_arrival + patience]
        if self.rules.target_latency is not None:
            limits.append(lane.oldest + self.rules.target_latency - option.seconds)
        return min(limits)

    def _allowed(self, lane: Lane, now: float) -> tuple[_Option, ...]:
        """Return the ways to run a lane now, by rows; a target for the latency may leave out long ones."""
        known = self._options.get(lane)
        if known is None or known[0] != lane.kind.version:
            options = tuple(
                _Option(bucket, bucket["rows"], self.seconds.of(lane.kind, bucket)) for bucket in lane.buckets
            )
            known = self._options[lane] = lane.kind.version, options
        options, target = known[1], self.rules.target_latency
        if target is None or not options or now - lane.oldest > target:  # late already: as fast as can be
            return options
        short = tuple(option for option in options if 2 * option.seconds <= target)
        return short or options[:1]

    def _want(self, lane: Lane, num: int, option: _Option | None, wanted: list[tuple[Kind, Bucket]]) -> None:
        """Ask for the program that would suit a lane best, unless those that exist are nearly as good."""
        if lane.is_complete or not lane.kind.is_open:
            return
        if lane.buckets and (option is None or not self.rules.compiles):
            return
        bucket = lane.own(num)
        if bucket in lane.kind.programs or (lane.kind, bucket) in self._asked:
            return
        if option is not None:
            if bucket in lane.kind.refused:
                return
            new = _Option(bucket, bucket["rows"], self.seconds.of(lane.kind, bucket))
            if new.rate(num) < _BETTER * option.rate(num):
                return
        self._asked.add((lane.kind, bucket))
        wanted.append((lane.kind, bucket))

    # --- among lanes ---

    def _first(self, ready: list[_Candidate], now: float) -> _Candidate:
        longest = max(candidate.option.seconds for candidate in ready)

        def order(candidate: _Candidate) -> tuple[float, bool, float]:
            lane, option = candidate.lane, candidate.option
            level = (now - lane.rank) // self.rules.aging
            # Of equal rates the one that waits for longer; squared, so that large examples get their turn.
            merit = option.rate(candidate.num) * (now - lane.oldest + longest) ** 2
            return level, lane.deadline < now + longest, merit

        return max(ready, key=order)

    def _batch(self, candidate: _Candidate) -> Batch:
        """Take a lane's first examples, and give rows that would be empty to shorter ones that wait."""
        lane, bucket = candidate.lane, candidate.option.bucket
        waiters = lane.take(candidate.num)
        self._settle(lane)
        room = candidate.option.rows - len(waiters)
        if room and lane.kind.moves:
            others = [o for o in self._active if o.kind is lane.kind and o.holds(bucket)]
            while room and others:
                first = min(others, key=lambda other: other.rank)
                waiters += first.take(1)
                room -= 1
                self._settle(first)
                others = [other for other in others if other.count]
        return Batch(lane.kind, bucket, tuple(waiters), candidate.option.estimate.seconds)

    def _settle(self, lane: Lane) -> None:
        if not lane.count:
            self._active.pop(lane, None)
            if lane.kind.is_passing:
                self._lanes.pop((lane.kind, lane.sizes), None)
                self._options.pop(lane, None)


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


def _least(options: tuple[_Option, ...], num: int) -> float:
    """Return the seconds of the shortest batch that holds `num` examples, or of the largest one."""
    return min((o.seconds for o in options if o.rows >= num), default=options[-1].seconds)
