"""Compare ways to form batches, in simulated time: the dispatcher's own planner, and simpler policies.

    python -m tools.replay                      # Poisson and bursty arrivals at 30, 60 and 90% of capacity
    python -m tools.replay --trace arrivals.csv # a recorded trace: a line "seconds,length" for each arrival
    python -m tools.replay --costs costs.json   # seconds by bucket, from `run.costs.to_json()`
    python -m tools.replay --live               # the simulation against the real dispatcher, in 30 s

Nothing sleeps: a clock of its own jumps from event to event, so that an hour takes seconds and the same trace
always gives the same numbers. The device runs one batch after another and takes what the cost table says.
"""

from .policies import POLICIES as POLICIES
from .policies import Policy as Policy
from .simulation import Outcome as Outcome
from .simulation import simulate as simulate
from .theory import bulk_service as bulk_service
from .theory import single_server as single_server
from .traces import Arrival as Arrival
