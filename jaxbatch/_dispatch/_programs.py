"""Which programs the kinds of a dispatcher have, for its planner to know; the dispatch thread's own."""

import time
from collections.abc import Callable

from .._engine import Engine
from .._grid import Bucket
from .._online import Planner
from ._faults import is_exhausted
from ._intake import Intake, TracedKind
from ._request import Request, as_request
from ._requests import Requests


class Programs:
    """Tells the planner which programs there are, whoever compiled them.

    Args:
      sort: sorts a request anew, after its kind was traced.
    """

    def __init__(
        self,
        engine: Engine,
        intake: Intake,
        planner: Planner,
        requests: Requests,
        *,
        sort: Callable[[Request], None],
    ):
        self._engine = engine
        self._intake = intake
        self._planner = planner
        self._requests = requests
        self._sort = sort
        self._version = -1

    def refresh(self) -> None:
        """Look for programs that others compiled, or dropped, meanwhile."""
        if self._version != self._engine.programs_version:
            self._version = self._engine.programs_version
            for kind in self._intake.kinds():
                if kind.exact is None:
                    self._find(kind)

    def traced(self, kind: TracedKind, error: Exception | None) -> None:
        """Let the requests of a kind go on, after its trace: to programs, or to its error."""
        requests = [as_request(waiter) for waiter in self._planner.take(kind)]
        if error is not None:
            for request in requests:
                self._requests.end(request, "failed", error)
            return
        if kind.traced is not None:
            kind.is_open = True
            kind.moves = kind.exact is None and kind.traced.moves
            self._find(kind)
        for request in requests:
            self._sort(request)

    def compiled(self, kind: TracedKind, bucket: Bucket, error: Exception | None) -> None:
        """Use a program that was compiled; one that could not be is the error of those who have no other."""
        if error is None:
            self._find(kind)
            return
        rows = self._intake.rows_for(kind, tuple(bucket.sizes.values()))
        if is_exhausted(error) and bucket["rows"] > rows[0]:
            self._planner.exhaust(kind, bucket)
            return
        self._planner.refuse(kind, bucket)
        for waiter in self._planner.take_stuck(kind, bucket):
            self._requests.end(as_request(waiter), "failed", error)

    def _find(self, kind: TracedKind) -> None:
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
