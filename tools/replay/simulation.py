"""A trace through a policy, in simulated time."""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxbatch import Bucket, Costs, Grid
from jaxbatch._lanes import Kind, Waiter
from jaxbatch._online import Batch

from .policies import Policy
from .traces import GRID, Arrival


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a simulation gave; times in seconds.

    Attributes:
      latency: of each example that ran, in the order of the trace.
      waited: how long the device was free between an example's arrival and its start.
      late: how many examples were not run since their deadline passed.
      busy: the share of time in which the device ran something.
    """

    latency: np.ndarray
    waited: np.ndarray
    batches: int
    late: int
    busy: float
    seconds: float

    @property
    def throughput(self) -> float:
        """Examples for each second."""
        return len(self.latency) / self.seconds if self.seconds else 0.0


def simulate(
    trace: Iterable[Arrival],
    policy: Policy,
    costs: Costs,
    grid: Grid = GRID,
    *,
    lag: Callable[[float], float] = lambda now: 0.0,
    seconds_of: Callable[[Bucket, float], float] | None = None,
    again: Callable[[float], Arrival | None] = lambda now: None,
) -> Outcome:
    """Run a trace through a policy.

    Args:
      costs: what the planner knows beforehand.
      lag: seconds until the planner hears of an arrival, or of the end of a batch, at a time.
      seconds_of: what a batch really takes that begins at a time; by default what `costs` say.
      again: for each example that is done at a time, the one that its caller asks for next, if any.
    """
    if policy.rows is not None:
        ladders: dict[str, Any] = {dim: list(ladder) for dim, ladder in grid.sizes.items()}
        grid = Grid(list(policy.rows), **ladders)
    kind = Kind(grid.dims)
    planner = policy.planner(policy.rules, lambda _, sizes: grid.rows_for(sizes), costs)
    planner.compiled(kind, frozenset(grid))
    (dim,) = grid.dims
    really = seconds_of or (lambda bucket, _: costs.seconds(bucket) or 0.0)
    arrivals: list[tuple[float, int, Arrival]] = [(each.time, i, each) for i, each in enumerate(trace)]
    heapq.heapify(arrivals)
    count = itertools.count(len(arrivals))
    place: dict[Waiter, int] = {}
    latency, waited = dict.fromkeys(range(len(arrivals)), math.nan), {}
    running: list[tuple[float, int, Batch, float]] = []
    now, wake, free, idle, busy, num, late = 0.0, math.inf, 0.0, 0.0, 0.0, 0, 0
    while arrivals or running or planner.count:
        heard = [each[0][0] for each in (arrivals, running) if each]
        now = max(now, min([wake, *(each + lag(each) for each in heard)]))
        while running and running[0][0] + lag(running[0][0]) <= now:
            end, _, batch, seconds = heapq.heappop(running)
            planner.device.finish(batch, end)
            planner.seconds.observe(kind, batch.bucket, seconds)
            planner.running -= len(batch.waiters)
            planner.delivered(len(batch.waiters), end)
            for waiter in batch.waiters:
                latency[place[waiter]] = end - waiter.arrival
                if (more := again(end)) is not None:
                    heapq.heappush(arrivals, (more.time, next(count), more))
            idle = end
        while arrivals and arrivals[0][0] + lag(arrivals[0][0]) <= now:
            _, i, each = heapq.heappop(arrivals)
            sizes = (grid.ceil({dim: each.length})[dim],)
            waiter = Waiter(kind, sizes, each.time, each.priority, each.deadline)
            place[waiter] = i
            planner.add(waiter)
        decision = planner.decide(now)
        late += len(decision.expired)
        for batch in decision.batches:
            seconds = really(batch.bucket, max(free, now))
            for waiter in batch.waiters:
                waited[place[waiter]] = 0.0 if running else max(now - max(waiter.arrival, idle), 0.0)
            free = max(free, now) + seconds
            num, busy = num + 1, busy + seconds
            planner.device.start(batch, now, batch.seconds)
            planner.running += len(batch.waiters)
            heapq.heappush(running, (free, num, batch, seconds))
        wake = decision.wake
    ran = [i for i in sorted(latency) if not math.isnan(latency[i])]
    times = np.array([latency[i] for i in ran]), np.array([waited[i] for i in ran])
    return Outcome(*times, num, late, busy / now if now else 0.0, now)
