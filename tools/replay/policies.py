"""Ways to form batches: a planner, its rules, and the rows it may use."""

import dataclasses
import math
from typing import Any

from jaxbatch._online import Batch, Decision, Planner
from jaxbatch._options import Options, Rules, Table


class AllBuffered(Planner):
    """Whenever the device is idle, run all that wait, and look at what came meanwhile only afterwards."""

    def decide(self, now: float) -> Decision:
        if self.device.in_flight:
            return Decision()
        batches: list[Batch] = []
        for lane in list(self._active):
            while lane.count:
                options = self.options.allowed(lane, now).options
                option = next((o for o in options if o.rows >= lane.count), options[-1])
                waiters = tuple(lane.take(option.rows))
                batches.append(Batch(lane.kind, option.bucket, waiters, option.estimate.seconds))
            self._settle(lane)
        return Decision(tuple(batches))


class FixedOptions(Options):
    """Full batches only, or those that a time limit cuts."""

    def due(self, candidate, now, coming):
        full, oldest = candidate.full, candidate.lane.oldest
        return (-math.inf if full else oldest + self._rules.max_delay), 1

    def allowed(self, lane, now):
        return Table(super().allowed(lane, now).options[-1:])


class FixedBatch(Planner):
    """Wait for a full batch or a time limit, as a batcher does that knows neither costs nor the load."""

    options_type = FixedOptions


@dataclasses.dataclass(frozen=True)
class Policy:
    """A planner by name; `rows` limits the grid to some numbers of rows."""

    name: str
    planner: type[Planner] = Planner
    rules: Rules = Rules()
    rows: list[Any] | None = None


POLICIES = (
    Policy("one at a time", rules=Rules(aging=1e-6), rows=[1]),
    Policy("all buffered", AllBuffered),
    Policy("fixed batch of 8", FixedBatch, Rules(max_delay=0.02), rows=[8]),
    Policy("elastic, no waiting", rules=Rules(patient=False)),
    Policy("adaptive", rules=Rules(max_delay=0.01)),
)
