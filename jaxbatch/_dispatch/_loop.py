"""The dispatch thread: tells the planner what happens, and does what it decides.

Only this thread touches the planner. Others leave requests in `arrivals` and messages in the inbox; a message
is a function and its arguments, which this thread calls. A request alone wakes it only while it could
matter (`_hungry`): with a full device it is found soon enough.
"""

import collections
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .. import _flights
from .._counts import bucket_name
from .._engine import Engine
from .._errors import DeadlineError, DispatcherClosedError
from .._grid import Bucket
from .._lanes import Waiter
from .._online import Batch, Planner, Rules
from .._timing import BatchTimes
from .._waits import Ledger
from ._compiler import Compiler, is_exhausted, is_final
from ._device import SharedDevice
from ._intake import Intake, TracedKind
from ._request import Request
from ._room import Room
from ._runners import Job, Runners, settle


class Loop:
    """The threads of one dispatcher and what they share.

    Args:
      shared: the shared leaves, on the device.
      make: traces a kind, or compiles its program for a bucket.
      settings: gives a thread the JAX settings of the thread that made the dispatcher.

    Attributes:
      open: the requests that have not ended.
      cause: what broke the dispatcher, if anything did.
      is_closing: whether no further request is taken.
    """

    def __init__(
        self,
        engine: Engine,
        shared: Sequence[Any],
        intake: Intake,
        room: Room,
        rules: Rules,
        device: SharedDevice,
        *,
        make: Callable[[TracedKind, Bucket | None], None],
        settings: Callable[[], None],
    ):
        self._engine = engine
        self._shared = list(shared)
        self._intake = intake
        self._room = room
        self._device = device
        self._settings = settings
        self._planner = Planner(rules, intake.rows_for, engine.costs, device)
        name = engine.function.name
        self._compiler = Compiler(name, make, report=self._report, broken=self.fail_all, settings=settings)
        self._runners = Runners(name, rules.in_flight, self._run_job, broken=self.fail_all, settings=settings)
        self._thread = threading.Thread(target=self._run, name=f"jaxbatch dispatch {name}", daemon=True)
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._arrivals: collections.deque[Request] = collections.deque()
        self._hungry = False
        self._retries: collections.deque[tuple[TracedKind, Bucket, Sequence[Request]]] = collections.deque()
        self._flights: set[Any] = set()
        self._programs_version = -1
        self._over = self._ending = False
        self.open: set[Request] = set()
        self.cause: BaseException | None = None
        self.is_closing = False
        self.ledger = Ledger()
        self.lock = threading.Lock()  # of the ledger

    # --- any thread ---

    def start(self) -> None:
        """Start the threads."""
        self._device.listen(self._wake)
        self._runners.start()
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Take a request that has room."""
        self.open.add(request)
        self._arrivals.append(request)
        if self._hungry or request.deadline < math.inf:
            self._hungry = False
            self._wake()
        if self._over:  # the thread ended in between, and nobody else looks at the arrivals
            self._sweep()

    def cancelled(self, request: Request) -> None:
        """Note that a request was cancelled."""
        self._inbox.put((self._on_cancelled, request))

    def close(self, *, cancel_pending: bool) -> None:
        """Take no further requests and end when those that were taken have ended; waits for nothing."""
        self.is_closing = True
        self._room.close()
        self._inbox.put((self._on_close, cancel_pending))

    def abandon(self) -> None:
        """Close when what is pending has run; safe wherever the garbage collector may be at work."""
        self._inbox.put((self._on_close, False))

    def join(self, seconds: float | None = None) -> bool:
        """Wait until all threads have ended, but never for the own one; return whether they have."""
        if self.is_own_thread():
            return False
        end = None if seconds is None else time.perf_counter() + seconds
        for thread in self._threads():
            thread.join(None if end is None else max(end - time.perf_counter(), 0.0))
        return not any(thread.is_alive() for thread in self._threads())

    def is_own_thread(self) -> bool:
        """Tell whether the dispatcher itself runs this, in a future's callback."""
        return threading.current_thread() in self._threads()

    def _threads(self) -> list[threading.Thread]:
        compiling = self._compiler.thread
        return [self._thread, *self._runners.threads, *([] if compiling is None else [compiling])]

    @property
    def in_flight(self) -> int:
        """How many batches run."""
        return len(self._flights)

    def closed_error(self) -> DispatcherClosedError:
        """Return the error of whoever still wants something."""
        where = self._engine.where
        if self.cause is None:
            return DispatcherClosedError(f"{where}: the dispatcher is closed. Make a new one.")
        error = DispatcherClosedError(
            f"{where}: the dispatcher broke ({type(self.cause).__name__}: {self.cause}). Make a new one."
        )
        error.__cause__ = self.cause
        return error

    def fail_all(self, cause: BaseException) -> None:
        """End everything: a thread of the dispatcher itself met this, which nothing accounts for."""
        with self.lock:
            self.cause = self.cause or cause
        self._over = self.is_closing = True
        self._room.close()
        self._sweep()
        self._compiler.close()
        self._runners.close()
        self._wake()

    def _wake(self) -> None:
        self._inbox.put((_nothing,))

    def _sweep(self) -> None:
        """End what is still open once nobody else does."""
        self._arrivals.clear()
        for request in self.open.copy():
            self._end(request, "failed", error=self.closed_error())

    def _report(self, kind: TracedKind, bucket: Bucket | None, error: Exception | None) -> None:
        self._inbox.put((self._on_traced if bucket is None else self._on_compiled, kind, bucket, error))

    # --- the dispatch thread ---

    def _run(self) -> None:
        try:
            self._settings()
            wake = 0.0
            while not self._over:
                self._absorb(wake)
                wake = self._act()
            self._runners.close()
            for thread in self._runners.threads:  # they may be delivering still
                thread.join()
            self._sweep()
        except BaseException as error:
            self.fail_all(error)
        finally:
            self._device.leave(self._wake)
            for flight in list(self._flights):
                self._device.finish(flight, time.perf_counter())
            self._compiler.close()
            self._runners.close()

    def _absorb(self, wake: float) -> None:
        """Wait for messages until `wake`, handle all that are there, and take what arrived."""
        try:
            self._hungry = self._device.in_flight < self._planner.rules.in_flight
            if self._arrivals and self._hungry:
                wake = 0.0
            seconds = wake - time.perf_counter()
            if seconds > 0:
                handle, *args = self._inbox.get(timeout=min(seconds, 3600.0))
                self._hungry = False
                handle(*args)
            self._hungry = False
            while True:
                handle, *args = self._inbox.get_nowait()
                handle(*args)
        except queue.Empty:
            self._hungry = False
        for _ in range(len(self._arrivals)):
            self._admit(self._arrivals.popleft())

    def _act(self) -> float:
        """Do what the planner decides, and return when to ask again."""
        if self._programs_version != self._engine.programs_version:
            self._programs_version = self._engine.programs_version
            for kind in self._intake.kinds():
                if kind.exact is None:
                    self._find_programs(kind)
        while self._retries and self._device.in_flight < self._planner.rules.in_flight:
            kind, bucket, requests = self._retries.popleft()
            self._start(kind, bucket, requests, None)
        decision = self._planner.decide(time.perf_counter())
        for waiter in decision.expired:
            self._expire(_request(waiter))
        for kind, bucket in decision.wanted:
            assert isinstance(kind, TracedKind)
            self._compiler.compile(kind, bucket)
        for batch in decision.batches:
            self._dispatch(batch)
        if self._ending and not (self._arrivals or self._planner.count or self._flights or self._retries):
            self._over = True
        return decision.wake

    # --- requests ---

    def _admit(self, request: Request) -> None:
        kind = request.kind
        assert isinstance(kind, TracedKind)
        if request.cancelled():
            self._end(request, "cancelled")
            return
        if kind.traced is None:
            self._compiler.trace(kind)
        elif kind.raises_at(request.lengths):  # it was sorted before the trace told
            self._sort_anew(request)
            return
        self._planner.add(request)

    def _sort_anew(self, request: Request) -> None:
        request.kind, request.sizes, _ = self._intake.sort(request.leaves, request.lengths)
        self._admit(request)

    def _expire(self, request: Request) -> None:
        late = time.perf_counter() - request.arrival
        error = DeadlineError(
            f"{self._engine.where}.submit: {late:.3g} s passed before the example could be run, more than "
            f"its deadline, so it was not run."
        )
        request.is_expired = request.claim()
        self._end(request, "expired", error=error)

    def _on_cancelled(self, request: Request) -> None:
        self._planner.discard(request)
        self._end(request, "cancelled")

    def _end(self, request: Request, outcome: str, result: Any = None, error: Any = None) -> None:
        """End a request, once: count it, give its room back, and settle its future."""
        try:
            self.open.remove(request)
        except KeyError:
            return
        self._free(request)
        if not request.claim():
            outcome = "cancelled"
        with self.lock:
            self.ledger.counts[outcome] += 1
        if outcome != "cancelled":
            request.ended = time.perf_counter()
            settle(request, result, error)
        request.leaves = ()

    def _free(self, *requests: Request) -> None:
        """Give back the room of requests that are no longer pending."""
        leaving = [request for request in requests if request.has_room]
        for request in leaving:
            request.has_room = False
        if leaving:
            self._room.leave(sum([request.cells for request in leaving]), len(leaving))

    # --- batches ---

    def _dispatch(self, batch: Batch) -> None:
        requests = []
        for waiter in batch.waiters:
            request = _request(waiter)
            if request.claim():
                requests.append(request)
            else:
                self._end(request, "cancelled")
        self._free(*requests)
        if requests:
            assert isinstance(batch.kind, TracedKind)
            self._start(batch.kind, batch.bucket, requests, batch.seconds)

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
        self._flights.add(job)
        self._device.start(job, now, seconds)
        self._runners.put(job)

    def _on_done(self, job: Job, times: BatchTimes) -> None:
        seconds = self._finish(job, times.delivered)
        self._planner.seconds.observe(job.kind, job.bucket, seconds)

    def _on_failed(self, job: Job, error: Exception) -> None:
        self._finish(job, time.perf_counter())
        self._split(job.kind, job.bucket, job.requests, error)

    def _finish(self, job: Job, now: float) -> float:
        self._flights.discard(job)
        seconds = self._device.finish(job, now)
        self._device.tell_others(self._wake)
        return seconds

    def _split(self, kind: TracedKind, bucket: Bucket, requests: Sequence[Request], error: Exception) -> None:
        """Give a failed batch's error to the example at fault, and run the others again."""
        with self.lock:
            self.ledger.counts["failed_batches"] += 1
        exhausted = is_exhausted(error)
        if exhausted and self._could_be_smaller(kind, bucket, requests):
            self._planner.exhaust(kind, bucket)
            for request in requests:
                request.deadline = math.inf  # it was run once, so that its result is due
                self._planner.add(request)
        elif len(requests) == 1 or exhausted or is_final(error):
            for request in requests:
                self._end(request, "failed", error=error)
        else:
            half = len(requests) // 2
            self._retries.append((kind, bucket, requests[:half]))
            self._retries.append((kind, bucket, requests[half:]))

    def _could_be_smaller(self, kind: TracedKind, bucket: Bucket, requests: Sequence[Request]) -> bool:
        """Tell whether there is a bucket for these requests that takes less memory."""
        sizes = tuple(bucket.sizes.values())
        fewest = self._intake.rows_for(kind, sizes)[0]
        return bucket["rows"] > fewest or any(request.sizes != sizes for request in requests)

    # --- the run threads ---

    def _run_job(self, job: Job) -> None:
        """Take a batch all the way; what fails on it goes back to the dispatch thread."""
        traced, bucket, executables = job.kind.traced, job.bucket, self._engine.executables
        assert traced is not None
        examples = [request.leaves for request in job.requests]
        try:
            program = executables.get(traced.key(bucket), lambda: traced.build(bucket, executables.disk))
            with jax.profiler.TraceAnnotation(f"{self._engine.function.name} {bucket_name(bucket)}"):
                flight = _flights.start(program, traced, bucket, examples, job.lengths, self._shared)
                results, times = _flights.fetch(flight)
        except Exception as error:
            self._inbox.put((self._on_failed, job, error))
        else:
            self._inbox.put((self._on_done, job, times))
            self._deliver(job, results, times)

    def _deliver(self, job: Job, results: list[Any], times: BatchTimes) -> None:
        requests, bucket, ended = job.requests, job.bucket, times.delivered
        queued, waited, ran, total = [], [], [], []
        for request in requests:
            begun = ended if request.begun is None else request.begun
            queued.append(begun - request.arrival - request.waited)
            waited.append(request.waited)
            ran.append(ended - begun)
            total.append(ended - request.arrival)
        valid = int(job.lengths.prod(axis=1).sum())
        with self.lock:
            counts, num = self.ledger.counts, len(requests)
            self.ledger.add_batch(bucket["rows"], num, valid, bucket.cells)
            self.ledger.add_times(queued, waited, ran, total)
            counts["completed"] += num
        stream = threading.current_thread()  # the batches of one thread come one after another
        exact = job.kind.exact is not None
        self._engine.recorder.add(bucket, job.lengths, times, exact=exact, call=stream, since=times.begun)
        for request, result in zip(requests, results, strict=True):
            self.open.discard(request)
            request.ended = ended
            request.leaves = ()
            settle(request, result)

    # --- programs ---

    def _find_programs(self, kind: TracedKind) -> None:
        if kind.traced is None:
            return
        if kind.exact is None:
            programs = frozenset(self._engine.programs(kind.traced))
        else:
            grid_rows = self._intake.rows_for(kind, kind.exact)
            buckets = [Bucket(rows=rows, **kind.lengths) for rows in grid_rows]
            programs = frozenset(
                bucket for bucket in buckets if kind.traced.key(bucket) in self._engine.executables
            )
        if programs != kind.programs:
            kind.changed_at = time.perf_counter()
            self._planner.compiled(kind, programs)

    def _on_traced(self, kind: TracedKind, _: None, error: Exception | None) -> None:
        requests = [_request(waiter) for waiter in self._planner.take(kind)]
        if error is not None:
            for request in requests:
                self._end(request, "failed", error=error)
            return
        if kind.traced is not None:
            kind.is_open = True
            kind.moves = kind.exact is None and kind.traced.moves
            self._find_programs(kind)
        for request in requests:
            self._sort_anew(request)

    def _on_compiled(self, kind: TracedKind, bucket: Bucket, error: Exception | None) -> None:
        if error is None:
            self._find_programs(kind)
            return
        if (
            is_exhausted(error)
            and bucket["rows"] > self._intake.rows_for(kind, tuple(bucket.sizes.values()))[0]
        ):
            self._planner.exhaust(kind, bucket)
            return
        self._planner.refuse(kind, bucket)
        for waiter in self._planner.take_stuck(kind, bucket):
            self._end(_request(waiter), "failed", error=error)

    # --- the end ---

    def _on_close(self, cancel_pending: bool) -> None:
        self._ending = self.is_closing = True
        self._room.close()
        if cancel_pending:
            while self._arrivals:
                self._admit(self._arrivals.popleft())
            for waiter in self._planner.take():
                request = _request(waiter)
                if request.attempts:
                    self._planner.add(request)  # it ran once, so its result is due
                else:
                    request.cancel()
                    self._end(request, "cancelled")


def _request(waiter: Waiter) -> Request:
    assert isinstance(waiter, Request)
    return waiter


def _nothing() -> None:
    """Do nothing but wake the thread."""
