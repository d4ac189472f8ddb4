"""The command; see `tools.replay`."""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxbatch import Bucket, Costs, Grid
from jaxbatch._options import Rules

from .live import compare_with_live
from .policies import POLICIES, Policy
from .simulation import simulate
from .theory import bulk_service, single_server
from .traces import GRID, LOADS, Arrival, arrivals, bursty, capacity, example_costs, poisson, recorded


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
        trace = arrivals(np.cumsum(rng.exponential(1 / rate, 40_000)), [16] * 40_000)
        costs = Costs({bucket: seconds for bucket in grid})
        policy = Policy("elastic", rules=Rules(patient=False, in_flight=1))
        got = simulate(trace, policy, costs, grid).latency.mean()
        expected = bulk_service(rate, lambda _: seconds, 16)
        print(
            f"  bulk service, load {load:4.1f}: simulated {got * 1e3:7.3f} ms, theory {expected * 1e3:.3f} ms"
        )
    for load in (0.3, 0.6, 0.9):
        rng = np.random.default_rng(3)
        trace = arrivals(np.cumsum(rng.exponential(seconds / load, 40_000)), [16] * 40_000)
        policy = Policy("alone", rules=Rules(in_flight=1), rows=[1])
        got = simulate(trace, policy, Costs({Bucket(n=16, rows=1): seconds}), grid).latency.mean()
        expected = single_server(load / seconds, [seconds], [1])
        print(f"  M/D/1, load {load:4.1f}: simulated {got * 1e3:7.3f} ms, formula {expected * 1e3:7.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.replay", description="Compare ways to form batches."
    )
    parser.add_argument("--trace", type=Path, help='a file of lines "seconds,length"')
    parser.add_argument("--costs", type=Path, help="a file from `run.costs.to_json()`")
    parser.add_argument("--num", type=int, default=20_000, help="arrivals of each random trace")
    parser.add_argument("--live", action="store_true", help="compare with the real dispatcher")
    args = parser.parse_args()
    costs = Costs.from_json(args.costs.read_text()) if args.costs else example_costs()
    if args.live:
        for comparison in compare_with_live():
            print(comparison, flush=True)
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
