"""Serve embeddings over HTTP: their process and event loop, our dispatcher.

    python -m examples.serve_fastapi              # http://127.0.0.1:8000/embed?text=hello, /metrics
    python -m examples.serve_fastapi --load 500   # start, send 500 requests from 16 clients, report, stop

The model is all-MiniLM-L6-v2, written for one text at its exact size; `--tiny` takes random weights instead,
and needs no download. A request awaits its own result, and the batches form behind it. What the client did
wrong is its 422, a full server is a 503 at once, and what came too late is a 504 that cost no computation.
It needs `pip install -e '.[serve]'`.
"""

import argparse
import contextlib
import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import uvicorn  # pyright: ignore[reportMissingImports]  (the extra `serve` installs both)
from fastapi import FastAPI, HTTPException, Response  # pyright: ignore[reportMissingImports]
from prometheus_client import CollectorRegistry, generate_latest

import jaxbatch as jb
from jaxbatch.prometheus import DispatcherCollector

GRID = jb.Grid(n=(16, 256), rows=(1, 16), max_cells=2048)
DEADLINE = 2.0  # seconds until a request must have begun to run


def minilm() -> tuple[Callable, Any, Callable[[str], np.ndarray]]:
    """Return the model, its weights and its tokenizer."""
    from models import bert, weights
    from models.tokenizer import Tokenizer

    folder = weights.fetch("minilm")
    model, params = bert.load(folder)
    tokenizer = Tokenizer(folder)
    return model.embed, params, lambda text: tokenizer([text], 256)[0]


def tiny() -> tuple[Callable, Any, Callable[[str], np.ndarray]]:
    """Return a model that is small and knows nothing."""
    table = np.random.default_rng(0).normal(size=(256, 32)).astype(np.float32)
    return lambda table, ids: table[ids].mean(0), table, lambda text: np.frombuffer(text.encode(), np.uint8)


def app(model: Callable, params: Any, tokenize: Callable[[str], np.ndarray]) -> FastAPI:
    """Return the application; it compiles before it takes requests, and answers all before it ends."""
    run = jb.batched(model, (None, 0), spec=jb.spec("n", "int32"), grid=GRID)
    registry, dispatchers = CollectorRegistry(), {}
    registry.register(DispatcherCollector(dispatchers))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        run.warm_up(params)
        with run.dispatcher(params, on_full="raise", max_pending=256) as dispatcher:
            dispatchers["embed"] = dispatcher
            yield

    service = FastAPI(lifespan=lifespan)

    @service.get("/embed")
    async def embed(text: str) -> list[float]:
        try:
            vector = await dispatchers["embed"](tokenize(text), deadline=DEADLINE)
        except jb.QueueFullError as error:
            raise HTTPException(503, str(error)) from error
        except jb.DeadlineError as error:
            raise HTTPException(504, str(error)) from error
        except (jb.SpecError, jb.OversizeError) as error:
            raise HTTPException(422, str(error)) from error
        return vector.tolist()

    @service.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain")

    @service.get("/statistics")
    async def statistics() -> Response:
        return Response(str(dispatchers["embed"].statistics()), media_type="text/plain")

    return service


# --- a load from this machine ----------------------------------------------------------------------


def ask(port: int, path: str) -> tuple[int, bytes]:
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.serve_fastapi", description="Serve embeddings.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tiny", action="store_true", help="random weights; nothing is downloaded")
    parser.add_argument("--load", type=int, metavar="N", help="send N requests, print the outcome, and stop")
    options = parser.parse_args()
    service = app(*(tiny() if options.tiny else minilm()))
    server = uvicorn.Server(uvicorn.Config(service, port=options.port, log_level="warning"))
    if not options.load:
        server.run()
        return
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.05)
    try:
        load(options.port, options.load)
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
