"""Measure the dispatcher on this machine: overhead, throughput, latency, the event loop, the simulation.

    python -m tools.latency                     # all five with a tiny model, in two minutes
    python -m tools.latency --quick             # in half a minute: does everything run?
    python -m tools.latency --minilm            # with real MiniLM where a model matters, in eight minutes
    python -m tools.latency --minilm --write    # and put the tables into BENCHMARKS.md

Under Poisson arrivals it stands next to two usual ways: a thread that collects what comes first for a few
milliseconds and pads it to its longest, and one request at a time. All of them use the same programs.
"""
