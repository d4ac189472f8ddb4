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
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn  # pyright: ignore[reportMissingImports]  (the extra `serve` installs both)
from fastapi import FastAPI, HTTPException, Response  # pyright: ignore[reportMissingImports]
from prometheus_client import CollectorRegistry, generate_latest

import jaxbatch as jb
from examples import serving
from jaxbatch.prometheus import DispatcherCollector


def app(model: Callable, params: Any, tokenize: serving.Tokenize) -> FastAPI:
    """Return the application; it compiles before it takes requests, and answers all before it ends."""
    registry, dispatchers = CollectorRegistry(), {}
    registry.register(DispatcherCollector(dispatchers))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        run = serving.warm(model, params)
        with run.dispatcher(params, on_full="raise", max_pending=serving.PENDING) as dispatcher:
            dispatchers["embed"] = dispatcher
            yield

    service = FastAPI(lifespan=lifespan)

    @service.get("/embed")
    async def embed(text: str) -> list[float]:
        try:
            vector = await dispatchers["embed"](tokenize(text), deadline=serving.DEADLINE)
        except jb.JaxbatchError as error:
            raise HTTPException(serving.status(error), str(error)) from error
        return vector.tolist()

    @service.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain")

    @service.get("/statistics")
    async def statistics() -> Response:
        return Response(str(dispatchers["embed"].statistics()), media_type="text/plain")

    return service


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.serve_fastapi", description="Serve embeddings.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tiny", action="store_true", help="random weights; nothing is downloaded")
    parser.add_argument("--load", type=int, metavar="N", help="send N requests, print the outcome, and stop")
    options = parser.parse_args()
    service = app(*(serving.tiny() if options.tiny else serving.minilm()))
    server = uvicorn.Server(uvicorn.Config(service, port=options.port, log_level="warning"))
    if not options.load:
        server.run()
        return
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.05)
    try:
        serving.load(options.port, options.load)
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
