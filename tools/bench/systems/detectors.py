"""A second model, with two ragged dims: PP-OCR's text detector on pages of many sizes."""

import jax
import numpy as np

import jaxbatch as jb
from models import ppocr_det, weights

from ..workloads import Workload
from .base import Answers, Settings, System
from .jax_programs import Programs, in_flight

MAX_PIXELS = 640 * 640
"""The most padded pixels in a batch, unless one page has more."""


class DetectEveryShape(System):
    """`jax.jit` of the function of one image: a program for every size that occurs."""

    precision: str | None = None

    def load(self, workload: Workload) -> None:
        params = jax.device_put(ppocr_det.load(weights.fetch("ppocr")))
        self._programs = Programs(ppocr_det.detect, params)

    def run(self, workload: Workload) -> Answers:
        maps: list[np.ndarray] = [np.empty(0)] * len(workload.items)

        def keep(each: tuple[int, np.ndarray], output: jax.Array) -> None:
            maps[each[0]] = np.asarray(output)

        with jax.default_matmul_precision(self.precision):
            in_flight(enumerate(workload.items), lambda each: self._programs(each[1]), keep)
        self.padded_cells, self.programs = int(workload.cells.sum()), len(self._programs)
        return maps


class DetectReference(DetectEveryShape):
    """What all answers are compared with."""

    precision = "highest"


class DetectZeros(System):
    """All images padded with zeros to the largest, and no mask: what the model sees is another picture."""

    def load(self, workload: Workload) -> None:
        params = jax.device_put(ppocr_det.load(weights.fetch("ppocr")))
        self._programs = Programs(ppocr_det.detect, params)
        self._size = [max(item.shape[axis] for item in workload.items) for axis in (1, 2)]

    def run(self, workload: Workload) -> Answers:
        maps = []
        for image in workload.items:
            padded = np.zeros((3, *self._size), np.float32)
            padded[:, : image.shape[1], : image.shape[2]] = image
            maps.append(np.asarray(self._programs(padded))[: image.shape[1], : image.shape[2]])
        self.padded_cells, self.programs = len(maps) * self._size[0] * self._size[1], 1
        return maps


class Detect(System):
    """jaxbatch over the function of one image; `ladder` is "max", None for powers of two, or a number."""

    def __init__(self, settings: Settings, ladder: int | str | None):
        super().__init__(settings)
        self._ladder = ladder

    def load(self, workload: Workload) -> None:
        self._params = jax.device_put(ppocr_det.load(weights.fetch("ppocr")))
        lengths, cells = workload.lengths, MAX_PIXELS // 1024
        tops = {dim: int(values.max()) for dim, values in lengths.items()}
        if isinstance(self._ladder, int):
            grid = jb.Grid.fit(lengths, self._ladder, multiple_of=1, rows=(1, 8), max_cells=cells)
        elif self._ladder == "max":
            grid = jb.Grid(h=tops["h"], w=tops["w"], rows=(1, 8), max_cells=cells)
        else:
            grid = jb.Grid(h=(2, tops["h"]), w=(2, tops["w"]), rows=(1, 8), max_cells=cells)
        self._batched = jb.batched(ppocr_det.detect, (None, 0), grid=grid)

    def run(self, workload: Workload) -> Answers:
        maps = self._batched(self._params, workload.items)
        planned = self._batched.explain(workload.lengths, self._params)
        self.padded_cells = 1024 * (planned.total.padded_cells + planned.total.filler_cells)
        self.programs = self._batched.statistics().compiles
        return maps
