"""Examples that wait for their run, in lanes: those of one kind and equal padded sizes wait in one lane.

A lane gives its examples out by rank, which is their arrival less a head start for their priority. So a
higher priority comes first, and whoever has waited for longer than the head start of another comes before
it: the order of two examples never changes while they wait, and nobody waits for ever. All times are float
seconds of any one clock.
"""

import collections
import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Any

from ._grid import Bucket

_GAP_WEIGHT = 0.2  # of a new gap between arrivals in their running mean


class Kind:
    """Examples that can share programs: those of one trace.

    Args:
      moves: whether an example may run in a larger bucket than the smallest that holds it.

    Attributes:
      is_open: whether programs may be asked for yet.
      is_passing: whether its lanes are forgotten when nobody waits: there may be any number of such kinds.
      programs: the buckets that have a program.
      refused: buckets whose program could not be compiled.
      exhausted: buckets that ran out of memory; neither they nor larger ones are used again.
      estimates: what is known of the seconds of batches, by bucket.
      version: grows with every change to what may be used.
    """

    def __init__(self, dims: tuple[str, ...], *, moves: bool = True, name: str = ""):
        self.dims = dims
        self.moves = moves
        self.name = name
        self.is_open = True
        self.is_passing = False
        self.programs: frozenset[Bucket] = frozenset()
        self.refused: set[Bucket] = set()
        self.exhausted: list[Bucket] = []
        self.estimates: dict[Bucket, Any] = {}
        self.version = 0

    def __repr__(self) -> str:
        return f"Kind({self.name or ', '.join(self.dims)})"

    def is_exhausted(self, bucket: Bucket) -> bool:
        """Tell whether a bucket, or one that it holds, ran out of memory."""
        return any(all(bucket[name] >= size for name, size in each.items()) for each in self.exhausted)


class Waiter:
    """One example that waits; it knows all that a decision depends on.

    Args:
      sizes: the padded sizes that hold it, in the order of its kind's dims.
      arrival: when it came.
      deadline: when it is no longer to be run.

    Attributes:
      gone: it does not wait: not yet, or no longer.
    """

    kind: Kind
    sizes: tuple[int, ...]
    arrival: float
    priority: float | int
    deadline: float
    gone: bool

    def __init__(
        self,
        kind: Kind,
        sizes: tuple[int, ...],
        arrival: float,
        priority: float | int = 0,
        deadline: float = math.inf,
    ):
        self.kind = kind
        self.sizes = sizes
        self.arrival = arrival
        self.priority = priority
        self.deadline = deadline
        self.gone = True


class Lane:
    """The waiting examples of one kind and size.

    Args:
      rows: the numbers of rows that the grid has at these sizes, ascending.
      aging: seconds of waiting that count as much as one step of priority.

    Attributes:
      count: how many wait.
      gap: the mean time between arrivals, weighted towards the latest; None before the second.
      last_arrival: the latest arrival.
    """

    def __init__(self, kind: Kind, sizes: tuple[int, ...], rows: tuple[int, ...], aging: float | int):
        self.kind = kind
        self.sizes = sizes
        self.rows = rows
        self.count = 0
        self.gap: float | None = None
        self.last_arrival = -math.inf
        self._aging = aging
        self._by_rank: list[tuple[float, int, Waiter]] = []
        self._by_arrival: collections.deque[Waiter] = collections.deque()
        self._by_deadline: list[tuple[float, int, Waiter]] = []
        self._num = 0
        self._buckets: tuple[Bucket, ...] = ()
        self._complete = False
        self._version = -1

    # --- in and out ---

    def add(self, waiter: Waiter) -> None:
        """Let an example wait; arrivals come in order, those that come back after a failure apart."""
        if self.last_arrival > -math.inf and waiter.arrival >= self.last_arrival:
            gap = waiter.arrival - self.last_arrival
            self.gap = gap if self.gap is None else self.gap + _GAP_WEIGHT * (gap - self.gap)
        self.last_arrival = max(self.last_arrival, waiter.arrival)
        self.count += 1
        self._num += 1
        waiter.gone = False
        rank = waiter.arrival - waiter.priority * self._aging
        heapq.heappush(self._by_rank, (rank, self._num, waiter))
        if self._by_arrival and waiter.arrival < self._by_arrival[0].arrival:
            self._by_arrival.appendleft(waiter)
        else:
            self._by_arrival.append(waiter)
        if waiter.deadline < math.inf:
            heapq.heappush(self._by_deadline, (waiter.deadline, self._num, waiter))

    def remove(self, waiter: Waiter) -> None:
        """Forget an example that waits; it is skipped wherever it still stands."""
        waiter.gone = True
        self.count -= 1
        self._forget()
        # What stands in the queues is kept in proportion to what waits.
        if len(self._by_rank) > 64 + 4 * self.count:
            for queue in (self._by_rank, self._by_deadline):
                queue[:] = [entry for entry in queue if not entry[2].gone]
                heapq.heapify(queue)
            self._by_arrival = collections.deque(w for w in self._by_arrival if not w.gone)

    def take(self, num: int) -> list[Waiter]:
        """Remove and return the first `num` examples by rank."""
        taken = []
        while len(taken) < num and self.count:
            _, _, waiter = heapq.heappop(self._by_rank)
            if not waiter.gone:
                waiter.gone = True
                self.count -= 1
                taken.append(waiter)
        self._forget()
        return taken

    def expired(self, now: float) -> Iterator[Waiter]:
        """Remove and yield the examples whose deadline has passed."""
        while (waiter := self._first(self._by_deadline)) is not None and waiter.deadline <= now:
            self.remove(waiter)
            yield waiter

    # --- what a decision looks at ---

    @property
    def rank(self) -> float:
        """The rank of the first example; `inf` where none waits."""
        first = self._first(self._by_rank)
        return math.inf if first is None else first.arrival - first.priority * self._aging

    @property
    def oldest(self) -> float:
        """The earliest arrival of those that wait."""
        while self._by_arrival and self._by_arrival[0].gone:
            self._by_arrival.popleft()
        return self._by_arrival[0].arrival if self._by_arrival else math.inf

    @property
    def deadline(self) -> float:
        """The earliest deadline of those that wait."""
        first = self._first(self._by_deadline)
        return math.inf if first is None else first.deadline

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets that can run this lane now, for each number of rows the smallest, by rows."""
        self._refresh()
        return self._buckets

    @property
    def is_complete(self) -> bool:
        """Whether each of its own buckets has a program."""
        self._refresh()
        return self._complete

    def own(self, num: int) -> Bucket:
        """Return the bucket of this lane's own sizes that fits `num` examples best.

        That of the fewest rows is always among them: what ran out of memory may fit another time.
        """
        sizes = dict(zip(self.kind.dims, self.sizes, strict=True))
        found = Bucket(rows=self.rows[0], **sizes)
        for rows in self.rows[1:]:
            bucket = Bucket(rows=rows, **sizes)
            if found["rows"] >= num or self.kind.is_exhausted(bucket):
                break
            found = bucket
        return found

    def holds(self, bucket: Bucket) -> bool:
        """Tell whether a bucket is large enough for this lane's examples."""
        return all(bucket[dim] >= size for dim, size in zip(self.kind.dims, self.sizes, strict=True))

    def _refresh(self) -> None:
        if self._version != self.kind.version:
            self._version, self._buckets = self.kind.version, tuple(self._ready())
            own = {self.own(rows) for rows in self.rows}
            self._complete = own <= self.kind.programs

    def _ready(self) -> Iterable[Bucket]:
        found: dict[int, Bucket] = {}
        for bucket in self.kind.programs:
            rows = bucket["rows"]
            own = tuple([bucket[dim] for dim in self.kind.dims]) == self.sizes
            if not (own or (self.kind.moves and self.holds(bucket))):
                continue
            if self.kind.is_exhausted(bucket) and not (own and rows == self.rows[0]):
                continue
            if rows not in found or bucket.cells < found[rows].cells:
                found[rows] = bucket
        return [found[rows] for rows in sorted(found)]

    def _forget(self) -> None:
        """Keep nothing of those that are gone once nobody waits."""
        if not self.count:
            self._by_rank.clear()
            self._by_arrival.clear()
            self._by_deadline.clear()

    @staticmethod
    def _first(queue: list[tuple[float, int, Waiter]]) -> Waiter | None:
        while queue and queue[0][2].gone:
            heapq.heappop(queue)
        return queue[0][2] if queue else None
