"""How a dispatcher works, as its maker asks for it."""

import dataclasses
import math
from typing import Literal

from .._engine import Engine
from .._grid import Bucket
from .._options import Rules
from ._room import Room

OnFull = Literal["block", "raise"]

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
        facts = {
            "max_delay": (self.max_delay >= 0, "0 or more seconds"),
            "max_pending": (self.max_pending >= 1, "1 or more"),
            "max_pending_cells": (self.max_pending_cells is None or self.max_pending_cells >= 1, "1 or more"),
            "on_full": (self.on_full in ("block", "raise"), "'block' or 'raise'"),
            "target_latency": (self.target_latency is None or self.target_latency > 0, "more than 0 seconds"),
            "aging": (self.aging > 0, "more than 0 seconds"),
            "in_flight": (self.in_flight >= 1, "1 or more"),
        }
        for name, (ok, expected) in facts.items():
            if not ok:
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
