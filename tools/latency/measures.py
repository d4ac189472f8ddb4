"""The measurements; each returns plain numbers by name, in seconds, for the report."""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

import jaxbatch as jb

from .models import Served, tiny
from .usual import PadToLongest

LOADS = (0.3, 0.6, 0.9)

Row = dict[str, Any]


def overhead(producers: int = 8, each: int = 2000) -> Iterator[Row]:
    """What a request costs beyond the model, with a model that costs nothing."""
    run, shared, xs = tiny()
    run.warm_up(*shared)
    for how, window in (("one at a time each", 1), ("16 ahead each", 16)):
        with run.dispatcher(*shared) as d:
            produce = _producer(d, xs, each, window)
            cpu = time.process_time()
            seconds = _in_threads(produce, producers)
            cpu, ran = time.process_time() - cpu, d.statistics()
        num = producers * each
        yield {
            "producers": producers,
            "how": how,
            "seconds": seconds / num,
            "core_seconds": cpu / num,
            "examples_per_batch": ran.filled_rows / ran.batches,
        }


def throughput(served: Served, rounds: int = 3) -> Row:
    """Examples a second of a call and of the dispatcher at saturation, in turns; ratios within a round."""
    run, shared, xs = served
    speeds: dict[str, list[float]] = {"run": [], "dispatcher": []}
    for _ in range(rounds):
        begin = time.perf_counter()
        run(*shared, xs)
        speeds["run"].append(len(xs) / (time.perf_counter() - begin))
        with run.dispatcher(*shared) as d:
            begin = time.perf_counter()
            for future in [d.submit(x) for x in xs]:
                future.result()
            speeds["dispatcher"].append(len(xs) / (time.perf_counter() - begin))
            ran = d.statistics()
    ratios = sorted(b / a for a, b in zip(*speeds.values(), strict=True))
    return {
        "examples": len(xs),
        "run": statistics.median(speeds["run"]),
        "dispatcher": statistics.median(speeds["dispatcher"]),
        "ratio": [statistics.median(ratios), ratios[0], ratios[-1]],
        "fill": ran.fill,
        "padding": ran.padding_share,
    }


def poisson(served: Served, capacity: float, seconds: float, loads: Sequence[float] = LOADS) -> Iterator[Row]:
    """Latencies under arrivals at random, for the three ways."""
    run, shared, xs = served
    ways: dict[str, Callable[[], Any]] = {
        "jaxbatch": lambda: run.dispatcher(*shared),
        "pad to longest": lambda: PadToLongest(run, shared, 16, 5e-3),
        "one at a time": lambda: PadToLongest(run, shared, 1, 0.0),
    }
    for load in loads:
        rate = load * capacity
        rng = np.random.default_rng(5)
        times = np.cumsum(rng.exponential(1 / rate, max(int(rate * seconds), 20)))
        for name, make in ways.items():
            way = make()
            latency = _replay(way.submit, times, xs)
            way.close()
            if isinstance(way, jb.Dispatcher):
                ran = way.statistics()
                mates = ran.filled_rows / ran.batches
            else:
                mates = way.requests / way.batches
            p50, p99 = np.quantile(latency, [0.5, 0.99]).tolist()
            row = {"load": load, "way": name, "requests": len(times), "p50": p50, "p99": p99}
            yield {**row, "examples_per_batch": mates}


def ticker(calls: int = 20) -> Row:
    """The gaps of a 2 ms ticker on an event loop while steps of about 30 ms run and programs compile."""

    def f(x):
        y = jax.numpy.outer(x, x)
        for _ in range(30):
            y = jax.numpy.tanh(y @ y.T) + y.sum(0)
        return y.sum()

    run = jb.batched(f, spec=jb.spec("n", "float32"), grid=jb.Grid(n=[64, 128, 256, 384, 512], rows=[1, 4]))

    async def main() -> list[float]:
        gaps: list[float] = []

        async def tick() -> None:
            last = time.perf_counter()
            while True:
                await asyncio.sleep(0.002)
                now = time.perf_counter()
                gaps.append(now - last - 0.002)
                last = now

        with run.dispatcher() as d:
            await asyncio.sleep(0.1)
            task = asyncio.ensure_future(tick())
            rng = np.random.default_rng(0)
            for _ in range(calls):
                await asyncio.gather(
                    *[d(rng.normal(size=n).astype(np.float32)) for n in rng.integers(1, 513, 8)]
                )
            task.cancel()
        return gaps

    gaps, compiled = asyncio.run(main()), run.statistics()
    p50, p99 = np.quantile(gaps, [0.5, 0.99]).tolist()
    row = {"ticks": len(gaps), "p50": p50, "p99": p99, "max": max(gaps)}
    return {**row, "compiles": compiled.compiles, "compile_seconds": compiled.compile_seconds}


# --- helpers ---------------------------------------------------------------------------------------


def _producer(d: jb.Dispatcher, xs: Sequence[np.ndarray], each: int, window: int) -> Callable[[], None]:
    def produce() -> None:
        futures: list[Future] = []
        for i in range(each):
            futures.append(d.submit(xs[i % len(xs)]))
            if len(futures) >= window:
                futures.pop(0).result()
        for future in futures:
            future.result()

    return produce


def _replay(submit: Callable[..., Future], times: np.ndarray, xs: Sequence[np.ndarray]) -> np.ndarray:
    """Submit examples at these times, and return the latencies, counted from when they were due."""
    ends = np.zeros(len(times))
    left = threading.Semaphore(0)
    begin = time.perf_counter() + 0.05

    def note(i: int) -> Callable[[Future], None]:
        def done(_: Future) -> None:
            ends[i] = time.perf_counter()
            left.release()

        return done

    for i, due in enumerate(times.tolist()):
        time.sleep(max(begin + due - time.perf_counter(), 0))
        submit(xs[i % len(xs)]).add_done_callback(note(i))
    for _ in times:
        left.acquire()
    return ends - begin - times


def _in_threads(work: Callable[[], None], num: int) -> float:
    threads = [threading.Thread(target=work) for _ in range(num)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin
