"""The compile thread: traces and compiles for a dispatcher, one after another, and reports each."""

import functools
import queue
import threading
from collections.abc import Callable

from .._engine import Engine
from .._errors import MaskError
from .._executables import KeyTakenError
from .._grid import Bucket
from .._shared import Shared
from ._intake import TracedKind

Report = Callable[..., None]
"""Called as `report(kind, bucket, error)`: without a bucket for a trace, without an error for a success."""


class Maker:
    """Makes traces and programs, in the thread that asks.

    Args:
      frozen: only what exists may be used.
    """

    def __init__(self, engine: Engine, shared: Shared, *, frozen: bool):
        self._engine = engine
        self._shared = shared
        self._frozen = frozen

    def make(self, kind: TracedKind, bucket: Bucket | None) -> None:
        """Trace a kind, or compile its program for a bucket, in this thread.

        Raises:
          Exception: what the function, JAX or the rules say against it.
        """
        if bucket is not None:
            assert kind.traced is not None
            executables = self._engine.executables
            build = functools.partial(kind.traced.build, bucket, executables.disk)
            executables.get(kind.traced.key(bucket), build, frozen=self._frozen)
        elif kind.exact is None:
            kind.traced = self._engine.padded(self._shared, kind.dtypes, kind.fixed)
        else:
            try:
                lengths = {**kind.fixed, **kind.lengths}
                kind.traced = self._engine.exact(self._shared, kind.dtypes, lengths)
            except (MaskError, KeyTakenError):
                raise
            except Exception as error:
                name = self._engine.function.name
                error.add_note(f"raised by {name} for an example of the exact size {kind.lengths}")
                raise


class Compiler:
    """The compile thread: starts with the first request, and ends with `close`.

    Args:
      settings: gives a thread the JAX settings of the thread that made the dispatcher.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[TracedKind, Bucket | None], None],
        *,
        report: Report,
        broken: Callable[[BaseException], None],
        settings: Callable[[], None],
    ):
        self._name = name
        self._make = make
        self._report = report
        self._broken = broken
        self._settings = settings
        self._queue: queue.SimpleQueue[tuple[TracedKind, Bucket | None] | None] = queue.SimpleQueue()
        self._tracing: set[TracedKind] = set()
        self.thread: threading.Thread | None = None

    def trace(self, kind: TracedKind) -> None:
        """Ask for a kind's trace, unless that was done."""
        if kind not in self._tracing:
            self._tracing.add(kind)
            self._ask(kind, None)

    def compile(self, kind: TracedKind, bucket: Bucket) -> None:
        """Ask for a program."""
        self._ask(kind, bucket)

    def close(self) -> None:
        """Let the thread end after what it is doing; what was asked for and not begun is not done."""
        self._queue.put(None)

    def _ask(self, kind: TracedKind, bucket: Bucket | None) -> None:
        if self.thread is None:
            name = f"jaxbatch compile {self._name}"
            self.thread = threading.Thread(target=self._run, name=name, daemon=True)
            self.thread.start()
        self._queue.put((kind, bucket))

    def _run(self) -> None:
        try:
            self._settings()
            while (asked := self._queue.get()) is not None:
                kind, bucket = asked
                error = None
                try:
                    self._make(kind, bucket)
                except Exception as caught:
                    error = caught
                if bucket is None:
                    self._tracing.discard(kind)
                self._report(kind, bucket, error)
                del asked, kind, bucket, error
        except BaseException as error:
            self._broken(error)
