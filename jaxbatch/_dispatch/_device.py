"""Devices that several dispatchers of a process may share: each sees what the others have on them."""

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from .._online import Device


class SharedDevice(Device):
    """A device whose batches may come from several dispatchers, in several threads."""

    def __init__(self):
        super().__init__()
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def listen(self, on_free: Callable[[], None]) -> None:
        """Call this whenever a batch of another dispatcher is done."""
        with self._lock:
            self._listeners.append(on_free)

    def leave(self, on_free: Callable[[], None]) -> None:
        """Call this no longer."""
        with self._lock:
            self._listeners = [each for each in self._listeners if each != on_free]

    def tell_others(self, own: Callable[[], None]) -> None:
        """Call all listeners but this one."""
        if len(self._listeners) > 1:
            for each in list(self._listeners):
                if each != own:
                    each()

    def start(self, flight: Hashable, now: float, seconds: float | None) -> None:  # noqa: D102
        with self._lock:
            super().start(flight, now, seconds)

    def finish(self, flight: Hashable, now: float) -> float:  # noqa: D102
        with self._lock:
            return super().finish(flight, now)

    def free_at(self, now: float) -> float:  # noqa: D102
        with self._lock:
            return super().free_at(now)


_devices: "weakref.WeakValueDictionary[Any, SharedDevice]" = weakref.WeakValueDictionary()
_lock = threading.Lock()


def shared_device(key: Hashable) -> SharedDevice:
    """Return the device behind a key, the same for all who use it at the same time."""
    with _lock:
        device = _devices.get(key)
        if device is None:
            device = _devices[key] = SharedDevice()
        return device
