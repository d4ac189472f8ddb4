"""Let other threads have their turn while a background thread traces.

Python takes the interpreter from a thread after 5 ms at the earliest, and an event loop that waits for it
beside several others may lose a few rounds. So a thread that works in the background, and has marked itself,
stops for a moment about every millisecond, wherever `give` is called.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

_EVERY, _PAUSE = 1e-3, 2e-5  # seconds

_thread = threading.local()


@contextlib.contextmanager
def giving() -> Iterator[None]:
    """Let this thread give way to others."""
    _thread.latest = 0.0
    try:
        yield
    finally:
        _thread.latest = None


def give() -> None:
    """Give way to others, if this thread is to do so, and has not just done it."""
    latest = getattr(_thread, "latest", None)
    if latest is not None and time.perf_counter() - latest > _EVERY:
        time.sleep(_PAUSE)
        _thread.latest = time.perf_counter()
