"""What the JAX systems share: the encoder in one form, compiled programs, and a few batches in flight.

On a CPU, JAX runs what one thread dispatches in order, one program after another, each spread over the cores
where it can be. With two threads two programs run at a time; then products are best left on one thread each.
"""

import collections
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from models import bert, weights

from .base import Settings

IN_FLIGHT = 3
"""Batches dispatched and not yet fetched, by each thread."""

ONE_THREAD = {"xla_cpu_multi_thread_eigen": False}
"""Compiler options for programs that shall not spread over the cores."""


def encoder(settings: Settings, attention: Any = "late") -> tuple[bert.Bert, bert.Params]:
    """Return MiniLM in the form of this table, with its weights on the device."""
    products: Any = settings.products
    model, params = bert.load(weights.fetch("minilm"), bert.Form(attention, products))
    return model, jax.device_put(params)


class Programs:
    """`f(params, *arrays)`, compiled once for each shape of the arrays."""

    def __init__(self, f: Callable[..., Any], params: Any, options: dict[str, Any] | None = None):
        self._jitted, self._params, self._options = jax.jit(f), params, options
        self._compiled: dict[tuple, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *arrays: np.ndarray) -> jax.Array:
        """Dispatch; the result may not be there yet."""
        key = tuple(array.shape for array in arrays)
        program = self._compiled.get(key)
        if program is None:
            with self._lock:
                if (program := self._compiled.get(key)) is None:
                    lowered = self._jitted.lower(self._params, *arrays)
                    program = self._compiled[key] = lowered.compile(compiler_options=self._options)
        return program(self._params, *arrays)

    def __len__(self) -> int:
        return len(self._compiled)


def in_flight(
    batches: Iterable[Any], start: Callable[[Any], Any], fetch: Callable[[Any, Any], Any], streams: int = 1
) -> None:
    """Start every batch, on `streams` threads, and fetch each once `IN_FLIGHT` later ones have started.

    `start(batch)` dispatches; `fetch(batch, output)` waits and keeps the result.
    """
    source, lock = iter(batches), threading.Lock()

    def stream(_: int) -> None:
        flights: collections.deque[tuple[Any, Any]] = collections.deque()
        while True:
            with lock:
                batch = next(source, None)
            if batch is None:
                break
            flights.append((batch, start(batch)))
            while len(flights) > IN_FLIGHT:
                fetch(*flights.popleft())
        for flight in flights:
            fetch(*flight)

    if streams == 1:
        stream(0)
        return
    with ThreadPoolExecutor(streams) as threads:
        list(threads.map(stream, range(streams)))
