"""A batch on its way: padded and started, later fetched and cut. JAX returns before the device is done.

A device runs what one thread starts one after another. On a CPU with several cores, two programs that are
started by two threads run at the same time and leave fewer cores idle than one program does; `Streams` are
these threads.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ._batch import Residuals
from ._grid import Bucket
from ._timing import BatchTimes
from ._traced import Traced


@dataclasses.dataclass(frozen=True, eq=False)
class Flight:
    """A batch that was started.

    Attributes:
      outputs: the padded output leaves, on the device, or the future of these and of when they were ready.
      begun: when its padding began; `padded`, `started` and `ready` are as in `BatchTimes`.
    """

    traced: Traced
    outputs: Sequence[Any] | concurrent.futures.Future
    residuals: Residuals
    begun: float
    padded: float
    started: float
    ready: float | None


class Streams:
    """Threads that each run one program at a time, made when they are first needed.

    Args:
      num: how many; with one, the caller's thread starts all programs, and JAX keeps them in order.
    """

    def __init__(self, num: int):
        self.num = num
        # Idle threads end with this object, or with the interpreter.
        self._pool = concurrent.futures.ThreadPoolExecutor(num, "jaxbatch-stream") if num > 1 else None

    def run(self, program: Callable[..., Any], *arguments: Any) -> Sequence[Any] | concurrent.futures.Future:
        """Start a program; the future's result is what it returned, and when that was ready."""
        return program(*arguments) if self._pool is None else self._pool.submit(_run, program, arguments)


def _run(program: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Sequence[Any], float]:
    outputs = program(*arguments)
    for output in outputs:
        output.copy_to_host_async()
    jax.block_until_ready(outputs)
    return outputs, time.perf_counter()


ONE = Streams(1)


def start(
    program: Callable[..., Any],
    traced: Traced,
    bucket: Bucket,
    examples: Sequence[Sequence[np.ndarray]],
    lengths: np.ndarray,
    shared: Sequence[Any],
    streams: Streams = ONE,
) -> Flight:
    """Pad examples into a bucket and start its program.

    Args:
      lengths: [num, num_dims], the columns in the order of the ragged dims.
      shared: the shared leaves, on the device.
    """
    begun = time.perf_counter()
    lengths = lengths[:, : len(traced.dims)]  # a program for exact sizes may need none
    arrays, residuals = traced.assemble(bucket, examples, lengths)
    padded = time.perf_counter()
    outputs = streams.run(program, traced.counts(residuals), traced.consts(bucket), shared, arrays)
    started, ready = time.perf_counter(), None
    if not isinstance(outputs, concurrent.futures.Future):
        ready = started if outputs and outputs[-1].is_ready() else None
        for output in outputs if ready is None else ():
            output.copy_to_host_async()
    return Flight(traced, outputs, residuals, begun, padded, started, ready)


AGAIN = object()
"""Stands for a result that does not count: the example is to run again, by the trace's `again`."""


def fetch(flight: Flight) -> tuple[list[Any], BatchTimes]:
    """Wait for a batch, and return the result of each example, and when the batch was where."""
    waited, outputs, ready = time.perf_counter(), flight.outputs, flight.ready
    if isinstance(outputs, concurrent.futures.Future):
        outputs, ready = outputs.result()
    elif outputs and ready is None and not outputs[-1].is_ready():
        jax.block_until_ready(outputs)
        ready = time.perf_counter()
    arrays = [np.asarray(output) for output in outputs]
    fetched = time.perf_counter()
    rows = flight.traced.take_apart(arrays, flight.residuals)
    tree = flight.traced.out_tree
    single = jax.tree_util.treedef_is_leaf(tree)  # nearly always, and then there is nothing to put together
    put = (lambda leaves: leaves[0]) if single else tree.unflatten
    results = [AGAIN if leaves is None else put(leaves) for leaves in rows]
    delivered = time.perf_counter()
    times = BatchTimes(flight.begun, flight.padded, flight.started, waited, fetched, delivered, ready)
    return results, times
