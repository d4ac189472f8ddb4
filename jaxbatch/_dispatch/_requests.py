"""The requests of a dispatcher that have not ended, and their ends: once, counted, and the room given back.

Any thread may end a request; whoever takes it out of the open ones does it, and everybody else does nothing.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from typing import Any

from .._waits import Ledger
from ._request import Request
from ._room import Room


class Requests:
    """The open requests, and the counts of all.

    Args:
      room: what pending requests take up.
    """

    def __init__(self, room: Room):
        self._room = room
        self._open: set[Request] = set()
        self._ledger = Ledger()
        self._lock = threading.Lock()  # of the ledger

    def add(self, request: Request) -> None:
        """Note a request that has room; it is open now."""
        self._open.add(request)

    def count(self, what: str) -> None:
        """Count something in the ledger."""
        with self._lock:
            self._ledger.counts[what] += 1

    def copy(self) -> tuple[Any, Any]:
        """Return a copy of the ledger, as `freeze` needs it."""
        with self._lock:
            return self._ledger.copy()

    def forked(self) -> None:
        """Go on in a forked process, where another thread may have had the lock."""
        self._lock = threading.Lock()

    # --- ends ---

    def end(self, request: Request, outcome: str, error: BaseException | None = None) -> None:
        """End a request without a result; one that was cancelled before counts as that."""
        try:
            self._open.remove(request)
        except KeyError:
            return
        self.free(request)
        if not request.claim():
            outcome = "cancelled"
        self.count(outcome)
        if outcome != "cancelled":
            request.ended = time.perf_counter()
            settle(request, error=error)
        request.leaves = ()

    def cancel(self, request: Request) -> None:
        """Cancel and end a request, unless it has begun to run."""
        request.cancel()
        self.end(request, "cancelled")

    def end_all(self, error: Callable[[], BaseException]) -> None:
        """End what is open, each with an error of its own."""
        for request in self._open.copy():
            self.end(request, "failed", error())

    def deliver(
        self, requests: Sequence[Request], results: Sequence[Any], now: float, cells: tuple[int, int, int]
    ) -> None:
        """End the requests of a batch with their results.

        Args:
          cells: rows of the batch, valid and padded cells.
        """
        queued, waited, ran, total = [], [], [], []
        for request in requests:
            begun = now if request.begun is None else request.begun
            queued.append(begun - request.arrival - request.waited)
            waited.append(request.waited)
            ran.append(now - begun)
            total.append(now - request.arrival)
        rows, valid, padded = cells
        with self._lock:
            self._ledger.add_batch(rows, len(requests), valid, padded)
            self._ledger.add_times(queued, waited, ran, total)
            self._ledger.counts["completed"] += len(requests)
        for request, result in zip(requests, results, strict=True):
            self._open.discard(request)
            request.ended = now
            request.leaves = ()
            settle(request, result)

    # --- room ---

    def free(self, *requests: Request) -> None:
        """Give back the room of requests that are no longer pending."""
        leaving = [request for request in requests if request.has_room]
        for request in leaving:
            request.has_room = False
        if leaving:
            self._room.leave(sum([request.cells for request in leaving]), len(leaving))


def settle(request: Request, result: Any = None, error: BaseException | None = None) -> None:
    """End a future, unless it has ended already; its callbacks run here."""
    try:  # not `suppress`, which takes as long as the future itself
        if error is None:
            request.set_result(result)
        else:
            request.set_exception(error)
    except InvalidStateError:
        pass
