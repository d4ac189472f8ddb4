"""The way in for coroutines: a request that waits for room without blocking the event loop."""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ._request import Request


async def request_result(
    request: Request, submit: Callable[[Request], bool], room: Callable[[], Future]
) -> Any:
    """Submit a request as soon as there is room, and wait for its result.

    Args:
      submit: submits the request if there is room, or ends it if it is too late, and says whether it did.
      room: returns a future that ends when there may be room.
    """
    while not submit(request):
        left = None if request.deadline == math.inf else request.deadline - time.perf_counter()
        await asyncio.wait([asyncio.wrap_future(room())], timeout=left)
    return await asyncio.wrap_future(request)
