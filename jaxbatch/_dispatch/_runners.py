"""The run threads: each takes a batch through padding, device and delivery, and then the next one.

There is one for each batch that may be in flight. So the dispatch thread goes on deciding also where a
program runs inside the call that starts it, as small ones and those with callbacks do on a CPU.
"""

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .. import _flights
from .._counts import bucket_name
from .._engine import Engine
from .._executables import Key
from .._grid import Bucket
from .._timing import BatchTimes
from .._traced import Traced
from ._intake import TracedKind
from ._request import Request
from ._requests import Requests


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Requests that run together; `lengths` has a row for each."""

    kind: TracedKind
    bucket: Bucket
    requests: Sequence[Request]
    lengths: np.ndarray


class Work:
    """What a run thread does with a job.

    Args:
      shared: the shared leaves, on the device.
      done: called with a job and its times, before its futures end.
      failed: called with a job and its error; the job's requests stay open.
    """

    def __init__(
        self,
        engine: Engine,
        shared: Sequence[Any],
        requests: Requests,
        *,
        done: Callable[[Job, BatchTimes], None],
        failed: Callable[[Job, Exception], None],
    ):
        self._engine = engine
        self._shared = list(shared)
        self._requests = requests
        self._done = done
        self._failed = failed
        self._names: dict[tuple[TracedKind, Bucket], tuple[Key, str]] = {}

    def run(self, job: Job) -> None:
        """Take a batch all the way."""
        traced, bucket, executables = job.kind.traced, job.bucket, self._engine.executables
        assert traced is not None
        examples = [request.leaves for request in job.requests]
        try:
            key, name = self._named(job.kind, traced, bucket)
            program = executables.get(key, lambda: traced.build(bucket, executables.disk))
            with jax.profiler.TraceAnnotation(name):
                flight = _flights.start(program, traced, bucket, examples, job.lengths, self._shared)
                results, times = _flights.fetch(flight)
        except Exception as error:
            self._failed(job, error)
        else:
            self._done(job, times)
            self._deliver(job, results, times)

    def _named(self, kind: TracedKind, traced: Traced, bucket: Bucket) -> tuple[Key, str]:
        """Return a program's key, and what a profile calls its batches; made once for each bucket."""
        known = self._names.get((kind, bucket))
        if known is None:
            known = traced.key(bucket), f"{self._engine.function.name} {bucket_name(bucket)}"
            if not kind.is_passing:
                self._names[kind, bucket] = known
        return known

    def _deliver(self, job: Job, results: list[Any], times: BatchTimes) -> None:
        bucket, exact = job.bucket, job.kind.exact is not None
        stream = threading.current_thread()  # the batches of one thread come one after another
        self._engine.recorder.add(bucket, job.lengths, times, exact=exact, call=stream, since=times.begun)
        cells = bucket["rows"], int(job.lengths.prod(axis=1).sum()), bucket.cells
        self._requests.deliver(job.requests, results, times.delivered, cells)


class Runners:
    """Threads that run jobs in the order in which they come.

    Args:
      num: how many.
      run: runs a job; what it raises breaks the dispatcher.
    """

    def __init__(
        self,
        name: str,
        num: int,
        run: Callable[[Job], None],
        *,
        broken: Callable[[BaseException], None],
        settings: Callable[[], None],
    ):
        self._execute = run
        self._broken = broken
        self._settings = settings
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._run, name=f"jaxbatch run {name} {i}", daemon=True)
            for i in range(num)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self.threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Hand a job over."""
        self._queue.put(job)

    def close(self) -> None:
        """Let the threads end after what was handed over."""
        for _ in self.threads:
            self._queue.put(None)

    def _run(self) -> None:
        try:
            self._settings()
            while (job := self._queue.get()) is not None:
                self._execute(job)
                del job  # nothing of a batch is kept while the next one is waited for
        except BaseException as error:
            self._broken(error)
