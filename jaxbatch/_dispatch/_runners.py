"""The run threads: each takes a batch through padding, device and delivery, and then the next one.

There is one for each batch that may be in flight. So the dispatch thread goes on deciding also where a
program runs inside the call that starts it, as small ones and those with callbacks do on a CPU.
"""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from typing import Any

import numpy as np

from .._grid import Bucket
from ._intake import TracedKind
from ._request import Request

_log = logging.getLogger("jaxbatch")


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Requests that run together; `lengths` has a row for each."""

    kind: TracedKind
    bucket: Bucket
    requests: Sequence[Request]
    lengths: np.ndarray


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


def settle(request: Request, result: Any = None, error: BaseException | None = None) -> None:
    """End a future, unless it has ended already; what its callbacks raise is theirs alone."""
    try:
        if error is None:
            request.set_result(result)
        else:
            request.set_exception(error)
    except InvalidStateError:
        pass
    except BaseException:  # the future logs an `Exception` itself, and lets a `SystemExit` pass
        _log.exception("a callback of a future ended with this")
