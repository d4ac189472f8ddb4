"""Serve embeddings with Ray Serve: their router and replicas, our dispatcher in each replica.

    python -m examples.serve_ray                     # http://127.0.0.1:8000/embed?text=hello
    python -m examples.serve_ray --tiny --load 500   # start, send 500 requests from 16 clients, report, stop

Ray Serve spreads requests over replicas; in each of them requests are coroutines that await the dispatcher,
so that texts of like lengths share batches and no batch waits to be full. Let a replica have more requests at
a time than a batch has rows (`max_ongoing_requests`): the default of 5 would leave nothing to batch. Ray is
started in this process for this machine alone. It needs `pip install -e '.[ray]'`.
"""

import argparse
import os
import threading

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from starlette.requests import Request  # pyright: ignore[reportMissingImports]
from starlette.responses import JSONResponse, PlainTextResponse, Response  # pyright: ignore[reportMissingImports]

import jaxbatch as jb
from examples import serving


class Embedder:
    """One replica, with a model and a dispatcher of its own; it is ready when all programs are compiled."""

    def __init__(self, tiny: bool):
        model, params, self._tokenize = serving.tiny() if tiny else serving.minilm()
        run = serving.warm(model, params)
        self._dispatcher = run.dispatcher(params, on_full="raise", max_pending=serving.PENDING)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        if request.url.path == "/statistics":
            return PlainTextResponse(str(self._dispatcher.statistics()))
        ids = self._tokenize(request.query_params.get("text", ""))
        try:
            vector = await self._dispatcher(ids, deadline=serving.DEADLINE)
        except jb.JaxbatchError as error:
            return PlainTextResponse(str(error), serving.status(error))
        return JSONResponse(vector.tolist())

    def check_health(self) -> None:
        """Let Ray replace the replica if its dispatcher broke."""
        if self._dispatcher.closed:
            raise RuntimeError("the dispatcher is closed")

    def __del__(self):
        self._dispatcher.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.serve_ray", description="Serve embeddings.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="random weights; nothing is downloaded")
    parser.add_argument("--load", type=int, metavar="N", help="send N requests, print the outcome, and stop")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        deployed = serve.deployment(num_replicas=options.replicas, max_ongoing_requests=serving.PENDING)
        serve.run(deployed(Embedder).bind(options.tiny), route_prefix="/")
        if options.load:
            serving.load(options.port, options.load)
        else:
            threading.Event().wait()  # until Ctrl-C
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
