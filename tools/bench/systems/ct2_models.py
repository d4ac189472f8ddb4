"""CTranslate2: an inference engine in C++ that drops padded positions inside its layers."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from models import weights

from ..batching import by_tokens, pooled, valid
from ..workloads import Workload
from .base import Answers, System, converted, package


class CTranslate2(System):
    """Batches of a bounded number of padded tokens; one batch at a time for each core, on one thread."""

    needs = ("ctranslate2", "transformers", "torch")
    budget = 2048
    compute_type = "float32"

    @classmethod
    def files(cls) -> list[Path]:
        return [converted("ctranslate2")]

    def load(self, workload: Workload) -> None:
        (path,) = self.files()
        if not path.exists():
            converter = package("ctranslate2.converters").TransformersConverter(str(weights.fetch("minilm")))
            converter.convert(str(path))
        streams = len(os.sched_getaffinity(0))
        self._encoder = package("ctranslate2").Encoder(
            str(path), compute_type=self.compute_type, inter_threads=streams, intra_threads=1
        )
        self._streams = streams

    def run(self, workload: Workload) -> Answers:
        lengths, batches = workload.lengths["n"], by_tokens(workload.lengths["n"], self.budget)
        vectors = np.empty((len(lengths), 384), np.float32)
        self.padded_cells = sum(len(indices) * int(lengths[indices].max()) for indices in batches)

        def one(indices: np.ndarray) -> None:
            output = self._encoder.forward_batch([workload.items[i].tolist() for i in indices])
            hidden = np.array(output.last_hidden_state)
            vectors[indices] = pooled(hidden, valid(lengths[indices], hidden.shape[1], len(indices)))

        with ThreadPoolExecutor(self._streams) as threads:
            list(threads.map(one, batches))
        return vectors


class CTranslate2Int8(CTranslate2):
    """The same with weights and operands of eight bits; its answers are a different, rougher model's."""

    compute_type = "int8"
