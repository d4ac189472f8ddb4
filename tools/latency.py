"""Measure the dispatcher on this machine: overhead, throughput, latency under load, and the event loop.

    python -m tools.latency               # all four with a tiny model, under a minute
    python -m tools.latency --minilm      # with real MiniLM where a model matters, under three minutes
    python -m tools.latency --only poisson --minilm --seconds 20

Under Poisson arrivals it stands next to two usual ways: a thread that collects what comes first for a few
milliseconds and pads it to its longest, and one request at a time. All of them use the same programs.
"""

import argparse
import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

import jaxbatch as jb

LOADS = (0.3, 0.6, 0.9)
PARTS = ("overhead", "throughput", "poisson", "ticker")


def tiny() -> tuple[jb.Batched, tuple, list[np.ndarray]]:
    """Return a function that costs next to nothing, and examples."""
    run = jb.batched(lambda x: x.sum(), spec=jb.spec("n", "float32"), grid=jb.Grid(n=(16, 64), rows=(1, 16)))
    rng = np.random.default_rng(0)
    return run, (), [rng.normal(size=n).astype(np.float32) for n in rng.integers(1, 65, 512)]


def minilm() -> tuple[jb.Batched, tuple, list[np.ndarray]]:
    """Return real MiniLM, and texts as ids of lengths as search queries and paragraphs have them."""
    from models import bert, weights

    model, params = bert.load(weights.fetch("minilm"))
    grid = jb.Grid(n=(16, 128), rows=(1, 16), max_cells=1024)
    run = jb.batched(model.embed, (None, 0), spec=jb.spec("n", "int32"), grid=grid)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.2, 0.7, 512), 3, 128).astype(int)
    return run, (params,), [rng.integers(1000, 2000, n).astype(np.int32) for n in lengths]


# --- the usual ways --------------------------------------------------------------------------------


class PadToLongest:
    """Collect up to `most` requests for up to `delay` seconds, pad all to the longest, run, hand out."""

    def __init__(self, run: jb.Batched, shared: tuple, most: int, delay: float):
        self._run, self._shared, self._most, self._delay = run, shared, most, delay
        self._queue: queue.SimpleQueue[tuple[np.ndarray, Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def submit(self, x: np.ndarray) -> Future:
        future: Future = Future()
        self._queue.put((x, future))
        return future

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        going = True
        while going and (first := self._queue.get()) is not None:
            batch, end = [first], time.perf_counter() + self._delay
            while len(batch) < self._most:
                try:
                    item = self._queue.get(timeout=max(end - time.perf_counter(), 0))
                except queue.Empty:
                    break
                if item is None:
                    going = False
                    break
                batch.append(item)
            longest = max(len(x) for x, _ in batch)
            rows = [np.concatenate([x, np.full(longest - len(x), x[0], x.dtype)]) for x, _ in batch]
            for (_, future), result in zip(batch, self._run(*self._shared, rows), strict=True):
                future.set_result(result)


# --- the four parts --------------------------------------------------------------------------------


def overhead(producers: int = 8, each: int = 2000) -> None:
    """Print what a request costs beyond the model, with a model that costs nothing."""
    run, shared, xs = tiny()
    run.warm_up(*shared)
    for name, window in (("one at a time each", 1), ("16 ahead each", 16)):
        with run.dispatcher(*shared) as d:

            def produce(d: jb.Dispatcher = d, window: int = window) -> None:
                futures: list[Future] = []
                for i in range(each):
                    futures.append(d.submit(xs[i % len(xs)]))
                    if len(futures) >= window:
                        futures.pop(0).result()
                for future in futures:
                    future.result()

            cpu = time.process_time()
            seconds = _in_threads(produce, producers)
            cpu, ran = time.process_time() - cpu, d.statistics()
        num = producers * each
        print(
            f"overhead, {producers} producers, {name}: {seconds / num * 1e6:.1f} us a request, "
            f"{cpu / num * 1e6:.1f} us of a core "
            f"({ran.filled_rows / ran.batches:.1f} examples a batch)"
        )


def throughput(run: jb.Batched, shared: tuple, xs: Sequence[np.ndarray], rounds: int = 3) -> float:
    """Print examples a second of a call and of the dispatcher at saturation; return the first."""
    best = {"run(...)": 0.0, "dispatcher": 0.0}
    for _ in range(rounds):
        begin = time.perf_counter()
        run(*shared, xs)
        best["run(...)"] = max(best["run(...)"], len(xs) / (time.perf_counter() - begin))
        with run.dispatcher(*shared) as d:
            begin = time.perf_counter()
            for future in [d.submit(x) for x in xs]:
                future.result()
            best["dispatcher"] = max(best["dispatcher"], len(xs) / (time.perf_counter() - begin))
            ran = d.statistics()
    ratio = best["dispatcher"] / best["run(...)"]
    print(
        f"throughput: run {best['run(...)']:.0f}/s, dispatcher {best['dispatcher']:.0f}/s, {ratio:.1%} of it"
    )
    print(f"  {ran.batches} batches, {ran.fill:.0%} of rows filled, {ran.padding_share:.0%} padding")
    return best["run(...)"]


def poisson(
    run: jb.Batched, shared: tuple, xs: Sequence[np.ndarray], capacity: float, seconds: float
) -> None:
    """Print p50 and p99 at loads of 30, 60 and 90% for the three ways."""
    print(f"{'load':<8}{'way':<20}{'p50 ms':>10}{'p99 ms':>10}{'examples/batch':>16}")
    for load in LOADS:
        rate = load * capacity
        rng = np.random.default_rng(5)
        times = np.cumsum(rng.exponential(1 / rate, max(int(rate * seconds), 20)))
        ways: dict[str, Callable[[], Any]] = {
            "jaxbatch": lambda: run.dispatcher(*shared),
            "pad to longest": lambda: PadToLongest(run, shared, 16, 5e-3),
            "one at a time": lambda: PadToLongest(run, shared, 1, 0.0),
        }
        for name, make in ways.items():
            way = make()
            latency = _replay(way.submit, times, xs)
            note = ""
            if isinstance(way, jb.Dispatcher):
                ran = way.statistics()
                note = f"{ran.filled_rows / ran.batches:.2f}"
            way.close()
            p50, p99 = np.quantile(latency, [0.5, 0.99]) * 1e3
            print(f"{load:<8.0%}{name:<20}{p50:>10.1f}{p99:>10.1f}{note:>16}", flush=True)


def ticker() -> None:
    """Print the gaps of a 2 ms ticker on an event loop while steps of 30 ms run and programs compile."""

    def f(x):
        y = jax.numpy.outer(x, x)
        for _ in range(30):
            y = jax.numpy.tanh(y @ y.T) + y.sum(0)
        return y.sum()

    run = jb.batched(f, spec=jb.spec("n", "float32"), grid=jb.Grid(n=[64, 128, 256, 384, 512], rows=[1, 4]))

    async def main() -> np.ndarray:
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
            for _ in range(20):
                await asyncio.gather(
                    *[d(rng.normal(size=n).astype(np.float32)) for n in rng.integers(1, 513, 8)]
                )
            task.cancel()
        return np.array(gaps)

    gaps = asyncio.run(main()) * 1e3
    compiled = run.statistics()
    print(
        f"ticker: gaps p50 {np.median(gaps):.2f} ms, p99 {np.quantile(gaps, 0.99):.2f} ms, longest "
        f"{gaps.max():.1f} ms, {compiled.compiles} compiles of {compiled.compile_seconds:.1f} s meanwhile"
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minilm", action="store_true", help="use real MiniLM")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; repeatable")
    parser.add_argument("--seconds", type=float, default=5.0, help="of arrivals, for each load and way")
    options = parser.parse_args()
    parts = options.only or PARTS
    if "overhead" in parts:
        overhead()
    if "throughput" in parts or "poisson" in parts:
        run, shared, xs = minilm() if options.minilm else tiny()
        run.warm_up(*shared)
        capacity = throughput(run, shared, xs)
        if "poisson" in parts:
            # A tiny model is bounded by the producer, not by the device.
            poisson(run, shared, xs, capacity if options.minilm else min(capacity, 5000), options.seconds)
    if "ticker" in parts:
        ticker()


if __name__ == "__main__":
    main()
