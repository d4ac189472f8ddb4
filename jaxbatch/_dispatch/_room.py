"""How much may be pending: a bounded number of examples and of cells, and who waits for room."""

import collections
import contextlib
import threading
import time
from concurrent.futures import Future, InvalidStateError


class Room:
    """Pending work, bounded in examples and in padded cells.

    An example larger than the bound in cells has room when nothing else is pending.
    """

    def __init__(self, max_pending: int, max_cells: float | int):
        self._max_pending = max_pending
        self._max_cells = max_cells
        self._condition = threading.Condition(threading.Lock())
        self._waiting = 0
        self._futures: collections.deque[Future] = collections.deque()
        self._closed = False
        self.pending = 0
        self.cells = 0

    def enter(self, cells: int, timeout: float | int | None) -> bool:
        """Take room for an example, waiting for at most `timeout` seconds; None waits without end.

        Returns:
          Whether there is room, which there always is once the room is closed: whoever entered looks at why.
        """
        with self._condition:
            if self._fits(cells):
                self._take(cells)
                return True
            if timeout is not None and timeout <= 0:
                return False
            end = None if timeout is None else time.perf_counter() + timeout
            self._waiting += 1
            try:
                while not self._fits(cells):
                    left = None if end is None else end - time.perf_counter()
                    if left is not None and left <= 0:
                        return False
                    self._condition.wait(left)
            finally:
                self._waiting -= 1
            self._take(cells)
            return True

    def leave(self, cells: int, num: int = 1) -> None:
        """Give the room of `num` examples back."""
        with self._condition:
            self.pending -= num
            self.cells -= cells
            self._tell()

    def change(self) -> Future:
        """Return a future that ends when there may be more room than now."""
        future: Future = Future()
        with self._condition:
            self._futures.append(future)
            if self._closed or not self.pending:
                self._tell()
        return future

    def close(self) -> None:
        """Let everybody in who waits."""
        with self._condition:
            self._closed = True
            self._tell()

    def _fits(self, cells: int) -> bool:
        if self._closed or not self.pending:
            return True
        return self.pending < self._max_pending and self.cells + cells <= self._max_cells

    def _take(self, cells: int) -> None:
        self.pending += 1
        self.cells += cells

    def _tell(self) -> None:
        if self._waiting:
            self._condition.notify_all()
        while self._futures:
            with contextlib.suppress(InvalidStateError):  # its task was cancelled
                self._futures.popleft().set_result(None)
