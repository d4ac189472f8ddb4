"""The way in for coroutines: they wait for room without blocking the event loop."""

import asyncio
import math
import time

from ._room import Room


async def enter(room: Room, cells: int, deadline: float) -> bool:
    """Take room, waiting for it until a time; return whether there was room."""
    ticket = room.ask(cells)
    try:
        if not ticket.done():
            left = None if deadline == math.inf else deadline - time.perf_counter()
            await asyncio.wait([asyncio.wrap_future(ticket)], timeout=left)
    except BaseException:  # its task was cancelled
        room.abandon(ticket)
        raise
    return not room.withdraw(ticket)
