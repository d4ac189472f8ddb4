"""The usual way to batch requests, as servers have it built in or as it is written by hand."""

import queue
import threading
import time
from concurrent.futures import Future

import numpy as np

import jaxbatch as jb


class PadToLongest:
    """Collect up to `most` requests for up to `delay` seconds, pad all to the longest, run, hand out."""

    def __init__(self, run: jb.Batched, shared: tuple, most: int, delay: float):
        self.batches = self.requests = 0
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
            results = self._run(*self._shared, rows)
            self.batches, self.requests = self.batches + 1, self.requests + len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)
