"""The end of the interpreter: every dispatcher that is open is closed, so that every future ends too."""

import atexit
import time
import weakref

from ._loop import Loop

_LAST_SECONDS = 10.0  # how long the end of the interpreter waits for batches that run

_alive: "weakref.WeakSet[Loop]" = weakref.WeakSet()


def enter(loop: Loop) -> None:
    """Note that a dispatcher is open."""
    _alive.add(loop)


def leave(loop: Loop) -> None:
    """Note that a dispatcher is closed."""
    _alive.discard(loop)


@atexit.register
def _close_all() -> None:
    loops, end = list(_alive), time.perf_counter() + _LAST_SECONDS
    for loop in loops:
        loop.close(cancel_pending=True)
    for loop in loops:
        if not loop.join(max(end - time.perf_counter(), 0.0)):
            loop.fail_all(RuntimeError(f"the interpreter ended, and a batch did not in {_LAST_SECONDS} s"))
