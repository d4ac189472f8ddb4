"""The delivery thread: waits for started batches, in their order, cuts results and ends the futures."""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from typing import Any

import numpy as np

from .. import _flights
from .._grid import Bucket
from .._timing import BatchTimes
from ._intake import TracedKind
from ._request import Request

_log = logging.getLogger("jaxbatch")


@dataclasses.dataclass(frozen=True, eq=False)
class Started:
    """A batch on the device."""

    kind: TracedKind
    bucket: Bucket
    requests: Sequence[Request]
    lengths: np.ndarray
    flight: _flights.Flight


class Delivery:
    """Takes started batches and delivers them.

    Args:
      done: called with a batch and its times as soon as its results are here, before they are delivered.
      failed: called with a batch and its error.
      deliver: called with a batch, its results and its times.
    """

    def __init__(
        self,
        name: str,
        *,
        done: Callable[[Started, BatchTimes], None],
        failed: Callable[[Started, Exception], None],
        deliver: Callable[[Started, list[Any], BatchTimes], None],
        broken: Callable[[BaseException], None],
    ):
        self._done = done
        self._failed = failed
        self._deliver = deliver
        self._broken = broken
        self._queue: queue.SimpleQueue[Started | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"jaxbatch deliver {name}", daemon=True)

    def put(self, started: Started) -> None:
        """Hand over a batch that was started."""
        self._queue.put(started)

    def close(self) -> None:
        """Let the thread end after what was handed over."""
        self._queue.put(None)

    def _run(self) -> None:
        try:
            while (started := self._queue.get()) is not None:
                try:
                    results, times = _flights.fetch(started.flight)
                except Exception as error:
                    self._failed(started, error)
                else:
                    self._done(started, times)
                    self._deliver(started, results, times)
                    del results
                del started  # nothing of a batch is kept while the next one is waited for
        except BaseException as error:
            self._broken(error)


def settle(request: Request, result: Any = None, error: BaseException | None = None) -> None:
    """End a future, unless it has ended already; what its callbacks raise is theirs alone."""
    try:
        if error is None:
            request.set_result(result)
        else:
            request.set_exception(error)
    except InvalidStateError:
        pass
    except BaseException:  # the library logs an `Exception` itself, and lets a `SystemExit` pass
        _log.exception("a callback of a future ended with this")
