"""Which waiting examples run now, in which bucket, and when to ask again: without a clock or a thread.

A `Planner` is told what arrives, what is cancelled, which programs exist and what the device does, each with
the time. `decide(now)` answers with batches to start, examples whose deadline has passed, programs that are
wanted, and when to ask again if nothing happens before. So every question of policy is a test with a table.

The policy in short. An idle device starts at once, unless others are expected so soon that starting together
makes the sum of latencies smaller (`_options`); it waits for `max_delay` at most. A busy device is
given another batch only if that is full, or if the device will be free in a moment: meanwhile batches fill
by themselves, the more so the higher the load. Among lanes the higher priority comes first, aged by
waiting, then who would miss a deadline, then who has many examples for each second of the device and has
waited for long. Shorter examples join a batch of longer ones where that makes the sum of latencies smaller.
"""

import dataclasses
import math
from collections.abc import Callable

from ._costs import Costs
from ._estimates import Device, Returns, Seconds
from ._grid import Bucket
from ._joining import group
from ._lanes import Kind, Lane, Waiter
from ._options import Candidate, Coming, Option, Options, Rules

# How long before the device is free the next batch is prepared: so many seconds, but at most a quarter of the
# batch that runs, since short batches are better filled; or this part of it, if that is more.
_LEAD, _LEAD_SHARE = 1e-3, 0.1


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
      enough: how many arrivals are a reason to ask again before that.
    """

    batches: tuple[Batch, ...] = ()
    expired: tuple[Waiter, ...] = ()
    wanted: tuple[tuple[Kind, Bucket], ...] = ()
    wake: float = math.inf
    enough: float | int = 1


class Planner:
    """The examples that wait, and the decision which of them run.

    Args:
      rows_for: returns the numbers of rows that may be used for a kind at these sizes, ascending.
      device: what the planner looks at; whoever starts and finishes batches tells it.

    Attributes:
      running: how many examples are in batches that were started and are not done; their owner keeps it.
    """

    options_type = Options

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
        self.options = self.options_type(rules, self.seconds)
        self._rows_for = rows_for
        self._lanes: dict[tuple[Kind, tuple[int, ...]], Lane] = {}
        self._active: dict[Lane, None] = {}  # those in which somebody waits
        self._asked: set[tuple[Kind, Bucket]] = set()
        self._returns = Returns()
        self.running = 0

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
        self._returns.arrived(waiter.arrival)

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

    def delivered(self, num: int, now: float) -> None:
        """Report that so many examples have their results."""
        self._returns.delivered(num, now)

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
        known: dict[Lane, Candidate | None] = {}
        enough: float | int = 1
        while self._active and in_flight < self.rules.in_flight:
            candidates = self._candidates(known, now, wanted)
            soon = free - max(min(_LEAD, last / 4), _LEAD_SHARE * last)
            if in_flight and now < soon:  # the device is busy for longer: only what need not grow
                wake = min(wake, soon)
                ready = [candidate for candidate in candidates if candidate.full]
            else:
                coming = self._coming(free, in_flight)
                dues = [self.options.due(candidate, now, coming) for candidate in candidates]
                ready = [
                    candidate for candidate, (due, _) in zip(candidates, dues, strict=True) if due <= now
                ]
                if dues and not ready:
                    wake, enough = min(wake, min(dues)[0]), min(mates for _, mates in dues)
            if not ready:
                break
            batch = self._batch(self._first(ready, now), candidates)
            batches.append(batch)
            in_flight += 1
            last = batch.seconds or 0.0
            free = math.inf if batch.seconds is None else max(free, now) + last
        if in_flight >= self.rules.in_flight:
            enough = math.inf
            for lane in self._active:
                self._want(lane, None, wanted)
        return Decision(tuple(batches), tuple(expired), tuple(wanted), wake, enough)

    def _coming(self, free: float, in_flight: int) -> Coming | None:
        """Return who is expected to come again after the batch that was done last, or that runs."""
        seconds = self._returns.seconds
        if seconds == math.inf or free == math.inf:
            return None
        if in_flight:
            return Coming(self.running, free, seconds)
        num, done = self._returns.latest
        return Coming(num, done, seconds)

    # --- one lane ---

    def _candidates(
        self, known: dict[Lane, Candidate | None], now: float, wanted: list[tuple[Kind, Bucket]]
    ) -> list[Candidate]:
        """Return what each lane would run now; `known` keeps it for as long as nobody else comes or goes."""
        for lane in self._active:
            candidate = known.get(lane)
            if candidate is None or candidate.waiting != lane.count:
                candidate = known[lane] = self.options.best(lane, now)
                self._want(lane, None if candidate is None else candidate.option, wanted)
        return [candidate for lane in self._active if (candidate := known[lane]) is not None]

    def _want(self, lane: Lane, option: Option | None, wanted: list[tuple[Kind, Bucket]]) -> None:
        """Ask for the program that a lane misses, once."""
        bucket = self.options.missing(lane, option)
        if bucket is not None and (lane.kind, bucket) not in self._asked:
            self._asked.add((lane.kind, bucket))
            wanted.append((lane.kind, bucket))

    def _settle(self, lane: Lane) -> None:
        """Note whether somebody still waits in a lane."""
        if not lane.count:
            self._active.pop(lane, None)
            if lane.kind.is_passing:
                self._lanes.pop((lane.kind, lane.sizes), None)
                self.options.forget(lane)

    # --- among lanes ---

    def _first(self, ready: list[Candidate], now: float) -> Candidate:
        longest = max(candidate.option.seconds for candidate in ready)

        def order(candidate: Candidate) -> tuple[float, bool, float]:
            lane, option = candidate.lane, candidate.option
            level = (now - lane.rank) // self.rules.aging
            # Of equal rates the one that waits for longer; squared, so that large examples get their turn.
            merit = option.rate(candidate.num) * (now - lane.oldest + longest) ** 2
            return level, lane.deadline < now + longest, merit

        return max(ready, key=order)

    def _batch(self, first: Candidate, candidates: list[Candidate]) -> Batch:
        """Take a lane's first examples, and those of other lanes that are better run together with them.

        Rows that would be empty in any case are given to shorter examples too.
        """
        members, option = group(first, candidates, self.count)
        waiters = [waiter for each in members for waiter in each.lane.take(each.num)]
        for each in members:
            self._settle(each.lane)
        waiters += self._fill(first.lane.kind, option, option.rows - len(waiters))
        return Batch(first.lane.kind, option.bucket, tuple(waiters), option.estimate.seconds)

    def _fill(self, kind: Kind, option: Option, room: int) -> list[Waiter]:
        """Take shorter examples for rows that would be empty."""
        if not (room and kind.moves):
            return []
        taken: list[Waiter] = []
        others = [lane for lane in self._active if lane.kind is kind and lane.holds(option.bucket)]
        while len(taken) < room and others:
            first = min(others, key=lambda other: other.rank)
            taken += first.take(1)
            self._settle(first)
            others = [other for other in others if other.count]
        return taken
