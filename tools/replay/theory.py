"""What queueing theory says of the mean latency, where it says something."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def single_server(rate: float, seconds: Sequence[float], weights: Any) -> float:
    """Return the mean latency of one server, first come first served: Pollaczek and Khinchine, M/G/1."""
    p = np.array(weights) / np.sum(weights)
    mean, square = float(p @ np.array(seconds)), float(p @ np.square(seconds))
    load = rate * mean
    return math.inf if load >= 1 else mean + rate * square / (2 * (1 - load))


def bulk_service(rate: float, seconds: Callable[[int], float], most: int) -> float:
    """Return the mean latency where an idle server takes all that wait, `most` at a time: M/D(k)/1 in bulk.

    The numbers found at the ends of batches are a Markov chain: from `q` a batch of `k = min(q, most)` leaves
    `q - k`, and Poisson(rate * seconds(k)) come; from 0 the next arrival is served alone. Little's law gives
    the latency from the mean number present.
    """
    size = max(8 * most, 200)
    counts = np.arange(size)
    step = np.zeros((size, size))
    durations = np.array([seconds(min(max(q, 1), most)) for q in range(size)])
    log_factorial = np.cumsum(np.log(np.maximum(counts, 1)))
    for q in counts:
        left = max(q - most, 0)
        come = np.exp(counts * math.log(rate * durations[q]) - rate * durations[q] - log_factorial)
        step[q, left:] = come[: size - left]
        step[q, -1] += 1 - step[q].sum()
    values, vectors = np.linalg.eig(step.T)
    stationary = np.real(vectors[:, np.argmin(abs(values - 1))])
    stationary /= stationary.sum()
    taken = np.minimum(np.maximum(counts, 1), most)
    left = np.maximum(counts - most, 0)
    present = (taken + left) * durations + rate * durations**2 / 2
    cycle = durations + (counts == 0) / rate
    return float(stationary @ present / (stationary @ cycle)) / rate
