"""Throw random events at a dispatcher from eight threads and an event loop, and see that every future ends.

    python -m tools.soak_dispatcher                      # 1,000 events under 20 seeds
    python -m tools.soak_dispatcher --seeds 3 --events 200

Examples succeed, fail on their own, run out of memory in large batches, are empty, oversize or malformed, are
cancelled, expire, have callbacks that raise or submit, or come in bursts; now and then everything is closed
and made anew. Every answer must be the right one, and after the last close nothing may be open. The exit
status is 1 if anything was wrong.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import random
import threading
import time
from typing import Any

import jax
import numpy as np

import jaxbatch as jb

BAD, LARGE = 666.0, 4
THREADS = 8


@dataclasses.dataclass
class Result:
    """What came of a seed: futures that never ended, wrong answers, and the slowest end after a close."""

    seed: int
    ended: dict[str, int] = dataclasses.field(default_factory=dict)
    open: int = 0
    wrong: int = 0
    slowest_end: float = 0.0


def _see(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows)
    if (rows == BAD).any():
        raise ValueError("this one is bad")
    if len(rows) > LARGE and rows[0].max(initial=0) > 90:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    time.sleep(0.0005 * len(rows))
    return rows.sum(1)


def _f(x, mask):
    shape = jax.ShapeDtypeStruct(x.shape[:1], x.dtype)
    return jax.pure_callback(_see, shape, jax.numpy.where(mask, x, 0), vmap_method="sequential")


def make() -> jb.Batched:
    """Return the function under test, with all its programs."""
    grid = jb.Grid(n=(4, 16), rows=(1, 8))
    spec = jb.spec("n", "float32")
    run = jb.batched(_f, spec=spec, grid=grid, per_example=False, mask_arg="mask", oversize="exact")
    run.warm_up(measure=False)
    return run


def soak(seed: int, events: int = 1000, run: jb.Batched | None = None) -> Result:
    """Run one seed."""
    run = run or make()
    result, lock = Result(seed), threading.Lock()
    current: list[jb.Dispatcher] = [run.dispatcher(max_pending=64)]
    futures: list[tuple[Any, float | None]] = []  # and the right answer; None where there is none

    def one(rng: random.Random) -> None:
        d, event = current[0], rng.random()
        n = rng.choice([1, 2, 4, 5, 9, 16, 16])
        x, want = np.full(n, rng.randint(1, 99), np.float32), None
        options: dict[str, Any] = {"priority": rng.choice([0, 0, 0, 1, 5])}
        if event < 0.06:
            x[rng.randrange(n)] = BAD
        elif event < 0.10:
            x = np.ones((2, 2), np.float32)
        elif event < 0.13:
            x = np.full(rng.choice([0, 17]), 2, np.float32)
            want = float(x.sum())
        elif event < 0.2:
            options["deadline"] = rng.choice([0.0, 1e-4, 2e-3, 5.0])
        else:
            want = float(x.sum())
        if event > 0.95:
            options |= {"on_full": "raise"}
        try:
            future = d.submit(x, **options)
        except (jb.SpecError, jb.DispatcherClosedError, jb.QueueFullError):
            return
        with lock:
            futures.append((future, want if "deadline" not in options else float(x.sum())))
        if 0.28 < event < 0.3:
            future.add_done_callback(rng.choice([_raise, again]))
        x[...] = -1  # the caller's array is the caller's again
        if 0.2 < event < 0.28:
            if rng.random() < 0.5:
                time.sleep(rng.random() * 2e-3)
            future.cancel()
        if event > 0.97:
            with contextlib.suppress(Exception, concurrent.futures.CancelledError):
                future.result(timeout=10)
        if 0.3 < event < 0.303:
            _renew()

    def again(_: Any) -> None:
        with contextlib.suppress(jb.DispatcherClosedError, jb.QueueFullError):
            more = current[0].submit(np.full(2, 3, np.float32))
            with lock:
                futures.append((more, 6.0))

    def _renew() -> None:
        with lock:
            old, current[0] = current[0], run.dispatcher(max_pending=64)
        begin = time.perf_counter()
        old.close(cancel_pending=bool(seed % 2))
        result.slowest_end = max(result.slowest_end, time.perf_counter() - begin)

    def producer(k: int) -> None:
        rng = random.Random(1000 * seed + k)
        for _ in range(events // (THREADS + 1)):
            if rng.random() < 0.05:
                time.sleep(rng.random() * 0.01)
            one(rng)

    async def coroutines() -> None:
        rng = random.Random(1000 * seed + 999)

        async def each(i: int) -> None:
            await asyncio.sleep(rng.random() * 0.05)
            x = np.full(3, i % 50, np.float32)
            task = asyncio.ensure_future(current[0](x, deadline=rng.choice([None, 0.001, 5.0])))
            if rng.random() < 0.1:
                await asyncio.sleep(0)
                task.cancel()
            try:
                if await task != 3 * (i % 50):
                    result.wrong += 1
            except (jb.JaxbatchError, asyncio.CancelledError):
                pass

        tasks = [each(i) for i in range(events // (THREADS + 1))]
        await asyncio.wait_for(asyncio.gather(*tasks), 60)

    threads = [threading.Thread(target=producer, args=(k,), daemon=True) for k in range(THREADS)]
    threads.append(threading.Thread(target=lambda: asyncio.run(coroutines()), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    begin = time.perf_counter()
    closer = threading.Thread(target=current[0].close, daemon=True)
    closer.start()
    closer.join(60)
    result.slowest_end = max(result.slowest_end, time.perf_counter() - begin)
    for future, want in futures:
        if not future.done():
            result.open += 1
            continue
        state = future.info.state
        result.ended[state] = result.ended.get(state, 0) + 1
        if state == "done" and (want is None or future.result() != want):
            result.wrong += 1
        if state == "failed" and want is not None and not _expected(future.exception()):
            result.wrong += 1
    result.open += sum(thread.is_alive() for thread in [*threads, closer])
    return result


def _raise(_: Any) -> None:
    raise SystemExit(3)


def _expected(error: BaseException | None) -> bool:
    return isinstance(error, jb.DispatcherClosedError)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--events", type=int, default=1000)
    args = parser.parse_args()
    for name in ("jax", "jaxbatch"):  # they show each error of a callback in full
        logging.getLogger(name).setLevel(logging.CRITICAL)
    run, failed = make(), 0
    for seed in range(args.seeds):
        result = soak(seed, args.events, run)
        failed += bool(result.open or result.wrong)
        print(result, flush=True)
    print("failed" if failed else "every future ended, every answer was right")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
