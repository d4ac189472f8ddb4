"""What a compiled program costs: a few timed runs on made-up data, and what the compiler says of it.

A run is timed from NumPy arrays to NumPy results, as a batch of a call would go. The fastest of a few
counts, since whatever else the machine does can only add to it.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ._grid import Bucket
from ._traced import Traced

ENOUGH = 0.25
"""Seconds of timed runs after which no further one is made."""

_RUNS = 5
_FLOPS_PER_BYTE = 8.0  # how many operations a device does in the time of moving one byte, roughly


def run_seconds(program: Any, traced: Traced, bucket: Bucket, shared: Sequence[Any]) -> float:
    """Return the seconds that one batch takes; all its rows are full, of zeros."""
    counts, consts = traced.counts(traced.trial(bucket)), traced.consts(bucket)
    *_, avals = traced.avals(bucket)

    def once() -> float:
        examples = [np.zeros(aval.shape, aval.dtype) for aval in avals]
        begin = time.perf_counter()
        for output in program(counts, consts, list(shared), examples):
            np.asarray(output)
        return time.perf_counter() - begin

    seconds = [once()]  # the first run allocates, and counts only if it takes so long that one must do
    while len(seconds) <= _RUNS and sum(seconds) < ENOUGH:
        seconds.append(once())
    return min(seconds[1:] or seconds)


def work(program: jax.stages.Compiled) -> float | None:
    """Return what the compiler says a program does, as a number that only compares; None if it is silent."""
    try:
        analysis = program.cost_analysis()
    except Exception:  # not every backend has one
        return None
    found = analysis[0] if isinstance(analysis, list) else analysis
    flops, moved = (found or {}).get("flops", 0.0), (found or {}).get("bytes accessed", 0.0)
    return flops + _FLOPS_PER_BYTE * moved or None


def peak_bytes(program: jax.stages.Compiled) -> int | None:
    """Return the bytes that a program needs at once, arguments and results included; None if not known."""
    try:
        memory = program.memory_analysis()
    except Exception:  # not every backend has one
        return None
    if memory is None:
        return None
    parts = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    return sum(parts) - memory.alias_size_in_bytes


def device_bytes() -> int | None:
    """Return the memory that the default device lets JAX use; None if it does not say, as CPUs do not."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
