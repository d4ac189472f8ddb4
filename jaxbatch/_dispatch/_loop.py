"""The dispatch thread: tells the planner what happens, and does what it decides.

Only this thread touches the planner. Others leave requests and messages in its mailbox.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .._engine import Engine
from .._errors import DeadlineError, DispatcherClosedError
from .._grid import Bucket
from .._online import Planner
from .._options import Rules
from .._timing import BatchTimes
from . import _thread_owner
from ._compiler import Compiler
from ._device import SharedDevice
from ._in_flight import InFlight
from ._intake import Intake, TracedKind
from ._mailbox import Mailbox
from ._programs import Programs
from ._request import Request, as_request
from ._requests import Requests
from ._room import Room
from ._runners import Job, Runners, Work


class Loop:
    """The threads of one dispatcher and what they share.

    Args:
      shared: the shared leaves, on the device.
      make: traces a kind, or compiles its program for a bucket.
      settings: gives a thread the JAX settings of the thread that made the dispatcher.

    Attributes:
      requests: those that have not ended, and the counts of all.
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
        self._where = engine.where
        self._intake = intake
        self._room = room
        self._device = device
        self._jax_settings = settings
        self._mail = mail = Mailbox()
        self.requests = requests = Requests(room)
        self._planner = planner = Planner(rules, intake.rows_for, engine.costs.of(packed=False), device)
        self._programs = Programs(engine, intake, planner, requests, sort=self._sort_anew)
        work = Work(engine, shared, requests, done=self._report_done, failed=self._report_failed)
        threads = {"broken": self.fail_all, "settings": self._settings}
        name = engine.function.name
        self._compiler = Compiler(name, make, report=self._report_made, **threads)
        self._runners = Runners(name, rules.in_flight, work.run, **threads)
        self._batches = InFlight(planner, device, intake, requests, self._runners, wake=mail.wake)
        self._thread = threading.Thread(target=self._run, name=f"jaxbatch dispatch {name}", daemon=True)
        self._over = self._ending = self._forked = False
        self.cause: BaseException | None = None
        self.is_closing = False

    # --- any thread ---

    def start(self) -> None:
        """Start the threads."""
        self._device.listen(self._mail.wake)
        self._runners.start()
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Take a request that has room."""
        self.requests.add(request)
        self._mail.add(request)
        if self._over:  # the thread ended in between, and nobody else looks at the arrivals
            self._sweep()

    def cancelled(self, request: Request) -> None:
        """Note that a request was cancelled."""
        self._mail.put(self._on_cancelled, request)

    def close(self, *, cancel_pending: bool) -> None:
        """Take no further requests and end when those that were taken have ended; waits for nothing."""
        self.is_closing = True
        self._room.close()
        self._mail.put(self._on_close, cancel_pending)

    def abandon(self) -> None:
        """Close when what is pending has run; safe wherever the garbage collector may be at work."""
        self._mail.put(self._on_close, False)

    def join(self, seconds: float | None = None) -> bool:
        """Wait until all threads have ended, unless in a callback; return whether they have."""
        if _thread_owner.owner() is not None:
            return False
        end = None if seconds is None else time.perf_counter() + seconds
        for thread in self._threads():
            thread.join(None if end is None else max(end - time.perf_counter(), 0.0))
        return not any(thread.is_alive() for thread in self._threads())

    def before_waiting(self) -> None:
        """Raise an error if this thread would wait for ever for one of the requests."""
        if self._forked:
            raise self.closed_error()
        if _thread_owner.owner() is self:
            raise RuntimeError(
                f"{self._where}: a callback waits for a result of its own dispatcher, whose thread it holds "
                f"up. Give that future a callback, or pass `timeout=`."
            )

    def forked(self) -> None:
        """Be closed, in a forked process: the threads are in the other one."""
        self.cause = RuntimeError("the process was forked, and the dispatcher's threads are in the other one")
        self._forked = self._over = self.is_closing = True
        self.requests.forked()
        self._room.forked()

    def _threads(self) -> list[threading.Thread]:
        compiling = self._compiler.thread
        return [self._thread, *self._runners.threads, *([] if compiling is None else [compiling])]

    @property
    def in_flight(self) -> int:
        """How many batches run."""
        return len(self._batches)

    def closed_error(self) -> DispatcherClosedError:
        """Return the error of whoever still wants something."""
        if self.cause is None:
            return DispatcherClosedError(f"{self._where}: the dispatcher is closed. Make a new one.")
        what = f"{type(self.cause).__name__}: {self.cause}"
        error = DispatcherClosedError(f"{self._where}: the dispatcher broke ({what}). Make a new one.")
        error.__cause__ = self.cause
        return error

    def fail_all(self, cause: BaseException) -> None:
        """End everything: a thread of the dispatcher itself met this, which nothing accounts for."""
        self.cause = self.cause or cause
        self._over = self.is_closing = True
        self._room.close()
        self._sweep()
        self._compiler.close()
        self._runners.close()
        self._mail.wake()

    def _settings(self) -> None:
        """Begin a thread."""
        _thread_owner.begin(self)
        self._jax_settings()

    def _sweep(self) -> None:
        """End what is still open once nobody else does."""
        self._mail.clear()
        self.requests.end_all(self.closed_error)

    def _report_made(self, kind: TracedKind, bucket: Bucket | None, error: Exception | None) -> None:
        if bucket is None:
            self._mail.put(self._programs.traced, kind, error)
        else:
            self._mail.put(self._programs.compiled, kind, bucket, error)

    def _report_done(self, job: Job, times: BatchTimes) -> None:
        self._mail.put(self._batches.done, job, times)

    def _report_failed(self, job: Job, error: Exception) -> None:
        self._mail.put(self._batches.failed, job, error)

    # --- the dispatch thread ---

    def _run(self) -> None:
        try:
            self._settings()
            wake, enough = 0.0, 1
            while not self._over:
                self._mail.handle(wake, enough)
                self._admit_all()
                wake, enough = self._act()
            self._runners.close()
            for thread in self._runners.threads:  # they may be delivering still
                thread.join()
            self._sweep()
        except BaseException as error:
            self.fail_all(error)
        finally:
            self._device.leave(self._mail.wake)
            self._batches.abandon()
            self._compiler.close()
            self._runners.close()

    def _act(self) -> tuple[float, float | int]:
        """Do what the planner decides; return when to ask again, and how many requests are a reason to."""
        self._programs.refresh()
        self._batches.retry()
        decision = self._planner.decide(time.perf_counter())
        for waiter in decision.expired:
            self._expire(as_request(waiter))
        for kind, bucket in decision.wanted:
            assert isinstance(kind, TracedKind)
            self._compiler.compile(kind, bucket)
        for batch in decision.batches:
            self._batches.start(batch)
        if self._ending and not (self._mail or self._planner.count) and self._batches.is_over:
            self._over = True
        return decision.wake, decision.enough

    # --- requests ---

    def _admit_all(self) -> None:
        for request in self._mail.arrivals():  # a function of its own, so that no thread keeps the last one
            self._admit(request)

    def _admit(self, request: Request) -> None:
        kind = request.kind
        assert isinstance(kind, TracedKind)
        if request.cancelled():
            self.requests.end(request, "cancelled")
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
            f"{self._where}.submit: {late:.3g} s passed before the example could be run, more than its "
            f"deadline, so it was not run."
        )
        request.is_expired = request.claim()
        self.requests.end(request, "expired", error)

    def _on_cancelled(self, request: Request) -> None:
        self._planner.discard(request)
        self.requests.end(request, "cancelled")

    # --- the end ---

    def _on_close(self, cancel_pending: bool) -> None:
        self._ending = self.is_closing = True
        self._room.close()
        if cancel_pending:
            self._admit_all()
            for waiter in self._planner.take():
                request = as_request(waiter)
                if request.attempts:
                    self._planner.add(request)  # it ran once, so its result is due
                else:
                    self.requests.cancel(request)
