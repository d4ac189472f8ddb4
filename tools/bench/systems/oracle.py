"""The bound: the function of one text, vmapped without a mask, on batches in which nothing is padded.

No system reaches it on real lengths. Each of five sizes is timed on full batches of that size, about as many
as the texts of its class would fill, and its time per token is weighed by the tokens of that class.
"""

import time

import jax
import numpy as np

from ..workloads import Workload
from .base import Answers, Settings, System
from .jax_programs import ONE_THREAD, Programs, encoder, in_flight

SIZES = (16, 32, 64, 128, 256)


class Oracle(System):
    """Full batches of exactly 16, 32, 64, 128 and 256 tokens."""

    def __init__(self, settings: Settings, streams: int = 1):
        super().__init__(settings)
        self._streams = streams

    def load(self, workload: Workload) -> None:
        model, params = encoder(self.settings)
        options = ONE_THREAD if self._streams > 1 else None
        self._programs = Programs(jax.vmap(model.embed, (None, 0)), params, options)
        lengths = workload.lengths["n"]
        classes = np.minimum(np.searchsorted(SIZES, lengths), len(SIZES) - 1)
        self._tokens = np.bincount(classes, lengths, len(SIZES))
        flat = np.concatenate(workload.items)
        self._batches = {}
        for size in SIZES:
            rows = max(1, self.settings.budget // size)
            self._batches[size] = np.resize(flat, (rows, size)).astype(np.int32)

    def run(self, workload: Workload) -> Answers:
        """Return an answer for every text of one of the five sizes, and nan for others.

        They are computed in full batches of texts of exactly that size, as far as there are any.
        """
        vectors = np.full((len(workload.items), 384), np.nan, np.float32)
        lengths = workload.lengths["n"]
        for size in SIZES:
            batch, places = self._batches[size].copy(), np.flatnonzero(lengths == size)
            for start in range(0, max(len(places), 1), len(batch)):
                own = places[start : start + len(batch)]
                for row, i in zip(batch, own, strict=False):
                    row[:] = workload.items[i]
                vectors[own] = np.asarray(self._programs(batch))[: len(own)]
        self.padded_cells, self.programs = int(workload.cells.sum()), len(self._programs)
        return vectors

    def timed(self, workload: Workload) -> float:
        seconds, self.details["seconds per token"] = 0.0, {}
        for size, tokens in zip(SIZES, self._tokens, strict=True):
            batch = self._batches[size]
            num = max(2 * self._streams, round(tokens / batch.size))
            start = time.perf_counter()
            in_flight(
                range(num),
                lambda _, batch=batch: self._programs(batch),
                lambda _, output: np.asarray(output),
                self._streams,
            )
            per_token = (time.perf_counter() - start) / (num * batch.size)
            self.details["seconds per token"][size] = per_token
            seconds += per_token * tokens
        return seconds
