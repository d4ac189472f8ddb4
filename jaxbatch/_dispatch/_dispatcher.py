"""The dispatcher itself: what users hold."""

import asyncio
import math
import time
import weakref
from collections.abc import Awaitable, Sequence
from typing import Any, Self

import jax

from .. import _compat
from .._engine import Engine
from .._errors import DeadlineError, JaxbatchError, MaskError, QueueFullError
from .._executables import KeyTakenError
from .._shared import Shared
from .._waits import DispatcherStatistics, freeze
from . import _exit, _thread_owner
from ._awaiting import enter
from ._compiler import Maker
from ._device import SharedDevice, shared_device
from ._intake import Intake
from ._loop import Loop
from ._request import Request
from ._requests import settle
from ._settings import MAX_PRIORITY, OnFull, Settings


class Dispatcher:
    """Takes single examples from any thread or coroutine, and runs them in batches.

    It is a context manager: at the end of the block what is pending is run first, and after an exception it
    is cancelled. Made by `Batched.dispatcher`; several may share a device.
    """

    def __init__(
        self,
        engine: Engine,
        shared_args: Sequence[Any],
        shared: Shared,
        settings: Settings,
        *,
        oversize: str,
        frozen: bool,
    ):
        self._engine = engine
        self._settings = settings
        intake = self._intake = Intake(engine, shared_args, oversize)
        self._room = settings.room(engine)
        maker = Maker(engine, shared, frozen=frozen)
        self._loop = Loop(
            engine,
            shared.arrays,
            intake,
            self._room,
            settings.rules(frozen=frozen),
            _device_of(shared),
            make=maker.make,
            settings=_compat.thread_settings(),
        )
        self._trace_early(maker)
        self._loop.start()
        _exit.enter(self._loop)
        # Who drops a dispatcher without closing it gets the results, and the threads end after them.
        self._finalizer = weakref.finalize(self, self._loop.abandon)
        self._finalizer.atexit = False

    # --- in ---

    def submit(
        self,
        *example: Any,
        priority: float | int = 0,
        deadline: float | int | None = None,
        on_full: OnFull | None = None,
        timeout: float | int | None = None,
    ) -> Request:
        """Take one example and return the future of its result.

        The example is checked here and its arrays are copied, so that they may be changed at once. The future
        is a `concurrent.futures.Future`; its result is what `f` returns for the example, as NumPy arrays that
        own their memory, and `future.info` says what happened. `future.cancel()` succeeds until it runs.
        Callbacks run in a thread of the dispatcher and hold up other results; there, nothing waits: this
        raises `QueueFullError`, and `result` of what has not ended a `RuntimeError`. In a coroutine, `await`
        the dispatcher itself instead, since this may block. Who waits for room gets it in turn.

        Args:
          example: one value for each per-example argument.
          priority: higher ones come first, in all buckets. Each `aging` seconds of waiting count as much as
            one step, so that nobody waits for ever.
          deadline: seconds from now to the start of its run; later, it gets a `DeadlineError` instead and is
            not run. Once it runs, the result is delivered.
          on_full: as for the dispatcher, for this example.
          timeout: the longest time to wait for room, in seconds; None waits without end.

        Raises:
          SpecError: the example does not match the spec.
          OversizeError: it is larger than the grid.
          QueueFullError: too much is pending, and it was not to wait, or waited for `timeout` seconds.
          DispatcherClosedError: the dispatcher is closed, or broke.
        """
        arrival = time.perf_counter()
        request = self._request(example, priority, deadline, arrival)
        timeout = math.inf if timeout is None else self._number("timeout", timeout)
        if self._on_full(on_full) == "raise" or _thread_owner.owner() is not None:
            timeout = 0.0
        until = min(timeout, request.deadline - arrival)
        entered = self._room.enter(request.cells, None if until == math.inf else until)
        return self._take(request, entered, timeout)

    def __call__(
        self,
        *example: Any,
        priority: float | int = 0,
        deadline: float | int | None = None,
        on_full: OnFull | None = None,
    ) -> Awaitable[Any]:
        """Submit one example and return what `await` waits for: its result.

        For coroutines: nothing here blocks the event loop. Where the dispatcher is full and "block" is asked
        for, room is awaited. Cancelling the task cancels the request, as long as it does not run.
        """
        arrival = time.perf_counter()
        request = self._request(example, priority, deadline, arrival)
        return self._result(request, waits=self._on_full(on_full) == "block")

    # --- out ---

    def statistics(self) -> DispatcherStatistics:
        """Return the counts and times so far; the snapshot does not change."""
        counts, times = self._loop.requests.copy()
        room = self._room
        return freeze(
            counts, times, pending=room.pending, pending_cells=room.cells, in_flight=self._loop.in_flight
        )

    def close(self, cancel_pending: bool = False) -> None:
        """Take no more examples, and return when all futures have ended and all threads too.

        It may be called again, and from several threads; a later call can still cancel. In a future's
        callback it returns at once.

        Args:
          cancel_pending: cancel what does not run yet; otherwise it is run first.
        """
        self._loop.close(cancel_pending=cancel_pending)
        if self._loop.join():
            _exit.leave(self._loop)
            self._finalizer.detach()

    @property
    def closed(self) -> bool:
        """Whether it takes no more examples: it was closed, or broke."""
        return self._loop.is_closing

    @property
    def name(self) -> str:
        """The name of the function."""
        return self._engine.function.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel_pending=kind is not None)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._room.pending} pending"
        return f"<jaxbatch dispatcher of {self.name}: {state}>"

    # --- between ---

    def _request(
        self, example: tuple[Any, ...], priority: float | int, deadline: float | int | None, arrival: float
    ) -> Request:
        if self._loop.is_closing:
            raise self._loop.closed_error()
        names = self._engine.function.spec.names
        if len(example) != len(names):
            raise TypeError(
                f"{self._engine.where}.submit: one example is {len(names)} values ({', '.join(names)}), got "
                f"{len(example)}. The shared arguments belong to the dispatcher."
            )
        if type(priority) is not int or priority:
            priority = self._number("priority", priority)
            if abs(priority) > MAX_PRIORITY:
                raise ValueError(f"{self._engine.where}.submit: priority={priority!r}; use less.")
        if deadline is not None:
            deadline = self._number("deadline", deadline)
        try:
            leaves, lengths = self._intake.check(example)
        except JaxbatchError:
            self._count("invalid")
            raise
        kind, sizes, cells = self._intake.sort(leaves, lengths)
        end = math.inf if deadline is None else arrival + deadline
        return Request(leaves, lengths, kind, sizes, cells, arrival, priority, end, self._loop)

    async def _result(self, request: Request, *, waits: bool) -> Any:
        cells = request.cells
        entered = self._room.enter(cells, 0.0)
        if waits and not entered:
            entered = await enter(self._room, cells, request.deadline)
        return await asyncio.wrap_future(self._take(request, entered, 0.0))

    def _take(self, request: Request, entered: bool, waited: float) -> Request:
        """Hand a request over to the dispatch thread, or end it if there was no room."""
        if not entered:
            if time.perf_counter() >= request.deadline:
                return self._expired(request)
            raise self._full(waited)
        if self._loop.is_closing:
            self._room.leave(request.cells)
            raise self._loop.closed_error()
        self._count("submitted")
        self._loop.submit(request)
        return request

    def _number(self, name: str, value: Any) -> float:
        """Return an option as a float; a number is nothing to be surprised by in another thread."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isnan(number):
            raise ValueError(f"{self._engine.where}.submit: {name}={value!r}; use a number.")
        return number

    def _on_full(self, given: str | None) -> str:
        if given not in (None, "block", "raise"):
            raise ValueError(f"{self._engine.where}.submit: on_full={given!r}; use 'block' or 'raise'.")
        return self._settings.on_full if given is None else given

    def _expired(self, request: Request) -> Request:
        self._count("submitted")
        self._count("expired")
        request.is_expired = True
        error = DeadlineError(
            f"{self._engine.where}.submit: the deadline passed while the example waited for room, so it was "
            f"not run."
        )
        settle(request, error=error)
        return request

    def _full(self, waited: float) -> QueueFullError:
        self._count("refused")
        how_long = f" for {waited:g} s" if waited else ""
        return QueueFullError(
            f"{self._engine.where}.submit: full{how_long}; {self._room.pending} examples of "
            f"{self._room.cells} cells are pending. Submit fewer at a time, or raise max_pending or "
            f"max_pending_cells."
        )

    def _count(self, what: str) -> None:
        self._loop.requests.count(what)

    def _trace_early(self, maker: Maker) -> None:
        """Trace in the caller's thread where all is known, so that a refusal shows here."""
        engine, fixed = self._engine, self._intake.fixed
        if engine.grid is None or any(dim not in fixed for dim in engine.fixed_dims):
            return
        kind = self._intake.kind(engine.function.spec.dtypes(), None)
        try:
            maker.make(kind, None)
        except (MaskError, KeyTakenError):
            raise
        except Exception:  # with a dtype family the default may be the wrong one; it belongs to an example
            return
        if kind.traced is not None:
            kind.is_open = True
            kind.moves = kind.traced.moves


def _device_of(shared: Shared) -> SharedDevice:
    """Return the device that batches run on, the same one for all dispatchers that use it."""
    placed = {device for array in shared.arrays if array.committed for device in array.devices()}
    default = jax.config.jax_default_device or jax.local_devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    return shared_device(frozenset(placed) or frozenset([default]))
