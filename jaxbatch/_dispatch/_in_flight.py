"""The batches that run: handed to the run threads, and taken back when they are done or failed.

The dispatch thread's own. What a failed batch leaves is run again, in halves or in a smaller bucket.
"""

import collections
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from .._grid import Bucket
from .._online import Batch, Planner
from .._timing import BatchTimes
from ._device import SharedDevice
from ._faults import remedy
from ._intake import Intake, TracedKind
from ._request import Request, as_request
from ._requests import Requests
from ._runners import Job, Runners


class InFlight:
    """The batches of one dispatcher that run, and those that are to run again.

    Args:
      wake: wakes the dispatch thread; other dispatchers of the device are woken when a batch is done.
    """

    def __init__(
        self,
        planner: Planner,
        device: SharedDevice,
        intake: Intake,
        requests: Requests,
        runners: Runners,
        *,
        wake: Callable[[], None],
    ):
        self._planner = planner
        self._device = device
        self._intake = intake
        self._requests = requests
        self._runners = runners
        self._wake = wake
        self._jobs: set[Job] = set()
        self._retries: collections.deque[tuple[TracedKind, Bucket, Sequence[Request]]] = collections.deque()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def has_room(self) -> bool:
        """Whether the device may be given another batch."""
        return self._device.in_flight < self._planner.rules.in_flight

    @property
    def is_over(self) -> bool:
        """Whether nothing runs, and nothing is to run again."""
        return not (self._jobs or self._retries)

    def start(self, batch: Batch) -> None:
        """Run what the planner decided, without those that were cancelled meanwhile."""
        requests = []
        for waiter in batch.waiters:
            request = as_request(waiter)
            if request.claim():
                requests.append(request)
            else:
                self._requests.end(request, "cancelled")
        self._requests.free(*requests)
        if requests:
            assert isinstance(batch.kind, TracedKind)
            self._start(batch.kind, batch.bucket, requests, batch.seconds)

    def retry(self) -> None:
        """Run again what is left of failed batches, as far as the device has room."""
        while self._retries and self.has_room:
            kind, bucket, requests = self._retries.popleft()
            self._start(kind, bucket, requests, None)

    def done(self, job: Job, times: BatchTimes) -> None:
        """Learn from a batch that ran."""
        seconds = self._finish(job, times.delivered)
        self._planner.seconds.observe(job.kind, job.bucket, seconds)
        self._planner.delivered(len(job.requests), times.delivered)

    def failed(self, job: Job, error: Exception) -> None:
        """Give the error to the example at fault, and let the others run again."""
        self._finish(job, time.perf_counter())
        self._requests.count("failed_batches")
        kind, bucket, requests = job.kind, job.bucket, job.requests
        fewest = self._intake.rows_for(kind, tuple(bucket.sizes.values()))[0]
        match remedy(error, bucket, requests, fewest):
            case "smaller":
                self._planner.exhaust(kind, bucket)
                for request in requests:
                    request.deadline = math.inf  # it was run once, so that its result is due
                    self._planner.add(request)
            case "halves":
                half = len(requests) // 2
                self._retries.append((kind, bucket, requests[:half]))
                self._retries.append((kind, bucket, requests[half:]))
            case "fail":
                for request in requests:
                    self._requests.end(request, "failed", error)

    def abandon(self) -> None:
        """Tell the device that nothing of this runs any more."""
        for job in list(self._jobs):
            self._device.finish(job, time.perf_counter())

    def _start(
        self, kind: TracedKind, bucket: Bucket, requests: Sequence[Request], seconds: float | None
    ) -> None:
        """Hand requests to a run thread."""
        now, free = time.perf_counter(), not self._device.in_flight
        since = max(self._device.idle_since, kind.changed_at) if free else math.inf
        for request in requests:
            request.begin(bucket, len(requests), now, since)
        lengths = np.array([request.lengths for request in requests], np.int64)
        job = Job(kind, bucket, requests, lengths.reshape(len(requests), len(kind.dims)))
        self._jobs.add(job)
        self._planner.running += len(requests)
        self._device.start(job, now, seconds)
        self._runners.put(job)

    def _finish(self, job: Job, now: float) -> float:
        self._jobs.discard(job)
        self._planner.running -= len(job.requests)
        seconds = self._device.finish(job, now)
        self._device.tell_others(self._wake)
        return seconds
