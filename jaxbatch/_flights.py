"""A batch on its way: padded and started, later fetched and cut. JAX returns before the device is done."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ._batch import Residuals, pad_and_stack, unstack
from ._grid import Bucket
from ._timing import BatchTimes
from ._traced import Traced


@dataclasses.dataclass(frozen=True, eq=False)
class Flight:
    """A batch that was started.

    Attributes:
      outputs: the padded output leaves, on the device.
      begun: when its padding began; `padded`, `started` and `ready` are as in `BatchTimes`.
    """

    traced: Traced
    outputs: Sequence[Any]
    residuals: Residuals
    begun: float
    padded: float
    started: float
    ready: float | None


def start(
    program: Callable[..., Any],
    traced: Traced,
    bucket: Bucket,
    examples: Sequence[Sequence[np.ndarray]],
    lengths: np.ndarray,
    shared: Sequence[Any],
) -> Flight:
    """Pad examples into a bucket and start its program.

    Args:
      lengths: [num, num_dims], the columns in the order of the ragged dims.
      shared: the shared leaves, on the device.
    """
    begun = time.perf_counter()
    lengths = lengths[:, : len(traced.dims)]  # a program for exact sizes may need none
    arrays, residuals = pad_and_stack(examples, lengths, traced.shapes(bucket), bucket["rows"])
    padded = time.perf_counter()
    outputs = program(traced.counts(residuals), traced.consts(bucket), shared, arrays)
    started = time.perf_counter()
    ready = started if outputs and outputs[-1].is_ready() else None
    for output in outputs:
        output.copy_to_host_async()
    return Flight(traced, outputs, residuals, begun, padded, started, ready)


def fetch(flight: Flight) -> tuple[list[Any], BatchTimes]:
    """Wait for a batch, and return the result of each example, and when the batch was where."""
    waited, ready = time.perf_counter(), flight.ready
    if flight.outputs and ready is None and not flight.outputs[-1].is_ready():
        jax.block_until_ready(flight.outputs)
        ready = time.perf_counter()
    arrays = [np.asarray(output) for output in flight.outputs]
    fetched = time.perf_counter()
    rows = unstack(arrays, flight.residuals, flight.traced.out_shapes(flight.residuals))
    tree = flight.traced.out_tree
    single = jax.tree_util.treedef_is_leaf(tree)  # nearly always, and then there is nothing to put together
    results = [leaves[0] for leaves in rows] if single else list(map(tree.unflatten, rows))
    delivered = time.perf_counter()
    times = BatchTimes(flight.begun, flight.padded, flight.started, waited, fetched, delivered, ready)
    return results, times
