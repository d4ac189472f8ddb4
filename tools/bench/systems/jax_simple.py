"""JAX without batching by size: one text at a time, every exact shape, or all padded to the longest."""

import jax
import numpy as np

from ..batching import pad
from ..workloads import Workload
from .base import Answers, System
from .by_hand import embed_batch
from .jax_programs import Programs, encoder, in_flight


class JaxEveryShape(System):
    """`jax.jit` of the function of one text: a program for every length that occurs."""

    attention = "late"

    def load(self, workload: Workload) -> None:
        model, params = encoder(self.settings, self.attention)
        self._programs = Programs(model.embed, params)

    def run(self, workload: Workload) -> Answers:
        vectors = np.empty((len(workload.items), 384), np.float32)
        in_flight(enumerate(workload.items), lambda each: self._programs(each[1]), _keep(vectors))
        self.padded_cells, self.programs = int(workload.cells.sum()), len(self._programs)
        return vectors


class Reference(JaxEveryShape):
    """What all answers are compared with: single calls at exact shapes, in the textbook's form."""

    attention = "softmax"

    def load(self, workload: Workload) -> None:
        with jax.default_matmul_precision("highest"):
            super().load(workload)

    def run(self, workload: Workload) -> Answers:
        with jax.default_matmul_precision("highest"):
            return super().run(workload)


class JaxOneByOne(System):
    """One text at a time, padded to a power of two and masked: few programs, no batching."""

    def load(self, workload: Workload) -> None:
        model, params = encoder(self.settings)
        self._programs = Programs(embed_batch(model), params)

    def run(self, workload: Workload) -> Answers:
        vectors, self.padded_cells = np.empty((len(workload.items), 384), np.float32), 0

        def start(each: tuple[int, np.ndarray]) -> jax.Array:
            ids = each[1]
            size = max(16, 1 << (len(ids) - 1).bit_length())
            self.padded_cells = (self.padded_cells or 0) + size
            return self._programs(pad([ids], size, 1, np.int32), np.array([len(ids)], np.int32))

        in_flight(enumerate(workload.items), start, _keep(vectors))
        self.programs = len(self._programs)
        return vectors


class JaxPadToMax(System):
    """Full batches in the order of the texts, all padded to the longest text there is: one program."""

    def load(self, workload: Workload) -> None:
        model, params = encoder(self.settings)
        self._programs = Programs(embed_batch(model), params)
        self._size = int(workload.lengths["n"].max())

    def run(self, workload: Workload) -> Answers:
        rows, num = self.settings.budget // self._size, len(workload.items)
        vectors = np.empty((num, 384), np.float32)

        def start(first: int) -> jax.Array:
            ids = workload.items[first : first + rows]
            lengths = np.full(rows, self._size, np.int32)
            lengths[: len(ids)] = [len(each) for each in ids]
            return self._programs(pad(ids, self._size, rows, np.int32), lengths)

        def keep(first: int, output: jax.Array) -> None:
            vectors[first : first + rows] = np.asarray(output)[: num - first]

        in_flight(range(0, num, rows), start, keep)
        self.padded_cells, self.programs = -(-num // rows) * rows * self._size, len(self._programs)
        return vectors


def _keep(vectors: np.ndarray):
    def keep(each: tuple[int, np.ndarray], output: jax.Array) -> None:
        vectors[each[0]] = np.asarray(output)

    return keep
