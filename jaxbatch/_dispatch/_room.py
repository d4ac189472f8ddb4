"""How much may be pending: a bounded number of examples and of cells, and who waits for room, in what order.

Whoever finds no room queues up, threads and coroutines alike, and room is given out in the queue's order:
nobody is woken for nothing, and a large example is not passed by small ones for ever.
"""

import collections
import threading
from concurrent.futures import Future


class Ticket(Future):
    """A place in the queue; it ends, with None, when its room was taken."""

    def __init__(self, cells: int):
        super().__init__()
        self.cells = cells


class Room:
    """Pending work, bounded in examples and in padded cells.

    An example larger than the bound in cells has room when nothing else is pending. Once the room is closed,
    everybody has room: whoever entered looks at why.
    """

    def __init__(self, max_pending: int, max_cells: float | int):
        self._max_pending = max_pending
        self._max_cells = max_cells
        self._lock = threading.Lock()
        self._queue: collections.deque[Ticket] = collections.deque()
        self._closed = False
        self.pending = 0
        self.cells = 0

    def enter(self, cells: int, timeout: float | int | None) -> bool:
        """Take room for an example, waiting for at most `timeout` seconds; None waits without end.

        Returns:
          Whether there was room.
        """
        with self._lock:
            if not self._queue and self._fits(cells):
                self._take(cells)
                return True
            if timeout is not None and timeout <= 0:
                return False
            ticket = self._queue_up(cells)
        try:
            ticket.result(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
            return True
        except TimeoutError:
            return not self.withdraw(ticket)
        except BaseException:  # Ctrl-C, in the main thread
            self.abandon(ticket)
            raise

    def ask(self, cells: int) -> Ticket:
        """Queue up; the ticket may have ended already."""
        with self._lock:
            ticket = self._queue_up(cells)
            self._give()
        return ticket

    def withdraw(self, ticket: Ticket) -> bool:
        """Leave the queue; return False if room was taken before, which then stays taken."""
        with self._lock:
            if ticket.done():
                return False
            self._queue.remove(ticket)
            self._give()  # to those behind, who may need less
            return True

    def abandon(self, ticket: Ticket) -> None:
        """Leave the queue, and give back what was taken."""
        if not self.withdraw(ticket):
            self.leave(ticket.cells)

    def leave(self, cells: int, num: int = 1) -> None:
        """Give the room of `num` examples back."""
        with self._lock:
            self.pending -= num
            self.cells -= cells
            self._give()

    def close(self) -> None:
        """Let everybody in who waits."""
        with self._lock:
            self._closed = True
            self._give()

    def forked(self) -> None:
        """Close, in a forked process: no other thread is left there, and one may have had the lock."""
        self._lock = threading.Lock()
        self._queue.clear()
        self.close()

    def _fits(self, cells: int) -> bool:
        if self._closed or not self.pending:
            return True
        return self.pending < self._max_pending and self.cells + cells <= self._max_cells

    def _take(self, cells: int) -> None:
        self.pending += 1
        self.cells += cells

    def _queue_up(self, cells: int) -> Ticket:
        ticket = Ticket(cells)
        self._queue.append(ticket)
        return ticket

    def _give(self) -> None:
        while self._queue and self._fits(self._queue[0].cells):
            ticket = self._queue.popleft()
            self._take(ticket.cells)
            ticket.set_result(None)
