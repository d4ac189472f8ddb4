"""What the dispatcher's tests share: functions that the host can hold up or fail, and time limits."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import jaxbatch as jb

VECTOR = jb.spec("n", "float32")
GRID = jb.Grid(n=(4, 16), rows=(1, 8))
SOON = 60.0  # seconds in which anything must have ended; the machine may be busy


def normal(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n).astype(np.float32) for n in lengths]


def on_host(see: Callable[[np.ndarray], None], grid: jb.Grid = GRID, **options: Any) -> jb.Batched:
    """Batch a sum whose rows the host sees first: `see` gets the padded rows, and may sleep or raise."""

    def looked_at(rows: np.ndarray) -> np.ndarray:
        see(np.asarray(rows))
        return np.asarray(rows).sum(1)

    def f(x, mask):
        shape = jax.ShapeDtypeStruct(x.shape[:1], x.dtype)
        return jax.pure_callback(looked_at, shape, jax.numpy.where(mask, x, 0), vmap_method="sequential")

    return jb.batched(f, spec=VECTOR, grid=grid, per_example=False, mask_arg="mask", **options)


class Gate:
    """Holds batches back on the host until it is opened; `entered` is set when the first is there."""

    def __init__(self):
        self.entered, self._open = threading.Event(), threading.Event()
        self.batches: list[np.ndarray] = []

    def __call__(self, rows: np.ndarray) -> None:
        self.batches.append(rows)
        self.entered.set()
        assert self._open.wait(SOON)

    def open(self) -> None:
        self._open.set()


def threads() -> list[str]:
    """Return the names of the dispatchers' threads that live."""
    return [t.name for t in threading.enumerate() if t.name.startswith("jaxbatch ")]


@contextlib.contextmanager
def ends_within(seconds: float = SOON) -> Iterator[None]:
    """Check that a block does not hang, as far as that can be seen from inside."""
    begin = time.perf_counter()
    yield
    assert time.perf_counter() - begin < seconds


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something is true that another thread brings about."""
    end = time.perf_counter() + SOON
    while not condition():
        assert time.perf_counter() < end, "it never came true"
        time.sleep(1e-3)
