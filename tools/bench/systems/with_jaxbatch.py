"""jaxbatch on the function of one text: powers of two, a ladder fitted to the lengths, or packed rows."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jaxbatch as jb

from ..workloads import MAX_TOKENS, Workload
from .base import Answers, Settings, System
from .jax_programs import encoder


def grid_of(ladder: int | None, workload: Workload, settings: Settings) -> jb.Grid:
    """Return the grid of `ladder` fitted sizes; None means powers of two."""
    if ladder is None:
        return jb.Grid(n=(16, MAX_TOKENS), rows=(1, 128), max_cells=settings.budget)
    lengths = workload.lengths
    return jb.Grid.fit(lengths, ladder, multiple_of=8, rows=(1, 128), max_cells=settings.budget)


def jobs_file(settings: Settings, ladder: int | None) -> Path:
    """Return where jaxbatch leaves its batches for the loop that is written by hand."""
    return settings.folder / f"jobs-{ladder or 'powers'}.json"


class Jaxbatch(System):
    """`jb.batched` of the function of one text, planned anew in every pass.

    Attributes:
      leaves_batches: whether the loop that is written by hand takes them over.
    """

    leaves_batches = True

    def __init__(self, settings: Settings, ladder: int | None, measured: bool = False, streams: int = 1):
        super().__init__(settings)
        self._ladder, self._measured, self._streams = ladder, measured, streams

    def load(self, workload: Workload) -> None:
        model, self._params = encoder(self.settings)
        self._batched = self.batched(model.embed, workload)
        self._passes = 0

    def batched(self, embed: Callable[..., Any], workload: Workload) -> jb.Batched:
        """Return the batched function."""
        grid = grid_of(self._ladder, workload, self.settings)
        return jb.batched(embed, (None, 0), grid=grid, streams=self._streams)

    def run(self, workload: Workload) -> Answers:
        whole = len(workload.items) > 1
        if whole and not self._passes and self._measured:
            self._batched.warm_up(self._params, lengths=workload.lengths)
        vectors = self._batched(self._params, workload.items)
        if whole and not self._passes:
            self._note(workload)
        self._passes += whole
        return vectors

    def _note(self, workload: Workload) -> None:
        planned = self._batched.explain(workload.lengths, self._params)
        jobs = [(job.bucket["n"], job.bucket["rows"], list(job.indices)) for job in planned.jobs]
        if not self._measured and self._streams == 1 and self.leaves_batches:
            jobs_file(self.settings, self._ladder).write_text(json.dumps(jobs))
        total = planned.total
        self.padded_cells = total.padded_cells + total.filler_cells
        self.programs = self._batched.statistics().compiles
        self.details["sizes"] = list(self._batched.grid.sizes["n"]) if self._batched.grid else []
        self.details["filler share"] = total.filler_cells / self.padded_cells
        self.details["layout"] = " ".join(filter(None, [planned.layout, planned.layout_reason]))
        self._before = self._batched.statistics().time
        self._passes_before = self._passes + 1

    def finish(self, workload: Workload) -> None:
        """Say where the host and the device were, in seconds of one warm pass."""
        before, after = (dataclasses.asdict(t) for t in (self._before, self._batched.statistics().time))
        passes = max(self._passes - self._passes_before, 1)
        self.details["time"] = {name: (after[name] - before[name]) / passes for name in after}


class Packed(Jaxbatch):
    """Several texts in each row of `sizes` cells; with "auto", where that is predicted to take less."""

    leaves_batches = False

    def __init__(
        self,
        settings: Settings,
        sizes: tuple[int, ...],
        measured: bool = False,
        layout: Literal["packed", "auto"] = "packed",
        streams: int = 1,
    ):
        super().__init__(settings, None, measured, streams)
        self._sizes = sizes
        self._layout: Literal["packed", "auto"] = layout

    def batched(self, embed: Callable[..., Any], workload: Workload) -> jb.Batched:  # noqa: D102
        grid = jb.Grid(n=list(self._sizes), rows=(1, 128), max_cells=self.settings.budget)
        return jb.batched(embed, (None, 0), grid=grid, streams=self._streams, layout=self._layout)
