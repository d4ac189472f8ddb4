"""Arrivals at random or as they were recorded, and what batches cost."""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxbatch import Costs, Grid

GRID = Grid(n=(16, 256), rows=(1, 32))
LOADS = (0.3, 0.6, 0.9)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One example: when it comes, how long it is, and when it is too late."""

    time: float
    length: int
    priority: float = 0.0
    deadline: float = math.inf


def lengths(num: int, rng: np.random.Generator) -> np.ndarray:
    """Return lengths as texts have them: many short ones and a few long ones."""
    return np.clip(rng.lognormal(3.5, 0.8, num), 1, 256).astype(int)


def poisson(rate: float, num: int, seed: int = 0) -> list[Arrival]:
    """Return arrivals at random."""
    rng = np.random.default_rng(seed)
    return arrivals(np.cumsum(rng.exponential(1 / rate, num)), lengths(num, rng))


def bursty(rate: float, num: int, seed: int = 0) -> list[Arrival]:
    """Return arrivals in bursts of about twenty, at three times the mean rate, with pauses between."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / (3 * rate), num)
    gaps += (rng.random(num) < 1 / 20) * rng.exponential(20 * (1 - 1 / 3) / rate, num)
    return arrivals(np.cumsum(gaps), lengths(num, rng))


def recorded(path: Path) -> list[Arrival]:
    """Read a trace."""
    table = np.loadtxt(path, delimiter=",", ndmin=2)
    table = table[np.argsort(table[:, 0], kind="stable")]
    return arrivals(table[:, 0] - table[0, 0], table[:, 1].astype(int))


def arrivals(times: Iterable[float], lengths: Iterable[int]) -> list[Arrival]:
    return [Arrival(float(t), int(n)) for t, n in zip(times, lengths, strict=True)]


def example_costs(grid: Grid = GRID) -> Costs:
    """Return costs as an accelerator has them: a fixed part, and one that grows with the cells."""
    return Costs({bucket: 2e-3 + 1e-6 * bucket.cells for bucket in grid})


def capacity(costs: Costs, grid: Grid = GRID) -> float:
    """Return how many examples a second the best batches run, for the lengths above."""
    sizes = [grid.ceil({"n": int(n)}) for n in lengths(2000, np.random.default_rng(1))]
    best = {s: min((costs.seconds(s.with_rows(r)) or 0) / r for r in grid.rows_for(s)) for s in set(sizes)}
    return 1 / float(np.mean([best[s] for s in sizes]))
