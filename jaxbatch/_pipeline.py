"""One call's way through the machine: examples in, results out, a few batches in flight.

JAX returns from a dispatch before the device is done. So batch k+1 is padded while k runs, and a result is
waited for only once `IN_FLIGHT` later batches have started. Results land in the place of their example,
whatever the order of batches. What fails is the failure of the examples of its own batch.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ._errors import CompileMissError, MaskError
from ._executables import Executables
from ._flights import AGAIN, Flight, Streams, fetch, start
from ._grid import Bucket
from ._statistics import Recorder
from ._traced import Traced

IN_FLIGHT = 3
"""Batches started and not yet fetched, of one stream; more hide no more time and hold more memory."""


@dataclasses.dataclass
class Window:
    """Examples that are planned together, and their results as they arrive.

    Attributes:
      results: in the order of the examples: None, then a result or the example's own error.
      pending: how many examples are planned and have no result yet.
    """

    results: list[Any]
    pending: int = 0

    def settle(self, indices: Sequence[int], results: Iterable[Any]) -> None:
        """Put results or errors in their places."""
        for index, result in zip(indices, results, strict=True):
            self.results[index] = result
        self.pending -= len(indices)


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """One batch to run: which examples of a window, in which bucket, by which trace."""

    window: Window
    traced: Traced
    bucket: Bucket
    indices: tuple[int, ...]
    examples: Sequence[tuple[np.ndarray, ...]]
    lengths: np.ndarray
    used: int | None = None  # rows that hold examples, if that is not one for each


class Pipeline:
    """Runs batches in order and keeps at most `IN_FLIGHT` of them on the device.

    Args:
      shared: the shared leaves, on the device.
      streams: what runs programs.
      on_failure: called with the error of a batch; it raises, or returns so that the batch's examples get it.
      on_delivered: called with each batch that has its results or errors.
      again: returns the batches for those examples of a batch whose results do not count, by their places.
    """

    def __init__(
        self,
        executables: Executables,
        recorder: Recorder,
        shared: Sequence[Any],
        streams: Streams,
        *,
        frozen: bool,
        on_failure: Callable[[Exception], None],
        on_delivered: Callable[[Work], None] | None = None,
        again: Callable[[Work, Sequence[int]], Iterable[Work]] | None = None,
    ):
        self._executables = executables
        self._recorder = recorder
        self._shared = list(shared)
        self._streams = streams
        self._most = IN_FLIGHT + streams.num - 1
        self._frozen = frozen
        self._on_failure = on_failure
        self._on_delivered = on_delivered
        self._again = again
        self._flights: collections.deque[tuple[Work, Flight]] = collections.deque()
        self._call = object()  # stands for this call where batches of several are counted
        self._since = time.perf_counter()

    def expect(self, traced: Traced, buckets: Iterable[Bucket]) -> None:
        """Begin to read the programs of these buckets, in order, while weights go to the device."""
        if (disk := self._executables.disk) is None:
            return
        missing = [b for b in dict.fromkeys(buckets) if traced.key(b) not in self._executables]
        with contextlib.suppress(Exception):  # what fails here will fail again where it has its place
            for bucket in missing:
                traced.expect(bucket, disk)
            if missing:
                traced.consts(missing[0])

    def start(self, work: Work) -> None:
        """Pad and start a batch, then fetch the oldest ones until few enough are in flight."""
        try:
            program = self._executables.get(
                work.traced.key(work.bucket),
                lambda: work.traced.build(work.bucket, self._executables.disk),
                frozen=self._frozen,
            )
            examples, lengths = work.examples, work.lengths
            flight = start(program, work.traced, work.bucket, examples, lengths, self._shared, self._streams)
        except (MaskError, CompileMissError):
            raise
        except Exception as error:
            self._fail(work, error)
            return
        self._flights.append((work, flight))
        while len(self._flights) > self._most:
            self._fetch()

    def finish(self, window: Window) -> None:
        """Wait until every example of the window has its result."""
        while window.pending:
            self._fetch()

    def _fetch(self) -> None:
        work, flight = self._flights.popleft()
        try:
            results, times = fetch(flight)
        except Exception as error:
            self._fail(work, error)
            return
        again = [k for k, result in enumerate(results) if result is AGAIN]
        if again:
            work, results = self._without(work, results, again)
        work.window.settle(work.indices, results)
        exact, since, self._since = work.traced.is_exact, self._since, times.delivered
        self._recorder.add(
            work.bucket, work.lengths, times, exact=exact, call=self._call, since=since, used=work.used
        )
        if self._on_delivered is not None:
            self._on_delivered(work)

    def _without(self, work: Work, results: Sequence[Any], again: Sequence[int]) -> tuple[Work, list[Any]]:
        """Start the examples at these places anew, and return the batch and its results without them."""
        assert self._again is not None
        self._recorder.add_again(len(again))
        for other in self._again(work, again):
            self.start(other)
        kept = sorted(set(range(len(results))) - set(again))
        indices, examples = tuple([work.indices[k] for k in kept]), [work.examples[k] for k in kept]
        rest = dataclasses.replace(work, indices=indices, examples=examples, lengths=work.lengths[kept])
        return rest, [results[k] for k in kept]

    def _fail(self, work: Work, error: Exception) -> None:
        self._on_failure(error)
        work.window.settle(work.indices, [error] * len(work.indices))
        if self._on_delivered is not None:
            self._on_delivered(work)
