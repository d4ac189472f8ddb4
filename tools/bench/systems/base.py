"""What a system is to the benchmark: it loads, and it answers a workload."""

import dataclasses
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models import weights

from ..workloads import Workload

Answers = np.ndarray | Sequence[np.ndarray]
"""One answer for each example, in order; a row each if they have one shape."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the systems of one table have in common.

    Attributes:
      products: the dtype of matrix products, "float32" or "bfloat16".
      budget: the most padded tokens in a batch of the JAX systems.
      folder: where systems of one run leave files for each other.
    """

    products: str
    budget: int
    folder: Path


class System:
    """One way to get all answers; a subclass for each.

    Attributes:
      needs: the packages that it imports.
      padded_cells: tokens or pixels computed in the last run, padding included; None if it cannot know.
      programs: programs compiled so far; None where nothing is compiled.
      details: numbers for the report, after the timed rounds.
    """

    needs: Sequence[str] = ()
    padded_cells: int | None = None
    programs: int | None = None

    def __init__(self, settings: Settings):
        self.settings = settings
        self.details: dict[str, Any] = {}

    @classmethod
    def files(cls) -> list[Path]:
        """Return the files that the first `load` on a machine makes, which is no part of a cold start."""
        return []

    def load(self, workload: Workload) -> None:
        """Load weights, and decide what depends on the sizes of the examples at hand."""
        raise NotImplementedError

    def run(self, workload: Workload) -> Answers:
        """Return the answers in the order of the examples."""
        raise NotImplementedError

    def timed(self, workload: Workload) -> float:
        """Return the seconds of one pass over the workload."""
        start = time.perf_counter()
        self.run(workload)
        return time.perf_counter() - start

    def finish(self, workload: Workload) -> None:
        """Fill in `details`; called once, after the last round."""


def converted(name: str) -> Path:
    """Return where a system keeps MiniLM in its own format, next to the weights."""
    folder = weights.fetch("minilm").parent / "minilm-converted"
    folder.mkdir(exist_ok=True)
    return folder / name


def package(name: str) -> Any:
    """Import an optional package; without a name in the source, type checkers ask for no stubs."""
    return importlib.import_module(name)
