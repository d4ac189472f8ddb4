"""The end of the interpreter, and forks: every open dispatcher is closed, so that nobody waits for it.

In a forked process it has none of its threads; in the one that was forked it goes on.
"""

import atexit
import os
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


def _in_child() -> None:
    for loop in list(_alive):
        loop.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
