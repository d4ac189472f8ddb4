"""How a dispatcher works, as its maker asks for it."""

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Literal

from .._engine import Engine
from .._grid import Bucket
from .._options import Rules
from ._room import Room

OnFull = Literal["block", "raise"]

MAX_AGING = MAX_PRIORITY = 1e9
"""Ranks are times less `priority * aging`: of larger numbers the times would not be seen any more."""

_BATCHES_PENDING, _CELLS_PENDING = 16, 2**20
"""How many of the largest batches, or cells if that is more, may be pending unless a number is given."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a dispatcher works; times are float seconds. `Batched.dispatcher` explains each."""

    max_delay: float | int = 2e-3
    max_pending: int = 4096
    max_pending_cells: int | None = None
    on_full: OnFull = "block"
    target_latency: float | int | None = None
    aging: float | int = 1.0
    in_flight: int = 2

    def __post_init__(self):
        seconds, positive = "0 or more seconds", "more than 0 seconds"
        cells, latency = self.max_pending_cells, self.target_latency
        self._expect("max_delay", lambda: self.max_delay >= 0, seconds)
        self._expect("max_pending", lambda: self.max_pending >= 1, "1 or more")
        self._expect("max_pending_cells", lambda: cells is None or cells >= 1, "1 or more")
        self._expect("on_full", lambda: self.on_full in ("block", "raise"), "'block' or 'raise'")
        self._expect("target_latency", lambda: latency is None or latency > 0, positive)
        self._expect("aging", lambda: 0 < self.aging <= MAX_AGING, f"{positive} and at most {MAX_AGING:g}")
        self._expect("in_flight", lambda: operator.index(self.in_flight) >= 1, "a whole number, 1 or more")

    def _expect(self, name: str, holds: Callable[[], bool], expected: str) -> None:
        with contextlib.suppress(TypeError):
            if holds():
                return
        raise ValueError(f"dispatcher: {name}={getattr(self, name)!r}; use {expected}.")

    def rules(self, *, frozen: bool) -> Rules:
        """Return what the planner may do."""
        return Rules(
            max_delay=self.max_delay,
            target_latency=self.target_latency,
            aging=self.aging,
            in_flight=self.in_flight,
            compiles=not frozen,
        )

    def room(self, engine: Engine) -> Room:
        """Return the room for pending work."""
        cells = self.max_pending_cells
        return Room(self.max_pending, _most_cells(engine) if cells is None else cells)


def _most_cells(engine: Engine) -> float | int:
    if engine.grid is None:
        return math.inf
    limits = engine.grid.limits
    largest = Bucket(rows=engine.grid.rows_for(limits)[-1], **limits)
    return max(_BATCHES_PENDING * largest.cells, _CELLS_PENDING)
