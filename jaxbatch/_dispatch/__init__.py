"""The dispatcher: single examples in, futures out, batches in between.

One request's way:

1. `Dispatcher.submit`, in the caller's thread, checks the example against the spec and copies its arrays
   (`_intake`), waits until there is room if it must (`_room`), and puts a `Request`, which is the future,
   where the dispatch thread finds it.
2. The dispatch thread (`_loop`) owns all decisions. It passes requests, cancellations, finished batches and
   new programs on to the planner (`_online`), which knows neither threads nor clocks, and does what that
   decides: it ends expired requests (`_requests`), hands out batches, and asks for programs (`_programs`).
3. The compile thread (`_compiler`) traces and compiles, so that those who wait for a program are the only
   ones who do.
4. A run thread (`_runners`) pads the batch, runs it, cuts the results and ends the futures, in whose
   callbacks users run their own code. A batch that failed goes back to the dispatch thread, which splits it
   until the example at fault is alone (`_faults`).

Every queue between them is bounded by what `_room` let in. Whatever escapes from one of the threads breaks
the dispatcher: all open futures get it as the cause of their error. Threads are daemons, so that they never
keep an interpreter from ending; before it ends, every dispatcher is closed, and its open futures with it.
"""

from ._dispatcher import Dispatcher as Dispatcher
from ._request import Request as Request
from ._request import RequestInfo as RequestInfo
from ._settings import Settings as Settings
