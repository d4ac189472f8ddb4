"""Padded or packed: plans examples in each layout that a function has, and takes the one that costs less.

A plan costs the predicted seconds of its batches, and a part of the compiles that it needs. A layout of which
no batch was measured is compared by the work of its programs, counted at a few sizes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Set

import numpy as np

from ._engine import Engine
from ._grid import Bucket, Grid
from ._packed_plan import plan_packed
from ._plan import Job, Means, plan
from ._search import REUSE
from ._traced import Traced

PLANNERS = {"padded": plan, "packed": plan_packed}


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """The batches of some examples.

    Attributes:
      layout: "padded" or "packed".
      traced: None where the function is not traced yet.
      means: what was planned by.
      programs: returns the buckets whose programs exist.
      reason: why it is this layout, where there was a choice.
    """

    layout: str
    traced: Traced | None
    jobs: list[Job]
    means: Means
    programs: Callable[[], Set[Bucket]]
    reason: str | None = None

    @functools.cached_property
    def missing(self) -> int:
        """How many of the programs do not exist yet, or did not when this was first asked."""
        return len({job.bucket for job in self.jobs} - self.programs())

    @property
    def seconds(self) -> float | None:
        """What the batches are predicted to take; None where nothing like them was measured."""
        each = [self.means.costs.seconds(job.bucket) for job in self.jobs]
        known = [seconds for seconds in each if seconds is not None]
        return sum(known) if len(known) == len(each) else None

    @property
    def compiling(self) -> float:
        """The part of the seconds of compiling that this run counts with, as in `_search`."""
        return self.missing * (self.means.costs.compile_seconds or 0.0) / REUSE


def plan_lists(
    engine: Engine, traces: Mapping[str, Traced | None], lengths: np.ndarray, grid: Grid, *, frozen: bool
) -> Planned:
    """Return the batches that run examples of these lengths, in the better one of the layouts.

    Args:
      traces: the function in each layout that it has, at least one; None where it is not traced yet.
      lengths: [num, num_dims], none longer than the grid's largest size.
    """
    plans = [_planned(engine, *each, lengths, grid, frozen=frozen) for each in traces.items()]
    return plans[0] if len(plans) == 1 or not len(lengths) else _better(engine, *plans)


def _planned(
    engine: Engine, layout: str, traced: Traced | None, lengths: np.ndarray, grid: Grid, *, frozen: bool
) -> Planned:
    if traced is None:
        means, programs = Means(engine.costs.of(packed=layout == "packed")), frozenset
    else:
        means = engine.means(traced, frozen=frozen)
        programs = lambda: engine.programs(traced).keys()  # noqa: E731  (asking takes time, and few need it)
    return Planned(layout, traced, PLANNERS[layout](lengths, grid, means), means, programs)


def _better(engine: Engine, padded: Planned, packed: Planned) -> Planned:
    """Return the plan that costs less, with the reason; of equal ones the padded."""
    if padded.means.frozen and min(padded.missing, packed.missing) == 0 < max(padded.missing, packed.missing):
        chosen, other = (packed, padded) if padded.missing else (padded, packed)
        return dataclasses.replace(chosen, reason=f"there are no programs for {other.layout} rows")
    seconds = padded.seconds, packed.seconds
    if seconds[0] is not None and seconds[1] is not None:
        costs = seconds[0] + padded.compiling, seconds[1] + packed.compiling
        text = (
            f"predicted {costs[0]:.3g} s padded and {costs[1]:.3g} s packed, a tenth of the compiles included"
        )
    else:
        work = _work(engine, padded), _work(engine, packed)
        known = [(own, each) for own, each in zip(seconds, work, strict=True) if own is not None]
        rate = known[0][0] / known[0][1] if known else None
        costs = work if rate is None else (work[0] * rate, work[1] * rate)
        ratio = f"packed rows are {work[1] / work[0]:.3g} of the padded work"
        text = f"nothing was measured; {ratio}" if rate is None else f"{ratio}, of which one was measured"
    chosen = packed if costs[1] < costs[0] else padded
    return dataclasses.replace(chosen, reason=text)


def _work(engine: Engine, planned: Planned) -> float:
    """Return the work of a plan: counted for one row of a few sizes, and interpolated between them."""
    if planned.traced is None:  # all that is known are cells
        return float(sum(job.bucket.cells for job in planned.jobs))
    rows: dict[int, int] = {}
    for job in planned.jobs:
        size = job.bucket.cells // job.bucket["rows"]
        rows[size] = rows.get(size, 0) + job.bucket["rows"]
    sizes = sorted(rows)
    few = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    known = [engine.row_work(planned.traced, size) for size in few]
    each = np.exp(np.interp(np.log(sizes), np.log(few), np.log(known)))
    return float(sum(own * rows[size] for own, size in zip(each.tolist(), sizes, strict=True)))
