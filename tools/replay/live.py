"""The simulation next to the real dispatcher, on the same arrivals.

The function sleeps as a cost table says, so that the device is the same in both. What the host takes beyond
that is measured in the live run and given to the simulation: how much longer batches took than they slept at
that time, and how long after a batch the next one began although somebody waited.
"""

import bisect
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

import jaxbatch as jb
from jaxbatch import Bucket, Costs, Grid
from jaxbatch._options import Rules

from .policies import Policy
from .simulation import simulate
from .traces import LOADS, Arrival

SIZES = Grid(n=[16, 64], rows=(1, 8))
COSTS = Costs({bucket: 8e-3 + 4e-5 * bucket.cells for bucket in SIZES})
MAX_DELAY = 0.01


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Latencies in seconds, live and simulated.

    Attributes:
      load: the share of what full batches of the largest size could do.
      overhead: what a batch took beyond its sleep, on average.
      lag: what lay between two batches though somebody waited, in the middle.
    """

    load: float
    num: int
    mean: tuple[float, float]
    p99: tuple[float, float]
    batches: tuple[int, int]
    overhead: float
    lag: float

    @property
    def off(self) -> float:
        """By which share the simulated mean is off."""
        return self.mean[1] / self.mean[0] - 1

    def __str__(self) -> str:
        (a, b), (p, q) = ([1e3 * each for each in pair] for pair in (self.mean, self.p99))
        return (
            f"load {self.load:.0%}: mean live {a:.2f} ms, simulated {b:.2f} ms ({self.off:+.1%}); p99 "
            f"{p:.2f} and {q:.2f} ms ({q / p - 1:+.1%}); batches {self.batches[0]} and {self.batches[1]}; "
            f"{1e3 * self.overhead:.2f} ms more a batch than its sleep, {1e3 * self.lag:.2f} ms between two"
        )


@dataclasses.dataclass(frozen=True)
class _Ran:
    """One batch of the live run; times are from its first arrival."""

    bucket: Bucket
    begun: float
    ended: float
    first_arrival: float

    @property
    def overhead(self) -> float:
        return self.ended - self.begun - _sleep(self.bucket)


def compare_with_live(seconds: float = 8.0, loads: Sequence[float] = LOADS) -> Iterator[Comparison]:
    """Run arrivals at random through the real dispatcher, and then through the simulation."""
    run = _sleeper()
    for load in loads:
        rng = np.random.default_rng(4)
        rate = load * 8 / (COSTS.seconds(Bucket(n=64, rows=8)) or 1.0)
        num = max(int(rate * seconds), 20)
        times, lengths = np.cumsum(rng.exponential(1 / rate, num)), rng.integers(1, 65, num).tolist()
        with run.dispatcher(max_delay=MAX_DELAY, in_flight=1) as dispatcher:
            begin = time.perf_counter()
            futures = []
            for due, length in zip(times.tolist(), lengths, strict=True):
                time.sleep(max(begin + due - time.perf_counter(), 0))
                futures.append(dispatcher.submit(np.ones(length, np.float32)))
            live = np.array([future.result() is not None and future.info.total for future in futures])
        # A producer that was woken late is late in the simulation too.
        trace = [Arrival(f.arrival - futures[0].arrival, n) for f, n in zip(futures, lengths, strict=True)]
        batches = _batches(futures)
        host = _Host(batches)
        policy = Policy("live", rules=Rules(max_delay=MAX_DELAY, in_flight=1))
        got = simulate(trace, policy, COSTS, SIZES, lag=host.lag, seconds_of=host.seconds_of)
        yield Comparison(
            load,
            num,
            (float(live.mean()), float(got.latency.mean())),
            (float(np.quantile(live, 0.99)), float(np.quantile(got.latency, 0.99))),
            (len(batches), got.batches),
            float(np.mean([batch.overhead for batch in batches])),
            host.usual_lag,
        )


class _Host:
    """What the host takes, as in the live run at the same time: what else the machine does comes and goes."""

    def __init__(self, batches: Sequence[_Ran]):
        self._batches = batches
        self._begins = [batch.begun for batch in batches]
        pairs = list(zip(batches, batches[1:], strict=False))
        gaps = [after.begun - ran.ended if after.first_arrival < ran.ended else None for ran, after in pairs]
        known = [gap for gap in gaps if gap is not None]
        self.usual_lag = float(np.median(known)) if known else 0.0
        self._gaps = [self.usual_lag if gap is None else gap for gap in (None, *gaps, None)]

    def seconds_of(self, bucket: Bucket, now: float) -> float:
        """Return what a batch takes that begins now."""
        latest = max(bisect.bisect(self._begins, now) - 1, 0)
        return _sleep(bucket) + self._batches[latest].overhead

    def lag(self, now: float) -> float:
        """Return how long the dispatcher takes to notice what happens now: the gap before the next batch."""
        return self._gaps[bisect.bisect(self._begins, now)]


def _sleeper() -> jb.Batched:
    """Return a function that sleeps as long as its batch costs, with all its programs."""

    def sleep(x):
        time.sleep(_sleep(Bucket(n=x.shape[1], rows=x.shape[0])))
        return x.sum(1)

    def f(x, mask):
        shape = jax.ShapeDtypeStruct(x.shape[:1], x.dtype)
        return jax.pure_callback(sleep, shape, jax.numpy.where(mask, x, 0), vmap_method="sequential")

    spec = jb.spec("n", "float32")
    run = jb.batched(f, spec=spec, grid=SIZES, per_example=False, mask_arg="mask", costs=COSTS)
    run.warm_up(measure=False)
    for bucket in SIZES:  # the first callback of each program takes longer
        run([np.ones(bucket["n"], np.float32)] * bucket["rows"])
    return run


def _sleep(bucket: Bucket) -> float:
    return COSTS.measured[bucket]


def _batches(futures: Sequence) -> list[_Ran]:
    """Return the batches behind futures that are done, by their start."""
    zero, found = futures[0].arrival, {}
    for future in futures:
        known = found.get(future.begun)
        first = future.arrival - zero if known is None else known.first_arrival  # they come in order
        found[future.begun] = _Ran(future.bucket, future.begun - zero, future.ended - zero, first)
    return [found[begun] for begun in sorted(found)]
