"""Which dispatcher a thread belongs to: a callback must not wait for what its own thread is to bring."""

import threading
from typing import Any

_here = threading.local()


def begin(owner: Any) -> None:
    """Note that this thread belongs to a dispatcher."""
    _here.owner = owner


def owner() -> Any:
    """Return what this thread belongs to; None for the threads of users."""
    return getattr(_here, "owner", None)
