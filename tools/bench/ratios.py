"""What is computed from the timed passes: speeds, and ratios within a round with their spread."""

import dataclasses
import statistics

from .rounds import Record, Table


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The ratios of two systems' speeds over the rounds in which both took part."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def find(table: Table, name: str) -> Record | None:
    """Return a system that was timed, or None."""
    return next((record for record in table.systems if record.name == name and record.seconds), None)


def thousands(table: Table, record: Record) -> float:
    """Return the median speed, in thousand tokens or pixels of the examples a second, padding not counted."""
    return table.valid_cells / statistics.median(record.seconds.values()) / 1000


def faster(one: Record | None, other: Record | None) -> Ratio | None:
    """Return how many times as fast `one` is as `other`; None if one of them was not timed."""
    if one is None or other is None:
        return None
    common = sorted(one.seconds.keys() & other.seconds.keys())
    ratios = [other.seconds[number] / one.seconds[number] for number in common]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def valid_share(table: Table, record: Record) -> float | None:
    """Return the share of all computed cells that are the examples' own."""
    return table.valid_cells / record.padded_cells if record.padded_cells else None
