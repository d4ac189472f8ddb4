"""What other threads leave for the dispatch thread: requests, and messages.

A message is a function and its arguments, which the dispatch thread calls. Requests alone wake it only when
there are enough of them to matter: with a full device they are found soon enough.
"""

import collections
import math
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

from ._request import Request


class Mailbox:
    """Requests and messages for one thread; any thread may put them in, also inside the garbage collector."""

    def __init__(self):
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._arrivals: collections.deque[Request] = collections.deque()
        self._enough: float | int = math.inf

    def put(self, handle: Callable[..., None], *args: Any) -> None:
        """Leave a message."""
        self._messages.put((handle, *args))

    def wake(self) -> None:
        """Wake the thread."""
        self._messages.put((_nothing,))

    def add(self, request: Request) -> None:
        """Leave a request."""
        self._arrivals.append(request)
        if len(self._arrivals) >= self._enough or request.deadline < math.inf:
            self._enough = math.inf
            self.wake()

    def clear(self) -> None:
        """Forget all requests."""
        self._arrivals.clear()

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    # --- its thread ---

    def handle(self, wake: float, enough: float | int) -> None:
        """Wait for messages until `wake`, and handle all that are there.

        Args:
          enough: how many requests are reason enough to return without a message.
        """
        try:
            self._enough = enough
            if len(self._arrivals) >= enough:
                wake = 0.0
            seconds = wake - time.perf_counter()
            if seconds > 0:
                handle, *args = self._messages.get(timeout=min(seconds, 3600.0))
                self._enough = math.inf
                handle(*args)
            self._enough = math.inf
            while True:
                handle, *args = self._messages.get_nowait()
                handle(*args)
        except queue.Empty:
            self._enough = math.inf

    def arrivals(self) -> Iterator[Request]:
        """Take out the requests that are there now."""
        for _ in range(len(self._arrivals)):
            yield self._arrivals.popleft()


def _nothing() -> None:
    """Do nothing but wake the thread."""
