"""One submitted example: the future that the caller holds, and what happened to it on its way."""

import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from .._grid import Bucket
from .._lanes import Kind, Waiter
from . import _thread_owner

_log = logging.getLogger("jaxbatch")


@dataclasses.dataclass(frozen=True)
class RequestInfo:
    """What happened to one example so far; times are in seconds.

    Attributes:
      state: "pending", "running", "done", "failed", "cancelled" or "expired".
      lengths: of its ragged dims.
      bucket: where it ran; None before that, here and below.
      mates: how many other examples ran in the same batch.
      queued: how long it waited for the device, for others before it, or for a program.
      waited: how long it waited for mates while the device was free and the program was there.
      ran: from its start, with the padding of its batch, to its result on the host.
      total: from `submit` to its result.
      attempts: how many batches it was in; more than one where a batch failed and was split.
    """

    state: str
    lengths: dict[str, int]
    bucket: Bucket | None = None
    mates: int | None = None
    queued: float | None = None
    waited: float | None = None
    ran: float | None = None
    total: float | None = None
    attempts: int = 0


@runtime_checkable
class Owner(Protocol):
    """What a request belongs to."""

    def cancelled(self, request: "Request") -> None:
        """Note that a request was cancelled before it ran."""
        ...

    def before_waiting(self) -> None:
        """Raise an error if this thread would wait for ever."""
        ...


class Request(Future, Waiter):
    """The future of one example; `info` says what happened to it.

    Args:
      leaves: the example's arrays, of the dispatcher's own.
      lengths: of the kind's ragged dims.
      cells: of the padded sizes.
    """

    def __init__(
        self,
        leaves: tuple[np.ndarray, ...],
        lengths: tuple[int, ...],
        kind: Kind,
        sizes: tuple[int, ...],
        cells: int,
        arrival: float,
        priority: float | int,
        deadline: float,
        owner: Owner,
    ):
        Future.__init__(self)
        Waiter.__init__(self, kind, sizes, arrival, priority, deadline)
        self.leaves = leaves
        self.lengths = lengths
        self.cells = cells
        self.has_room = True  # it counts among what is pending
        self.is_expired = False
        self.attempts = 0
        self.bucket: Bucket | None = None
        self.mates = 0
        self.begun: float | None = None
        self.ended: float | None = None
        self.waited = 0.0
        self._claimed: bool | None = None
        self._owner = owner

    def result(self, timeout: float | int | None = None) -> Any:
        """Return the result, or raise the error, waiting for it as any future does.

        Raises:
          RuntimeError: in a callback of the same dispatcher, which might wait for its own thread.
        """
        if timeout is None and not self.done():
            self._owner.before_waiting()
        return super().result(timeout)

    def exception(self, timeout: float | int | None = None) -> BaseException | None:
        """Return the error, or None, waiting for it as any future does; in a callback as `result`."""
        if timeout is None and not self.done():
            self._owner.before_waiting()
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call `fn` with the future when it has ended; what it raises, `SystemExit` too, stops no other."""

        def contained(_: Future) -> None:
            try:
                fn(self)
            except Exception:
                raise  # the future logs it
            except BaseException:
                if _thread_owner.owner() is None:
                    raise
                _log.exception("a callback of a future ended with this")

        super().add_done_callback(contained)

    def cancel(self) -> bool:
        """Cancel the request if it does not run yet; then it never will."""
        before = self.cancelled()
        done = super().cancel()
        if done and not before:
            self._owner.cancelled(self)
        return done

    def claim(self) -> bool:
        """Make sure that it is not cancelled any more; return False if it was, of which waiters are told."""
        if self._claimed is None:
            try:
                self._claimed = self.set_running_or_notify_cancel()
            except (InvalidStateError, RuntimeError):  # another thread ended it, as the dispatcher broke
                self._claimed = False
        return self._claimed

    def begin(self, bucket: Bucket, num: int, now: float, free_since: float) -> None:
        """Note that it runs now, with `num - 1` others; the device and its program are free since then."""
        self.attempts += 1
        self.bucket, self.mates = bucket, num - 1
        if self.begun is None:
            self.begun, self.waited = now, max(now - max(self.arrival, free_since), 0.0)

    @property
    def info(self) -> RequestInfo:
        """What happened to this example so far."""
        lengths = dict(zip(self.kind.dims, self.lengths, strict=True))
        begun, ended = self.begun, self.ended
        if begun is None:
            return RequestInfo(self._what(), lengths)
        return RequestInfo(
            self._what(),
            lengths,
            self.bucket,
            self.mates,
            begun - self.arrival - self.waited,
            self.waited,
            None if ended is None else ended - begun,
            None if ended is None else ended - self.arrival,
            self.attempts,
        )

    def _what(self) -> str:
        if self.cancelled():
            return "cancelled"
        if self.is_expired:
            return "expired"
        if self.done():
            return "done" if self.exception() is None else "failed"
        return "running" if self.running() else "pending"


def as_request(waiter: Waiter) -> Request:
    """Return a waiter, which in a dispatcher is always a request, as one."""
    assert isinstance(waiter, Request)
    return waiter
