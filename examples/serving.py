"""What the serving examples share: a model, the answers to errors, and a load from this machine."""

import http.client
import json
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import jaxbatch as jb

GRID = jb.Grid(n=(16, 256), rows=(1, 16), max_cells=2048)
PENDING = 256  # how many requests may wait; more are told at once
DEADLINE = 2.0  # seconds until a request must have begun to run

Tokenize = Callable[[str], np.ndarray]
"""From a text to its ids."""


def minilm() -> tuple[Callable, Any, Tokenize]:
    """Return the model, its weights and its tokenizer."""
    from models import bert, weights
    from models.tokenizer import Tokenizer

    folder = weights.fetch("minilm")
    model, params = bert.load(folder)
    tokenizer = Tokenizer(folder)
    return model.embed, params, lambda text: tokenizer([text], 256)[0]


def tiny() -> tuple[Callable, Any, Tokenize]:
    """Return a model that is small and knows nothing."""
    table = np.random.default_rng(0).normal(size=(256, 32)).astype(np.float32)
    tokenize = lambda text: np.frombuffer(f"[{text}]".encode(), np.uint8)
    return lambda table, ids: table[ids].mean(0), table, tokenize


def warm(model: Callable, params: Any) -> jb.Batched:
    """Return the batched model with all its programs."""
    run = jb.batched(model, (None, 0), spec=jb.spec("n", "int32"), grid=GRID)
    run.warm_up(params)
    return run


def status(error: jb.JaxbatchError) -> int:
    """Return the HTTP status of an error: a full server, one that was too late, or the client's own fault."""
    if isinstance(error, jb.QueueFullError | jb.DispatcherClosedError):
        return 503
    return 504 if isinstance(error, jb.DeadlineError) else 422


# --- a load from this machine ----------------------------------------------------------------------


def ask(port: int, path: str) -> tuple[int, bytes]:
    """Return status and body of one request to this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def load(port: int, num: int, clients: int = 16) -> None:
    """Send texts of many lengths from several clients and print what came of it."""
    rng = np.random.default_rng(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "nobody", "looks"]
    texts = [" ".join(rng.choice(words, n)) for n in np.clip(rng.lognormal(2.0, 0.8, num), 1, 40).astype(int)]

    def one(text: str) -> tuple[int, float]:
        begin = time.perf_counter()
        status, body = ask(port, f"/embed?{urllib.parse.urlencode({'text': text})}")
        assert status != 200 or len(json.loads(body)) > 0
        return status, time.perf_counter() - begin

    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        got = list(pool.map(one, texts))
    seconds, times = time.perf_counter() - begin, np.array([t for _, t in got]) * 1e3
    statuses = {status: sum(s == status for s, _ in got) for status in sorted({s for s, _ in got})}
    print(f"{num} requests in {seconds:.2f} s, {num / seconds:.0f} a second; statuses {statuses}")
    print(f"latency: median {np.median(times):.1f} ms, p99 {np.quantile(times, 0.99):.1f} ms")
    print(ask(port, "/statistics")[1].decode())
