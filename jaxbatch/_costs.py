"""What a batch in each bucket costs, in seconds: measured where it was, estimated from neighbours elsewhere.

A `Costs` is plain data: it is printed, saved as JSON and given to another `batched` of the same function on
the same kind of device. It changes no answer; it tells the planner which examples to run together.
"""

import dataclasses
import json
import math
from collections.abc import Mapping

from ._grid import Bucket

_FORMAT = 1
_WEIGHTS = {"rows": 0.5, "segments": 0.25}  # how much a factor between two buckets counts; sizes count 1


@dataclasses.dataclass(frozen=True)
class Costs:
    """The cost of one batch in each bucket.

    Attributes:
      measured: seconds from NumPy arrays to NumPy results, by bucket.
      work: what the compiler says a program does, in units that only compare; by bucket, rows included.
      compile_seconds: mean time to compile one program, None where none was compiled.

    Example:
      >>> costs = Costs({Bucket(n=16, rows=8): 0.001})
      >>> costs.seconds(Bucket(n=16, rows=8)), costs.seconds(Bucket(n=64, rows=8))
      (0.001, 0.004)
    """

    measured: Mapping[Bucket, float] = dataclasses.field(default_factory=dict)
    work: Mapping[Bucket, float] = dataclasses.field(default_factory=dict)
    compile_seconds: float | None = None

    def __post_init__(self):
        known = frozenset(self.measured.items()), frozenset(self.work.items()), self.compile_seconds
        object.__setattr__(self, "_hash", hash(known))

    def __hash__(self) -> int:
        return self._hash  # pyright: ignore[reportAttributeAccessIssue]  # set in `__post_init__`

    def __bool__(self) -> bool:
        return bool(self.measured)

    def of(self, *, packed: bool) -> "Costs":
        """Return what is known of packed rows alone, or of padded ones."""
        measured = {b: each for b, each in self.measured.items() if (b.segments is not None) == packed}
        return dataclasses.replace(self, measured=measured)

    def seconds(self, bucket: Bucket) -> float | None:
        """Return the seconds of one batch: measured, else estimated; None where nothing was measured.

        The estimate scales the measured bucket of the same layout that is nearest in sizes and rows by the
        work of the two programs, if both were compiled, else by their cells.
        """
        if (known := self.measured.get(bucket)) is not None:
            return known
        alike = [other for other in self.measured if (other.segments is None) == (bucket.segments is None)]
        if not alike:
            return None
        nearest = min(alike, key=lambda other: _distance(other, bucket))
        pair = self.work.get(bucket), self.work.get(nearest)
        ratio = pair[0] / pair[1] if pair[0] and pair[1] else bucket.cells / nearest.cells
        return self.measured[nearest] * ratio

    def slower_together(self) -> list[tuple[Bucket, Bucket]]:
        """Return pairs of measured buckets of equal sizes: of one row, and of the rows nearest to its speed.

        In these sizes no number of rows was faster for each example than one.
        """
        found = []
        measured = {b: seconds for b, seconds in self.measured.items() if b.segments is None}
        for single, seconds in measured.items():
            others = [b for b in measured if b.sizes == single.sizes and b["rows"] > 1]
            if single["rows"] == 1 and others:
                best = min(others, key=lambda bucket: self.measured[bucket] / bucket["rows"])
                if seconds < self.measured[best] / best["rows"]:
                    found.append((single, best))
        return found

    def __str__(self) -> str:
        lines = [f"{len(self.measured)} buckets measured, {len(self.work)} compiled"]
        for bucket, seconds in sorted(self.measured.items(), key=lambda item: (item[0].cells, item[1])):
            name = " ".join(f"{key}={size}" for key, size in bucket.items())
            lines.append(
                f"  {name:<24} {seconds * 1e3:>10.3f} ms {seconds / bucket['rows'] * 1e3:>10.3f} ms/row"
            )
        return "\n".join(lines)

    # --- saved and reused ---

    def to_json(self) -> str:
        """Return all of it as JSON text."""
        tables = {
            name: [[dict(bucket), value] for bucket, value in getattr(self, name).items()]
            for name in ("measured", "work")
        }
        return json.dumps({"format": _FORMAT, "compile_seconds": self.compile_seconds, **tables}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Costs":
        """Return what `to_json` wrote.

        Raises:
          ValueError: the text is something else.
        """
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise ValueError(f"format {data['format']}, expected {_FORMAT}")
            tables = {
                name: {Bucket(**bucket): _positive(value) for bucket, value in data[name]}
                for name in ("measured", "work")
            }
            seconds = data["compile_seconds"]
            return cls(**tables, compile_seconds=None if seconds is None else _positive(seconds))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Costs.from_json: this is no cost table ({error!r}). Measure anew.") from error


def _positive(value: float) -> float:
    value = float(value)
    if not 0 < value < math.inf:
        raise ValueError(f"{value} is no cost")
    return value


def _distance(one: Bucket, other: Bucket) -> float:
    """Compare two buckets by the factors between them; rows count less, since cost grows with them evenly."""
    return sum(
        abs(math.log(one[name] / other[name])) * _WEIGHTS.get(name, 1.0) for name in other if name in one
    )
