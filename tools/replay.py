"""Compare ways to form batches, in simulated time: the dispatcher's own planner, and simpler policies.

    python -m tools.replay                      # Poisson and bursty arrivals at 30, 60 and 90% of capacity
    python -m tools.replay --trace arrivals.csv # a recorded trace: a line "seconds,length" for each arrival
    python -m tools.replay --costs costs.json   # seconds by bucket, from `run.costs.to_json()`
    python -m tools.replay --live               # the simulation against the real dispatcher, in 30 s

Nothing sleeps: a clock of its own jumps from event to event, so that an hour takes seconds and the same trace
always gives the same numbers. The device runs one batch after another and takes what the cost table says.
"""

import argparse
import collections
import dataclasses
import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxbatch import Bucket, Costs, Grid
from jaxbatch._lanes import Kind, Waiter
from jaxbatch._online import Batch, Decision, Planner
from jaxbatch._options import Options, Rules

GRID = Grid(n=(16, 256), rows=(1, 32))
LOADS = (0.3, 0.6, 0.9)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One example: when it comes, how long it is, and when it is too late."""

    time: float
    length: int
    priority: float = 0.0
    deadline: float = math.inf


# --- policies --------------------------------------------------------------------------------------


class AllBuffered(Planner):
    """Whenever the device is idle, run all that wait, and look at what came meanwhile only afterwards."""

    def decide(self, now: float) -> Decision:
        if self.device.in_flight:
            return Decision()
        batches: list[Batch] = []
        for lane in list(self._active):
            while lane.count:
                options = self.options.allowed(lane, now)
                option = next((o for o in options if o.rows >= lane.count), options[-1])
                waiters = tuple(lane.take(option.rows))
                batches.append(Batch(lane.kind, option.bucket, waiters, option.estimate.seconds))
            self._settle(lane)
        return Decision(tuple(batches))


class FixedOptions(Options):
    """Full batches only, or those that a time limit cuts."""

    def due(self, lane, options, option):
        return lane.oldest + self._rules.max_delay

    def allowed(self, lane, now):
        return super().allowed(lane, now)[-1:]


class FixedBatch(Planner):
    """Wait for a full batch or a time limit, as a batcher does that knows neither costs nor the load."""

    options_type = FixedOptions


@dataclasses.dataclass(frozen=True)
class Policy:
    """A planner by name; `rows` limits the grid to some numbers of rows."""

    name: str
    planner: type[Planner] = Planner
    rules: Rules = Rules()
    rows: list[Any] | None = None


POLICIES = (
    Policy("one at a time", rules=Rules(aging=1e-6), rows=[1]),
    Policy("all buffered", AllBuffered),
    Policy("fixed batch of 8", FixedBatch, Rules(max_delay=0.02), rows=[8]),
    Policy("elastic, no waiting", rules=Rules(patient=False)),
    Policy("adaptive", rules=Rules(max_delay=0.01)),
)


# --- simulated time --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a simulation gave; times in seconds.

    Attributes:
      latency: of each example that ran, in the order of the trace.
      waited: how long the device was free between an example's arrival and its start.
      late: how many examples were not run since their deadline passed.
      busy: the share of time in which the device ran something.
    """

    latency: np.ndarray
    waited: np.ndarray
    batches: int
    late: int
    busy: float
    seconds: float

    @property
    def throughput(self) -> float:
        """Examples for each second."""
        return len(self.latency) / self.seconds if self.seconds else 0.0


def simulate(
    trace: Sequence[Arrival],
    policy: Policy,
    costs: Costs,
    grid: Grid = GRID,
    *,
    overhead: float = 0.0,
    seconds_of: Callable[[Bucket], float] | None = None,
) -> Outcome:
    """Run a trace, whose arrivals are in order, through a policy.

    Args:
      costs: what the planner knows beforehand.
      overhead: seconds that each batch takes in addition.
      seconds_of: what batches really take; by default what `costs` say.
    """
    if policy.rows is not None:
        ladders: dict[str, Any] = {dim: list(ladder) for dim, ladder in grid.sizes.items()}
        grid = Grid(list(policy.rows), **ladders)
    kind = Kind(grid.dims)
    planner = policy.planner(policy.rules, lambda _, sizes: grid.rows_for(sizes), costs)
    planner.compiled(kind, frozenset(grid))
    (dim,) = grid.dims
    really = seconds_of or (lambda bucket: costs.seconds(bucket) or 0.0)
    arrivals = collections.deque(
        Waiter(kind, (grid.ceil({dim: a.length})[dim],), a.time, a.priority, a.deadline) for a in trace
    )
    place = {waiter: i for i, waiter in enumerate(arrivals)}
    latency, waited = np.full(len(trace), np.nan), np.zeros(len(trace))
    running: list[tuple[float, int, Batch, float]] = []
    now, wake, free, idle, busy, num, late = 0.0, math.inf, 0.0, 0.0, 0.0, 0, 0
    while arrivals or running or planner.count:
        now = min(arrivals[0].arrival if arrivals else math.inf, running[0][0] if running else math.inf, wake)
        while running and running[0][0] <= now:
            end, _, batch, seconds = heapq.heappop(running)
            planner.device.finish(batch, end)
            planner.seconds.observe(kind, batch.bucket, seconds)
            for waiter in batch.waiters:
                latency[place[waiter]] = end - waiter.arrival
            idle = end
        while arrivals and arrivals[0].arrival <= now:
            planner.add(arrivals.popleft())
        decision = planner.decide(now)
        late += len(decision.expired)
        for batch in decision.batches:
            seconds = really(batch.bucket) + overhead
            for waiter in batch.waiters:
                waited[place[waiter]] = 0.0 if running else max(now - max(waiter.arrival, idle), 0.0)
            free = max(free, now) + seconds
            num, busy = num + 1, busy + seconds
            planner.device.start(batch, now, batch.seconds)
            heapq.heappush(running, (free, num, batch, seconds))
        wake = decision.wake
    ran = ~np.isnan(latency)
    return Outcome(latency[ran], waited[ran], num, late, busy / now if now else 0.0, now)


# --- what theory says ------------------------------------------------------------------------------


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


# --- traces ----------------------------------------------------------------------------------------


def lengths(num: int, rng: np.random.Generator) -> np.ndarray:
    """Return lengths as texts have them: many short ones and a few long ones."""
    return np.clip(rng.lognormal(3.5, 0.8, num), 1, 256).astype(int)


def poisson(rate: float, num: int, seed: int = 0) -> list[Arrival]:
    """Return arrivals at random."""
    rng = np.random.default_rng(seed)
    return _arrivals(np.cumsum(rng.exponential(1 / rate, num)), lengths(num, rng))


def bursty(rate: float, num: int, seed: int = 0) -> list[Arrival]:
    """Return arrivals in bursts of about twenty, at three times the mean rate, with pauses between."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / (3 * rate), num)
    gaps += (rng.random(num) < 1 / 20) * rng.exponential(20 * (1 - 1 / 3) / rate, num)
    return _arrivals(np.cumsum(gaps), lengths(num, rng))


def recorded(path: Path) -> list[Arrival]:
    """Read a trace."""
    table = np.loadtxt(path, delimiter=",", ndmin=2)
    table = table[np.argsort(table[:, 0], kind="stable")]
    return _arrivals(table[:, 0] - table[0, 0], table[:, 1].astype(int))


def _arrivals(times: Iterable[float], lengths: Iterable[int]) -> list[Arrival]:
    return [Arrival(float(t), int(n)) for t, n in zip(times, lengths, strict=True)]


def example_costs(grid: Grid = GRID) -> Costs:
    """Return costs as an accelerator has them: a fixed part, and one that grows with the cells."""
    return Costs({bucket: 2e-3 + 1e-6 * bucket.cells for bucket in grid})


def capacity(costs: Costs, grid: Grid = GRID) -> float:
    """Return how many examples a second the best batches run, for the lengths above."""
    sizes = [grid.ceil({"n": int(n)}) for n in lengths(2000, np.random.default_rng(1))]
    best = {s: min((costs.seconds(s.with_rows(r)) or 0) / r for r in grid.rows_for(s)) for s in set(sizes)}
    return 1 / float(np.mean([best[s] for s in sizes]))


# --- commands --------------------------------------------------------------------------------------


def show(title: str, trace: Sequence[Arrival], costs: Costs) -> None:
    print(f"\n{title}: {len(trace):,} arrivals in {trace[-1].time:.1f} s")
    print(f"{'policy':<22}{'examples/s':>12}{'mean ms':>10}{'p99 ms':>10}{'rows/batch':>12}{'busy':>8}")
    rate = len(trace) / trace[-1].time if trace[-1].time else math.inf
    begin, simulated = time.perf_counter(), 0.0
    for policy in POLICIES:
        got = simulate(trace, policy, costs)
        simulated += got.seconds
        mean, p99 = got.latency.mean() * 1e3, np.quantile(got.latency, 0.99) * 1e3
        rows = len(got.latency) / got.batches
        line = (
            f"{policy.name:<22}{got.throughput:>12.1f}{mean:>10.2f}{p99:>10.2f}{rows:>12.2f}{got.busy:>8.0%}"
        )
        if policy.rows == [1]:
            alone = [costs.seconds(GRID.ceil({"n": a.length}).with_rows(1)) or 0.0 for a in trace]
            expected = single_server(rate, alone, np.ones(len(alone)))
            line += (
                f"   M/G/1 says {'no steady state' if math.isinf(expected) else f'{expected * 1e3:.2f} ms'}"
            )
        print(line)
    wall = time.perf_counter() - begin
    print(f"{simulated:.0f} simulated seconds in {wall:.2f} s")


def compare_with_formulas() -> None:
    """Print the simulation next to what theory says, where it says something."""
    print("\nagainst formulas (Poisson arrivals, one size, one batch in flight)")
    grid, seconds = Grid(n=16, rows=list(range(1, 17))), 5e-3
    for load in (0.3, 1.0, 4.0, 10.0):  # of what a server would do that takes one at a time
        rate = load / seconds
        rng = np.random.default_rng(2)
        trace = _arrivals(np.cumsum(rng.exponential(1 / rate, 40_000)), [16] * 40_000)
        costs = Costs({bucket: seconds for bucket in grid})
        policy = Policy("elastic", rules=Rules(patient=False, in_flight=1))
        got = simulate(trace, policy, costs, grid).latency.mean()
        expected = bulk_service(rate, lambda _: seconds, 16)
        print(
            f"  bulk service, load {load:4.1f}: simulated {got * 1e3:7.3f} ms, theory {expected * 1e3:.3f} ms"
        )
    for load in (0.3, 0.6, 0.9):
        rng = np.random.default_rng(3)
        trace = _arrivals(np.cumsum(rng.exponential(seconds / load, 40_000)), [16] * 40_000)
        policy = Policy("alone", rules=Rules(in_flight=1), rows=[1])
        got = simulate(trace, policy, Costs({Bucket(n=16, rows=1): seconds}), grid).latency.mean()
        expected = single_server(load / seconds, [seconds], [1])
        print(f"  M/D/1, load {load:4.1f}: simulated {got * 1e3:7.3f} ms, formula {expected * 1e3:7.3f} ms")


def compare_with_live(seconds: float = 8.0) -> None:
    """Print the simulation next to the real dispatcher, over a function that sleeps as the table says."""
    import jax

    import jaxbatch as jb

    grid = Grid(n=[16, 64], rows=(1, 8))
    costs = Costs({bucket: 8e-3 + 4e-5 * bucket.cells for bucket in grid})

    def sleep(x):
        time.sleep(costs.measured[Bucket(n=x.shape[1], rows=x.shape[0])])
        return x.sum(1)

    def f(x, mask):
        shape = jax.ShapeDtypeStruct(x.shape[:1], x.dtype)
        return jax.pure_callback(sleep, shape, jax.numpy.where(mask, x, 0), vmap_method="sequential")

    spec = jb.spec("n", "float32")
    run = jb.batched(f, spec=spec, grid=grid, per_example=False, mask_arg="mask", costs=costs)
    run.warm_up(measure=False)
    for bucket in grid:  # the first callback of each program takes longer
        run([np.ones(bucket["n"], np.float32)] * bucket["rows"])
    for load in LOADS:
        rng = np.random.default_rng(4)
        rate = load * 8 / (costs.seconds(Bucket(n=64, rows=8)) or 1.0)
        num = int(rate * seconds)
        trace = _arrivals(np.cumsum(rng.exponential(1 / rate, num)), rng.integers(1, 65, num))
        live = []
        with run.dispatcher(max_delay=0.01, in_flight=1) as dispatcher:
            begin = time.perf_counter()
            futures = []
            for arrival in trace:
                time.sleep(max(begin + arrival.time - time.perf_counter(), 0))
                futures.append(dispatcher.submit(np.ones(arrival.length, np.float32)))
            for future in futures:
                future.result()
                live.append(future.info.total)
            infos = [future.info for future in futures]
            ran = dispatcher.statistics()
        # What a batch takes beyond its sleep depends on how busy this machine is.
        overhead = float(np.mean([info.ran - costs.seconds(info.bucket) for info in infos]))
        rules = Rules(max_delay=0.01, in_flight=1)
        got = simulate(trace, Policy("live", rules=rules), costs, grid, overhead=overhead)
        a, b = np.mean(live) * 1e3, got.latency.mean() * 1e3
        p, q = np.quantile(live, 0.99) * 1e3, np.quantile(got.latency, 0.99) * 1e3
        print(
            f"load {load:.0%}: mean live {a:.2f} ms, simulated {b:.2f} ms ({b / a - 1:+.1%}); p99 {p:.2f} "
            f"and {q:.2f} ms ({q / p - 1:+.1%}); batches {ran.batches} and {got.batches}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, help='a file of lines "seconds,length"')
    parser.add_argument("--costs", type=Path, help="a file from `run.costs.to_json()`")
    parser.add_argument("--num", type=int, default=20_000, help="arrivals of each random trace")
    parser.add_argument("--live", action="store_true", help="compare with the real dispatcher")
    args = parser.parse_args()
    costs = Costs.from_json(args.costs.read_text()) if args.costs else example_costs()
    if args.live:
        compare_with_live()
        return
    if args.trace:
        show(str(args.trace), recorded(args.trace), costs)
        return
    most = capacity(costs)
    for load in LOADS:
        for make in (poisson, bursty):
            show(f"{make.__name__}, {load:.0%} of capacity", make(load * most, args.num), costs)
    compare_with_formulas()


if __name__ == "__main__":
    main()
